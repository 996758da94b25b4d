"""Decode attention over the paged cache: one query token a request (Pallas Mosaic GPU, compute capability 9.0).

The line of all key tiles is cut into one stretch a CTA (work_lists.DecodeWork), so uneven lengths balance and there is
no split count to choose. In a CTA one warp copies tiles into a ring in shared memory and runs ahead across items; one
warpgroup computes. Keys are the rows of the products, S^T = K Q^T and O^T = V^T P^T, so that a small group of query
heads costs 8 columns and not 64 rows. A CTA that has only part of an item writes a normalised partial result and its
log-sum-exp; the last of the item's CTAs to arrive merges them in the order of the line: the same bits every time.

Letters: T tokens  R rows  N query heads  K kv heads  H head_dim  G = N / K
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import (
    ATOM,
    LOG2E,
    MIN_SCORE,
    Ref,
    capped,
    div,
    full,
    pl,
    plgpu,
    swizzled_smem,
    widened,
)
from pallas_kernels.decode_copy import DecodeInputs, DecodeScratch, copy_tiles, my_stretch
from pallas_kernels.decode_merge import across_rows, arrive, merge_item, merge_kernel, store_item, store_zeros
from pallas_kernels.decode_sizes import DecodeSizes
from pallas_kernels.tuning import DecodeConfig
from pallas_kernels.work_lists import DecodeWork

_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
_WGMMA = plgpu.Layout.WGMMA


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
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scale: jax.Array | None = None,
    config: DecodeConfig,
    interpret: Any = False,
) -> jax.Array:
    """Attention of the decode rows, which are the first tokens of the step.

    Args:
      q: bf16 or f16[T, N, H].
      kv_cache: [L, num_blocks, 2, K, block_size, H] of q's dtype, or float8_e4m3fn.
      layer: i32[].
      block_tables: i32[R, max_blocks].
      seq_lens: i32[R].
      num_tokens: i32[] real tokens of the step, decode and prefill.
      work: from make_decode_work with the same config and window; it says how many rows are decode rows.
      scale: factor of the scores.
      sliding_window, soft_cap, sinks, kv_scale: as in ops.paged_attention.
      config: static.
      interpret: False, or InterpretGPUParams.

    Returns:
      Like q: results in the decode rows, zeros from num_tokens on; what lies between is NOT written.
    """
    num_tokens_padded, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    sizes = DecodeSizes(
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        num_rows=seq_lens.shape[0],
        num_heads=num_heads,
        num_tokens=num_tokens_padded,
        block_size=block_size,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
        dtype=q.dtype,
        cache_dtype=kv_cache.dtype,
        config=config,
    )
    operands = [_as_rows(q, sizes), kv_cache, block_tables, seq_lens, layer.reshape(1), num_tokens.reshape(1)]
    operands += [work.starts, work.stretch]
    operands += [work.arrivals] if sizes.on_card else []
    sink_operands = [] if sinks is None else [sizes.sinks_by_column(sinks)]
    operands += sink_operands
    operands += [] if kv_scale is None else [kv_scale]
    out, partials = pl.kernel(
        functools.partial(_attend, sizes),
        out_type=(
            jax.ShapeDtypeStruct((num_tokens_padded * num_heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((2 * config.num_ctas, sizes.parts + 1, 64, sizes.columns), jnp.float32),
        ),
        mesh=plgpu.Mesh(grid=(config.num_ctas,), grid_names=("cta",), num_threads=2, thread_name="warpgroup"),
        compiler_params=_COMPILER_PARAMS,
        interpret=interpret,
        name="paged_decode",
    )(*operands)
    if config.merge == "kernel":
        out_ref = jax.new_ref(out, memory_space=plgpu.GMEM)
        pl.kernel(
            functools.partial(merge_kernel, sizes),
            out_type=(),
            mesh=plgpu.Mesh(grid=(config.num_ctas,), grid_names=("cta",)),
            compiler_params=_COMPILER_PARAMS,
            interpret=interpret,
            name="paged_decode_merge",
        )(seq_lens, work.starts, work.stretch, partials, *sink_operands, out_ref)
        out = jax.freeze(out_ref)
    return out.reshape(q.shape)


def _as_rows(q: jax.Array, sizes: DecodeSizes) -> jax.Array:
    """q as [rows, H], a multiple of 8 rows. Copies only where a group does not fit (3, 7), or the batch is tiny."""
    if sizes.q_rows != sizes.group:
        q = q[: sizes.num_rows].reshape(-1, sizes.num_kv_heads, sizes.group, sizes.head_dim)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, sizes.q_rows - sizes.group), (0, 0)))
    q = q.reshape(-1, sizes.head_dim)
    return jnp.pad(q, ((0, -q.shape[0] % ATOM), (0, 0)))


def _attend(sizes: DecodeSizes, *refs: Ref) -> None:
    """The body of the kernel; scratch first, then one branch a warpgroup."""
    operands, outputs = list(refs[:-2]), refs[-2:]
    kv_scale = operands.pop() if sizes.is_narrow else None
    sinks = operands.pop() if sizes.has_sinks else None
    arrivals = operands.pop() if sizes.on_card else None
    inputs = DecodeInputs(*operands, arrivals=arrivals, sinks=sinks, kv_scale=kv_scale)

    def scoped(*buffers: Ref) -> None:
        warpgroup = lax.axis_index("warpgroup")
        scratch = DecodeScratch(*buffers)

        @pl.when(warpgroup == 0)
        def _():
            _compute(sizes, inputs, outputs, scratch)

        @pl.when(warpgroup == 1)
        def _():
            plgpu.warp_map(lambda warp: pl.when(warp == 0)(lambda: copy_tiles(sizes, inputs, scratch)))

    pl.run_scoped(scoped, *_scratch_types(sizes), collective_axes="warpgroup")


def _scratch_types(sizes: DecodeSizes) -> tuple[Any, ...]:
    """The fields of DecodeScratch."""
    tile, stages, head_dim = sizes.config.tile, sizes.config.stages, sizes.head_dim
    smem = functools.partial(swizzled_smem, dtype=sizes.dtype)
    ring = swizzled_smem(stages, tile, head_dim, dtype=sizes.cache_dtype)
    filled = plgpu.Barrier(num_arrivals=sizes.blocks_per_tile, num_barriers=stages)
    return (
        smem(2, sizes.columns, head_dim),
        ring,
        ring,
        smem(tile, head_dim) if sizes.is_narrow and not sizes.on_card else None,
        smem(tile, head_dim) if sizes.is_narrow else None,
        smem(sizes.columns, tile),
        plgpu.SMEM((sizes.columns, head_dim), sizes.dtype),
        plgpu.SMEM((1,), jnp.int32),
        plgpu.Barrier(num_barriers=2),
        filled,
        filled,
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
    )


def _compute(sizes: DecodeSizes, inputs: DecodeInputs, outputs: tuple[Ref, ...], scratch: DecodeScratch) -> None:
    """One warpgroup: the items of the stretch, one after the other."""
    out_ref, partials_ref = outputs
    cta = lax.axis_index("cta")
    mine = my_stretch(inputs.starts, cta)
    store_zeros(sizes, inputs.num_tokens[0], scratch.o, out_ref)

    def store_partial(item: jax.Array, outs: list[jax.Array], lse: jax.Array, begin: jax.Array, item_tile: jax.Array):
        """Part of an item, whose first tile on the line is item_tile; the last CTA to get here merges the parts."""
        slot = 2 * cta + jnp.where(begin == 0, 1, 0)
        for part, out in enumerate(outs):
            partials_ref[slot, part] = out
        partials_ref[slot, sizes.parts] = across_rows(lse, outs[0])
        if inputs.arrivals is None:
            return
        num_tiles = sizes.num_tiles(inputs.seq_lens[div(item, sizes.num_kv_heads)])
        first, last = div(item_tile, inputs.stretch[0]), div(item_tile + num_tiles - 1, inputs.stretch[0])
        is_last = arrive(inputs.arrivals, scratch.is_last, first, last - first)

        @pl.when(is_last != 0)
        def _():
            merge_item(sizes, item, first, last, partials_ref, inputs.sinks, scratch.o, out_ref)

    def item_body(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, begin = carry  # tiles done in the stretch; where in this item the stretch begins
        item = mine.first_item + j
        length = inputs.seq_lens[div(item, sizes.num_kv_heads)]
        num_tiles = sizes.num_tiles(length)
        end = jnp.minimum(num_tiles, begin + (mine.num_tiles - done))
        q_slot = lax.rem(j, jnp.int32(2))
        plgpu.barrier_wait(scratch.q_full.at[q_slot])
        outs, lse = _attend_tiles(sizes, inputs, scratch, scratch.q.at[q_slot], length, begin, end, done)
        plgpu.barrier_arrive(scratch.q_free.at[q_slot])
        is_whole = jnp.logical_and(begin == 0, end == num_tiles)

        @pl.when(is_whole)
        def _():
            store_item(sizes, outs, lse, item, inputs.sinks, scratch.o, out_ref)

        @pl.when(jnp.logical_not(is_whole))
        def _():
            store_partial(item, outs, lse, begin, mine.first_tile + done - begin)

        return done + (end - begin), jnp.int32(0)

    lax.fori_loop(0, mine.num_items, item_body, (jnp.int32(0), mine.first_index))
    plgpu.wait_smem_to_gmem(0)


def _attend_tiles(
    sizes: DecodeSizes,
    inputs: DecodeInputs,
    scratch: DecodeScratch,
    q_smem: Ref,
    length: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    done: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    """Tiles [begin, end) of one item: normalised O^T in 64-row parts, and the base-2 log-sum-exp of each column."""
    tile, columns, parts = sizes.config.tile, sizes.columns, sizes.parts
    v_operand = scratch.v_wide if sizes.is_narrow else None
    factor = sizes.scale * (1.0 if sizes.soft_cap else LOG2E)
    if inputs.kv_scale is not None:
        factor = factor * inputs.kv_scale[0]

    def scores_of(slot: jax.Array) -> jax.Array:
        if sizes.is_narrow:
            k = widened(scratch.k.at[slot], sizes.dtype)
            if not sizes.on_card:
                scratch.k_wide[...] = k
                plgpu.commit_smem()
                k = scratch.k_wide
        else:
            k = scratch.k.at[slot]

        def body(acc: Ref) -> jax.Array:
            plgpu.wgmma(acc, k, q_smem.transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(body, plgpu.ACC((tile, columns), jnp.float32))

    def values_of(values: Ref) -> tuple[jax.Array, ...]:
        def body(*accs: Ref) -> tuple[jax.Array, ...]:
            for part, acc in enumerate(accs):
                rows = values.at[:, pl.ds(part * 64, 64)].transpose((1, 0))
                plgpu.wgmma(acc, rows, scratch.p.transpose((1, 0)))
            return tuple(acc[...] for acc in accs)

        return pl.run_scoped(body, *[plgpu.ACC((64, columns), jnp.float32) for _ in range(parts)])

    def is_seen(shape: tuple[int, ...], first_key: jax.Array) -> jax.Array:
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)
        seen = key < length - first_key
        if sizes.sliding_window is None:
            return seen
        return jnp.logical_and(seen, key >= length - sizes.sliding_window - first_key)

    def zero_unseen_values(values: Ref, first_key: jax.Array) -> None:
        # The weights there are 0, but 0 * NaN is NaN.
        for part in range(0, tile, 64):
            here = values.at[pl.ds(part, 64)]
            loaded = plgpu.load(here, layout=_WGMMA)
            here[...] = jnp.where(is_seen(loaded.shape, first_key + part), loaded, jnp.zeros_like(loaded))

    def step(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        highest, total, acc = carry
        slot = lax.rem(done + (i - begin), jnp.int32(sizes.config.stages))
        first_key = (sizes.first_tile(length) + i) * tile
        plgpu.barrier_wait(scratch.k_full.at[slot])
        scores = scores_of(slot)
        plgpu.barrier_arrive(scratch.k_free.at[slot])
        scores = scores * factor
        if sizes.soft_cap is not None:
            scores = capped(scores, sizes.soft_cap)
        scores = jnp.where(is_seen((tile, columns), first_key), scores, MIN_SCORE)
        new_highest = jnp.maximum(highest, scores.max(axis=0))
        rescale = jnp.exp2(highest - new_highest)
        p = jnp.exp2(scores - across_rows(new_highest, scores))
        # Summed over keys only once, at the end: a sum across warps costs more than these additions.
        total = total * across_rows(rescale, total) + p
        scratch.p.transpose((1, 0))[...] = p.astype(sizes.dtype)
        plgpu.barrier_wait(scratch.v_full.at[slot])
        values = scratch.v.at[slot]
        if v_operand is not None:
            for part in range(0, tile, 64):
                v_operand[pl.ds(part, 64)] = widened(values.at[pl.ds(part, 64)], sizes.dtype)
            plgpu.barrier_arrive(scratch.v_free.at[slot])
            values = v_operand
        has_unseen = length - first_key < tile
        if sizes.sliding_window is not None:
            has_unseen = jnp.logical_or(has_unseen, length - sizes.sliding_window > first_key)
        pl.when(has_unseen)(lambda: zero_unseen_values(values, first_key))
        plgpu.commit_smem()
        update = values_of(values)
        if v_operand is None:
            plgpu.barrier_arrive(scratch.v_free.at[slot])
        acc = tuple(a * across_rows(rescale, a) + u for a, u in zip(acc, update, strict=True))
        return new_highest, total, acc

    start = (full((columns,), MIN_SCORE, _WGMMA.reduce(0)), full((tile, columns), 0.0, _WGMMA))
    zeros = tuple(full((64, columns), 0.0, _WGMMA) for _ in range(parts))
    highest, total, acc = lax.fori_loop(begin, end, step, (*start, zeros))
    total = total.sum(axis=0)
    total = jnp.where(total == 0, 1.0, total)
    factor_of_values = 1.0 / total
    if inputs.kv_scale is not None:
        factor_of_values = factor_of_values * inputs.kv_scale[1]
    return [a * across_rows(factor_of_values, a) for a in acc], highest + jnp.log2(total)
