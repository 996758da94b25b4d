"""Decode attention over the paged cache: one query token a request (Pallas Mosaic GPU, compute capability 9.0).

The line of all key tiles is cut into one stretch a CTA (work_lists.DecodeWork), so uneven lengths balance and there is
no split count to choose. In a CTA one warp copies tiles into a ring in shared memory and runs ahead across items; one
warpgroup computes. Keys are the rows of the products, S^T = K Q^T and O^T = V^T P^T, so that a small group of query
heads costs 8 columns and not 64 rows. A CTA that has only part of an item writes a normalised partial result and its
log-sum-exp; the last of the item's CTAs to arrive merges them in the order of the line: the same bits every time.

Letters: T tokens  R rows  N query heads  K kv heads  H head_dim  G = N / K
"""

import functools
import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import ATOM, COPIES_OF_WARPS, LOG2E, MIN_SCORE, Ref, div, full, pl, plgpu, swizzled_smem
from pallas_kernels.tuning import DecodeConfig
from pallas_kernels.work_lists import DecodeWork

_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
_WGMMA = plgpu.Layout.WGMMA


@dataclass(frozen=True)
class _Statics:
    """Sizes that the kernel is compiled for."""

    num_kv_heads: int
    group: int
    head_dim: int
    num_rows: int
    num_heads: int
    num_tokens: int
    block_size: int
    scale: float
    dtype: Any
    config: DecodeConfig

    @property
    def q_rows(self) -> int:
        """Rows of q an item: the group, padded where groups do not fit into swizzle atoms."""
        return self.group if ATOM % self.group == 0 else -(-self.group // ATOM) * ATOM

    @property
    def columns(self) -> int:
        """Columns of the products; those beyond the group are other heads' or padding, and are not stored."""
        return max(ATOM, self.q_rows)

    @property
    def parts(self) -> int:
        """64-row parts of O^T."""
        return self.head_dim // 64

    @property
    def blocks_per_tile(self) -> int:
        return self.config.tile // self.block_size

    def num_tiles(self, length: jax.Array) -> jax.Array:
        return jnp.maximum(div(length + (self.config.tile - 1), self.config.tile), 1)

    def first_group_row(self, item: jax.Array) -> jax.Array | int:
        """Where the item's group lies among its columns."""
        return lax.rem(item * self.group, jnp.int32(ATOM)) if self.q_rows < ATOM else 0


def paged_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    num_tokens: jax.Array,
    work: DecodeWork,
    *,
    scale: float,
    config: DecodeConfig,
    interpret: Any = False,
) -> jax.Array:
    """Attention of the decode rows, which are the first tokens of the step.

    Args:
      q: bf16[T, N, H].
      kv_cache: bf16[L, num_blocks, 2, K, block_size, H].
      layer: i32[].
      block_tables: i32[R, max_blocks].
      seq_lens: i32[R].
      num_tokens: i32[] real tokens of the step, decode and prefill.
      work: from make_decode_work with the same config; it says how many rows are decode rows.
      scale: factor of the scores.
      config: static.
      interpret: False, or InterpretGPUParams.

    Returns:
      bf16[T, N, H]: results in the decode rows, zeros from num_tokens on; what lies between is NOT written.
    """
    num_tokens_padded, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    num_rows = seq_lens.shape[0]
    statics = _Statics(
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        num_rows=num_rows,
        num_heads=num_heads,
        num_tokens=num_tokens_padded,
        block_size=block_size,
        scale=scale,
        dtype=q.dtype,
        config=config,
    )
    num_ctas = config.num_ctas
    partial_shape = (2 * num_ctas, statics.parts + 1, 64, statics.columns)
    operands = [_as_rows(q, statics), kv_cache, block_tables, seq_lens, layer.reshape(1), num_tokens.reshape(1)]
    operands += [work.starts, work.stretch]
    if config.merge == "atomic":
        operands.append(work.arrivals)
    out, partials = pl.kernel(
        functools.partial(_attend, statics),
        out_type=(
            jax.ShapeDtypeStruct((num_tokens_padded * num_heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        ),
        mesh=plgpu.Mesh(grid=(num_ctas,), grid_names=("cta",), num_threads=2, thread_name="warpgroup"),
        compiler_params=_COMPILER_PARAMS,
        interpret=interpret,
        name="paged_decode",
    )(*operands)
    if config.merge == "kernel":
        out_ref = jax.new_ref(out, memory_space=plgpu.GMEM)
        pl.kernel(
            functools.partial(_merge_kernel, statics),
            out_type=(),
            mesh=plgpu.Mesh(grid=(num_ctas,), grid_names=("cta",)),
            compiler_params=_COMPILER_PARAMS,
            interpret=interpret,
            name="paged_decode_merge",
        )(seq_lens, work.starts, work.stretch, partials, out_ref)
        out = jax.freeze(out_ref)
    return out.reshape(q.shape)


def _as_rows(q: jax.Array, statics: _Statics) -> jax.Array:
    """q as [rows, H], a multiple of 8 rows. Copies only where a group does not fit (3, 7), or the batch is tiny."""
    if statics.q_rows != statics.group:
        q = q[: statics.num_rows].reshape(-1, statics.num_kv_heads, statics.group, statics.head_dim)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, statics.q_rows - statics.group), (0, 0)))
    q = q.reshape(-1, statics.head_dim)
    return jnp.pad(q, ((0, -q.shape[0] % ATOM), (0, 0)))


def _across_rows(row: jax.Array, like: jax.Array) -> jax.Array:
    """[columns] -> like.shape."""
    return plgpu.layout_cast(lax.broadcast_in_dim(row, like.shape, [1]), _WGMMA)


def _attend(statics: _Statics, *refs: Ref) -> None:
    """The body of the kernel; scratch first, then one branch a warpgroup."""
    config, head_dim, dtype = statics.config, statics.head_dim, statics.dtype
    atomic = config.merge == "atomic"
    arrivals_ref = refs[8] if atomic else None
    inputs, outputs = refs[:8], refs[-2:]
    smem = functools.partial(swizzled_smem, dtype=dtype)

    def scoped(*scratch: Ref) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            _compute(statics, inputs, outputs, arrivals_ref, scratch)

        @pl.when(warpgroup == 1)
        def _():
            def warp_body(warp: jax.Array) -> None:
                for i, copies in enumerate(COPIES_OF_WARPS[config.copy_warps]):
                    pl.when(warp == i)(functools.partial(_copy_tiles, statics, inputs, scratch, copies))

            plgpu.warp_map(warp_body)

    stages = config.stages
    pl.run_scoped(
        scoped,
        smem(2, statics.columns, head_dim),  # q of this item and of the next
        smem(stages, config.tile, head_dim),  # k
        smem(stages, config.tile, head_dim),  # v
        smem(statics.columns, config.tile),  # p
        plgpu.SMEM((statics.columns, head_dim), dtype),  # o; not swizzled, so that its rows can go anywhere
        plgpu.SMEM((1,), jnp.int32),  # is this CTA the last to arrive
        plgpu.Barrier(num_barriers=2),  # q full
        plgpu.Barrier(num_arrivals=statics.blocks_per_tile, num_barriers=stages),  # k full
        plgpu.Barrier(num_arrivals=statics.blocks_per_tile, num_barriers=stages),  # v full
        plgpu.Barrier(num_barriers=2),  # q free
        plgpu.Barrier(num_barriers=stages),  # k free
        plgpu.Barrier(num_barriers=stages),  # v free
        collective_axes="warpgroup",
    )


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class _Tile:
    """A key tile of an item."""

    item: jax.Array
    index: jax.Array  # within the item
    length: jax.Array  # keys of the item
    blocks: tuple[jax.Array, ...]


@dataclass(frozen=True)
class _Stretch:
    """The part of the line that one CTA has."""

    first_tile: jax.Array
    num_tiles: jax.Array
    first_item: jax.Array
    first_index: jax.Array  # of its first tile within its first item
    num_items: jax.Array


def _my_stretch(starts_ref: Ref, cta: jax.Array) -> _Stretch:
    first = starts_ref[0, cta]
    num_tiles = starts_ref[0, cta + 1] - first
    item = starts_ref[1, cta]
    # The stretch ends within an item unless the next one starts at an item's first tile.
    num_items = starts_ref[1, cta + 1] - item + jnp.where(starts_ref[2, cta + 1] > 0, 1, 0)
    return _Stretch(first, num_tiles, item, starts_ref[2, cta], jnp.where(num_tiles > 0, num_items, 0))


def _cta_of_tile(stretch_ref: Ref, tile: jax.Array) -> jax.Array:
    large, small, num_large = stretch_ref[0], stretch_ref[1], stretch_ref[2]
    beyond = tile - large * num_large
    return jnp.where(beyond < 0, div(tile, large), num_large + div(jnp.maximum(beyond, 0), small))


def _copy_tiles(statics: _Statics, inputs: tuple[Ref, ...], scratch: tuple[Ref, ...], copies: tuple[int, ...]) -> None:
    """One warp: the K (0) or V (1) blocks of each tile of the stretch, as buffers become free; with K each item's q."""
    q_ref, cache_ref, tables_ref, lens_ref, layer_ref, _, starts_ref, _ = inputs
    q_smem, k_smem, v_smem, _, _, _, q_full, k_full, v_full, q_free, k_free, v_free = scratch
    rings = [((k_smem, k_full, k_free), (v_smem, v_full, v_free))[kv] for kv in copies]
    config, block_size, per_tile = statics.config, statics.block_size, statics.blocks_per_tile
    stages = config.stages
    num_kv_heads = jnp.int32(statics.num_kv_heads)
    last_item = statics.num_rows * statics.num_kv_heads - 1
    last_block = tables_ref.shape[1] - 1
    mine = _my_stretch(starts_ref, lax.axis_index("cta"))
    layer = layer_ref[0]

    def blocks_of(row: jax.Array, index: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(tables_ref[row, jnp.minimum(index * per_tile + j, last_block)] for j in range(per_tile))

    def next_tile(tile: _Tile) -> _Tile:
        ends = tile.index + 1 >= statics.num_tiles(tile.length)
        item = jnp.minimum(jnp.where(ends, tile.item + 1, tile.item), last_item)
        index = jnp.where(ends, 0, tile.index + 1)
        row = div(item, num_kv_heads)
        return _Tile(item, index, lens_ref[row], blocks_of(row, index))

    def copy_q(item: jax.Array, copied: jax.Array) -> None:
        slot = lax.rem(copied, jnp.int32(2))

        @pl.when(copied >= 2)
        def _():
            plgpu.barrier_wait(q_free.at[slot])

        row = item * statics.q_rows
        row = div(row, ATOM) * ATOM if statics.q_rows < ATOM else row
        plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(row, statics.columns)], q_smem.at[slot], q_full.at[slot])

    def copy_block(tile: _Tile, j: int, kv: int, smem: Ref, filled: Ref) -> None:
        # Blocks past the row's last one are not its own. What the buffer holds there is masked like its tail, and so
        # is what the interpreter copies, which knows no predicates.
        is_own = (tile.index * per_tile + j) * block_size < tile.length
        is_own = None if j == 0 or config.merge == "kernel" else is_own
        rows, head = pl.ds(j * block_size, block_size), lax.rem(tile.item, num_kv_heads)
        source = cache_ref.at[layer, tile.blocks[j], kv, head]
        plgpu.copy_gmem_to_smem(source, smem.at[rows], filled, predicate=is_own)

    def copy_tile(k: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        tile, following, q_copied = carry
        slot = lax.rem(k, jnp.int32(stages))
        is_new_item = jnp.logical_or(k == 0, tile.index == 0)
        if 0 in copies:
            pl.when(is_new_item)(lambda: copy_q(tile.item, q_copied))
        # Block ids come from device memory, behind all that is in flight: they are read two tiles ahead.
        after = next_tile(following)
        for kv, (smem, filled, free) in zip(copies, rings, strict=True):

            @pl.when(k >= stages)
            def _(free: Ref = free):
                plgpu.barrier_wait(free.at[slot])

            for j in range(per_tile):
                copy_block(tile, j, kv, smem.at[slot], filled.at[slot])
        return following, after, q_copied + jnp.where(is_new_item, 1, 0)

    item = jnp.minimum(mine.first_item, last_item)
    row = div(item, num_kv_heads)
    first = _Tile(item, mine.first_index, lens_ref[row], blocks_of(row, mine.first_index))
    q_copied = lax.fori_loop(0, mine.num_tiles, copy_tile, (first, next_tile(first), jnp.int32(0)))[2]

    # Every completion of a barrier has to be waited for before the CTA ends.
    def drain(k: jax.Array, _: None) -> None:
        for _, _, free in rings:
            plgpu.barrier_wait(free.at[lax.rem(k, jnp.int32(stages))])

    def drain_q(k: jax.Array, _: None) -> None:
        plgpu.barrier_wait(q_free.at[lax.rem(k, jnp.int32(2))])

    lax.fori_loop(jnp.maximum(mine.num_tiles - stages, 0), mine.num_tiles, drain, None)
    if 0 in copies:
        lax.fori_loop(jnp.maximum(q_copied - 2, 0), q_copied, drain_q, None)


def _compute(
    statics: _Statics, inputs: tuple[Ref, ...], outputs: tuple[Ref, ...], arrivals_ref: Ref, scratch: tuple[Ref, ...]
) -> None:
    """One warpgroup: the items of the stretch, one after the other."""
    _, _, _, lens_ref, _, num_tokens_ref, starts_ref, stretch_ref = inputs
    out_ref, partials_ref = outputs
    q_smem, _, _, _, o_smem, flag_smem, q_full, _, _, q_free, _, _ = scratch
    cta = lax.axis_index("cta")
    mine = _my_stretch(starts_ref, cta)
    _store_zeros(statics, num_tokens_ref[0], o_smem, out_ref)

    def item_body(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, begin = carry  # tiles done in the stretch; where in this item the stretch begins
        item = mine.first_item + j
        length = lens_ref[div(item, statics.num_kv_heads)]
        num_tiles = statics.num_tiles(length)
        end = jnp.minimum(num_tiles, begin + (mine.num_tiles - done))
        q_slot = lax.rem(j, jnp.int32(2))
        plgpu.barrier_wait(q_full.at[q_slot])
        outs, lse = _attend_tiles(statics, scratch, q_smem.at[q_slot], length, begin, end, done)
        plgpu.barrier_arrive(q_free.at[q_slot])
        is_whole = jnp.logical_and(begin == 0, end == num_tiles)

        @pl.when(is_whole)
        def _():
            _store_item(statics, outs, item, o_smem, out_ref)

        @pl.when(jnp.logical_not(is_whole))
        def _():
            slot = 2 * cta + jnp.where(begin == 0, 1, 0)
            for part, out in enumerate(outs):
                partials_ref[slot, part] = out
            partials_ref[slot, statics.parts] = _across_rows(lse, outs[0])
            if arrivals_ref is not None:
                item_tile = mine.first_tile + done - begin
                first = _cta_of_tile(stretch_ref, item_tile)
                last = _cta_of_tile(stretch_ref, item_tile + num_tiles - 1)
                is_last = _arrive(arrivals_ref, flag_smem, first, last - first)

                @pl.when(is_last != 0)
                def _():
                    _merge_item(statics, item, first, last, partials_ref, o_smem, out_ref)

        return done + (end - begin), jnp.int32(0)

    lax.fori_loop(0, mine.num_items, item_body, (jnp.int32(0), mine.first_index))
    plgpu.wait_smem_to_gmem(0)


def _attend_tiles(
    statics: _Statics,
    scratch: tuple[Ref, ...],
    q_smem: Ref,
    length: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    done: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    """Tiles [begin, end) of one item: normalised O^T in 64-row parts, and the base-2 log-sum-exp of each column."""
    _, k_smem, v_smem, p_smem, _, _, _, k_full, v_full, _, k_free, v_free = scratch
    tile, columns, parts = statics.config.tile, statics.columns, statics.parts
    factor = statics.scale * LOG2E

    def scores_of(slot: jax.Array) -> jax.Array:
        def body(acc: Ref) -> jax.Array:
            plgpu.wgmma(acc, k_smem.at[slot], q_smem.transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(body, plgpu.ACC((tile, columns), jnp.float32))

    def values_of(slot: jax.Array) -> tuple[jax.Array, ...]:
        def body(*accs: Ref) -> tuple[jax.Array, ...]:
            for part, acc in enumerate(accs):
                values = v_smem.at[slot, :, pl.ds(part * 64, 64)]
                plgpu.wgmma(acc, values.transpose((1, 0)), p_smem.transpose((1, 0)))
            return tuple(acc[...] for acc in accs)

        return pl.run_scoped(body, *[plgpu.ACC((64, columns), jnp.float32) for _ in range(parts)])

    def zero_values_beyond(slot: jax.Array, num_keys: jax.Array) -> None:
        # The weights there are 0, but 0 * NaN is NaN.
        values = plgpu.load(v_smem.at[slot], layout=_WGMMA)
        key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=_WGMMA)
        v_smem[slot] = jnp.where(key < num_keys, values, jnp.zeros_like(values))

    def step(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        highest, total, acc = carry
        slot = lax.rem(done + (i - begin), jnp.int32(statics.config.stages))
        num_keys = length - i * tile
        plgpu.barrier_wait(k_full.at[slot])
        scores = scores_of(slot)
        plgpu.barrier_arrive(k_free.at[slot])
        key = plgpu.broadcasted_iota(jnp.int32, (tile, columns), 0, layout=_WGMMA)
        scores = jnp.where(key < num_keys, scores * factor, MIN_SCORE)
        new_highest = jnp.maximum(highest, scores.max(axis=0))
        rescale = jnp.exp2(highest - new_highest)
        p = jnp.exp2(scores - _across_rows(new_highest, scores))
        # Summed over keys only once, at the end: a sum across warps costs more than these additions.
        total = total * _across_rows(rescale, total) + p
        p_smem.transpose((1, 0))[...] = p.astype(statics.dtype)
        plgpu.barrier_wait(v_full.at[slot])
        pl.when(num_keys < tile)(lambda: zero_values_beyond(slot, num_keys))
        plgpu.commit_smem()
        update = values_of(slot)
        plgpu.barrier_arrive(v_free.at[slot])
        acc = tuple(a * _across_rows(rescale, a) + u for a, u in zip(acc, update, strict=True))
        return new_highest, total, acc

    start = (full((columns,), MIN_SCORE, _WGMMA.reduce(0)), full((tile, columns), 0.0, _WGMMA))
    zeros = tuple(full((64, columns), 0.0, _WGMMA) for _ in range(parts))
    highest, total, acc = lax.fori_loop(begin, end, step, (*start, zeros))
    total = total.sum(axis=0)
    total = jnp.where(total == 0, 1.0, total)
    inverse = 1.0 / total
    return [a * _across_rows(inverse, a) for a in acc], highest + jnp.log2(total)


def _store_item(statics: _Statics, outs: list[jax.Array], item: jax.Array, o_smem: Ref, out_ref: Ref) -> None:
    """Write the group's rows of O, given as O^T f32[64, columns] parts."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for part, out in enumerate(outs):
        o_smem.at[:, pl.ds(part * 64, 64)].transpose((1, 0))[...] = out.astype(statics.dtype)
    plgpu.commit_smem()
    rows = pl.ds(statics.first_group_row(item), statics.group)
    plgpu.copy_smem_to_gmem(o_smem.at[rows], out_ref.at[pl.ds(item * statics.group, statics.group)])


def _store_zeros(statics: _Statics, num_tokens: jax.Array, o_smem: Ref, out_ref: Ref) -> None:
    """Zero the pad tokens [num_tokens, T), shared among the CTAs."""
    heads = max(n for n in range(1, statics.columns + 1) if statics.num_heads % n == 0)
    for part in range(statics.parts):
        zeros = full((64, statics.columns), 0.0, _WGMMA).astype(statics.dtype)
        o_smem.at[:, pl.ds(part * 64, 64)].transpose((1, 0))[...] = zeros
    plgpu.commit_smem()
    first = num_tokens + lax.axis_index("cta")
    num_ctas = statics.config.num_ctas

    def store(i: jax.Array, _: None) -> None:
        row = (first + i * num_ctas) * statics.num_heads
        for j in range(0, statics.num_heads, heads):
            plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, heads)], out_ref.at[pl.ds(row + j, heads)])

    mine = div(jnp.maximum(statics.num_tokens - first + (num_ctas - 1), 0), num_ctas)
    lax.fori_loop(0, mine, store, None)


def _merge_item(
    statics: _Statics, item: jax.Array, first: jax.Array, last: jax.Array, partials_ref: Ref, o_smem: Ref, out_ref: Ref
) -> None:
    """Combine the partial results of CTAs first..last, in this order, and write the item.

    A CTA has two places: an item that began before its stretch, 2 * cta, and one that begins in it, 2 * cta + 1.
    """
    unroll = 4 if statics.columns == ATOM else 2  # loads in flight; 12 registers a thread for each at 8 columns
    parts = statics.parts

    def body(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        highest, weight, acc = carry
        ctas = [first + i * unroll + u for u in range(unroll)]
        inside = [jnp.where(cta <= last, 0.0, MIN_SCORE).astype(jnp.float32) for cta in ctas]
        ctas = [jnp.minimum(cta, last) for cta in ctas]
        slots = [2 * cta + jnp.where(cta == first, 1, 0) for cta in ctas]
        lses = [plgpu.load(partials_ref.at[slot, parts], layout=_WGMMA, optimized=False) for slot in slots]
        outs = [
            [plgpu.load(partials_ref.at[slot, p], layout=_WGMMA, optimized=False) for p in range(parts)]
            for slot in slots
        ]
        lses = [lse + bias for lse, bias in zip(lses, inside, strict=True)]
        new_highest = functools.reduce(jnp.maximum, lses, highest)
        rescale = jnp.exp2(highest - new_highest)
        weights = [jnp.exp2(lse - new_highest) for lse in lses]
        weight = functools.reduce(operator.add, weights, weight * rescale)
        acc = tuple(
            functools.reduce(
                lambda a, b: a + b, [w * out[p] for w, out in zip(weights, outs, strict=True)], a * rescale
            )
            for p, a in enumerate(acc)
        )
        return new_highest, weight, acc

    shape = (64, statics.columns)
    zeros = tuple(full(shape, 0.0, _WGMMA) for _ in range(parts))
    start = (full(shape, MIN_SCORE, _WGMMA), full(shape, 0.0, _WGMMA), zeros)
    _, weight, acc = lax.fori_loop(0, div(last - first + unroll, unroll), body, start)
    _store_item(statics, [a / weight for a in acc], item, o_smem, out_ref)


def _merge_kernel(
    statics: _Statics, lens_ref: Ref, starts_ref: Ref, stretch_ref: Ref, partials_ref: Ref, out_ref: Ref
) -> None:
    """merge="kernel": CTA c merges the item that the end of stretch c cuts, if it began in stretch c."""

    def scoped(o_smem: Ref) -> None:
        cta = lax.axis_index("cta")
        item, index = starts_ref[1, cta + 1], starts_ref[2, cta + 1]
        item_tile = starts_ref[0, cta + 1] - index

        @pl.when(jnp.logical_and(index > 0, item_tile >= starts_ref[0, cta]))
        def _():
            num_tiles = statics.num_tiles(lens_ref[div(item, statics.num_kv_heads)])
            last = _cta_of_tile(stretch_ref, item_tile + num_tiles - 1)
            _merge_item(statics, item, cta, last, partials_ref, o_smem, out_ref)

        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(scoped, plgpu.SMEM((statics.columns, statics.head_dim), statics.dtype))


def _arrive(arrivals_ref: Ref, flag_smem: Ref, index: jax.Array, others: jax.Array) -> jax.Array:
    """Tell the item's other CTAs that this one's partial result is stored. Not for the interpreter.

    All 128 threads call it. Adds 1 to arrivals_ref[index] with acquire and release at the scope of the GPU.

    Returns:
      i32[] 1 in the last of the others + 1 callers, which also sets the counter back to 0; else 0.
    """
    # Mosaic GPU has no fetch-and-add in Pallas yet; the dialect modules are private until it has.
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import arith, memref
    from jax.experimental.mosaic import gpu as mgpu

    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), splat, splat),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, splat),
    )
    def arrive(ctx: Any, counters: Any, flag: Any, index: Any, others: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        index, others = index.registers.item(), others.registers.item()
        zero = mgpu.utils.c(0, ir.IndexType.get())
        ptx = functools.partial(mgpu.utils.inline_ptx, has_side_effects=True)
        mgpu.utils.warpgroup_barrier()  # the stores of all 128 threads come before the release
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(counters), [index], i32)
            before = ptx("atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;", pointer, result_types=i32)
            is_last = arith.cmpi(arith.CmpIPredicate.eq, before, others)
            ptx("st.global.u32 [$0], 0;", pointer, predicate=is_last)
            memref.store(arith.extui(i32, is_last), flag, [zero])
        mgpu.utils.warpgroup_barrier()
        result = memref.load(flag, [zero])
        mgpu.utils.warpgroup_barrier()
        return mgpu.FragmentedArray.splat(result, (), is_signed=True)

    return arrive(arrivals_ref, flag_smem, index, others)
