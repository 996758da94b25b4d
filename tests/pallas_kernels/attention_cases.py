"""Ragged batches over a paged cache that is poisoned where nothing may read, and a float64 NumPy oracle."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


def merge_qkv(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """[T, N, H], [T, K, H], [T, K, H] as rope_and_write_kv takes them: [T, K, N / K + 2, H]."""
    q = q.reshape(len(q), k.shape[1], -1, q.shape[2])
    return jnp.concatenate([q, k[:, :, None], v[:, :, None]], axis=2)


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of the two ops as NumPy, and what the oracle needs besides.

    The cache holds the keys and values of all tokens before this step and NaN everywhere else: null block, tails,
    blocks that nobody owns, other layers. `k`, `v` are the step's own, to be written first.
    """

    q: np.ndarray  # [T, N, H]
    k: np.ndarray  # [T, K, H]
    v: np.ndarray  # [T, K, H]
    kv_cache: np.ndarray  # [L, num_blocks, 2, K, block_size, H]
    layer: np.int32
    slot_mapping: np.ndarray  # i32[T]
    block_tables: np.ndarray  # i32[R, max_blocks]
    seq_lens: np.ndarray  # i32[R]
    query_start_loc: np.ndarray  # i32[R + 1]
    num_decodes: np.int32
    num_reqs: np.int32
    history: list[tuple[np.ndarray, np.ndarray]]  # per request: all keys, all values [seq_len, K, H]

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    def rows(self) -> tuple:
        return self.block_tables, self.seq_lens, self.query_start_loc, self.num_decodes, self.num_reqs


def make_case(
    rng: np.random.Generator,
    requests: list[tuple[int, int]],
    *,
    num_decodes: int = 0,
    pad_tokens: int = 0,
    pad_rows: int = 0,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    num_layers: int = 3,
    layer: int = 1,
    hidden_before: int | None = None,
) -> AttentionCase:
    """Build a case from (computed, new) token counts a request; blocks are handed out in random order.

    `hidden_before`: with a sliding window of this length, poison the keys that no query of the step sees any more.
    """
    seq_lens = np.array([c + n for c, n in requests], np.int32)
    new = np.array([n for _, n in requests], np.int32)
    num_tokens, num_rows = int(new.sum()), len(requests)
    padded, rows = num_tokens + pad_tokens, num_rows + pad_rows
    blocks_of = [-(-int(s) // block_size) for s in seq_lens]
    max_blocks = max(blocks_of) + 3
    free = list(rng.permutation(np.arange(1, sum(blocks_of) + 5)))
    kv_cache = np.full((num_layers, sum(blocks_of) + 5, 2, num_kv_heads, block_size, head_dim), np.nan, np.float32)
    tables = np.zeros((rows, max_blocks), np.int32)
    slots = np.zeros(padded, np.int32)
    history, start = [], 0
    k = np.full((padded, num_kv_heads, head_dim), np.nan, np.float32)
    v = np.full((padded, num_kv_heads, head_dim), np.nan, np.float32)
    for r, (computed, count) in enumerate(requests):
        tables[r, : blocks_of[r]] = [free.pop() for _ in range(blocks_of[r])]
        keys, values = rng.standard_normal((2, computed + count, num_kv_heads, head_dim)).astype(np.float32)
        position = np.arange(computed + count)
        block, offset = tables[r, position // block_size], position % block_size
        first_seen = 0 if hidden_before is None else max(0, computed - hidden_before + 1)
        old = slice(first_seen, computed)
        kv_cache[layer, block[old], 0, :, offset[old]] = keys[old]
        kv_cache[layer, block[old], 1, :, offset[old]] = values[old]
        slots[start : start + count] = (block * block_size + offset)[computed:]
        k[start : start + count], v[start : start + count] = keys[computed:], values[computed:]
        history.append((keys, values))
        start += count
    return AttentionCase(
        q=rng.standard_normal((padded, num_heads, head_dim)).astype(np.float32),
        k=k,
        v=v,
        kv_cache=kv_cache,
        layer=np.int32(layer),
        slot_mapping=slots,
        block_tables=tables,
        seq_lens=np.pad(seq_lens, (0, pad_rows)),
        query_start_loc=np.pad(np.cumsum(np.concatenate([[0], new])), (0, pad_rows), mode="edge").astype(np.int32),
        num_decodes=np.int32(num_decodes),
        num_reqs=np.int32(num_rows),
        history=history,
    )


def rounded_case(case: AttentionCase, dtype: jnp.dtype, cache_dtype: jnp.dtype | None = None) -> AttentionCase:
    """The case with numbers that are exact in dtype, keys and values also in cache_dtype; NaN in the q of pads."""

    def exact(x: np.ndarray, *dtypes: jnp.dtype | None) -> np.ndarray:
        for to in dtypes:
            x = x if to is None else np.asarray(jnp.asarray(x, to).astype(jnp.float32))
        return x

    q = np.array(exact(case.q, dtype))
    q[case.num_tokens :] = np.nan
    keys_and_values = {name: exact(getattr(case, name), dtype, cache_dtype) for name in ("k", "v", "kv_cache")}
    history = [tuple(exact(x, dtype, cache_dtype) for x in kv) for kv in case.history]
    return AttentionCase(**{**vars(case), **keys_and_values, "q": q, "history": history})


def expected_attention(
    case: AttentionCase,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    kv_scale: np.ndarray | None = None,
) -> np.ndarray:
    """The oracle: plain softmax in float64, [T, N, H], zeros for pads."""
    key_scale, value_scale = (1.0, 1.0) if kv_scale is None else kv_scale
    out = np.zeros(case.q.shape, np.float64)
    group = case.q.shape[1] // case.k.shape[1]
    for r, (keys, values) in enumerate(case.history):
        start, end = case.query_start_loc[r], case.query_start_loc[r + 1]
        keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (keys, values))
        scores = np.einsum("mnh,tnh->nmt", case.q[start:end].astype(np.float64), keys) * (scale * key_scale)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        distance = (len(keys) - (end - start) + np.arange(end - start))[:, None] - np.arange(len(keys))
        visible = (distance >= 0) & (distance < (sliding_window or len(keys)))
        weights = np.where(visible, np.exp(scores), 0)  # small scores: nothing overflows float64
        total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[:, None, None])
        out[start:end] = np.einsum("nmt,tnh->mnh", weights / total, values * value_scale)
    return out
