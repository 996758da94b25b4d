"""Products of at most 8 rows with weight matrices, one after the other, as one Pallas Mosaic GPU kernel (Hopper).

With 8 rows a product takes as long as reading the weights, if nothing else takes time: so weights stream into shared
memory ahead of the computation, across products, and norm, bias, activation and residual are part of the kernel.

A unit is 16 output columns: 16 rows of a weight [N, K]. One thread block (CTA) computes a unit over the whole of K, so
that nothing is summed across CTAs and results have the same bits every time. Tensor cores take 64 rows at a time, and
there are 8, so K is cut: each run of 8 atoms of 64 inputs counts as 8 segments, one below the other,

    x [8, 512] -> X [8 segments * 8 rows, 64]      w [8, 512] -> W [8 segments * 8 columns, 64]

and block (s, s) of X W^T is the product of segment s. The other blocks are not used, which costs nothing: the tensor
cores wait for memory. In shared memory [8, 512] and [64, 64] are the same bytes, since the layout of wgmma's operands
goes by atoms of 8 rows and 64 columns; so one copy brings 16 KiB and more. That matters: a copy costs 128 arrivals at a
barrier, 0.2 us (with a copy a segment a layer of Qwen3-0.6B took 24.6 us, LOG 2026-11-30).

In a CTA one warp copies weights and runs ahead, one warpgroup computes. Between products all CTAs wait for each other
(they are all resident: one an SM), or each product is a kernel of its own.

Letters: K inputs  N outputs  S segments
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout

from pallas_kernels.common import Ref, div, full, pl, plgpu, swizzled_smem
from pallas_kernels.layer_slice import LayerSlice, as_stack, place_in
from pallas_kernels.reference_matmul import MatmulStage
from pallas_kernels.tuning import MatmulConfig

FEW_ROWS = 8
UNIT = 16
MAX_STAGES = 4
_SEGMENTS = (8, 4, 2, 1)
# Rows of a unit in atoms.
_ROW_TILES = UNIT // FEW_ROWS
_ATOM_BYTES = 1024
_MAX_TILE = 16
_SMEM_BYTES = 227 * 1024
# Beside the ring and x: barriers, sums of squares, the sums across segments.
_OTHER_BYTES = 12 * 1024
_WGMMA = plgpu.Layout.WGMMA


@dataclass(frozen=True)
class _Stage:
    """Sizes and options of one product."""

    num_inputs: int
    num_outputs: int
    segments: int
    is_gated: bool
    has_norm: bool
    eps: float
    unit_offset: bool
    has_bias: bool
    activation: str | None
    adds_residual: bool
    first_cta: int  # which takes unit 0

    @property
    def ways(self) -> int:
        """Weight rows of an output: 2 with a gate."""
        return 2 if self.is_gated else 1

    @property
    def num_units(self) -> int:
        return self.num_outputs // UNIT

    @property
    def num_atoms(self) -> int:
        return self.num_inputs // 64

    @property
    def tile(self) -> int:
        """Atoms of each weight row that one slot of the ring holds."""
        counts = range(self.segments, _MAX_TILE + 1, self.segments)
        return max(n for n in counts if self.num_atoms % n == 0)

    @property
    def tiles(self) -> int:
        return self.num_atoms // self.tile


@dataclass(frozen=True)
class _Statics:
    """What a kernel is compiled for."""

    stages: tuple[_Stage, ...]
    num_ctas: int
    dtype: Any
    max_slots: int
    copy_whole_tiles: bool

    @property
    def tile(self) -> int:
        return self.stages[0].tile

    @property
    def max_atoms(self) -> int:
        return max(stage.num_atoms for stage in self.stages)

    @property
    def x_rows(self) -> int:
        """Rows of x_smem: every run of segments can be read as 64 rows, whatever lies behind."""
        return FEW_ROWS * (self.max_atoms + 8 - self.stages[0].segments)

    @property
    def num_slots(self) -> int:
        room = _SMEM_BYTES - _OTHER_BYTES - 128 * self.x_rows
        return min(room // (_ATOM_BYTES * _ROW_TILES * self.tile), self.max_slots)

    def num_mine(self, stage: _Stage) -> tuple[jax.Array, jax.Array]:
        """The first unit of this CTA, and how many it has: every num_ctas-th."""
        first = lax.axis_index("cta") + (self.num_ctas - stage.first_cta)
        first = jnp.where(first >= self.num_ctas, first - self.num_ctas, first)
        return first, div(jnp.maximum(stage.num_units - first + (self.num_ctas - 1), 0), self.num_ctas)


def _segments_of(num_inputs: int) -> int:
    """Into how many segments K, a multiple of 64, is cut."""
    return next(s for s in _SEGMENTS if num_inputs % (64 * s) == 0)


def unsupported_reason(x: jax.Array, stages: tuple[MatmulStage, ...]) -> str | None:
    """Why there is no kernel for these arguments, in words, or None if there is one."""
    if x.shape[0] != FEW_ROWS:
        return f"{x.shape[0]} rows, only {FEW_ROWS} have a kernel"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype.name}, only bfloat16 and float16 have kernels"
    if len(stages) > MAX_STAGES:
        return f"{len(stages)} stages, at most {MAX_STAGES} have a kernel"
    for stage in stages:
        if stage.activation == "gelu":
            return "activation gelu, only its approximation by tanh has a kernel"
        num_outputs, num_inputs = stage.weight.shape[-2:]
        if num_outputs % UNIT or num_inputs % 64:
            return f"{num_inputs} inputs and {num_outputs} outputs, only multiples of 64 and {UNIT} have kernels"
        if 2 * FEW_ROWS * num_inputs > _SMEM_BYTES - _OTHER_BYTES - (3 * _MAX_TILE * _ROW_TILES + 8) * _ATOM_BYTES:
            return f"{num_inputs} inputs do not fit into shared memory"
    return None


def matmul_stages(
    x: jax.Array,
    stages: tuple[MatmulStage, ...],
    residual: jax.Array | None,
    arrivals: jax.Array,
    *,
    config: MatmulConfig,
    interpret: Any = False,
) -> jax.Array:
    """See ops.matmul_stages.

    Args:
      x: bf16 or fp16 [8, K].
      residual: [8, D] or None.
      arrivals: i32[MAX_STAGES], zeros; zeros again afterwards. Used where the stages are one kernel.
      config: static.
      interpret: False, or InterpretGPUParams.

    Returns:
      [8, N] of the last stage.
    """
    statics = _make_statics(x, stages, config)
    # Slots of the ring have one shape.
    if not config.one_kernel or len({(stage.segments, stage.tile) for stage in statics.stages}) > 1:
        for stage, sizes in zip(stages, statics.stages, strict=True):
            alone = replace(statics, stages=(sizes,))
            x = _run(alone, x, (stage,), residual, arrivals, interpret)[-1]
            residual = x if stage.adds_residual else residual
        return x
    return _run(statics, x, stages, residual, arrivals, interpret)[-1]


def _make_statics(x: jax.Array, stages: tuple[MatmulStage, ...], config: MatmulConfig) -> _Statics:
    made, first_cta = [], 0
    for stage in stages:
        num_inputs = stage.weight.shape[-1]
        made.append(
            _Stage(
                num_inputs=num_inputs,
                num_outputs=stage.weight.shape[-2],
                segments=_segments_of(num_inputs),
                is_gated=stage.is_gated,
                has_norm=stage.norm_weight is not None,
                eps=stage.eps,
                unit_offset=stage.unit_offset,
                has_bias=stage.bias is not None,
                activation=stage.activation,
                adds_residual=stage.adds_residual,
                first_cta=first_cta,
            )
        )
        first_cta = (first_cta + made[-1].num_units) % config.num_ctas
    return _Statics(tuple(made), config.num_ctas, x.dtype, config.max_slots, config.copy_whole_tiles)


def _run(
    statics: _Statics,
    x: jax.Array,
    stages: tuple[MatmulStage, ...],
    residual: jax.Array | None,
    arrivals: jax.Array,
    interpret: Any,
) -> list[jax.Array]:
    """The results of all stages."""
    weights = jax.tree.leaves(stages, is_leaf=lambda node: isinstance(node, LayerSlice))
    layer = next((weight.layer for weight in weights if isinstance(weight, LayerSlice)), jnp.int32(0))
    operands = [x, arrivals, layer.reshape(1)] + ([residual] if residual is not None else [])
    for stage in stages:
        operands.append(as_stack(stage.weight.reshape(-1, stage.weight.shape[-1]), layer))
        operands += [] if stage.norm_weight is None else [as_stack(stage.norm_weight, layer)]
        operands += [] if stage.bias is None else [as_stack(stage.bias.reshape(-1), layer)]
    return pl.kernel(
        functools.partial(_body, statics, residual is not None),
        out_type=[jax.ShapeDtypeStruct((FEW_ROWS, stage.num_outputs), statics.dtype) for stage in statics.stages],
        mesh=plgpu.Mesh(grid=(statics.num_ctas,), grid_names=("cta",), num_threads=2, thread_name="warpgroup"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        name="matmul_stages",
    )(*operands)


@dataclass(frozen=True)
class _StageRefs:
    """Global memory of one product."""

    x: Ref
    weight: Ref  # [L or 1, ways * N, K]
    norm_weight: Ref | None  # [L or 1, K]
    bias: Ref | None  # [L or 1, ways * N]
    residual: Ref | None
    out: Ref
    layer: jax.Array

    def of_layer(self, stack: Ref) -> jax.Array | int:
        """The first index into the weight, the norm's weight or the bias."""
        return place_in(stack, self.layer)


def _stage_refs(statics: _Statics, has_residual: bool, refs: list[Ref]) -> list[_StageRefs]:
    outs = refs[-len(statics.stages) :]
    x, residual = refs[0], refs[3] if has_residual else None
    rest = iter(refs[4 if has_residual else 3 :])
    layer = refs[2][0]  # read while the barriers are made, long before the first copy asks for it
    made = []
    for stage, out in zip(statics.stages, outs, strict=True):
        weight = next(rest)
        norm_weight = next(rest) if stage.has_norm else None
        bias = next(rest) if stage.has_bias else None
        made.append(_StageRefs(x, weight, norm_weight, bias, residual if stage.adds_residual else None, out, layer))
        x = out
        residual = out if stage.adds_residual else residual
    return made


def _body(statics: _Statics, has_residual: bool, *refs: Ref) -> None:
    """One warpgroup computes, one warp of the other copies."""
    stages = _stage_refs(statics, has_residual, list(refs))
    arrivals_ref = refs[1]

    def scoped(weights: Ref, x: Ref, *rest: Ref) -> None:
        scratch = (tuple(weights), tuple(x), *rest) if statics.copy_whole_tiles else (weights, x, *rest)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            _compute(statics, stages, arrivals_ref, scratch)

        @pl.when(warpgroup == 1)
        def _():
            def warp_body(warp: jax.Array) -> None:
                pl.when(warp == 0)(functools.partial(_copy_weights, statics, stages, scratch))

            plgpu.warp_map(warp_body)

    num_slots, tile = statics.num_slots, statics.tile
    ways = max(stage.ways for stage in statics.stages)
    smem = functools.partial(swizzled_smem, dtype=statics.dtype)
    weights, x = smem(num_slots, _ROW_TILES * tile * FEW_ROWS, 64), smem(statics.x_rows, 64)
    copies_w, copies_x = _ROW_TILES * tile, statics.max_atoms
    if statics.copy_whole_tiles:
        # The same bytes as copies fill them: atoms of 8 rows and 64 columns in the same order.
        weights = plgpu.RefUnion(smem(num_slots, UNIT, 64 * tile), weights)
        x = plgpu.RefUnion(smem(FEW_ROWS, 64 * statics.max_atoms), x)
        copies_w = copies_x = 1
    pl.run_scoped(
        scoped,
        weights,
        x,
        plgpu.SMEM((ways * 64, UNIT), jnp.float32),  # a unit before the sum over segments
        plgpu.SMEM((64,), jnp.float32),  # sums of squares of the rows of x
        plgpu.Barrier(num_arrivals=copies_w, num_barriers=num_slots),  # weights full
        plgpu.Barrier(num_barriers=num_slots),  # weights free
        plgpu.Barrier(num_arrivals=copies_x),  # x full
        collective_axes="warpgroup",
    )


def _operand(ref: Ref) -> Ref:
    """Shared memory as wgmma reads it: atoms one below the other."""
    return ref[1] if isinstance(ref, tuple) else ref


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
        wide = target[0] if slot is None else target[0].at[slot]
        plgpu.copy_gmem_to_smem(block, wide.at[:, pl.ds(0, 64 * count)], barrier)
        return
    tall = target if slot is None else target.at[slot]
    for i in range(row_tiles):
        for j in range(count):
            block = source.at[*layer, pl.ds(row + i * FEW_ROWS, FEW_ROWS), pl.ds((first + j) * 64, 64)]
            plgpu.copy_gmem_to_smem(block, tall.at[pl.ds((i * count + j) * FEW_ROWS, FEW_ROWS)], barrier)


def _copy_weights(statics: _Statics, stages: list[_StageRefs], scratch: tuple[Ref, ...]) -> None:
    """One warp: the tiles of all units of all stages in order, as slots become free."""
    w_smem, _, _, _, filled, free, _ = scratch
    num_slots = statics.num_slots
    copied = jnp.int32(0)
    for stage, refs in zip(statics.stages, stages, strict=True):
        first_unit, num_mine = statics.num_mine(stage)

        def copy_tile(i: jax.Array, copied: jax.Array, stage=stage, refs=refs, first_unit=first_unit) -> jax.Array:
            slot = lax.rem(copied, jnp.int32(num_slots))

            @pl.when(copied >= num_slots)
            def _():
                plgpu.barrier_wait(free.at[slot])

            unit_way = div(i, stage.tiles)
            tile = i - unit_way * stage.tiles
            unit = div(unit_way, stage.ways)
            way = unit_way - unit * stage.ways
            row = way * stage.num_outputs + (first_unit + unit * statics.num_ctas) * UNIT
            where, atoms = (refs.of_layer(refs.weight), row), (tile * stage.tile, stage.tile)
            _copy_atoms(refs.weight, w_smem, slot, filled.at[slot], where, _ROW_TILES, atoms)
            return copied + 1

        copied = lax.fori_loop(0, num_mine * (stage.ways * stage.tiles), copy_tile, copied)

    # Every completion of a barrier has to be waited for before the CTA ends.
    def drain(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(num_slots))])

    lax.fori_loop(jnp.maximum(copied - num_slots, 0), copied, drain, None)


def _compute(statics: _Statics, stages: list[_StageRefs], arrivals_ref: Ref, scratch: tuple[Ref, ...]) -> None:
    """One warpgroup: for each stage wait for the one before, take x, compute the units."""
    used = jnp.int32(0)
    for index, (stage, refs) in enumerate(zip(statics.stages, stages, strict=True)):
        first_unit, num_mine = statics.num_mine(stage)

        @pl.when(num_mine > 0)
        def _(index=index, stage=stage, refs=refs, first_unit=first_unit, num_mine=num_mine, used=used):
            if index == 0:
                _copy_atoms(refs.x, scratch[1], None, scratch[-1], (0,), 1, (0, stage.num_atoms))
            # Before the wait, if there are registers for them: these loads wait for no other stage.
            chunks = stage.num_atoms // stage.segments if stage.has_norm else 0
            weights = [_norm_weight(stage, refs, i) for i in range(chunks)] if chunks <= 4 else []
            if index > 0:
                _wait_for_arrivals(arrivals_ref, index - 1, min(statics.stages[index - 1].num_units, statics.num_ctas))
                _copy_atoms(refs.x, scratch[1], None, scratch[-1], (0,), 1, (0, stage.num_atoms))
            _take_x(stage, refs, weights, scratch)

            def unit_body(i: jax.Array, used: jax.Array) -> jax.Array:
                return _compute_unit(statics, stage, refs, first_unit + i * statics.num_ctas, used, scratch)

            lax.fori_loop(0, num_mine, unit_body, used)
            if index + 1 < len(stages):
                _arrive(arrivals_ref, index)

        used = used + num_mine * (stage.ways * stage.tiles)
    if len(stages) > 1:
        _reset_arrivals(arrivals_ref, len(stages) - 1, statics.num_ctas)


def _norm_weight(stage: _Stage, refs: _StageRefs, chunk: int | jax.Array) -> jax.Array:
    """The weights of the norm for one run of segments, as the rows of X need them; [64, 64]."""
    assert refs.norm_weight is not None
    row = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=_WGMMA)
    # Rows of other chunks are left as they are.
    out = full((64, 64), 0.0 if stage.unit_offset else 1.0, _WGMMA).astype(refs.norm_weight.dtype)
    for segment in range(stage.segments):
        columns = pl.ds((chunk * stage.segments + segment) * 64, 64)
        part = refs.norm_weight.at[refs.of_layer(refs.norm_weight), columns]
        weight = plgpu.load(part, layout=_WGMMA.reduce(0), optimized=False)
        weight = plgpu.layout_cast(lax.broadcast_in_dim(weight, (64, 64), [1]), _WGMMA)
        is_segment = jnp.logical_and(row >= segment * FEW_ROWS, row < (segment + 1) * FEW_ROWS)
        out = jnp.where(is_segment, weight, out)
    return out


def _take_x(stage: _Stage, refs: _StageRefs, norm_weights: list[jax.Array], scratch: tuple[Ref, ...]) -> None:
    """Wait for x in shared memory and multiply it by the weights of the norm; the rows' sums of squares beside it.

    Args:
      norm_weights: of all chunks, or none if they are still to be loaded.
    """
    _, x_smem, _, squares_smem, _, _, x_full = scratch
    x_smem = _operand(x_smem)
    plgpu.barrier_wait(x_full)
    if not stage.has_norm:
        return
    squares = full((64,), 0.0, _WGMMA.reduce(1))

    def scale(i: int | jax.Array, squares: jax.Array) -> jax.Array:
        weight = norm_weights[i] if norm_weights and isinstance(i, int) else _norm_weight(stage, refs, i)
        weight = weight.astype(jnp.float32)
        chunk = x_smem.at[pl.ds(i * (stage.segments * FEW_ROWS), 64)]
        x = plgpu.load(chunk, layout=_WGMMA).astype(jnp.float32)
        chunk[...] = (x * (1.0 + weight if stage.unit_offset else weight)).astype(x_smem.dtype)
        return squares + (x * x).sum(axis=1)

    if norm_weights:
        for i in range(len(norm_weights)):
            squares = scale(i, squares)
    else:
        squares = lax.fori_loop(0, stage.num_atoms // stage.segments, scale, squares)
    squares_smem[...] = squares
    plgpu.commit_smem()


def _compute_unit(
    statics: _Statics, stage: _Stage, refs: _StageRefs, unit: jax.Array, used: jax.Array, scratch: tuple[Ref, ...]
) -> jax.Array:
    """16 output columns; returns the number of slots used so far."""
    w_smem, x_smem, sums_smem, squares_smem, filled, free, _ = scratch
    w_smem, x_smem = _operand(w_smem), _operand(x_smem)
    columns = pl.ds(unit * UNIT, UNIT)
    layout = _out_layout()
    residual = None
    if refs.residual is not None:  # loaded early: nothing waits for it
        residual = plgpu.load(refs.residual.at[:, columns], layout=layout, optimized=False)
    run = stage.segments * FEW_ROWS  # rows of a run of segments

    def product(way: int) -> tuple[jax.Array, ...]:
        def body(*accs: Ref) -> tuple[jax.Array, ...]:
            for tile in range(stage.tiles):
                slot = lax.rem(used + (way * stage.tiles + tile), jnp.int32(statics.num_slots))
                plgpu.barrier_wait(filled.at[slot])
                for j in range(0, stage.tile, stage.segments):
                    x = x_smem.at[pl.ds((tile * stage.tile + j) * FEW_ROWS, 64)]
                    for i, acc in enumerate(accs):
                        weights = w_smem.at[slot, pl.ds((i * stage.tile + j) * FEW_ROWS, run)]
                        plgpu.wgmma(acc, x, weights.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])
            return tuple(acc[...] for acc in accs)

        return pl.run_scoped(body, *[plgpu.ACC((64, run), jnp.float32) for _ in range(_ROW_TILES)])

    for way in range(stage.ways):
        for i, blocks in enumerate(product(way)):
            sums_smem[pl.ds(way * 64, 64), pl.ds(i * FEW_ROWS, FEW_ROWS)] = _diagonal(stage, blocks)
    plgpu.commit_smem()
    parts = [_sum_segments(stage, sums_smem, way) for way in range(stage.ways)]
    if stage.has_norm:
        rstd = _across_columns(_rstd(stage, squares_smem))
        parts = [part * rstd for part in parts]
    if refs.bias is not None:
        for way in range(stage.ways):
            row = pl.ds(way * stage.num_outputs + unit * UNIT, UNIT)
            bias = refs.bias.at[refs.of_layer(refs.bias), row]
            bias = plgpu.load(bias, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
            parts[way] = parts[way] + plgpu.layout_cast(lax.broadcast_in_dim(bias, (FEW_ROWS, UNIT), [1]), layout)
    out = _activate(stage.activation, parts[0])
    if stage.is_gated:
        out = out * parts[1]
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    refs.out.at[:, columns][...] = out.astype(statics.dtype)
    return used + stage.ways * stage.tiles


def _diagonal(stage: _Stage, blocks: jax.Array) -> jax.Array:
    """[64, S * 8] -> [64, 8]: of the 8 rows of segment s the 8 columns of segment s."""
    row = plgpu.broadcasted_iota(jnp.int32, (64, FEW_ROWS), 0, layout=_WGMMA)
    out = full((64, FEW_ROWS), 0.0, _WGMMA)
    for segment in range(stage.segments):
        part = lax.slice(blocks, (0, segment * FEW_ROWS), (64, (segment + 1) * FEW_ROWS))
        is_segment = jnp.logical_and(row >= segment * FEW_ROWS, row < (segment + 1) * FEW_ROWS)
        out = jnp.where(is_segment, part, out)
    return out


@functools.cache
def _out_layout() -> Any:
    """f32[8, 16] over the 128 threads: one element each, a row beside the next."""
    tiling = plgpu.Tiling(((FEW_ROWS, UNIT), (2, UNIT), (1, 1)))
    layout = TiledLayout(tiling, (-6,), (-4, -3), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _sum_segments(stage: _Stage, sums_smem: Ref, way: int) -> jax.Array:
    """[8, 16] in the order of the segments."""
    total = full((FEW_ROWS, UNIT), 0.0, _out_layout())
    for segment in range(stage.segments):
        rows = pl.ds(way * 64 + segment * FEW_ROWS, FEW_ROWS)
        total = total + plgpu.load(sums_smem.at[rows], layout=_out_layout(), optimized=False)
    return total


def _rstd(stage: _Stage, squares_smem: Ref) -> jax.Array:
    """1 / rms of the 8 rows."""
    total = full((FEW_ROWS,), 0.0, _out_layout().reduce(1))
    for segment in range(stage.segments):
        part = squares_smem.at[pl.ds(segment * FEW_ROWS, FEW_ROWS)]
        total = total + plgpu.load(part, layout=_out_layout().reduce(1), optimized=False)
    return lax.rsqrt(total * (1.0 / stage.num_inputs) + stage.eps)


def _across_columns(row: jax.Array) -> jax.Array:
    """[8] -> [8, 16]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(row, (FEW_ROWS, UNIT), [0]), _out_layout())


def _activate(name: str | None, x: jax.Array) -> jax.Array:
    if name == "silu":
        return x / (1.0 + jnp.exp(-x))
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return 0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))
    if name == "relu":
        return jnp.maximum(x, 0.0)
    assert name is None, name
    return x


def _arrive(arrivals_ref: Ref, index: int) -> None:
    """Tell all CTAs that this one's part of a stage is stored. Not for the interpreter; all 128 threads call it."""
    _counters(arrivals_ref, "red.release.gpu.global.add.u32 [$0], 1;", "", index)


def _wait_for_arrivals(arrivals_ref: Ref, index: int, count: int) -> None:
    """Wait until `count` CTAs have arrived; what they stored may be read then, by copies to shared memory too."""
    spin = (
        "{ .reg .pred again; .reg .u32 seen; "
        f"poll: ld.acquire.gpu.global.u32 seen, [$0]; setp.lt.u32 again, seen, {count}; @again bra poll; }}"
    )
    _counters(arrivals_ref, spin, "fence.proxy.async;", index)


def _reset_arrivals(arrivals_ref: Ref, index: int, num_ctas: int) -> None:
    """The last of all CTAs sets all counters back to 0."""
    last = (
        "{ .reg .pred last; .reg .u32 before; atom.acq_rel.gpu.global.add.u32 before, [$0], 1; "
        f"setp.eq.u32 last, before, {num_ctas - 1}; "
        + " ".join(f"@last st.global.u32 [$0 + {-4 * i}], 0;" for i in range(index + 1))
        + " }"
    )
    _counters(arrivals_ref, last, "", index)


def _counters(arrivals_ref: Ref, first: str, second: str, index: int) -> None:
    """One thread runs two instructions on a counter, the whole warpgroup before and after."""
    # The dialect modules are private until Pallas has atomics of its own here.
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax.experimental.mosaic import gpu as mgpu

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(ctx: Any, counters: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(counters), [index], i32)
            for text in (first, second):
                operands = (pointer,) if "$0" in text else ()
                if text:
                    mgpu.utils.inline_ptx(text, *operands, has_side_effects=True)
        mgpu.utils.warpgroup_barrier()

    run(arrivals_ref)
