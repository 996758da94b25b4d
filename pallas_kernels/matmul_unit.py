"""What the computing warpgroup of the few-row products does: the norm of x, and a unit of output columns at a time.

Letters: K inputs  N outputs  S segments
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import LANES, PRODUCT_ROWS, Ref, full, pl, plgpu, spread, tiled_layout
from pallas_kernels.matmul_sizes import FEW_ROWS, MAX_UNIT, MatmulScratch, MatmulSizes, StageRefs, StageSizes

_WGMMA = plgpu.Layout.WGMMA


def as_operand(ref: Ref) -> Ref:
    """Shared memory as wgmma reads it: atoms one below the other."""
    return ref[-1] if isinstance(ref, tuple) else ref


@functools.cache
def _atom_layout() -> Any:
    """[8, 64] over the 128 threads: 4 neighbours of a row each, rows within a warp."""
    return tiled_layout((FEW_ROWS, 64), (2, 64), (1, 4), warp_dims=(-6,), lane_dims=(-4, -3))


def take_x(stage: StageSizes, scratch: MatmulScratch) -> jax.Array | None:
    """Wait for x in shared memory and multiply it by the weights of the norm.

    Returns:
      f32[8, unit] 1 / rms of the rows, or None without a norm.
    """
    if stage.has_norm:
        plgpu.barrier_wait(scratch.norms_full.at[stage.norm_index])
    plgpu.barrier_wait(scratch.x_full)
    if not stage.has_norm:
        return None
    x_smem, weights = as_operand(scratch.x), scratch.norms.at[stage.norm_index]
    layout, shape = _atom_layout(), (FEW_ROWS, 64)
    at_once = next(n for n in (4, 3, 2, 1) if stage.num_atoms % n == 0)  # for loads to overlap

    def scale(i: jax.Array, squares: jax.Array) -> jax.Array:
        atoms = [i * at_once + j for j in range(at_once)]
        rows = [x_smem.at[pl.ds(atom * FEW_ROWS, FEW_ROWS)] for atom in atoms]
        xs = [plgpu.load(part, layout=layout, optimized=False).astype(jnp.float32) for part in rows]
        factors = [plgpu.load(weights.at[atom], layout=layout.reduce(0), optimized=False) for atom in atoms]
        for part, x, factor in zip(rows, xs, factors, strict=True):
            factor = factor.astype(jnp.float32)
            factor = 1.0 + factor if stage.unit_offset else factor
            factor = spread(factor, shape, (1,), layout)
            part[...] = (x * factor).astype(x_smem.dtype)
            squares = squares + x * x
        return squares

    squares = lax.fori_loop(0, stage.num_atoms // at_once, scale, full(shape, 0.0, layout))
    scratch.squares[...] = squares.sum(axis=1)
    plgpu.commit_smem()
    layout = _out_layout(stage.unit)
    squares = plgpu.load(scratch.squares, layout=layout.reduce(1), optimized=False)
    rstd = lax.rsqrt(squares * (1.0 / stage.num_inputs) + stage.eps)
    return spread(rstd, (FEW_ROWS, stage.unit), (0,), layout)


def compute_unit(
    sizes: MatmulSizes,
    stage: StageSizes,
    refs: StageRefs,
    rstd: jax.Array | None,
    unit: jax.Array,
    used: jax.Array,
    scratch: MatmulScratch,
) -> jax.Array:
    """A unit of output columns; returns the number of slots used so far."""
    w_smem, x_smem, sums_smem = as_operand(scratch.weights), as_operand(scratch.x), scratch.sums
    columns = pl.ds(unit * stage.unit, stage.unit)
    layout = _out_layout(stage.unit)
    residual = None
    if refs.residual is not None:  # loaded early: nothing waits for it
        residual = plgpu.load(refs.residual.at[:, columns], layout=layout, optimized=False)
    run = stage.segments * FEW_ROWS  # rows of a run of segments
    stride = sizes.slot_atoms // stage.row_tiles

    def product(way: int) -> tuple[jax.Array, ...]:
        def body(*accs: Ref) -> tuple[jax.Array, ...]:
            def add_tile(tile: jax.Array, _: None) -> None:
                slot = lax.rem(used + (way * stage.tiles + tile), jnp.int32(sizes.num_slots))
                plgpu.barrier_wait(scratch.filled.at[slot])
                for j in range(0, stage.tile, stage.segments):
                    x = x_smem.at[pl.ds((tile * stage.tile + j) * FEW_ROWS, PRODUCT_ROWS)]
                    for i, acc in enumerate(accs):
                        weights = w_smem.at[slot, pl.ds((i * stride + j) * FEW_ROWS, run)]
                        plgpu.wgmma(acc, x, weights.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(scratch.free.at[slot])

            lax.fori_loop(0, stage.tiles, add_tile, None)
            return tuple(acc[...] for acc in accs)

        return pl.run_scoped(body, *[plgpu.ACC((PRODUCT_ROWS, run), jnp.float32) for _ in range(stage.row_tiles)])

    for way in range(stage.ways):
        for i, blocks in enumerate(product(way)):
            sums_smem[pl.ds(way * PRODUCT_ROWS, PRODUCT_ROWS), pl.ds(i * FEW_ROWS, FEW_ROWS)] = _diagonal(stage, blocks)
    plgpu.commit_smem()
    parts = [_sum_segments(stage, sums_smem, way) for way in range(stage.ways)]
    if rstd is not None:
        parts = [part * rstd for part in parts]
    if refs.bias is not None:
        for way in range(stage.ways):
            row = pl.ds(way * stage.num_outputs + unit * stage.unit, stage.unit)
            bias = refs.bias.at[refs.of_layer(refs.bias), row]
            bias = plgpu.load(bias, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
            parts[way] = parts[way] + spread(bias, (FEW_ROWS, stage.unit), (1,), layout)
    out = activate(stage.activation, parts[0])
    if stage.is_gated:
        out = out * parts[1]
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    refs.out.at[:, columns][...] = out.astype(sizes.dtype)
    return used + stage.ways * stage.tiles


def _diagonal(stage: StageSizes, blocks: jax.Array) -> jax.Array:
    """[64, S * 8] -> [64, 8]: of the 8 rows of segment s the 8 columns of segment s."""
    row = plgpu.broadcasted_iota(jnp.int32, (PRODUCT_ROWS, FEW_ROWS), 0, layout=_WGMMA)
    out = full((PRODUCT_ROWS, FEW_ROWS), 0.0, _WGMMA)
    for segment in range(stage.segments):
        part = lax.slice(blocks, (0, segment * FEW_ROWS), (PRODUCT_ROWS, (segment + 1) * FEW_ROWS))
        is_segment = jnp.logical_and(row >= segment * FEW_ROWS, row < (segment + 1) * FEW_ROWS)
        out = jnp.where(is_segment, part, out)
    return out


@functools.cache
def _out_layout(unit: int) -> Any:
    """f32[8, unit] over the 128 threads: one element each, a row beside the next; 8 columns twice, by 2 warps each."""
    rows_of_warp = LANES // unit
    warp_dims = (-6,) if unit == MAX_UNIT else (plgpu.Replicated(2), -6)
    return tiled_layout((FEW_ROWS, unit), (rows_of_warp, unit), (1, 1), warp_dims=warp_dims, lane_dims=(-4, -3))


def _sum_segments(stage: StageSizes, sums_smem: Ref, way: int) -> jax.Array:
    """[8, unit] in the order of the segments."""
    layout = _out_layout(stage.unit)
    total = full((FEW_ROWS, stage.unit), 0.0, layout)
    for segment in range(stage.segments):
        rows = pl.ds(way * PRODUCT_ROWS + segment * FEW_ROWS, FEW_ROWS)
        part = sums_smem.at[rows, pl.ds(0, stage.unit)]
        total = total + plgpu.load(part, layout=layout, optimized=False)
    return total


def activate(name: str | None, x: jax.Array) -> jax.Array:
    """An activation of float32 registers by name; None is the identity."""
    if name == "silu":
        return x / (1.0 + jnp.exp(-x))
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return 0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))
    if name == "relu":
        return jnp.maximum(x, 0.0)
    assert name is None, name
    return x
