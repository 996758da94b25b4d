"""Prefill attention over the paged cache: many query tokens a request (Pallas Mosaic GPU, compute capability 9.0).

Persistent CTAs take query tiles of one request and one kv head (work_lists.PrefillWork), the longest context first. A
row of a tile is one query head of one token: 64 // G tokens of G heads for each of two computing warpgroups, which
share the K and V tiles. A warp copies and runs ahead across query tiles. q and o keep their [T, N, H] layout: a tile
arrives by one copy a warpgroup and leaves the same way, or token by token where a request ends within it.

Letters: T tokens  R rows  N query heads  K kv heads  H head_dim  G = N / K
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import (
    LOG2E,
    Ref,
    capped,
    div,
    finish_before_what_follows,
    full,
    hide_columns,
    pl,
    plgpu,
    swizzled_smem,
)
from pallas_kernels.layer_slice import LayerArray, as_stack, place_in
from pallas_kernels.prefill_copy import (
    PrefillInputs,
    PrefillScratch,
    PrefillSizes,
    QueryTile,
    by_token,
    copy_tiles,
    num_rounds,
    query_tile,
    widen_tiles,
)
from pallas_kernels.tuning import PrefillConfig
from pallas_kernels.work_lists import ROWS_PER_WARPGROUP, PrefillWork

# Registers a thread of computing, copying and widening warpgroups, by how many compute and whether one widens; all
# fit the 65,536 of an SM.
REGISTERS = {
    (2, False): (240, 24, 0),
    (2, True): (216, 24, 56),
    (1, False): (256, 32, 0),
    (1, True): (256, 24, 72),
}

# Where a maximum starts: below all real scores, and so far above hidden ones that their weights are 0 in a row that
# sees no key of its first tiles.
_LOWEST_MAXIMUM = -1e20


def paged_prefill(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    out: jax.Array,
    work: PrefillWork,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scale: LayerArray | None = None,
    config: PrefillConfig,
    interpret: Any = False,
) -> jax.Array:
    """Causal attention of the prefill tokens, into an array that holds the others' results.

    Args:
      q: bf16 or f16[T, N, H].
      kv_cache: [L, num_blocks, 2, K, block_size, H] of q's dtype, or float8_e4m3fn; holds the keys and values of these
        tokens already.
      layer: i32[].
      block_tables: i32[R, max_blocks].
      out: like q; consumed, and written in place where nothing else reads it.
      work: from make_prefill_work with the same config.
      scale: factor of the scores.
      sliding_window, soft_cap, sinks, kv_scale: as in ops.paged_attention.
      config: static.
      interpret: False, or InterpretGPUParams.

    Returns:
      out with the tokens of the work's tiles replaced, and no others.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    group = num_heads // num_kv_heads
    sizes = PrefillSizes(
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
        dtype=q.dtype,
        cache_dtype=kv_cache.dtype,
        config=config,
    )
    # A copy is never longer than the array it reads.
    q = jnp.pad(q, ((0, max(sizes.tokens - num_tokens, 0)), (0, 0), (0, 0)))
    operands = [q, kv_cache, block_tables, layer.reshape(1), work.tiles, work.num_tiles]
    if sinks is not None:  # of each row of a tile
        heads = jnp.arange(ROWS_PER_WARPGROUP) % group
        operands.append(sinks.reshape(num_kv_heads, group)[:, heads])
    operands += [] if kv_scale is None else [as_stack(kv_scale, layer)]
    out_ref = jax.new_ref(out, memory_space=plgpu.GMEM)
    num_threads = config.warpgroups + (2 if sizes.is_narrow else 1)
    pl.kernel(
        functools.partial(_attend, sizes),
        out_type=(),
        mesh=plgpu.Mesh(grid=(config.num_ctas,), grid_names=("cta",), num_threads=num_threads, thread_name="warpgroup"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        name="paged_prefill",
    )(*operands, out_ref)
    return jax.freeze(out_ref)


def _across_columns(column: jax.Array, like: jax.Array) -> jax.Array:
    """[rows] -> like.shape."""
    return lax.broadcast_in_dim(column, like.shape, [0])


def _attend(sizes: PrefillSizes, *refs: Ref) -> None:
    """The body of the kernel; scratch first, then one branch a warpgroup."""
    config = sizes.config
    operands, out_ref = list(refs[:-1]), refs[-1]
    kv_scale = operands.pop() if sizes.is_narrow else None
    sinks = operands.pop() if sizes.has_sinks else None
    inputs = PrefillInputs(*operands, out=out_ref, sinks=sinks, kv_scale=kv_scale)
    compute_registers, copy_registers, widen_registers = REGISTERS[config.warpgroups, sizes.is_narrow]

    def scoped(*buffers: Ref) -> None:
        warpgroup = lax.axis_index("warpgroup")
        scratch = PrefillScratch(*buffers)

        @pl.when(warpgroup < config.warpgroups)
        def _():
            plgpu.set_max_registers(compute_registers, action="increase")
            _compute(sizes, inputs, scratch, warpgroup)

        @pl.when(warpgroup == config.warpgroups)
        def _():
            plgpu.set_max_registers(copy_registers, action="decrease")

            plgpu.warp_map(lambda warp: pl.when(warp == 0)(lambda: copy_tiles(sizes, inputs, scratch)))

        if sizes.is_narrow:

            @pl.when(warpgroup == config.warpgroups + 1)
            def _():
                plgpu.set_max_registers(widen_registers, action="decrease")
                widen_tiles(sizes, inputs, scratch)

    pl.run_scoped(scoped, *_scratch_types(sizes), collective_axes="warpgroup")


def _scratch_types(sizes: PrefillSizes) -> tuple[Any, ...]:
    """The fields of PrefillScratch."""
    config, head_dim, dtype = sizes.config, sizes.head_dim, sizes.dtype
    warpgroups, rows, stages = config.warpgroups, ROWS_PER_WARPGROUP, config.stages
    ring = swizzled_smem(stages, config.tile, head_dim, dtype=dtype)
    narrow_ring = swizzled_smem(stages, config.tile, head_dim, dtype=sizes.cache_dtype) if sizes.is_narrow else None
    arrived = plgpu.Barrier(num_arrivals=sizes.blocks_per_tile, num_barriers=stages)
    widened = plgpu.Barrier(num_barriers=stages)
    filled = widened if sizes.is_narrow else arrived
    free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    return (
        plgpu.SMEM((warpgroups, rows, head_dim), dtype),
        swizzled_smem(warpgroups, rows, head_dim, dtype=dtype),
        plgpu.SMEM((warpgroups, rows, head_dim), dtype),
        ring,
        ring,
        narrow_ring,
        narrow_ring,
        None if config.p_in_registers else swizzled_smem(warpgroups, rows, config.tile, dtype=dtype),
        plgpu.Barrier(num_arrivals=1 if config.copy_whole_tiles else sizes.tokens, num_barriers=warpgroups),
        plgpu.Barrier(num_barriers=warpgroups),
        filled,
        filled,
        free,
        free,
        arrived if sizes.is_narrow else None,
        arrived if sizes.is_narrow else None,
        widened if sizes.is_narrow else None,
        widened if sizes.is_narrow else None,
        plgpu.Barrier(num_arrivals=warpgroups),
    )


def _compute(sizes: PrefillSizes, inputs: PrefillInputs, scratch: PrefillScratch, warpgroup: jax.Array) -> None:
    """One of the computing warpgroups: its share of every query tile."""
    q_in, q_smem, o_smem = (buffer.at[warpgroup] for buffer in (scratch.q_in, scratch.q, scratch.o))

    def query_body(r: jax.Array, done: jax.Array) -> jax.Array:
        query = query_tile(sizes, inputs.tiles, r)
        plgpu.barrier_wait(scratch.q_full.at[warpgroup])
        q_smem[...] = plgpu.load(q_in, layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.q_free.at[warpgroup])
        out = _attend_tiles(sizes, inputs, scratch, query, warpgroup, q_smem, done)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_smem[...] = out.astype(sizes.dtype)
        plgpu.commit_smem()
        _store_tokens(sizes, query, warpgroup, o_smem, inputs.out)
        return done + sizes.num_steps(query)

    lax.fori_loop(0, num_rounds(sizes, inputs.num_tiles), query_body, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _store_tokens(sizes: PrefillSizes, query: QueryTile, warpgroup: jax.Array, o_smem: Ref, out_ref: Ref) -> None:
    """Write the warpgroup's real tokens: all by one copy, or one by one where the request ends among them."""
    first = warpgroup * sizes.tokens
    token = query.token + first
    count = jnp.clip(query.num_tokens - first, 0, sizes.tokens)
    heads = pl.ds(query.head * sizes.group, sizes.group)
    is_whole = jnp.logical_and(count == sizes.tokens, sizes.config.copy_whole_tiles)
    if sizes.config.copy_whole_tiles:

        @pl.when(is_whole)
        def _():
            plgpu.copy_smem_to_gmem(by_token(sizes, o_smem), out_ref.at[pl.ds(token, sizes.tokens), heads])

    @pl.when(jnp.logical_not(is_whole))
    def _():
        def store(t: jax.Array, _: None) -> None:
            rows = pl.ds(t * sizes.group, sizes.group)
            plgpu.copy_smem_to_gmem(o_smem.at[rows], out_ref.at[token + t, heads])

        lax.fori_loop(0, count, store, None)


def _attend_tiles(
    sizes: PrefillSizes,
    inputs: PrefillInputs,
    scratch: PrefillScratch,
    query: QueryTile,
    warpgroup: jax.Array,
    q_smem: Ref,
    done: jax.Array,
) -> jax.Array:
    """All K and V tiles that the query tile sees, with an online softmax: f32[64, H], normalised."""
    config, dtype, window = sizes.config, sizes.dtype, sizes.sliding_window
    rows, tile, head_dim = ROWS_PER_WARPGROUP, config.tile, sizes.head_dim
    k_smem, v_smem, k_full, v_full = scratch.k, scratch.v, scratch.k_full, scratch.v_full
    first_position = query.position + warpgroup * sizes.tokens
    first, end = sizes.first_step(query), sizes.end_step(query)
    factor: Any = sizes.scale
    if inputs.kv_scale is not None:
        factor = factor * inputs.kv_scale[place_in(inputs.kv_scale, inputs.layer[0]), 0]
    wgmma = plgpu.Layout.WGMMA
    by_row = wgmma.reduce(1)

    def slot_of(i: jax.Array | int) -> jax.Array:
        return lax.rem(done + (i - first), jnp.int32(config.stages))

    def zero_unseen_values(i: jax.Array, lowest: jax.Array | int) -> None:
        # The weights there are 0, but 0 * NaN is NaN. The warpgroups share the work, 64 keys at a time; each waits for
        # all.
        slot = slot_of(i)
        for part in range(tile // 64):

            @pl.when(warpgroup == part % config.warpgroups)
            def _(part: int = part):
                here = pl.ds(part * 64, 64)
                key = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=by_row) + (i * tile + part * 64)
                seen = jnp.logical_and(key < query.num_keys, key >= lowest)
                for column in range(0, head_dim, 64):  # few registers at a time
                    columns = pl.ds(column, 64)
                    values = plgpu.load(v_smem.at[slot, here, columns], layout=wgmma)
                    zeroed = jnp.where(_across_columns(seen, values), values, jnp.zeros_like(values))
                    v_smem[slot, here, columns] = zeroed

        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.v_zeroed)
        plgpu.barrier_wait(scratch.v_zeroed)

    def hand_over(p: jax.Array) -> jax.Array | None:
        """P for the next product: registers, or shared memory."""
        p = p.astype(dtype)
        if config.p_in_registers:
            return p
        scratch.p[warpgroup] = p
        plgpu.commit_smem()
        return None

    # The interpreter cannot set an accumulator: it starts from zeros and adds at the end.
    def start_from(acc_ref: Ref, acc: jax.Array) -> None:
        if config.p_in_registers:
            acc_ref[...] = acc

    def total_of(acc_ref: Ref, acc: jax.Array) -> jax.Array:
        new = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
        return new if config.p_in_registers else acc + new

    def add_values(acc_ref: Ref, p: jax.Array | None, slot: jax.Array) -> None:
        plgpu.wgmma(acc_ref, scratch.p.at[warpgroup] if p is None else p, v_smem.at[slot])

    def softmax(
        i: jax.Array, scores: jax.Array, highest: jax.Array, total: jax.Array, *, is_masked: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """P in float32, the new maximum and sum, and the factor of what was summed before."""
        to_base_2 = factor * LOG2E
        if sizes.soft_cap is not None:
            scores, to_base_2 = capped(scores * factor, sizes.soft_cap), 1.0
        if is_masked:
            token = div(plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=by_row), sizes.group)
            num_seen = token + (first_position + 1 - i * tile)
            hidden = None if window is None else num_seen - window
            scores = hide_columns(scores, hidden, num_seen, interpret=not config.p_in_registers)
        new_highest = jnp.maximum(highest, scores.max(axis=1) * to_base_2)
        rescale = jnp.exp2(highest - new_highest)
        p = jnp.exp2(scores * to_base_2 - _across_columns(new_highest, scores))
        return p, new_highest, total * rescale + p.sum(axis=1), rescale

    def scores_of(slot: jax.Array) -> jax.Array:
        def body(acc: Ref) -> jax.Array:
            plgpu.wgmma(acc, q_smem, k_smem.at[slot].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(body, plgpu.ACC((rows, tile), jnp.float32))

    def first_scores() -> tuple[jax.Array | None, jax.Array, jax.Array]:
        slot = slot_of(first)
        plgpu.barrier_wait(k_full.at[slot])
        scores = scores_of(slot)
        plgpu.barrier_arrive(scratch.k_free.at[slot])
        lowest, nothing = full((rows,), _LOWEST_MAXIMUM, by_row), full((rows,), 0.0, by_row)
        p, highest, total, _ = softmax(jnp.int32(first), scores, lowest, nothing, is_masked=True)
        return hand_over(p), highest, total

    def step(i: jax.Array, carry: tuple[Any, ...], *, is_masked: bool) -> tuple[Any, ...]:
        """Scores of tile i while the values of tile i - 1 are added, whose P is in the carry."""
        acc, p, highest, total = carry
        slot, before = slot_of(i), slot_of(i - 1)
        plgpu.barrier_wait(k_full.at[slot])

        def body(acc_ref: Ref, scores_ref: Ref) -> tuple[Any, ...]:
            start_from(acc_ref, acc)
            plgpu.wgmma(scores_ref, q_smem, k_smem.at[slot].transpose((1, 0)))
            plgpu.barrier_wait(v_full.at[before])
            if window is not None:
                lowest_key = query.position + 1 - window
                is_edge = jnp.logical_and(i - 1 == first, lowest_key > first * tile)
                pl.when(is_edge)(lambda: zero_unseen_values(i - 1, lowest_key))
            add_values(acc_ref, p, before)
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            plgpu.barrier_arrive(scratch.k_free.at[slot])
            new = softmax(i, scores, highest, total, is_masked=is_masked)
            if config.p_in_registers:
                finish_before_what_follows(new[2])
            return lax.optimization_barrier((total_of(acc_ref, acc), *new))

        accs = plgpu.ACC((rows, head_dim), jnp.float32), plgpu.ACC((rows, tile), jnp.float32)
        acc, p, highest, total, rescale = pl.run_scoped(body, *accs)
        plgpu.barrier_arrive(scratch.v_free.at[before])
        return acc * _across_columns(rescale, acc), hand_over(p), highest, total

    def last_values(acc: jax.Array, p: jax.Array | None) -> jax.Array:
        last = end - 1
        slot = slot_of(last)
        plgpu.barrier_wait(v_full.at[slot])
        lowest_key = 0 if window is None else query.position + 1 - window
        has_unseen = jnp.logical_or(query.num_keys < end * tile, lowest_key > last * tile)
        pl.when(has_unseen)(lambda: zero_unseen_values(last, lowest_key))

        def body(acc_ref: Ref) -> jax.Array:
            start_from(acc_ref, acc)
            add_values(acc_ref, p, slot)
            return total_of(acc_ref, acc)

        acc = pl.run_scoped(body, plgpu.ACC((rows, head_dim), jnp.float32))
        plgpu.barrier_arrive(scratch.v_free.at[slot])
        return acc

    carry = full((rows, head_dim), 0.0, wgmma), *first_scores()
    begin = first + 1
    if window is not None:
        # Up to the last tile that hides a key from the warpgroup's last token.
        covered = div(jnp.maximum(first_position + sizes.tokens - window, 0) + (tile - 1), tile)
        upper = jnp.clip(covered, begin, end)
        carry = lax.fori_loop(begin, upper, functools.partial(step, is_masked=True), carry)
        begin = upper
    num_unmasked = jnp.minimum(div(first_position + 1, tile), div(query.num_keys, tile))
    middle = jnp.clip(num_unmasked, begin, end)
    carry = lax.fori_loop(begin, middle, functools.partial(step, is_masked=False), carry)
    acc, p, highest, total = lax.fori_loop(middle, end, functools.partial(step, is_masked=True), carry)
    acc = last_values(acc, p)
    if inputs.sinks is not None:
        sink = plgpu.load(inputs.sinks.at[query.head], layout=by_row, optimized=False)
        total = total + jnp.exp2(sink * LOG2E - highest)
    weight = 1.0 / total
    if inputs.kv_scale is not None:
        weight = weight * inputs.kv_scale[place_in(inputs.kv_scale, inputs.layer[0]), 1]
    return acc * _across_columns(weight, acc)
