"""Products of at most 8 rows with weight matrices, one after the other, as one Pallas Mosaic GPU kernel (Hopper).

With 8 rows a product takes as long as reading the weights, if nothing else takes time: so weights stream into shared
memory ahead of the computation, across products, and norm, bias, activation and residual are part of the kernel.

A unit is 16 output columns: 16 rows of a weight [N, K]. One thread block (CTA) computes a unit over the whole of K, so
that nothing is summed across CTAs and results have the same bits every time. Tensor cores take 64 rows at a time, and
there are 8: K is cut into 8 segments, and the segments of x and of the weights stand below each other,

    x [8, K] -> X [8 segments * 8 rows, K / 8]      w [16, K] -> W [8 segments * 16 columns, K / 8]

so that block (s, s) of X W^T is the product of segment s; the other blocks are not used, which costs nothing: the
tensor cores wait for memory. In a CTA one warp copies weights and runs ahead, one warpgroup computes. Between products
all CTAs wait for each other (they are all resident: one an SM), or each product is a kernel of its own.

Letters: K inputs  N outputs  S segments
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout

from pallas_kernels.common import Ref, div, full, pl, plgpu, swizzled_smem
from pallas_kernels.reference_matmul import MatmulStage
from pallas_kernels.tuning import MatmulConfig

ROWS = 8
UNIT = 16
_SEGMENTS = (8, 4, 2, 1)
_SLOT_BYTES = 32 * 1024
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
    def segment(self) -> int:
        """Inputs of a segment."""
        return self.num_inputs // self.segments

    @property
    def tile(self) -> int:
        """Inputs of each segment that one slot of the ring holds."""
        count = self.segment // 64
        most = _SLOT_BYTES // (UNIT * self.segments * 128)
        return 64 * max(n for n in range(1, count + 1) if count % n == 0 and n <= most)

    @property
    def tiles(self) -> int:
        return self.segment // self.tile


@dataclass(frozen=True)
class _Statics:
    """What a kernel is compiled for."""

    stages: tuple[_Stage, ...]
    num_ctas: int
    dtype: Any
    max_slots: int

    @property
    def segments(self) -> int:
        return self.stages[0].segments

    @property
    def slot_shape(self) -> tuple[int, int]:
        return UNIT * self.segments, max(stage.tile for stage in self.stages)

    @property
    def x_shape(self) -> tuple[int, int]:
        return 64, max(stage.segment for stage in self.stages)

    @property
    def num_slots(self) -> int:
        rows, columns = self.slot_shape
        room = _SMEM_BYTES - _OTHER_BYTES - 2 * self.x_shape[0] * self.x_shape[1]
        return min(room // (2 * rows * columns), self.max_slots)

    def num_mine(self, stage: _Stage) -> tuple[jax.Array, jax.Array]:
        """The first unit of this CTA, and how many it has: every num_ctas-th."""
        first = lax.axis_index("cta") + (self.num_ctas - stage.first_cta)
        first = jnp.where(first >= self.num_ctas, first - self.num_ctas, first)
        return first, div(jnp.maximum(stage.num_units - first + (self.num_ctas - 1), 0), self.num_ctas)


def segments_of(num_inputs: int) -> int | None:
    """Into how many segments K is cut, None if it cannot be."""
    return next((s for s in _SEGMENTS if num_inputs % (64 * s) == 0), None)


def unsupported_sizes(sizes: tuple[tuple[int, int], ...]) -> str | None:
    """Why products of these (K, N) cannot be one kernel, in words, or None if they can."""
    for num_inputs, num_outputs in sizes:
        if num_outputs % UNIT or num_inputs % 64:
            return f"{num_inputs} inputs and {num_outputs} outputs, expected multiples of 64 and {UNIT}"
        segments = segments_of(num_inputs)
        assert segments is not None
        if 128 * num_inputs // segments > _SMEM_BYTES - _OTHER_BYTES - 3 * _SLOT_BYTES:
            return f"{num_inputs} inputs do not fit into shared memory"
    if len({segments_of(num_inputs) for num_inputs, _ in sizes}) > 1:
        return "the numbers of inputs cannot be cut alike"
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
      arrivals: i32[len(stages)], zeros; zeros again afterwards. Used where the stages are one kernel.
      config: static.
      interpret: False, or InterpretGPUParams.

    Returns:
      [8, N] of the last stage.
    """
    statics = _make_statics(x, stages, config)
    if not config.one_kernel:
        for stage, sizes in zip(stages, statics.stages, strict=True):
            alone = _Statics((sizes,), statics.num_ctas, statics.dtype, statics.max_slots)
            x = _run(alone, x, (stage,), residual, arrivals, interpret)[-1]
            residual = x if stage.adds_residual else residual
        return x
    return _run(statics, x, stages, residual, arrivals, interpret)[-1]


def _make_statics(x: jax.Array, stages: tuple[MatmulStage, ...], config: MatmulConfig) -> _Statics:
    made, first_cta = [], 0
    for stage in stages:
        num_inputs = stage.weight.shape[-1]
        segments = segments_of(num_inputs)
        assert segments is not None
        made.append(
            _Stage(
                num_inputs=num_inputs,
                num_outputs=stage.weight.shape[-2],
                segments=segments,
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
    return _Statics(tuple(made), config.num_ctas, x.dtype, config.max_slots)


def _run(
    statics: _Statics,
    x: jax.Array,
    stages: tuple[MatmulStage, ...],
    residual: jax.Array | None,
    arrivals: jax.Array,
    interpret: Any,
) -> list[jax.Array]:
    """The results of all stages."""
    operands = [x, arrivals] + ([residual] if residual is not None else [])
    for stage in stages:
        operands.append(stage.weight.reshape(-1, stage.weight.shape[-1]))
        operands += [] if stage.norm_weight is None else [stage.norm_weight]
        operands += [] if stage.bias is None else [stage.bias.reshape(-1)]
    return pl.kernel(
        functools.partial(_body, statics, residual is not None),
        out_type=[jax.ShapeDtypeStruct((ROWS, stage.num_outputs), statics.dtype) for stage in statics.stages],
        mesh=plgpu.Mesh(grid=(statics.num_ctas,), grid_names=("cta",), num_threads=2, thread_name="warpgroup"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        name="matmul_stages",
    )(*operands)


@dataclass(frozen=True)
class _StageRefs:
    """Global memory of one product."""

    x: Ref
    weight: Ref
    norm_weight: Ref | None
    bias: Ref | None
    residual: Ref | None
    out: Ref


def _stage_refs(statics: _Statics, has_residual: bool, refs: list[Ref]) -> list[_StageRefs]:
    outs = refs[-len(statics.stages) :]
    x, residual = refs[0], refs[2] if has_residual else None
    rest = iter(refs[3 if has_residual else 2 :])
    made = []
    for stage, out in zip(statics.stages, outs, strict=True):
        weight = next(rest)
        norm_weight = next(rest) if stage.has_norm else None
        bias = next(rest) if stage.has_bias else None
        made.append(_StageRefs(x, weight, norm_weight, bias, residual if stage.adds_residual else None, out))
        x = out
        residual = out if stage.adds_residual else residual
    return made


def _body(statics: _Statics, has_residual: bool, *refs: Ref) -> None:
    """One warpgroup computes, one warp of the other copies."""
    stages = _stage_refs(statics, has_residual, list(refs))
    arrivals_ref = refs[1]

    def scoped(*scratch: Ref) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            _compute(statics, stages, arrivals_ref, scratch)

        @pl.when(warpgroup == 1)
        def _():
            def warp_body(warp: jax.Array) -> None:
                pl.when(warp == 0)(functools.partial(_copy_weights, statics, stages, scratch))

            plgpu.warp_map(warp_body)

    num_slots = statics.num_slots
    ways = max(stage.ways for stage in statics.stages)
    pl.run_scoped(
        scoped,
        swizzled_smem(num_slots, *statics.slot_shape, dtype=statics.dtype),  # weights
        swizzled_smem(*statics.x_shape, dtype=statics.dtype),  # x, segments below each other
        plgpu.SMEM((ways * 64, UNIT), jnp.float32),  # a unit before the sum over segments
        plgpu.SMEM((64,), jnp.float32),  # sums of squares of the rows of x_smem
        plgpu.SMEM((1,), jnp.int32),  # is this CTA the last to arrive
        plgpu.Barrier(num_arrivals=statics.segments, num_barriers=num_slots),  # weights full
        plgpu.Barrier(num_barriers=num_slots),  # weights free
        plgpu.Barrier(num_arrivals=statics.segments),  # x full
        collective_axes="warpgroup",
    )


def _copy_weights(statics: _Statics, stages: list[_StageRefs], scratch: tuple[Ref, ...]) -> None:
    """One warp: the tiles of all units of all stages in order, as slots become free."""
    w_smem, _, _, _, _, filled, free, _ = scratch
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
            for segment in range(stage.segments):
                columns = pl.ds(segment * stage.segment + tile * stage.tile, stage.tile)
                target = w_smem.at[slot, pl.ds(segment * UNIT, UNIT), pl.ds(0, stage.tile)]
                plgpu.copy_gmem_to_smem(refs.weight.at[pl.ds(row, UNIT), columns], target, filled.at[slot])
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
            # Before the wait, if there are registers for them: these loads wait for no other stage.
            chunks = stage.segment // 64 if stage.has_norm else 0
            weights = [_norm_weight(stage, refs, i) for i in range(chunks)] if chunks <= 4 else []
            if index > 0:
                _wait_for_arrivals(arrivals_ref, index - 1, min(statics.stages[index - 1].num_units, statics.num_ctas))
            _load_x(stage, refs, weights, scratch)

            def unit_body(i: jax.Array, used: jax.Array) -> jax.Array:
                return _compute_unit(statics, stage, refs, first_unit + i * statics.num_ctas, used, scratch)

            lax.fori_loop(0, num_mine, unit_body, used)
            if index + 1 < len(stages):
                _arrive(arrivals_ref, index)

        used = used + num_mine * (stage.ways * stage.tiles)
    if len(stages) > 1:
        _reset_arrivals(arrivals_ref, len(stages) - 1, statics.num_ctas)


def _norm_weight(stage: _Stage, refs: _StageRefs, chunk: int | jax.Array) -> jax.Array:
    """The weights of the norm for 64 columns of X, as its rows need them; [64, 64]."""
    assert refs.norm_weight is not None
    row = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=_WGMMA)
    out = full((64, 64), 1.0, _WGMMA).astype(refs.norm_weight.dtype)
    for segment in range(stage.segments):
        part = refs.norm_weight.at[pl.ds(segment * stage.segment + 64 * chunk, 64)]
        weight = plgpu.load(part, layout=_WGMMA.reduce(0), optimized=False)
        weight = plgpu.layout_cast(lax.broadcast_in_dim(weight, (64, 64), [1]), _WGMMA)
        is_segment = jnp.logical_and(row >= segment * ROWS, row < (segment + 1) * ROWS)
        out = jnp.where(is_segment, weight, out)
    return out


def _load_x(stage: _Stage, refs: _StageRefs, norm_weights: list[jax.Array], scratch: tuple[Ref, ...]) -> None:
    """x into shared memory, times the weights of the norm; the rows' sums of squares beside it.

    Args:
      norm_weights: of all chunks, or none if they are still to be loaded.
    """
    _, x_smem, _, squares_smem, _, _, _, x_full = scratch
    for segment in range(stage.segments):
        source = refs.x.at[:, pl.ds(segment * stage.segment, stage.segment)]
        target = x_smem.at[pl.ds(segment * ROWS, ROWS), pl.ds(0, stage.segment)]
        plgpu.copy_gmem_to_smem(source, target, x_full)
    plgpu.barrier_wait(x_full)
    if not stage.has_norm:
        return
    squares = full((64,), 0.0, _WGMMA.reduce(1))

    def scale(i: int | jax.Array, squares: jax.Array) -> jax.Array:
        weight = norm_weights[i] if norm_weights and isinstance(i, int) else _norm_weight(stage, refs, i)
        weight = weight.astype(jnp.float32)
        chunk = x_smem.at[:, pl.ds(64 * i, 64)]
        x = plgpu.load(chunk, layout=_WGMMA).astype(jnp.float32)
        chunk[...] = (x * (1.0 + weight if stage.unit_offset else weight)).astype(x_smem.dtype)
        return squares + (x * x).sum(axis=1)

    if norm_weights:
        for i in range(len(norm_weights)):
            squares = scale(i, squares)
    else:
        squares = lax.fori_loop(0, stage.segment // 64, scale, squares)
    squares_smem[...] = squares
    plgpu.commit_smem()


def _compute_unit(
    statics: _Statics, stage: _Stage, refs: _StageRefs, unit: jax.Array, used: jax.Array, scratch: tuple[Ref, ...]
) -> jax.Array:
    """16 output columns; returns the number of slots used so far."""
    w_smem, x_smem, sums_smem, squares_smem, _, filled, free, _ = scratch
    columns = pl.ds(unit * UNIT, UNIT)
    layout = _out_layout()
    residual = None
    if refs.residual is not None:  # loaded early: nothing waits for it
        residual = plgpu.load(refs.residual.at[:, columns], layout=layout, optimized=False)
    width = UNIT * stage.segments

    def product(way: int) -> jax.Array:
        def body(acc: Ref) -> jax.Array:
            for tile in range(stage.tiles):
                slot = lax.rem(used + (way * stage.tiles + tile), jnp.int32(statics.num_slots))
                plgpu.barrier_wait(filled.at[slot])
                weights = w_smem.at[slot, :, pl.ds(0, stage.tile)]
                plgpu.wgmma(acc, x_smem.at[:, pl.ds(tile * stage.tile, stage.tile)], weights.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])
            return acc[...]

        return pl.run_scoped(body, plgpu.ACC((64, width), jnp.float32))

    for way in range(stage.ways):
        sums_smem[pl.ds(way * 64, 64), :] = _diagonal(stage, product(way))
    plgpu.commit_smem()
    parts = [_sum_segments(stage, sums_smem, way) for way in range(stage.ways)]
    if stage.has_norm:
        rstd = _across_columns(_rstd(stage, squares_smem))
        parts = [part * rstd for part in parts]
    if refs.bias is not None:
        for way in range(stage.ways):
            bias = refs.bias.at[pl.ds(way * stage.num_outputs + unit * UNIT, UNIT)]
            bias = plgpu.load(bias, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
            parts[way] = parts[way] + plgpu.layout_cast(lax.broadcast_in_dim(bias, (ROWS, UNIT), [1]), layout)
    out = _activate(stage.activation, parts[0])
    if stage.is_gated:
        out = out * parts[1]
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    refs.out.at[:, columns][...] = out.astype(statics.dtype)
    return used + stage.ways * stage.tiles


def _diagonal(stage: _Stage, product: jax.Array) -> jax.Array:
    """[64, S * 16] -> [64, 16]: of the 8 rows of segment s the 16 columns of segment s."""
    row = plgpu.broadcasted_iota(jnp.int32, (64, UNIT), 0, layout=_WGMMA)
    out = full((64, UNIT), 0.0, _WGMMA)
    for segment in range(stage.segments):
        part = lax.slice(product, (0, segment * UNIT), (64, (segment + 1) * UNIT))
        is_segment = jnp.logical_and(row >= segment * ROWS, row < (segment + 1) * ROWS)
        out = jnp.where(is_segment, part, out)
    return out


@functools.cache
def _out_layout() -> Any:
    """f32[8, 16] over the 128 threads: one element each, a row beside the next."""
    tiling = plgpu.Tiling(((ROWS, UNIT), (2, UNIT), (1, 1)))
    layout = TiledLayout(tiling, (-6,), (-4, -3), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _sum_segments(stage: _Stage, sums_smem: Ref, way: int) -> jax.Array:
    """[8, 16] in the order of the segments."""
    total = full((ROWS, UNIT), 0.0, _out_layout())
    for segment in range(stage.segments):
        rows = pl.ds(way * 64 + segment * ROWS, ROWS)
        total = total + plgpu.load(sums_smem.at[rows], layout=_out_layout(), optimized=False)
    return total


def _rstd(stage: _Stage, squares_smem: Ref) -> jax.Array:
    """1 / rms of the 8 rows."""
    total = full((ROWS,), 0.0, _out_layout().reduce(1))
    for segment in range(stage.segments):
        part = squares_smem.at[pl.ds(segment * ROWS, ROWS)]
        total = total + plgpu.load(part, layout=_out_layout().reduce(1), optimized=False)
    return lax.rsqrt(total * (1.0 / stage.num_inputs) + stage.eps)


def _across_columns(row: jax.Array) -> jax.Array:
    """[8] -> [8, 16]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(row, (ROWS, UNIT), [0]), _out_layout())


def _activate(name: str | None, x: jax.Array) -> jax.Array:
    if name == "silu":
        return x / (1.0 + jnp.exp(-x))
    if name == "gelu_pytorch_tanh":
        return 0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))
    if name == "relu":
        return jnp.maximum(x, 0.0)
    assert name is None, name
    return x


def _arrive(arrivals_ref: Ref, index: int) -> None:
    """Tell all CTAs that this one's part of a stage is stored. Not for the interpreter; all 128 threads call it."""
    _counters(arrivals_ref, "fence.acq_rel.gpu;", "red.release.gpu.global.add.u32 [$0], 1;", index)


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
