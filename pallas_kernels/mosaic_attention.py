"""The Mosaic GPU backend of attention and KV write: what it supports, and which kernels serve a step."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import rope_write
from pallas_kernels.common import DTYPES
from pallas_kernels.decode_sizes import takes_merged_qkv
from pallas_kernels.layer_slice import LayerArray
from pallas_kernels.matmul_sizes import FEW_ROWS
from pallas_kernels.reference_rope_write import HeadNorm, norm_and_rotate
from pallas_kernels.tuning import AttentionConfig, attention_config
from pallas_kernels.validation import Backend, Kind, is_interpreted
from pallas_kernels.work_lists import AttentionWork, cut_attention_work

CACHE_DTYPES = (*DTYPES, "float8_e4m3fn")
# Of the cache. Heads of other sizes are kept padded to the next of these: see cache_head_dim.
HEAD_DIMS = (64, 128, 256)
MAX_GROUP_SIZE = 16
BLOCK_SIZES = (16, 32, 64, 128)


def cache_head_dim(head_dim: int) -> int:
    """The head_dim of a cache for these kernels: 80 and 96 are padded to 128, which costs their share of the memory.

    Returns head_dim itself where nothing fits; unsupported_reason says so.
    """
    return next((size for size in HEAD_DIMS if size >= head_dim), head_dim)


def unsupported_reason(
    *,
    dtype: Any,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    cache_dtype: Any = None,
) -> str | None:
    """Why these kernels cannot serve a model, in words for the log, or None if they can.

    It does not ask about the device: the kernels need compute capability 9.0 exactly.

    Args:
      dtype: of q.
      head_dim, num_heads, num_kv_heads, block_size: sizes on one device.
      cache_dtype: None for q's.
    """
    group_size = num_heads // num_kv_heads
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype {jnp.dtype(dtype).name}, only {DTYPES} have kernels"
    if cache_dtype is not None and jnp.dtype(cache_dtype) not in (jnp.dtype(dtype), jnp.dtype(jnp.float8_e4m3fn)):
        return f"a {jnp.dtype(cache_dtype).name} cache for {jnp.dtype(dtype).name}, only float8_e4m3fn has kernels"
    if head_dim > HEAD_DIMS[-1] or head_dim % 16:
        return f"{head_dim=}, only multiples of 16 up to {HEAD_DIMS[-1]} have kernels"
    if group_size > MAX_GROUP_SIZE:
        return f"{group_size} query heads a kv head, at most {MAX_GROUP_SIZE} have kernels"
    if block_size not in BLOCK_SIZES:
        return f"{block_size=}, only {BLOCK_SIZES} have kernels"
    if block_size == BLOCK_SIZES[-1] and head_dim > 128:
        return f"{block_size=} with heads of {head_dim}, which leaves no room in shared memory: use a smaller one"
    return None


def make_attention_work(
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    num_reqs: jax.Array,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_dtype: Any = jnp.bfloat16,
    windows: tuple[int | None, ...] = (None,),
    kind: Kind,
    backend: Backend,
) -> AttentionWork | None:
    """Cut the step's attention for the backend's kernels: once a step, inside the jitted step.

    Args:
      seq_lens: i32[R] keys of each row, its new tokens included.
      query_start_loc: i32[R + 1] first token of each row.
      num_decodes, num_reqs: i32[] as in ops.paged_attention.
      num_tokens: static; T, the padded tokens.
      num_heads, num_kv_heads: static; of the part of the model on one device.
      head_dim, block_size, cache_dtype: static; of the cache.
      windows: static; the distinct sliding windows of the layers, None for those that see all keys.
      kind, backend: static; as in ops.paged_attention.

    Returns:
      What ops.paged_attention takes as `work` in all layers; None for the reference, which needs nothing.
    """
    if backend == "reference":
        return None
    config = attention_config(
        interpret=is_interpreted(backend),
        num_rows=len(seq_lens),
        block_size=block_size,
        head_dim=head_dim,
        cache_bytes=jnp.dtype(cache_dtype).itemsize,
    )
    return cut_attention_work(
        seq_lens,
        query_start_loc,
        num_decodes,
        num_reqs,
        kind=kind,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        windows=windows,
        config=config,
    )


def paged_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    work: AttentionWork,
    *,
    sliding_window: int | jax.Array | None,
    backend: Backend,
    **options: Any,
) -> jax.Array:
    """See ops.paged_attention. One kernel in a decode bucket, two in a mixed one; both write one array in place."""
    num_heads, head_dim = q.shape[1:]
    config = _config_of(q.dtype, len(seq_lens), num_heads, head_dim, kv_cache, sliding_window, backend)
    options |= {"sliding_window": sliding_window, "config": config, "interpret": is_interpreted(backend)}
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, kv_cache.shape[-1] - head_dim)))
    out = attend(padded, kv_cache, layer, block_tables, seq_lens, query_start_loc, work, **options)
    return out[..., :head_dim]


def _config_of(
    dtype: Any,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    kv_cache: jax.Array,
    sliding_window: int | jax.Array | None,
    backend: Backend,
) -> AttentionConfig:
    """The configuration for a bucket and a cache; raises NotImplementedError where nothing has kernels."""
    num_kv_heads, block_size, cache_dim = kv_cache.shape[3:]
    if isinstance(sliding_window, jax.Array):
        raise NotImplementedError(f"{backend} has no kernel for a window that is an array; use backend 'reference'")
    reason = unsupported_reason(
        dtype=dtype,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        cache_dtype=kv_cache.dtype,
    )
    if reason is None and cache_dim not in HEAD_DIMS:
        reason = f"a cache of head_dim {cache_dim}, which must be padded to {cache_head_dim(head_dim)}"
    if reason is not None:
        raise NotImplementedError(f"{backend} attention: {reason}; use backend 'reference'")
    return attention_config(
        interpret=is_interpreted(backend),
        num_rows=num_rows,
        block_size=block_size,
        head_dim=cache_dim,
        cache_bytes=kv_cache.dtype.itemsize,
    )


def attend(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    work: AttentionWork,
    *,
    config: AttentionConfig,
    **options: Any,
) -> jax.Array:
    """Attention with a given configuration, the one that cut `work`.

    Args:
      q: bf16 or f16[T, N, H] with the cache's H.
      kv_cache, layer, block_tables, seq_lens, query_start_loc, work: as in ops.paged_attention.
      config: static.
      options: scale, sliding_window, soft_cap, sinks and kv_scale of ops.paged_attention; `interpret` of the kernels.

    Returns:
      [T, N, H] of q's dtype.
    """
    # Late, as in write_and_attend and mosaic_matmul.matmul_stages: see pallas_kernels.lazy.
    from pallas_kernels.decode import paged_decode
    from pallas_kernels.prefill import paged_prefill

    options = _kernel_options(kv_cache, **options)
    decode_work = work.decode_with(options["sliding_window"])
    rows = (block_tables, seq_lens, query_start_loc)
    out = paged_decode(q, kv_cache, layer, *rows, decode_work, config=config.decode, **options)
    if work.prefill is None:
        return out
    return paged_prefill(q, kv_cache, layer, block_tables, out, work.prefill, config=config.prefill, **options)


def _kernel_options(
    kv_cache: jax.Array,
    *,
    sinks: jax.Array | None = None,
    kv_scale: LayerArray | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What the attention kernels take by name."""
    sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    return {"sliding_window": None, "sinks": sinks, "kv_scale": _scale_of(kv_cache, kv_scale), **options}


def _scale_of(kv_cache: jax.Array, kv_scale: LayerArray | None) -> LayerArray | None:
    """f32[2] for kernels over an 8-bit cache, which always take one; None for those over 16 bits."""
    if kv_cache.dtype.itemsize > 1:
        return None
    return jnp.ones(2, jnp.float32) if kv_scale is None else kv_scale


def rope_write_and_attend(
    qkv: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    work: AttentionWork,
    *,
    rope: tuple[jax.Array, jax.Array] | None,
    norm: HeadNorm | None,
    sliding_window: int | jax.Array | None,
    kv_scale: LayerArray | None,
    backend: Backend,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """See ops.rope_write_and_attend. One kernel for few rows whose windows of qkv allow it, else the two of its parts.

    One kernel saves a launch, some 3 us of a layer at one request of 384 keys. With many rows whole steps took as long
    either way (one H200: 64 x 2048 1.52 s, 256 requests 5.05 and 5.07 s), and two kernels compile faster.
    """
    num_kv_heads, parts, head_dim = qkv.shape[1:]
    rows = (block_tables, seq_lens, query_start_loc)
    options |= {"sliding_window": sliding_window, "kv_scale": kv_scale}
    num_heads = num_kv_heads * (parts - 2)
    config = _config_of(qkv.dtype, len(seq_lens), num_heads, head_dim, kv_cache, sliding_window, backend)
    is_whole = head_dim == kv_cache.shape[-1] and (rope is None or 2 * rope[0].shape[-1] == head_dim)
    if len(qkv) > FEW_ROWS or not is_whole or not takes_merged_qkv(parts - 2, head_dim):
        to_write = {"rope": rope, "norm": norm, "kv_scale": kv_scale, "backend": backend}
        q, kv_cache = rope_and_write_kv(qkv, kv_cache, slot_mapping, layer, **to_write)
        return paged_attention(q, kv_cache, layer, *rows, work, **options, backend=backend), kv_cache
    options |= {"rope": rope, "norm": norm, "config": config, "interpret": is_interpreted(backend)}
    return write_and_attend(qkv, kv_cache, slot_mapping, layer, *rows, work, **options)


def write_and_attend(
    qkv: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    work: AttentionWork,
    *,
    rope: tuple[jax.Array, jax.Array] | None,
    norm: HeadNorm | None,
    config: AttentionConfig,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """The one kernel of rope_write_and_attend with a given configuration, the one that cut `work`.

    Args:
      qkv, ..., norm: as in ops.rope_write_and_attend, but H is the cache's, and rope turns all of it.
      config: static.
      options: as in attend.

    Returns:
      [T, N, H], and kv_cache.
    """
    from pallas_kernels.decode import write_and_decode

    options = _kernel_options(kv_cache, **options) | {"rope": rope, "norm": norm}
    decode_work = work.decode_with(options["sliding_window"])
    rows = (block_tables, seq_lens, query_start_loc)
    return write_and_decode(qkv, kv_cache, slot_mapping, layer, *rows, decode_work, config=config.decode, **options)


def rope_and_write_kv(
    qkv: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    *,
    rope: tuple[jax.Array, jax.Array] | None,
    norm: HeadNorm | None,
    kv_scale: LayerArray | None,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """See ops.rope_and_write_kv. One kernel; XLA norms and rotates beforehand what is not a whole head of the cache."""
    head_dim, cache_dim = qkv.shape[-1], kv_cache.shape[-1]
    reason = None
    if qkv.dtype.name not in DTYPES or kv_cache.dtype.name not in CACHE_DTYPES:
        reason = f"dtypes {qkv.dtype.name} and {kv_cache.dtype.name} (cache): only {DTYPES} and {CACHE_DTYPES}"
    elif cache_dim not in HEAD_DIMS:
        reason = f"a cache of head_dim {cache_dim}: only {HEAD_DIMS}"
    if reason is not None:
        raise NotImplementedError(f"{backend} KV write: {reason} have kernels; use backend 'reference'")
    if head_dim != cache_dim or (rope is not None and 2 * rope[0].shape[-1] != head_dim):
        q, k, v = norm_and_rotate(qkv, rope, norm)
        qkv, rope, norm = jnp.concatenate([q, k[:, :, None], v[:, :, None]], axis=2), None, None
        qkv = jnp.pad(qkv, ((0, 0), (0, 0), (0, 0), (0, cache_dim - head_dim)))
    q, kv_cache = rope_write.rope_and_write_kv(
        qkv,
        kv_cache,
        slot_mapping,
        layer,
        rope=rope,
        norm=norm,
        kv_scale=_scale_of(kv_cache, kv_scale),
        interpret=is_interpreted(backend),
    )
    return q[..., :head_dim], kv_cache
