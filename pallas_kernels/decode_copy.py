"""The copying side of the decode kernel: which tiles a CTA has, and the warps that bring them to shared memory.

Letters: N query heads  K kv heads  H head_dim  G = N / K
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import Ref, div, pl, plgpu
from pallas_kernels.decode_sizes import DecodeSizes


@dataclass(frozen=True)
class DecodeInputs:
    """The kernel's operands in global memory; see decode.paged_decode and write_and_decode."""

    q: Ref  # [rows, H], or the rows of the merged qkv
    kv_cache: Ref  # [L, num_blocks, 2, K, block_size, H]
    block_tables: Ref  # i32[R, max_blocks]
    seq_lens: Ref  # i32[R]
    layer: Ref  # i32[1]
    query_start_loc: Ref  # i32[R + 1], the last one the tokens of the step
    starts: Ref  # as in work_lists.DecodeWork, like the next one
    arrivals: Ref = None  # None: another kernel merges
    sinks: Ref = None  # of DecodeSizes.sinks_by_column
    kv_scale: Ref = None  # f32[L or 1, 2]
    # With merged qkv only:
    slots: Ref = None  # i32[T]
    cos: Ref = None  # f32[T, H / 2]; with heads of 64 [T, H], see write_and_decode
    sin: Ref = None
    q_weight: Ref = None  # [L or 1, H]
    k_weight: Ref = None


@dataclass(frozen=True)
class DecodeScratch:
    """Shared memory and barriers of one CTA. A barrier of a buffer has as many places as the buffer."""

    q: Ref  # [2, columns, H] of this item and of the next
    q_half: Ref  # f16[columns, H] of this item times the scores' factor, for 8-bit keys; see decode_keys
    k: Ref  # [stages, tile, H] the rings, of the cache's dtype
    v: Ref
    k_wide: Ref  # f16[64, H] 8-bit keys widened; in the interpreter only, else they go to registers
    v_wide: Ref  # f16[tile, H] 8-bit values widened
    p: Ref  # [columns, tile] weights of the keys
    o: Ref  # [columns, H] not swizzled, so that its rows can go anywhere
    turned: Ref  # [columns, 2 * H] heads of 64 of merged qkv, twice; see decode_newest
    is_last: Ref  # i32[1] is this CTA the last to arrive
    q_full: Ref
    k_full: Ref
    v_full: Ref
    q_free: Ref
    k_free: Ref
    v_free: Ref


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class _Tile:
    """A key tile of an item."""

    item: jax.Array
    index: jax.Array  # within the item
    length: jax.Array  # keys of the item
    blocks: tuple[jax.Array, ...]  # ids of its KV cache blocks


@dataclass(frozen=True)
class Stretch:
    """The part of the line that one CTA has."""

    first_tile: jax.Array  # on the line
    num_tiles: jax.Array
    first_item: jax.Array
    first_index: jax.Array  # of its first tile within its first item
    num_items: jax.Array


def my_stretch(starts_ref: Ref, cta: jax.Array) -> Stretch:
    """Read a CTA's part of the work list."""
    first = starts_ref[0, cta]
    num_tiles = starts_ref[0, cta + 1] - first
    item = starts_ref[1, cta]
    # The stretch ends within an item unless the next one starts at an item's first tile.
    num_items = starts_ref[1, cta + 1] - item + jnp.where(starts_ref[2, cta + 1] > 0, 1, 0)
    return Stretch(first, num_tiles, item, starts_ref[2, cta], jnp.where(num_tiles > 0, num_items, 0))


def copy_tiles(sizes: DecodeSizes, inputs: DecodeInputs, scratch: DecodeScratch) -> None:
    """One warp: the blocks of each tile of the stretch, as buffers become free, and each item's q."""
    rings = (scratch.k, scratch.k_full, scratch.k_free), (scratch.v, scratch.v_full, scratch.v_free)
    tables_ref, lens_ref = inputs.block_tables, inputs.seq_lens
    config, block_size, per_tile = sizes.config, sizes.block_size, sizes.blocks_per_tile
    stages = config.stages
    num_kv_heads = jnp.int32(sizes.num_kv_heads)
    last_item = sizes.num_rows * sizes.num_kv_heads - 1
    last_block = tables_ref.shape[1] - 1
    mine = my_stretch(inputs.starts, lax.axis_index("cta"))
    layer = inputs.layer[0]

    def read_tile(item: jax.Array, index: jax.Array) -> _Tile:
        row = div(item, num_kv_heads)
        length = lens_ref[row]
        first_block = (sizes.first_tile(length) + index) * per_tile
        blocks = tuple(tables_ref[row, jnp.minimum(first_block + j, last_block)] for j in range(per_tile))
        return _Tile(item, index, length, blocks)

    def next_tile(tile: _Tile) -> _Tile:
        ends = tile.index + 1 >= sizes.num_tiles(tile.length)
        item = jnp.minimum(jnp.where(ends, tile.item + 1, tile.item), last_item)
        return read_tile(item, jnp.where(ends, 0, tile.index + 1))

    def copy_q(item: jax.Array, copied: jax.Array) -> None:
        slot = lax.rem(copied, jnp.int32(2))

        @pl.when(copied >= 2)
        def _():
            plgpu.barrier_wait(scratch.q_free.at[slot])

        rows = pl.ds(sizes.first_q_row(item), sizes.columns)
        plgpu.copy_gmem_to_smem(inputs.q.at[rows], scratch.q.at[slot], scratch.q_full.at[slot])

    def copy_block(tile: _Tile, j: int, kv: int, smem: Ref, filled: Ref) -> None:
        # Blocks past the row's last one are not its own. What the buffer holds there is masked like its tail, and so
        # is what the interpreter copies, which knows no predicates.
        is_own = ((sizes.first_tile(tile.length) + tile.index) * per_tile + j) * block_size < tile.length
        rows, head = pl.ds(j * block_size, block_size), lax.rem(tile.item, num_kv_heads)
        source = inputs.kv_cache.at[layer, tile.blocks[j], kv, head]
        predicate = is_own if j and sizes.on_card else None
        plgpu.copy_gmem_to_smem(source, smem.at[rows], filled, predicate=predicate)

    def copy_tile(k: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        tile, following, q_copied = carry
        slot = lax.rem(k, jnp.int32(stages))
        is_new_item = jnp.logical_or(k == 0, tile.index == 0)
        pl.when(is_new_item)(lambda: copy_q(tile.item, q_copied))
        for kv, (smem, filled, free) in enumerate(rings):

            @pl.when(k >= stages)
            def _(free: Ref = free):
                plgpu.barrier_wait(free.at[slot])

            for j in range(per_tile):
                copy_block(tile, j, kv, smem.at[slot], filled.at[slot])
        # Block ids come from device memory, behind all that is in flight: they are read two tiles ahead, but not before
        # the first copies are on their way.
        after = next_tile(following)
        return following, after, q_copied + jnp.where(is_new_item, 1, 0)

    first = read_tile(jnp.minimum(mine.first_item, last_item), mine.first_index)
    q_copied = lax.fori_loop(0, mine.num_tiles, copy_tile, (first, next_tile(first), jnp.int32(0)))[2]

    # Every completion of a barrier has to be waited for before the CTA ends.
    def drain(k: jax.Array, _: None) -> None:
        for _, _, free in rings:
            plgpu.barrier_wait(free.at[lax.rem(k, jnp.int32(stages))])

    def drain_q(k: jax.Array, _: None) -> None:
        plgpu.barrier_wait(scratch.q_free.at[lax.rem(k, jnp.int32(2))])

    lax.fori_loop(jnp.maximum(mine.num_tiles - stages, 0), mine.num_tiles, drain, None)
    lax.fori_loop(jnp.maximum(q_copied - 2, 0), q_copied, drain_q, None)
