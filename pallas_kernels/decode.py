"""Decode attention over the paged cache: one query token a request (Pallas Mosaic GPU, compute capability 9.0).

The line of all key tiles is cut into one stretch a CTA (work_lists.DecodeWork), so uneven lengths balance and there is
no split count to choose. In a CTA one warp copies tiles into a ring in shared memory and runs ahead across items; one
warpgroup computes. Keys are the rows of the products, S^T = K Q^T and O^T = V^T P^T, so that a small group of query
heads costs 8 columns and not 64 rows. A CTA that has only part of an item writes a normalised partial result and its
log-sum-exp; the last of the item's CTAs to arrive merges them in the order of the line: the same bits every time.

In a step of few decode rows and no others the kernel takes the merged qkv (write_and_decode): it norms and rotates
queries and key, writes key and value to the cache, and starts the softmax with them (decode_newest.py).

Letters: T tokens  R rows  N query heads  K kv heads  H head_dim  G = N / K
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import ATOM, PRODUCT_ROWS, Ref, across_rows, div, kernel, pl, plgpu, swizzled_smem
from pallas_kernels.decode_copy import DecodeInputs, DecodeScratch, copy_tiles, my_stretch
from pallas_kernels.decode_merge import arrive, merge_item, merge_kernel, store_item, store_zeros
from pallas_kernels.decode_newest import load_tables
from pallas_kernels.decode_sizes import DecodeSizes, MergedQKV, round_up
from pallas_kernels.decode_tiles import ItemTiles, attend_tiles
from pallas_kernels.layer_slice import LayerArray, as_stack
from pallas_kernels.reference_rope_write import HeadNorm
from pallas_kernels.tuning import DecodeConfig
from pallas_kernels.work_lists import DecodeWork


def paged_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    work: DecodeWork,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scale: LayerArray | None = None,
    config: DecodeConfig,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the decode rows, which are the first tokens of the step.

    Args:
      q: bf16 or f16[T, N, H].
      kv_cache: [L, num_blocks, 2, K, block_size, H] of q's dtype, or float8_e4m3fn.
      layer: i32[].
      block_tables: i32[R, max_blocks].
      seq_lens: i32[R].
      query_start_loc: i32[R + 1]; the last one says how many real tokens the step has, decode and prefill.
      work: from make_decode_work with the same config and window; it says how many rows are decode rows.
      scale: factor of the scores.
      sliding_window, soft_cap, sinks, kv_scale: as in ops.paged_attention.
      config: static.
      interpret: for the CPU interpreter.

    Returns:
      Like q: results in the decode rows, zeros behind the last real token; what lies between is NOT written.
    """
    num_heads = q.shape[1]
    sizes = _sizes(
        q,
        kv_cache,
        seq_lens,
        group=num_heads // kv_cache.shape[3],
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        config=config,
    )
    operands = {
        "q": _as_rows(q, sizes),
        **_cached(kv_cache, layer, block_tables, seq_lens, query_start_loc, kv_scale),
    }
    return _run(sizes, operands, work, sinks, interpret).reshape(q.shape)


def write_and_decode(
    qkv: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    work: DecodeWork,
    *,
    rope: tuple[jax.Array, jax.Array] | None,
    norm: HeadNorm | None,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scale: LayerArray | None = None,
    config: DecodeConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Norm, rotation, cache write and attention of a step of decode rows only; see decode_sizes.takes_merged_qkv.

    Args:
      qkv: bf16 or f16[T, K, G + 2, H] with T = R.
      kv_cache: as in paged_decode; consumed, and written in place where nothing else reads it.
      slot_mapping: i32[T] flat slot of each row's token; slots of the null block are not written.
      layer, block_tables, seq_lens, query_start_loc, work: as in paged_decode; seq_lens count the new token.
      rope: cos and sin, f32[T, H / 2] each, or None.
      norm: of the query and key heads, or None.
      scale, sliding_window, soft_cap, sinks, kv_scale, config, interpret: as in paged_decode.

    Returns:
      [T, N, H], and kv_cache.
    """
    num_rows, num_kv_heads, parts, head_dim = qkv.shape
    sizes = _sizes(
        qkv,
        kv_cache,
        seq_lens,
        group=parts - 2,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        config=config,
        merged=MergedQKV(norm.eps, norm.unit_offset) if norm else MergedQKV(),
    )
    if rope is not None and head_dim == 64:  # for both halves of a head, which are one part of its rows
        cos, sin = rope
        rope = (jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1))
    rows = qkv.reshape(-1, head_dim)
    num_padded = max(round_up(len(rows), ATOM), sizes.columns)
    cache_ref = jax.new_ref(kv_cache, memory_space=plgpu.GMEM)
    operands = {
        "q": jnp.pad(rows, ((0, num_padded - len(rows)), (0, 0))),  # copies only where the batch is tiny
        **_cached(cache_ref, layer, block_tables, seq_lens, query_start_loc, kv_scale),
        "slots": slot_mapping,
        "cos": rope and rope[0],
        "sin": rope and rope[1],
        "q_weight": norm and as_stack(norm.q_weight, layer),
        "k_weight": norm and as_stack(norm.k_weight, layer),
    }
    out = _run(sizes, operands, work, sinks, interpret)
    return out.reshape(num_rows, num_kv_heads * (parts - 2), head_dim), jax.freeze(cache_ref)


def _sizes(
    q: jax.Array, kv_cache: jax.Array, seq_lens: jax.Array, *, group: int, sinks: jax.Array | None, **options: Any
) -> DecodeSizes:
    num_kv_heads, block_size = kv_cache.shape[3:5]
    return DecodeSizes(
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=q.shape[-1],
        num_rows=seq_lens.shape[0],
        num_heads=num_kv_heads * group,
        num_tokens=len(q),
        block_size=block_size,
        has_sinks=sinks is not None,
        dtype=q.dtype,
        cache_dtype=kv_cache.dtype,
        **options,
    )


def _cached(
    kv_cache: Any,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    kv_scale: LayerArray | None,
) -> dict[str, Any]:
    """The operands that say what each row has in the cache."""
    return {
        "kv_cache": kv_cache,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "layer": layer.reshape(1),
        "query_start_loc": query_start_loc,
        "kv_scale": None if kv_scale is None else as_stack(kv_scale, layer),
    }


def _run(
    sizes: DecodeSizes, operands: dict[str, Any], work: DecodeWork, sinks: jax.Array | None, interpret: bool
) -> jax.Array:
    """Call the kernel, and the one that merges if it does not itself: [T * N, H].

    Args:
      operands: of DecodeInputs by name, but for those from work and sinks; None where there is none.
    """
    config = sizes.config
    operands = operands | {
        "starts": work.starts,
        "arrivals": work.arrivals if sizes.on_card else None,
        "sinks": None if sinks is None else sizes.sinks_by_column(sinks),
    }
    operands = {name: x for name, x in operands.items() if x is not None}
    out, partials = kernel(
        functools.partial(_attend, sizes, tuple(operands)),
        out_type=(
            jax.ShapeDtypeStruct((sizes.num_tokens * sizes.num_heads, sizes.head_dim), sizes.dtype),
            jax.ShapeDtypeStruct((2 * config.num_ctas, sizes.parts + 1, PRODUCT_ROWS, sizes.columns), jnp.float32),
        ),
        mesh=plgpu.Mesh(grid=(config.num_ctas,), grid_names=("cta",), num_threads=2, thread_name="warpgroup"),
        interpret=interpret,
        name="paged_decode" if sizes.merged is None else "write_and_decode",
    )(*operands.values())
    if sizes.on_card:
        return out
    out_ref = jax.new_ref(out, memory_space=plgpu.GMEM)
    sink_operands = [operands["sinks"]] if sizes.has_sinks else []
    kernel(
        functools.partial(merge_kernel, sizes),
        out_type=(),
        mesh=plgpu.Mesh(grid=(config.num_ctas,), grid_names=("cta",)),
        interpret=interpret,
        name="paged_decode_merge",
    )(operands["seq_lens"], work.starts, partials, *sink_operands, out_ref)
    return jax.freeze(out_ref)


def _as_rows(q: jax.Array, sizes: DecodeSizes) -> jax.Array:
    """q as [rows, H], a multiple of 8 rows. Copies only where a group does not fit (3, 7), or the batch is tiny."""
    if sizes.q_rows != sizes.group:
        q = q[: sizes.num_rows].reshape(-1, sizes.num_kv_heads, sizes.group, sizes.head_dim)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, sizes.q_rows - sizes.group), (0, 0)))
    q = q.reshape(-1, sizes.head_dim)
    return jnp.pad(q, ((0, -q.shape[0] % ATOM), (0, 0)))


def _attend(sizes: DecodeSizes, names: tuple[str, ...], *refs: Ref) -> None:
    """The body of the kernel; scratch first, then one branch a warpgroup.

    Args:
      names: of the operands, among DecodeInputs.
    """
    operands, outputs = refs[:-2], refs[-2:]
    inputs = DecodeInputs(**dict(zip(names, operands, strict=True)))

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
    smem, wide = (functools.partial(swizzled_smem, dtype=dtype) for dtype in (sizes.dtype, sizes.product_dtype))
    ring = swizzled_smem(stages, tile, head_dim, dtype=sizes.cache_dtype)
    filled = plgpu.Barrier(num_arrivals=sizes.blocks_per_tile, num_barriers=stages)
    return (
        smem(2, sizes.columns, head_dim),
        wide(sizes.columns, head_dim) if sizes.is_narrow else None,
        ring,
        ring,
        wide(PRODUCT_ROWS, head_dim) if sizes.is_narrow and not sizes.on_card else None,
        wide(tile, head_dim) if sizes.is_narrow else None,
        wide(sizes.columns, tile),
        plgpu.SMEM((sizes.columns, head_dim), sizes.dtype),
        plgpu.SMEM((sizes.columns, 2 * head_dim), sizes.dtype) if sizes.merged and head_dim == 64 else None,
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
    store_zeros(sizes, inputs.query_start_loc[sizes.num_rows], scratch.o, out_ref)

    def store_partial(item: jax.Array, outs: list[jax.Array], lse: jax.Array, begin: jax.Array, item_tile: jax.Array):
        """Part of an item, whose first tile on the line is item_tile; the last CTA to get here merges the parts."""
        slot = 2 * cta + jnp.where(begin == 0, 1, 0)
        for part, out in enumerate(outs):
            partials_ref[slot, part] = out
        partials_ref[slot, sizes.parts] = across_rows(lse, outs[0])
        if inputs.arrivals is None:
            return
        num_tiles = sizes.num_tiles(inputs.seq_lens[div(item, sizes.num_kv_heads)])
        stretch = inputs.starts[3, cta]
        first, last = div(item_tile, stretch), div(item_tile + num_tiles - 1, stretch)
        is_last = arrive(inputs.arrivals, scratch.is_last, first, last - first)

        @pl.when(is_last != 0)
        def _():
            merge_item(sizes, item, first, last, partials_ref, inputs.sinks, scratch.o, out_ref)

    def item_body(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, begin = carry  # tiles done in the stretch; where in this item the stretch begins
        item = mine.first_item + j
        row = div(item, sizes.num_kv_heads)
        length = inputs.seq_lens[row]
        num_tiles = sizes.num_tiles(length)
        end = jnp.minimum(num_tiles, begin + (mine.num_tiles - done))
        q_slot = lax.rem(j, jnp.int32(2))
        tables = None if sizes.merged is None else load_tables(inputs, row)
        plgpu.barrier_wait(scratch.q_full.at[q_slot])
        outs, lse = attend_tiles(sizes, inputs, scratch, q_slot, ItemTiles(item, length, begin, end, done), tables)
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
