"""Prefill attention over the paged cache: many query tokens a request (Pallas Mosaic GPU, compute capability 9.0).

Persistent CTAs take query tiles of one request and one kv head (work_lists.PrefillWork), the longest context first. A
row of a tile is one query head of one token: 64 // G tokens of G heads for each of two computing warpgroups, which
share the K and V tiles. A warp copies and runs ahead across query tiles. q and o keep their [T, N, H] layout: a tile
arrives by one copy a warpgroup and leaves the same way, or token by token where a request ends within it.

Letters: T tokens  R rows  N query heads  K kv heads  H head_dim  G = N / K
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import (
    COPIES_OF_WARPS,
    LOG2E,
    MIN_SCORE,
    Ref,
    div,
    finish_before_what_follows,
    full,
    hide_columns_from,
    pl,
    plgpu,
    swizzled_smem,
)
from pallas_kernels.tuning import PrefillConfig
from pallas_kernels.work_lists import COMPUTE_WARPGROUPS, ROWS_PER_WARPGROUP, PrefillWork, tokens_per_warpgroup

# Registers a thread: 2 * 232 + 40 fit the 65,536 of an SM.
_COMPUTE_REGISTERS, _COPY_REGISTERS = 240, 24


@dataclass(frozen=True)
class _Statics:
    """Sizes that the kernel is compiled for."""

    num_tokens: int
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    scale: float
    dtype: Any
    config: PrefillConfig

    @property
    def tokens(self) -> int:
        """Query tokens of a warpgroup."""
        return tokens_per_warpgroup(self.group)

    @property
    def blocks_per_tile(self) -> int:
        return self.config.tile // self.block_size


def paged_prefill(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    out: jax.Array,
    work: PrefillWork,
    *,
    scale: float,
    config: PrefillConfig,
    interpret: Any = False,
) -> jax.Array:
    """Causal attention of the prefill tokens, into an array that holds the others' results.

    Args:
      q: bf16[T, N, H].
      kv_cache: bf16[L, num_blocks, 2, K, block_size, H]; holds the keys and values of these tokens already.
      layer: i32[].
      block_tables: i32[R, max_blocks].
      out: bf16[T, N, H]; consumed, and written in place where nothing else reads it.
      work: from make_prefill_work.
      scale: factor of the scores.
      config: static.
      interpret: False, or InterpretGPUParams.

    Returns:
      out with the tokens of the work's tiles replaced, and no others.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    statics = _Statics(
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        scale=scale,
        dtype=q.dtype,
        config=config,
    )
    # A copy is never longer than the array it reads.
    q = jnp.pad(q, ((0, max(statics.tokens - num_tokens, 0)), (0, 0), (0, 0)))
    out_ref = jax.new_ref(out, memory_space=plgpu.GMEM)
    pl.kernel(
        functools.partial(_attend, statics),
        out_type=(),
        mesh=plgpu.Mesh(
            grid=(config.num_ctas,), grid_names=("cta",), num_threads=COMPUTE_WARPGROUPS + 1, thread_name="warpgroup"
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        name="paged_prefill",
    )(q, kv_cache, block_tables, layer.reshape(1), work.tiles, work.num_tiles, out_ref)
    return jax.freeze(out_ref)


def _across_columns(column: jax.Array, like: jax.Array) -> jax.Array:
    """[rows] -> like.shape."""
    return lax.broadcast_in_dim(column, like.shape, [0])


def _attend(statics: _Statics, *refs: Ref) -> None:
    """The body of the kernel; scratch first, then one branch a warpgroup."""
    config, head_dim, dtype = statics.config, statics.head_dim, statics.dtype
    smem = functools.partial(swizzled_smem, dtype=dtype)
    warpgroups, rows, stages = COMPUTE_WARPGROUPS, ROWS_PER_WARPGROUP, config.stages

    def scoped(*scratch: Ref) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            _compute(statics, refs, scratch, warpgroup)

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")

            def warp_body(warp: jax.Array) -> None:
                for i, copies in enumerate(COPIES_OF_WARPS[config.copy_warps]):
                    pl.when(warp == i)(functools.partial(_copy_tiles, statics, refs, scratch, copies))

            plgpu.warp_map(warp_body)

    q_copies = 1 if config.copy_whole_tiles else statics.tokens
    p_scratch = None if config.p_in_registers else smem(warpgroups, rows, config.tile)
    pl.run_scoped(
        scoped,
        plgpu.SMEM((warpgroups, rows, head_dim), dtype),  # q as it arrives: any token offset works unswizzled
        smem(warpgroups, rows, head_dim),  # q as the products read it
        plgpu.SMEM((warpgroups, rows, head_dim), dtype),  # o
        smem(stages, config.tile, head_dim),  # k
        smem(stages, config.tile, head_dim),  # v
        p_scratch,
        plgpu.Barrier(num_arrivals=q_copies, num_barriers=warpgroups),  # q full
        plgpu.Barrier(num_barriers=warpgroups),  # q free
        plgpu.Barrier(num_arrivals=statics.blocks_per_tile, num_barriers=stages),  # k full
        plgpu.Barrier(num_arrivals=statics.blocks_per_tile, num_barriers=stages),  # v full
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),  # k free
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),  # v free
        plgpu.Barrier(num_arrivals=warpgroups),  # v zeroed beyond the last key
        plgpu.Barrier(num_barriers=warpgroups),  # whose turn it is on the tensor cores
        collective_axes="warpgroup",
    )


@dataclass(frozen=True)
class _QueryTile:
    """Up to 2 * tokens_per_warpgroup tokens of one request, for one kv head."""

    head: jax.Array
    row: jax.Array
    token: jax.Array  # first one, in the step
    position: jax.Array  # of the first one, in its request
    num_tokens: jax.Array
    num_keys: jax.Array  # that its last token sees


def _num_rounds(statics: _Statics, num_tiles_ref: Ref) -> jax.Array:
    """Query tiles of this CTA. They are dealt to and fro, since the longest come first: 0 1 2, 2 1 0, 0 1 2, ..."""
    num_items = num_tiles_ref[0] * statics.num_kv_heads
    num_ctas = statics.config.num_ctas
    rounds = div(num_items + (num_ctas - 1), num_ctas)
    return jnp.where(_item_of(statics, rounds - 1) < num_items, rounds, jnp.maximum(rounds - 1, 0))


def _item_of(statics: _Statics, r: jax.Array) -> jax.Array:
    cta, num_ctas = lax.axis_index("cta"), statics.config.num_ctas
    is_back = lax.rem(r, jnp.int32(2)) == 1
    return r * num_ctas + jnp.where(is_back, num_ctas - 1 - cta, cta)


def _query_tile(statics: _Statics, tiles_ref: Ref, r: jax.Array) -> _QueryTile:
    item = _item_of(statics, r)
    tile = div(item, statics.num_kv_heads)
    row, token, position, num_tokens = (tiles_ref[field, tile] for field in range(4))
    return _QueryTile(
        item - tile * statics.num_kv_heads, row, token, position, num_tokens, num_keys=position + num_tokens
    )


def _copy_tiles(statics: _Statics, refs: tuple[Ref, ...], scratch: tuple[Ref, ...], copies: tuple[int, ...]) -> None:
    """One warp: all K (0) or V (1) tiles that each query tile sees, as buffers become free; with K its q."""
    q_ref, cache_ref, tables_ref, layer_ref, tiles_ref, num_tiles_ref, _ = refs
    q_in, _, _, k_smem, v_smem, _, q_full, q_free, k_full, v_full, k_free, v_free, _, _ = scratch
    rings = [((k_smem, k_full, k_free), (v_smem, v_full, v_free))[kv] for kv in copies]
    config, block_size, per_tile = statics.config, statics.block_size, statics.blocks_per_tile
    stages = jnp.int32(config.stages)
    layer = layer_ref[0]
    num_rounds = _num_rounds(statics, num_tiles_ref)

    def blocks_of(query: _QueryTile, i: jax.Array) -> tuple[jax.Array, ...]:
        # Never past the last block that the tile sees: what the table holds there is not its own.
        last = div(query.num_keys - 1, block_size)
        return tuple(tables_ref[query.row, jnp.minimum(i * per_tile + j, last)] for j in range(per_tile))

    def copy_q(query: _QueryTile, r: jax.Array) -> None:
        for warpgroup in range(COMPUTE_WARPGROUPS):

            @pl.when(r > 0)
            def _(warpgroup: int = warpgroup):
                plgpu.barrier_wait(q_free.at[warpgroup])

            _load_tokens(statics, query, warpgroup, q_ref, q_in.at[warpgroup], q_full.at[warpgroup])

    def query_body(r: jax.Array, copied: jax.Array) -> jax.Array:
        query = _query_tile(statics, tiles_ref, r)
        if 0 in copies:
            copy_q(query, r)

        def copy_tile(i: jax.Array, blocks: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot = lax.rem(copied + i, stages)
            next_blocks = blocks_of(query, i + 1)  # before anything is waited for: they come from device memory
            for kv, (smem, filled, free) in zip(copies, rings, strict=True):

                @pl.when(copied + i >= stages)
                def _(free: Ref = free):
                    plgpu.barrier_wait(free.at[slot])

                for j in range(per_tile):
                    rows = pl.ds(j * block_size, block_size)
                    source = cache_ref.at[layer, blocks[j], kv, query.head]
                    plgpu.copy_gmem_to_smem(source, smem.at[slot, rows], filled.at[slot])
            return next_blocks

        steps = _num_steps(statics, query)
        lax.fori_loop(0, steps, copy_tile, blocks_of(query, jnp.int32(0)))
        return copied + steps

    copied = lax.fori_loop(0, num_rounds, query_body, jnp.int32(0))

    # Every completion of a barrier has to be waited for before the CTA ends.
    def drain(i: jax.Array, _: None) -> None:
        for _, _, free in rings:
            plgpu.barrier_wait(free.at[lax.rem(i, stages)])

    lax.fori_loop(jnp.maximum(copied - stages, 0), copied, drain, None)

    if 0 in copies:

        @pl.when(num_rounds > 0)
        def _():
            for warpgroup in range(COMPUTE_WARPGROUPS):
                plgpu.barrier_wait(q_free.at[warpgroup])


def _num_steps(statics: _Statics, query: _QueryTile) -> jax.Array:
    return div(query.num_keys + (statics.config.tile - 1), statics.config.tile)


def _by_token(statics: _Statics, rows: Ref) -> Ref:
    """[64, H] -> [tokens, G, H]. With 3 or 7 heads a group the last of the 64 rows is left over."""
    used = statics.tokens * statics.group
    return rows.at[pl.ds(0, used)].reshape(statics.tokens, statics.group, statics.head_dim)


def _compute(statics: _Statics, refs: tuple[Ref, ...], scratch: tuple[Ref, ...], warpgroup: jax.Array) -> None:
    """One of the computing warpgroups: its half of every query tile."""
    *_, tiles_ref, num_tiles_ref, out_ref = refs
    q_in, q_smem, o_smem, _, _, _, q_full, q_free, _, _, _, _, _, turn = scratch
    q_in, q_smem, o_smem = q_in.at[warpgroup], q_smem.at[warpgroup], o_smem.at[warpgroup]

    def query_body(r: jax.Array, done: jax.Array) -> jax.Array:
        query = _query_tile(statics, tiles_ref, r)
        plgpu.barrier_wait(q_full.at[warpgroup])
        q_smem[...] = plgpu.load(q_in, layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.commit_smem()
        plgpu.barrier_arrive(q_free.at[warpgroup])
        out = _attend_tiles(statics, scratch, query, warpgroup, q_smem, done)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_smem[...] = out.astype(statics.dtype)
        plgpu.commit_smem()
        _store_tokens(statics, query, warpgroup, o_smem, out_ref)
        return done + _num_steps(statics, query)

    if statics.config.pingpong:
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
    lax.fori_loop(0, _num_rounds(statics, num_tiles_ref), query_body, jnp.int32(0))
    if statics.config.pingpong:
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
    plgpu.wait_smem_to_gmem(0)


def _take_turns(turn: Ref) -> None:
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


def _load_tokens(statics: _Statics, query: _QueryTile, warpgroup: int, q_ref: Ref, q_in: Ref, q_full: Ref) -> None:
    """Read the warpgroup's tokens. Those past the query tile are other requests', or padding, and come to nothing."""
    token = query.token + warpgroup * statics.tokens
    heads = pl.ds(query.head * statics.group, statics.group)
    if statics.config.copy_whole_tiles:
        plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(token, statics.tokens), heads], _by_token(statics, q_in), q_full)
        return

    def load(t: jax.Array, _: None) -> None:
        source = q_ref.at[jnp.minimum(token + t, statics.num_tokens - 1), heads]
        plgpu.copy_gmem_to_smem(source, q_in.at[pl.ds(t * statics.group, statics.group)], q_full)

    lax.fori_loop(0, statics.tokens, load, None)


def _store_tokens(statics: _Statics, query: _QueryTile, warpgroup: jax.Array, o_smem: Ref, out_ref: Ref) -> None:
    """Write the warpgroup's real tokens: all by one copy, or one by one where the request ends among them."""
    first = warpgroup * statics.tokens
    token = query.token + first
    count = jnp.clip(query.num_tokens - first, 0, statics.tokens)
    heads = pl.ds(query.head * statics.group, statics.group)
    is_whole = jnp.logical_and(count == statics.tokens, statics.config.copy_whole_tiles)
    if statics.config.copy_whole_tiles:

        @pl.when(is_whole)
        def _():
            plgpu.copy_smem_to_gmem(_by_token(statics, o_smem), out_ref.at[pl.ds(token, statics.tokens), heads])

    @pl.when(jnp.logical_not(is_whole))
    def _():
        def store(t: jax.Array, _: None) -> None:
            rows = pl.ds(t * statics.group, statics.group)
            plgpu.copy_smem_to_gmem(o_smem.at[rows], out_ref.at[token + t, heads])

        lax.fori_loop(0, count, store, None)


def _attend_tiles(
    statics: _Statics,
    scratch: tuple[Ref, ...],
    query: _QueryTile,
    warpgroup: jax.Array,
    q_smem: Ref,
    done: jax.Array,
) -> jax.Array:
    """All K and V tiles that the query tile sees, with an online softmax: f32[64, H], normalised."""
    _, _, _, k_smem, v_smem, p_smem, _, _, k_full, v_full, k_free, v_free, v_zeroed, turn = scratch
    config, dtype = statics.config, statics.dtype
    rows, tile, head_dim = ROWS_PER_WARPGROUP, config.tile, statics.head_dim
    first_position = query.position + warpgroup * statics.tokens
    factor = statics.scale * LOG2E
    wgmma = plgpu.Layout.WGMMA

    def zero_values_beyond(slot: jax.Array, num_keys: jax.Array) -> None:
        # The weights there are 0, but 0 * NaN is NaN. Each warpgroup does its half; both wait for both.
        half = pl.ds(warpgroup * (tile // 2), tile // 2)
        values = plgpu.load(v_smem.at[slot, half], layout=wgmma)
        key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=wgmma) + warpgroup * (tile // 2)
        v_smem[slot, half] = jnp.where(key < num_keys, values, jnp.zeros_like(values))
        plgpu.commit_smem()
        _take_turns(v_zeroed)

    def slot_of(i: jax.Array) -> jax.Array:
        return lax.rem(done + i, jnp.int32(config.stages))

    def hand_over(p: jax.Array) -> jax.Array | None:
        """P for the next product: registers, or shared memory."""
        p = p.astype(dtype)
        if config.p_in_registers:
            return p
        p_smem[warpgroup] = p
        plgpu.commit_smem()
        return None

    def add_values(acc_ref: Ref, p: jax.Array | None, slot: jax.Array) -> None:
        plgpu.wgmma(acc_ref, p_smem.at[warpgroup] if p is None else p, v_smem.at[slot])

    def softmax(
        i: jax.Array, scores: jax.Array, highest: jax.Array, total: jax.Array, *, is_masked: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """P in float32, the new maximum and sum, and the factor of what was summed before."""
        if is_masked:
            token = div(plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=by_row), statics.group)
            num_seen = token + (first_position + 1 - i * tile)
            scores = hide_columns_from(num_seen, scores, interpret=not config.p_in_registers)
        new_highest = jnp.maximum(highest, scores.max(axis=1) * factor)
        rescale = jnp.exp2(highest - new_highest)
        p = jnp.exp2(scores * factor - _across_columns(new_highest, scores))
        return p, new_highest, total * rescale + p.sum(axis=1), rescale

    def scores_of(slot: jax.Array) -> jax.Array:
        def body(acc: Ref) -> jax.Array:
            plgpu.wgmma(acc, q_smem, k_smem.at[slot].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(body, plgpu.ACC((rows, tile), jnp.float32))

    def first_step() -> tuple[jax.Array | None, jax.Array, jax.Array]:
        slot = slot_of(jnp.int32(0))
        plgpu.barrier_wait(k_full.at[slot])
        scores = scores_of(slot)
        plgpu.barrier_arrive(k_free.at[slot])
        p, highest, total, _ = softmax(
            jnp.int32(0), scores, full((rows,), MIN_SCORE, by_row), full((rows,), 0.0, by_row), is_masked=True
        )
        return hand_over(p), highest, total

    def step(i: jax.Array, carry: tuple[Any, ...], *, is_masked: bool) -> tuple[Any, ...]:
        """Scores of tile i while the values of tile i - 1 are added, whose P is in the carry."""
        acc, p, highest, total = carry
        slot, before = slot_of(i), slot_of(i - 1)
        plgpu.barrier_wait(k_full.at[slot])
        if config.pingpong:
            plgpu.barrier_wait(turn.at[warpgroup])

        def body(acc_ref: Ref, scores_ref: Ref) -> tuple[Any, ...]:
            if config.p_in_registers:  # the interpreter starts from zeros and adds at the end
                acc_ref[...] = acc
            plgpu.wgmma(scores_ref, q_smem, k_smem.at[slot].transpose((1, 0)))
            plgpu.barrier_wait(v_full.at[before])
            add_values(acc_ref, p, before)
            if config.pingpong:
                plgpu.barrier_arrive(turn.at[1 - warpgroup])
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            plgpu.barrier_arrive(k_free.at[slot])
            new = softmax(i, scores, highest, total, is_masked=is_masked)
            if config.p_in_registers:
                finish_before_what_follows(new[2])
            new_acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
            return lax.optimization_barrier((new_acc if config.p_in_registers else acc + new_acc, *new))

        accs = plgpu.ACC((rows, head_dim), jnp.float32), plgpu.ACC((rows, tile), jnp.float32)
        acc, p, highest, total, rescale = pl.run_scoped(body, *accs)
        plgpu.barrier_arrive(v_free.at[before])
        return acc * _across_columns(rescale, acc), hand_over(p), highest, total

    def last_values(acc: jax.Array, p: jax.Array | None) -> jax.Array:
        last = num_steps - 1
        slot = slot_of(last)
        plgpu.barrier_wait(v_full.at[slot])
        num_keys = query.num_keys - last * tile
        pl.when(num_keys < tile)(lambda: zero_values_beyond(slot, num_keys))

        def body(acc_ref: Ref) -> jax.Array:
            add_values(acc_ref, p, slot)
            return acc_ref[...]

        acc = acc + pl.run_scoped(body, plgpu.ACC((rows, head_dim), jnp.float32))
        plgpu.barrier_arrive(v_free.at[slot])
        return acc

    by_row = wgmma.reduce(1)
    num_steps = _num_steps(statics, query)
    num_unmasked = jnp.maximum(jnp.minimum(div(first_position + 1, tile), div(query.num_keys, tile)), 1)
    carry = full((rows, head_dim), 0.0, wgmma), *first_step()
    carry = lax.fori_loop(1, num_unmasked, functools.partial(step, is_masked=False), carry)
    acc, p, _, total = lax.fori_loop(num_unmasked, num_steps, functools.partial(step, is_masked=True), carry)
    acc = last_values(acc, p)
    return acc * _across_columns(1.0 / total, acc)
