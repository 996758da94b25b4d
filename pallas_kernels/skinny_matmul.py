"""Products of at most 8 rows with weight matrices, one after the other, as one Pallas Mosaic GPU kernel (Hopper).

With 8 rows a product takes as long as reading the weights, if nothing else takes time: so weights stream into shared
memory ahead of the computation, across products, and norm, bias, activation and residual are part of the kernel.

A unit is 16 output columns, or 8: so many rows of a weight [N, K]. One thread block (CTA) computes a unit over the
whole of K, so that nothing is summed across CTAs and results have the same bits every time. Tensor cores take 64 rows
at a time, and there are 8, so K is cut: each run of 8 atoms of 64 inputs counts as 8 segments, one below the other,

    x [8, 512] -> X [8 segments * 8 rows, 64]      w [8, 512] -> W [8 segments * 8 columns, 64]

and block (s, s) of X W^T is the product of segment s. The other blocks are not used, which costs nothing: the tensor
cores wait for memory. In shared memory [8, 512] and [64, 64] are the same bytes, since the layout of wgmma's operands
goes by atoms of 8 rows and 64 columns; so one copy brings 16 KiB and more. That matters: a copy costs 128 arrivals at a
barrier, 0.2 us (with a copy a segment a layer of Qwen3-0.6B took 24.6 us, LOG 2026-11-30).

In a CTA one warp copies weights and runs ahead, across products, since weights wait for nobody; another copies x as
soon as all CTAs have their part of it (they are all resident: one an SM); one warpgroup computes.

Letters: K inputs  N outputs  S segments
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import Ref, div, kernel, pl, plgpu, swizzled_smem
from pallas_kernels.layer_slice import as_stack
from pallas_kernels.matmul_arrivals import arrive, reset_arrivals, wait_for_arrivals
from pallas_kernels.matmul_sizes import (
    FEW_ROWS,
    MAX_UNIT,
    MatmulScratch,
    MatmulSizes,
    StageRefs,
    layer_numbers,
    make_sizes,
    stage_refs,
    stages_by_kernel,
)
from pallas_kernels.matmul_unit import compute_unit, take_x
from pallas_kernels.reference_matmul import MatmulStage
from pallas_kernels.tuning import MatmulConfig


def matmul_stages(
    x: jax.Array,
    stages: tuple[MatmulStage, ...],
    residual: jax.Array | None,
    arrivals: jax.Array,
    *,
    config: MatmulConfig,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """See ops.matmul_stages.

    Args:
      x: bf16 or fp16 [8, K].
      residual: [8, D] or None.
      arrivals: i32[MAX_ARRIVALS], zeros; zeros again afterwards.
      config: static.
      interpret: for the CPU interpreter.

    Returns:
      [8, N] of each stage.
    """
    results: list[jax.Array] = []
    for group in stages_by_kernel(stages, config):
        outs = _run(make_sizes(x, group, config), x, group, residual, arrivals, interpret)
        results += outs
        x = outs[-1]
        for stage, out in zip(group, outs, strict=True):
            residual = out if stage.adds_residual else residual
    return tuple(results)


def _run(
    sizes: MatmulSizes,
    x: jax.Array,
    stages: tuple[MatmulStage, ...],
    residual: jax.Array | None,
    arrivals: jax.Array,
    interpret: bool,
) -> list[jax.Array]:
    """The results of stages that are one kernel."""
    layers, layer_indices = layer_numbers(stages)
    operands = [x, arrivals, jnp.stack(layers)] + ([residual] if residual is not None else [])
    for stage, index in zip(stages, layer_indices, strict=True):
        layer = layers[index]
        operands.append(as_stack(stage.weight.reshape(-1, stage.weight.shape[-1]), layer))
        operands += [] if stage.norm_weight is None else [as_stack(stage.norm_weight.reshape(-1, 64), layer)]
        operands += [] if stage.bias is None else [as_stack(stage.bias.reshape(-1), layer)]
    return kernel(
        functools.partial(_body, sizes, residual is not None),
        out_type=[jax.ShapeDtypeStruct((FEW_ROWS, stage.num_outputs), sizes.dtype) for stage in sizes.stages],
        mesh=plgpu.Mesh(grid=(sizes.num_ctas,), grid_names=("cta",), num_threads=2, thread_name="warpgroup"),
        interpret=interpret,
        name="matmul_stages",
    )(*operands)


def _body(sizes: MatmulSizes, has_residual: bool, *refs: Ref) -> None:
    """One warpgroup computes, two warps of the other copy."""
    stages = stage_refs(sizes, has_residual, list(refs))
    arrivals_ref = refs[1]

    def scoped(weights: Ref, x: Ref, *rest: Ref) -> None:
        views = (tuple(weights), tuple(x)) if sizes.copy_whole_tiles else (weights, x)
        scratch = MatmulScratch(*views, *rest)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            _compute(sizes, stages, arrivals_ref, scratch)

        @pl.when(warpgroup == 1)
        def _():
            def warp_body(warp: jax.Array) -> None:
                pl.when(warp == 0)(functools.partial(_copy_weights, sizes, stages, scratch))
                pl.when(warp == 1)(functools.partial(_copy_inputs, sizes, stages, arrivals_ref, scratch))

            plgpu.warp_map(warp_body)

    pl.run_scoped(scoped, *_scratch_types(sizes), collective_axes="warpgroup")


def _scratch_types(sizes: MatmulSizes) -> tuple[Any, ...]:
    """The fields of MatmulScratch."""
    num_slots, slot_atoms = sizes.num_slots, sizes.slot_atoms
    ways = max(stage.ways for stage in sizes.stages)
    smem = functools.partial(swizzled_smem, dtype=sizes.dtype)
    weights, x = smem(num_slots, slot_atoms * FEW_ROWS, 64), smem(sizes.x_rows, 64)
    copies_w, copies_x = max(stage.row_tiles * stage.tile for stage in sizes.stages), sizes.max_atoms
    if sizes.copy_whole_tiles:
        # The same bytes as copies fill them: atoms of 8 rows and 64 columns in the same order.
        wide = [smem(num_slots, FEW_ROWS * n, slot_atoms // n * 64) for n in {s.row_tiles for s in sizes.stages}]
        weights = plgpu.RefUnion(*wide, weights)
        x = plgpu.RefUnion(smem(FEW_ROWS, 64 * sizes.max_atoms), x)
        copies_w = copies_x = 1
    has_norms = sizes.num_norms > 0
    return (
        weights,
        x,
        plgpu.SMEM((sizes.num_norms, sizes.norm_atoms, 64), sizes.dtype) if has_norms else None,
        plgpu.SMEM((ways * 64, MAX_UNIT), jnp.float32),
        plgpu.SMEM((FEW_ROWS,), jnp.float32),
        plgpu.Barrier(num_arrivals=copies_w, num_barriers=num_slots),
        plgpu.Barrier(num_barriers=num_slots),
        plgpu.Barrier(num_arrivals=copies_x),
        plgpu.Barrier(num_barriers=sizes.num_norms) if has_norms else None,
    )


def _copy_atoms(
    source: Ref, target: Ref, slot: Any, barrier: Ref, where: tuple[Any, ...], row_tiles: int, atoms: tuple[Any, int]
) -> None:
    """Copy 8 * row_tiles rows, of each so many atoms (the first one, how many), into a slot of `target`.

    `where`: the first row in `source`, and before it the layer if `source` has layers.

    One copy where `target` is a union; the interpreter, which forbids to read a union otherwise than it was written,
    takes one an atom.
    """
    first, count = atoms
    *layer, row = where
    if isinstance(target, tuple):
        block = source.at[*layer, pl.ds(row, FEW_ROWS * row_tiles), pl.ds(first * 64, count * 64)]
        wide = next(part for part in target[:-1] if part.shape[-2] == FEW_ROWS * row_tiles)
        wide = wide if slot is None else wide.at[slot]
        plgpu.copy_gmem_to_smem(block, wide.at[:, pl.ds(0, 64 * count)], barrier)
        return
    tall = target if slot is None else target.at[slot]
    stride = tall.shape[-2] // FEW_ROWS // row_tiles
    for i in range(row_tiles):
        for j in range(count):
            block = source.at[*layer, pl.ds(row + i * FEW_ROWS, FEW_ROWS), pl.ds((first + j) * 64, 64)]
            plgpu.copy_gmem_to_smem(block, tall.at[pl.ds((i * stride + j) * FEW_ROWS, FEW_ROWS)], barrier)


def _copy_weights(sizes: MatmulSizes, stages: list[StageRefs], scratch: MatmulScratch) -> None:
    """One warp: the tiles of all units of all stages in order, as slots become free."""
    filled, free = scratch.filled, scratch.free
    num_slots = sizes.num_slots
    copied = jnp.int32(0)
    for stage, refs in zip(sizes.stages, stages, strict=True):
        first_unit, num_mine = sizes.my_units(stage, refs)

        def copy_tile(i: jax.Array, copied: jax.Array, stage=stage, refs=refs, first_unit=first_unit) -> jax.Array:
            slot = lax.rem(copied, jnp.int32(num_slots))

            @pl.when(copied >= num_slots)
            def _():
                plgpu.barrier_wait(free.at[slot])

            if sizes.in_flight:

                @pl.when(copied >= sizes.in_flight)
                def _():
                    plgpu.barrier_wait(filled.at[lax.rem(copied - sizes.in_flight, jnp.int32(num_slots))])

            unit_way = div(i, stage.tiles)
            tile = i - unit_way * stage.tiles
            unit = div(unit_way, stage.ways)
            way = unit_way - unit * stage.ways
            row = way * stage.num_outputs + (first_unit + unit * sizes.num_ctas) * stage.unit
            where, atoms = (refs.of_layer(refs.weight), row), (tile * stage.tile, stage.tile)
            _copy_atoms(refs.weight, scratch.weights, slot, filled.at[slot], where, stage.row_tiles, atoms)
            return copied + 1

        copied = lax.fori_loop(0, num_mine * (stage.ways * stage.tiles), copy_tile, copied)

    # Every completion of a barrier has to be waited for before the CTA ends.
    def drain(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(num_slots))])

    lax.fori_loop(jnp.maximum(copied - num_slots, 0), copied, drain, None)


def _copy_inputs(sizes: MatmulSizes, stages: list[StageRefs], arrivals_ref: Ref, scratch: MatmulScratch) -> None:
    """One warp: the weights of norms, and the input of each stage in which this CTA has units, once it is stored.

    When all CTAs have stored it, this one has also done all it had to with the input before, which lies in the same
    place: it has arrived itself, or others could not have gone on to what they arrived with.
    """
    for stage, refs in zip(sizes.stages, stages, strict=True):
        if stage.has_norm:

            @pl.when(sizes.my_units(stage, refs)[1] > 0)
            def _(stage=stage, refs=refs):
                assert refs.norm_weight is not None
                source = refs.norm_weight.at[refs.of_layer(refs.norm_weight)]
                target = scratch.norms.at[stage.norm_index, pl.ds(0, stage.num_atoms)]
                plgpu.copy_gmem_to_smem(source, target, scratch.norms_full.at[stage.norm_index])

    for index, (stage, refs) in enumerate(zip(sizes.stages, stages, strict=True)):
        _, num_mine = sizes.my_units(stage, refs)

        @pl.when(num_mine > 0)
        def _(index=index, stage=stage, refs=refs):
            if index > 0:
                wait_for_arrivals(arrivals_ref, index - 1, min(sizes.stages[index - 1].num_units, sizes.num_ctas))
            _copy_atoms(refs.x, scratch.x, None, scratch.x_full, (0,), 1, (0, stage.num_atoms))

    if len(stages) > 1:
        reset_arrivals(arrivals_ref, len(stages) - 1, sizes.num_ctas)


def _compute(sizes: MatmulSizes, stages: list[StageRefs], arrivals_ref: Ref, scratch: MatmulScratch) -> None:
    """One warpgroup: for each stage take x, compute the units, tell the other CTAs."""
    used = jnp.int32(0)
    for index, (stage, refs) in enumerate(zip(sizes.stages, stages, strict=True)):
        first_unit, num_mine = sizes.my_units(stage, refs)

        @pl.when(num_mine > 0)
        def _(index=index, stage=stage, refs=refs, first_unit=first_unit, num_mine=num_mine, used=used):
            rstd = take_x(stage, scratch)

            def unit_body(i: jax.Array, used: jax.Array) -> jax.Array:
                return compute_unit(sizes, stage, refs, rstd, first_unit + i * sizes.num_ctas, used, scratch)

            lax.fori_loop(0, num_mine, unit_body, used)
            if index + 1 < len(stages):
                pl.when(stages[index + 1].is_there)(lambda: arrive(arrivals_ref, index))

        used = used + num_mine * (stage.ways * stage.tiles)
