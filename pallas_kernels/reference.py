"""What paged_attention means, in plain XLA: on a CPU, on GPUs without kernels, and as the oracle of the tests.

Nothing is sized by max_model_len: loops run over chunks of keys with a trip count taken from the lengths.
Einsum letters: B rows  P pieces of a chunk of keys  S keys of a piece  K kv heads  M queries of one kv head  H head_dim
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layer_slice import LayerArray, as_array

# Keys a loop iteration reads, and queries of one request that share a read.
KEYS_PER_CHUNK = 128
QUERIES_PER_TILE = 64
# Finite, so that a row without any visible key has exp(score - max) that is masked rather than NaN.
_MIN_SCORE = -1e30


def paged_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    num_reqs: jax.Array,
    *,
    scale: float,
    sliding_window: int | jax.Array | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scale: LayerArray | None,
    kind: str,
) -> jax.Array:
    """See ops.paged_attention. Decode rows go as one batch, prefill rows tile after tile."""
    options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    attend = partial(_attend, kv_cache=kv_cache, layer=layer, sinks=sinks, kv_scale=kv_scale, **options)
    num_rows = seq_lens.shape[0]
    is_decode = jnp.arange(num_rows) < (num_reqs if kind == "decode" else num_decodes)
    decoded = _attend_decode_rows(attend, q[:num_rows], block_tables, jnp.where(is_decode, seq_lens, 0))
    if kind == "decode":
        return decoded
    out = jnp.pad(decoded, ((0, q.shape[0] - num_rows), (0, 0), (0, 0)))
    return _attend_prefill_rows(attend, q, out, block_tables, seq_lens, query_start_loc, num_decodes, num_reqs)


def _attend_decode_rows(attend: partial, q: jax.Array, block_tables: jax.Array, seq_lens: jax.Array) -> jax.Array:
    """One query a row, [R, N, H]; a row of length 0 gives zeros."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = attend.keywords["kv_cache"].shape[3]
    positions = seq_lens[:, None] - 1
    out = attend(q.reshape(num_rows, num_kv_heads, -1, head_dim), positions, block_tables)
    return out.reshape(num_rows, num_heads, head_dim).astype(q.dtype)


def _attend_prefill_rows(
    attend: partial,
    q: jax.Array,
    out: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    num_reqs: jax.Array,
) -> jax.Array:
    """Fill `out` [T, N, H] for the tokens of rows [num_decodes, num_reqs), one tile of one request at a time."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = attend.keywords["kv_cache"].shape[3]
    tile_size = min(QUERIES_PER_TILE, num_tokens)
    row = jnp.arange(seq_lens.shape[0])
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    is_prefill = (row >= num_decodes) & (row < num_reqs)
    tiles_until = jnp.cumsum(jnp.where(is_prefill, -(-query_lens // tile_size), 0))
    tail = ((0, tile_size), (0, 0), (0, 0))
    q = jnp.pad(q, tail)

    def attend_tile(tile: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(tiles_until, tile, side="right").astype(jnp.int32)
        tiles_before = jnp.where(row > 0, tiles_until[row - 1], 0)
        first = (tile - tiles_before) * tile_size  # of the tile's queries, counted within its request
        start = query_start_loc[row] + first
        index = first + jnp.arange(tile_size)
        # A query past the end of its request sees nothing and gets zeros, which the next request's tile overwrites.
        positions = jnp.where(index < query_lens[row], seq_lens[row] - query_lens[row] + index, -1)
        tile_q = lax.dynamic_slice_in_dim(q, start, tile_size)
        tile_q = tile_q.reshape(tile_size, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
        groups = tile_q.shape[1]
        tile_q = tile_q.reshape(1, num_kv_heads, groups * tile_size, head_dim)
        tile_out = attend(tile_q, jnp.tile(positions, groups)[None], block_tables[row][None])
        tile_out = tile_out.reshape(num_heads, tile_size, head_dim).swapaxes(0, 1).astype(out.dtype)
        return lax.dynamic_update_slice_in_dim(out, tile_out, start, axis=0)

    return lax.fori_loop(0, tiles_until[-1], attend_tile, jnp.pad(out, tail))[:num_tokens]


def _attend(
    q: jax.Array,
    positions: jax.Array,
    block_tables: jax.Array,
    *,
    kv_cache: jax.Array,
    layer: jax.Array,
    scale: float,
    sliding_window: int | jax.Array | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scale: LayerArray | None,
) -> jax.Array:
    """Online softmax over chunks of keys.

    Args:
      q: [B, K, M, H].
      positions: i32[B, 1 or M] of the queries; -1 sees no key.
      block_tables: i32[B, max_blocks].

    Returns:
      f32[B, K, M, H]; zeros for queries that see no key.
    """
    block_size = kv_cache.shape[4]
    chunk_blocks = max(1, min(KEYS_PER_CHUNK // block_size, block_tables.shape[1]))
    chunk_keys = chunk_blocks * block_size
    # Padded to whole chunks: a dynamic slice that runs over the end would be shifted back.
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % chunk_blocks)))
    first_key, end_key = _visible_range(positions, sliding_window)
    head_dim = q.shape[3]
    key_scale, value_scale = (1.0, 1.0) if kv_scale is None else as_array(kv_scale)
    q = (q.astype(jnp.float32) * (scale * key_scale))[:, None]
    # For few queries a matmul a block, which spares a transposed copy of the keys; else one for the whole chunk.
    pieces = chunk_blocks if q.shape[3] < block_size else 1

    def step(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, acc = carry
        block_ids = lax.dynamic_slice_in_dim(tables, chunk * chunk_blocks, chunk_blocks, axis=1)
        keys = chunk * chunk_keys + jnp.arange(chunk_keys)
        is_read = (keys >= first_key[:, None]) & (keys < end_key[:, None])
        k, v = (_read_chunk(kv_cache, layer, block_ids, part, is_read, pieces)[..., :head_dim] for part in (0, 1))
        many_q = jnp.broadcast_to(q, (*k.shape[:3], *q.shape[3:]))
        scores = jnp.einsum("bpkmh,bpksh->bpkms", many_q, k, precision="highest")
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        visible = _is_visible(keys.reshape(pieces, 1, -1), positions, sliding_window)
        new_highest = jnp.maximum(highest, jnp.max(jnp.where(visible, scores, _MIN_SCORE), axis=(1, 4)))
        weights = jnp.where(visible, jnp.exp(scores - new_highest[:, None, :, :, None]), 0)
        rescale = jnp.exp(highest - new_highest)
        chunk_acc = jnp.sum(jnp.einsum("bpkms,bpksh->bpkmh", weights, v, precision="highest"), axis=1)
        total = total * rescale + jnp.sum(weights, axis=(1, 4))
        return new_highest, total, acc * rescale[..., None] + chunk_acc

    batch, _, num_kv_heads, num_queries, _ = q.shape
    rows = (batch, num_kv_heads, num_queries)
    start = (jnp.full(rows, _MIN_SCORE), jnp.zeros(rows), jnp.zeros((*rows, head_dim)))
    first_chunk = jnp.min(jnp.where(end_key > 0, first_key, jnp.iinfo(jnp.int32).max)) // chunk_keys
    num_chunks = -(-jnp.max(end_key) // chunk_keys)
    highest, total, acc = lax.fori_loop(first_chunk, num_chunks, step, start)
    if sinks is not None:
        by_query = jnp.repeat(sinks.reshape(num_kv_heads, -1), num_queries * num_kv_heads // len(sinks), axis=1)
        total = jnp.where(total > 0, total + jnp.exp(by_query - highest), 0)
    return acc * (value_scale / jnp.where(total > 0, total, 1))[..., None]


def _visible_range(positions: jax.Array, sliding_window: int | jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """First key and end of the keys that any of a row's queries sees, i32[B] each; 0, 0 if none does."""
    end_key = jnp.max(positions, axis=1) + 1
    if sliding_window is None:
        return jnp.zeros_like(end_key), end_key
    lowest = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions), axis=1)
    return jnp.where(end_key > 0, jnp.maximum(lowest - sliding_window + 1, 0), 0), end_key


def _is_visible(keys: jax.Array, positions: jax.Array, sliding_window: int | jax.Array | None) -> jax.Array:
    """bool[B, P, 1, 1 or M, S] for keys i32[P, 1, S] and positions i32[B, 1 or M]."""
    here = positions[:, None, :, None]
    visible = keys <= here
    if sliding_window is not None:
        visible &= keys > here - sliding_window
    return visible[:, :, None]


def _read_chunk(
    kv_cache: jax.Array, layer: jax.Array, block_ids: jax.Array, part: int, is_read: jax.Array, pieces: int
) -> jax.Array:
    """Gather the keys (part 0) or values (1) of a chunk's blocks.

    Slots outside what a row reads become zero: masking the scores alone would leave 0 * NaN in the values.

    Args:
      block_ids: i32[B, blocks].
      is_read: bool[B, keys].
      pieces: into how many runs of keys the chunk is cut: the number of blocks, or 1.

    Returns:
      f32[B, pieces, K, keys / pieces, H].
    """
    blocks = kv_cache.at[layer, block_ids, part].get(mode="clip")
    batch, num_blocks, num_kv_heads, block_size, head_dim = blocks.shape
    blocks = jnp.where(is_read.reshape(batch, num_blocks, 1, block_size, 1), blocks, 0).astype(jnp.float32)
    if pieces == num_blocks:
        return blocks
    return blocks.swapaxes(1, 2).reshape(batch, 1, num_kv_heads, num_blocks * block_size, head_dim)
