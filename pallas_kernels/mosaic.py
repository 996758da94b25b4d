"""The Mosaic GPU backend behind ops: what it supports, and which kernels a step runs."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import rope_write, skinny_matmul
from pallas_kernels.common import plgpu
from pallas_kernels.decode import paged_decode
from pallas_kernels.prefill import paged_prefill
from pallas_kernels.reference_matmul import MatmulStage
from pallas_kernels.reference_rope_write import HeadNorm, norm_and_rotate
from pallas_kernels.tuning import MAX_PREFERRED_WEIGHTS, AttentionConfig, attention_config, matmul_config
from pallas_kernels.validation import Backend, Kind
from pallas_kernels.work_lists import AttentionWork, cut_attention_work

HEAD_DIMS = (64, 128)
MAX_GROUP_SIZE = 8
BLOCK_SIZES = (16, 32, 64, 128)


def unsupported_reason(
    *,
    dtype: Any,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    max_model_len: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> str | None:
    """Why these kernels cannot serve a model, in words for the log, or None if they can.

    It does not ask about the device: the kernels need compute capability 9.0 exactly.

    Args:
      dtype: of q and of the cache.
      head_dim, num_heads, num_kv_heads, block_size: sizes on one device.
      max_model_len: a window at least this long hides nothing.
      sliding_window, soft_cap: as in ops.paged_attention.
    """
    group_size = num_heads // num_kv_heads
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"dtype {jnp.dtype(dtype).name}, only bfloat16 has kernels"
    if head_dim not in HEAD_DIMS:
        return f"{head_dim=}, only {HEAD_DIMS} have kernels"
    if group_size > MAX_GROUP_SIZE:
        return f"{group_size} query heads a kv head, at most {MAX_GROUP_SIZE} have kernels"
    if block_size not in BLOCK_SIZES:
        return f"{block_size=}, only {BLOCK_SIZES} have kernels"
    if sliding_window is not None and sliding_window < max_model_len:
        return f"{sliding_window=} is shorter than {max_model_len=}, which has no kernel"
    if soft_cap is not None:
        return f"{soft_cap=} has no kernel"
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
    block_size: int,
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
      block_size, kind, backend: static; as in ops.paged_attention.

    Returns:
      What ops.paged_attention takes as `work` in all layers; None for the reference, which needs nothing.
    """
    if backend == "reference":
        return None
    config = attention_config(interpret=backend == "mosaic_gpu_interpret", block_size=block_size)
    return cut_attention_work(
        seq_lens,
        query_start_loc,
        num_decodes,
        num_reqs,
        kind=kind,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
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
    scale: float,
    sliding_window: int | jax.Array | None,
    soft_cap: float | None,
    backend: Backend,
) -> jax.Array:
    """See ops.paged_attention. One kernel in a decode bucket, two in a mixed one; both write one array in place."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[3:5]
    if isinstance(sliding_window, jax.Array):
        raise NotImplementedError(f"{backend} has no kernel for a window that is an array; use backend 'reference'")
    reason = unsupported_reason(
        dtype=q.dtype,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        max_model_len=block_tables.shape[1] * block_size,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    if reason is not None:
        raise NotImplementedError(f"{backend} attention: {reason}; use backend 'reference'")
    interpret = backend == "mosaic_gpu_interpret"
    config = attention_config(interpret=interpret, block_size=block_size)
    arrays = (q, kv_cache, layer, block_tables, seq_lens, query_start_loc)
    return attend(*arrays, work, scale=scale, config=config, interpret=interpret)


def attend(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    work: AttentionWork,
    *,
    scale: float,
    config: AttentionConfig,
    interpret: bool = False,
) -> jax.Array:
    """Attention with a given configuration, the one that cut `work`. Arguments as in ops.paged_attention."""
    params = plgpu.InterpretGPUParams() if interpret else False
    out = paged_decode(
        q,
        kv_cache,
        layer,
        block_tables,
        seq_lens,
        query_start_loc[-1],
        work.decode,
        scale=scale,
        config=config.decode,
        interpret=params,
    )
    if work.prefill is None:
        return out
    return paged_prefill(
        q, kv_cache, layer, block_tables, out, work.prefill, scale=scale, config=config.prefill, interpret=params
    )


def rope_and_write_kv(
    qkv: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    *,
    rope: tuple[jax.Array, jax.Array] | None,
    norm: HeadNorm | None,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """See ops.rope_and_write_kv. One kernel; where only a part of each head rotates, XLA does that beforehand."""
    head_dim = qkv.shape[-1]
    if qkv.dtype != jnp.bfloat16 or head_dim not in HEAD_DIMS:
        what = f"dtype {qkv.dtype.name}, {head_dim=}: only bfloat16 and {HEAD_DIMS} have kernels"
        raise NotImplementedError(f"{backend} KV write: {what}; use backend 'reference'")
    if rope is not None and 2 * rope[0].shape[-1] != head_dim:
        q, k, v = norm_and_rotate(qkv, rope, norm)
        qkv, rope, norm = jnp.concatenate([q, k[:, :, None], v[:, :, None]], axis=2), None, None
    params = plgpu.InterpretGPUParams() if backend == "mosaic_gpu_interpret" else False
    return rope_write.rope_and_write_kv(qkv, kv_cache, slot_mapping, layer, rope=rope, norm=norm, interpret=params)


def make_arrivals(backend: Backend) -> jax.Array | None:
    """What matmul_stages counts in: once a step, for all layers. None for the reference."""
    return None if backend == "reference" else jnp.zeros(skinny_matmul.MAX_STAGES, jnp.int32)


def prefers_matmul_kernel(x: jax.Array, stages: tuple[MatmulStage, ...], backend: Backend) -> bool:
    """Whether matmul_stages of a backend can run these and was measured to be faster than what XLA makes of them."""
    if backend == "reference" or skinny_matmul.unsupported_reason(x, stages) is not None:
        return False
    return sum(stage.weight.size for stage in stages) <= MAX_PREFERRED_WEIGHTS


def matmul_stages(
    x: jax.Array,
    stages: tuple[MatmulStage, ...],
    residual: jax.Array | None,
    arrivals: jax.Array,
    *,
    backend: Backend,
) -> jax.Array:
    """See ops.matmul_stages. One kernel, or one a stage where thread blocks cannot wait for each other."""
    reason = skinny_matmul.unsupported_reason(x, stages)
    if reason is not None:
        raise NotImplementedError(f"{backend} matmul: {reason}; use backend 'reference'")
    interpret = backend == "mosaic_gpu_interpret"
    device = jax.devices()[0]
    # Where there is no GPU this compiles for one elsewhere.
    num_sms = getattr(device, "core_count", None) if device.platform == "gpu" else None
    params = plgpu.InterpretGPUParams() if interpret else False
    config = matmul_config(interpret=interpret, num_sms=num_sms)
    return skinny_matmul.matmul_stages(x, stages, residual, arrivals, config=config, interpret=params)
