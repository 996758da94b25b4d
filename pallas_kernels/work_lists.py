"""What each thread block of the Mosaic attention kernels works on, cut on the device from the lengths of the step.

Once a step, not once a layer: a few small XLA reductions. Lengths and counts are data, so a bucket has one program.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.common import MAX_ARRIVALS, zero_arrivals
from pallas_kernels.tuning import AttentionConfig, DecodeConfig, PrefillConfig

# Query rows (token, head of the group) of one computing warpgroup.
ROWS_PER_WARPGROUP = 64


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class DecodeWork:
    """Stretches of the line of key tiles of all decode items; item = row * num_kv_heads + kv head."""

    # i32[4, num_ctas + 1] of each CTA: first tile on the line, its item, its index in the item; tiles of any stretch
    starts: jax.Array
    arrivals: jax.Array  # i32[MAX_ARRIVALS] zeros; the kernel counts in them and leaves zeros


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class PrefillWork:
    """Query tiles, the longest context first."""

    tiles: jax.Array  # i32[4, max_tiles]: row, first token in the step, its position in the request, tokens
    num_tiles: jax.Array  # i32[1] real tiles


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class AttentionWork:
    """The work lists of one step, the same for all its layers."""

    decode: tuple[DecodeWork, ...]  # one a window
    prefill: PrefillWork | None  # None in a decode bucket
    windows: tuple[int | None, ...] = field(metadata={"static": True}, default=(None,))

    def decode_with(self, sliding_window: int | None) -> DecodeWork:
        """The list for layers with this window. Raises ValueError if the work was cut for other windows."""
        if sliding_window not in self.windows:
            raise ValueError(f"{sliding_window=}, but the work lists were cut for {self.windows}")
        return self.decode[self.windows.index(sliding_window)]


def tokens_per_warpgroup(group_size: int) -> int:
    """Query tokens of one computing warpgroup of the prefill kernel, with `group_size` query heads a kv head."""
    return ROWS_PER_WARPGROUP // group_size


def cut_attention_work(
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    num_reqs: jax.Array,
    *,
    kind: str,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    windows: tuple[int | None, ...] = (None,),
    config: AttentionConfig,
) -> AttentionWork:
    """Cut the step's attention into work for the Mosaic kernels.

    Args:
      seq_lens: i32[R] keys of each row, its new tokens included.
      query_start_loc: i32[R + 1] first token of each row.
      num_decodes: i32[] leading rows with one token; ignored by kind "decode", where all real rows are.
      num_reqs: i32[] real rows.
      kind: static; "decode" makes no prefill tiles.
      num_tokens: static; T, the padded tokens of the step.
      num_heads, num_kv_heads: static; of the part of the model on one device.
      windows: static; the distinct sliding windows of the layers, None for those that see all keys.
      config: static; the one that paged_attention gets.

    Returns:
      AttentionWork, to pass to every layer's paged_attention.
    """
    if kind == "decode":
        num_decodes = num_reqs
    decode = tuple(
        make_decode_work(seq_lens, num_decodes, num_kv_heads=num_kv_heads, sliding_window=window, config=config.decode)
        for window in windows
    )
    if kind == "decode":
        return AttentionWork(decode, None, windows)
    rows = (seq_lens, query_start_loc, num_decodes, num_reqs)
    group_size = num_heads // num_kv_heads
    prefill = make_prefill_work(*rows, num_tokens=num_tokens, group_size=group_size, config=config.prefill)
    return AttentionWork(decode, prefill, windows)


def make_decode_work(
    seq_lens: jax.Array,
    num_decodes: jax.Array,
    *,
    num_kv_heads: int,
    sliding_window: int | None = None,
    config: DecodeConfig,
) -> DecodeWork:
    """Cut the line of visible key tiles of rows [0, num_decodes) into one stretch a CTA, whatever their lengths."""
    assert config.num_ctas <= MAX_ARRIVALS, "each CTA may begin an item that others end"
    num_rows = seq_lens.shape[0]
    row = jnp.arange(num_rows)
    num_tiles = jnp.maximum(-(-seq_lens // config.tile), 1)
    if sliding_window is not None:
        num_tiles -= jnp.maximum(seq_lens - sliding_window, 0) // config.tile
    num_tiles = jnp.where(row < num_decodes, num_tiles, 0)
    # Sums over a comparison instead of scans: XLA makes one kernel of each.
    ends = jnp.sum(jnp.where(row[:, None] >= row, num_tiles, 0), axis=1) * num_kv_heads
    total = ends[-1]
    stretch = jnp.maximum(-(-total // config.num_ctas), 1)
    start = jnp.minimum(jnp.arange(config.num_ctas + 1) * stretch, total)
    is_before = ends[None, :] <= start[:, None]
    start_row = jnp.minimum(jnp.sum(is_before, axis=1), num_decodes)
    row_start = jnp.max(jnp.where(is_before, ends[None, :], 0), axis=1)
    row_end = jnp.min(jnp.where(is_before, jnp.iinfo(jnp.int32).max, ends[None, :]), axis=1)
    tiles_of_item = jnp.where(start < total, (row_end - row_start) // num_kv_heads, 1)
    head = (start - row_start) // tiles_of_item
    # In one array: each more would be a kernel of 1.5 us.
    rows = start, start_row * num_kv_heads + head, start - row_start - head * tiles_of_item
    starts = jnp.stack([*rows, jnp.broadcast_to(stretch, start.shape)])
    return DecodeWork(starts.astype(jnp.int32), zero_arrivals())


def max_prefill_tiles(num_tokens: int, num_rows: int, tokens: int) -> int:
    """The most query tiles of `tokens` tokens each that `num_tokens` tokens of `num_rows` requests can need."""
    return min(num_tokens, (num_tokens + num_rows * (tokens - 1)) // tokens)


def make_prefill_work(
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    num_reqs: jax.Array,
    *,
    num_tokens: int,
    group_size: int,
    config: PrefillConfig,
) -> PrefillWork:
    """Cut the tokens of rows [num_decodes, num_reqs) into tiles of one request each."""
    num_rows = seq_lens.shape[0]
    tokens_per_tile = config.warpgroups * tokens_per_warpgroup(group_size)
    row = jnp.arange(num_rows)
    query_lens = jnp.where((row >= num_decodes) & (row < num_reqs), query_start_loc[1:] - query_start_loc[:-1], 0)
    tiles_of_row = -(-query_lens // tokens_per_tile)
    ends = jnp.sum(jnp.where(row[:, None] >= row, tiles_of_row, 0), axis=1)
    tile = jnp.arange(max_prefill_tiles(num_tokens, num_rows, tokens_per_tile))
    is_before = ends[None, :] <= tile[:, None]
    tile_row = jnp.minimum(jnp.sum(is_before, axis=1), num_rows - 1)
    first = (tile - jnp.max(jnp.where(is_before, ends[None, :], 0), axis=1)) * tokens_per_tile
    num_queries = query_lens[tile_row]
    count = jnp.clip(num_queries - first, 0, tokens_per_tile)
    position = seq_lens[tile_row] - num_queries + first
    order = jnp.argsort(jnp.where(tile < ends[-1], -(position + count), 1))
    tiles = jnp.stack([tile_row, query_start_loc[tile_row] + first, position, count])[:, order]
    return PrefillWork(tiles.astype(jnp.int32), ends[-1:].astype(jnp.int32))
