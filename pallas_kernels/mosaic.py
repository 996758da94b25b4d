"""The Mosaic GPU backend behind ops: what it supports, and which kernels a step runs."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import (
    matmul_sizes,
    reference_matmul,
    rope_write,
    row_kernels,
    row_matmul,
    row_matmul_sizes,
    skinny_matmul,
    tuning,
)
from pallas_kernels.common import plgpu
from pallas_kernels.decode import paged_decode, write_and_decode
from pallas_kernels.decode_sizes import takes_merged_qkv
from pallas_kernels.layer_slice import LayerArray
from pallas_kernels.prefill import paged_prefill
from pallas_kernels.reference_matmul import Activation, MatmulStage
from pallas_kernels.reference_rope_write import HeadNorm, norm_and_rotate
from pallas_kernels.tuning import (
    MAX_PREFERRED_INPUT,
    MAX_PREFERRED_WEIGHTS,
    MIN_PREFERRED_ROWS,
    AttentionConfig,
    attention_config,
    matmul_config,
    row_matmul_config,
)
from pallas_kernels.validation import Backend, Kind
from pallas_kernels.work_lists import AttentionWork, cut_attention_work

DTYPES = ("bfloat16", "float16")
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
        interpret=backend == "mosaic_gpu_interpret",
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
    config = _config_of(q.dtype, num_heads, head_dim, kv_cache, sliding_window, backend)
    interpret = backend == "mosaic_gpu_interpret"
    options |= {"sliding_window": sliding_window, "config": config, "interpret": interpret}
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, kv_cache.shape[-1] - head_dim)))
    out = attend(padded, kv_cache, layer, block_tables, seq_lens, query_start_loc, work, **options)
    return out[..., :head_dim]


def _config_of(
    dtype: Any,
    num_heads: int,
    head_dim: int,
    kv_cache: jax.Array,
    sliding_window: int | jax.Array | None,
    backend: Backend,
) -> AttentionConfig:
    """The configuration for a cache; raises NotImplementedError where nothing has kernels."""
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
        interpret=backend == "mosaic_gpu_interpret",
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
    interpret: bool = False,
    **options: Any,
) -> jax.Array:
    """Attention with a given configuration, the one that cut `work`. Arguments as in ops.paged_attention."""
    options = _kernel_options(kv_cache, interpret=interpret, **options)
    decode_work = work.decode_with(options["sliding_window"])
    rows = (block_tables, seq_lens, query_start_loc[-1])
    out = paged_decode(q, kv_cache, layer, *rows, decode_work, config=config.decode, **options)
    if work.prefill is None:
        return out
    return paged_prefill(q, kv_cache, layer, block_tables, out, work.prefill, config=config.prefill, **options)


def _kernel_options(
    kv_cache: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scale: LayerArray | None = None,
    interpret: bool,
) -> dict[str, Any]:
    """What the attention kernels take by name."""
    if kv_cache.dtype.itemsize == 1 and kv_scale is None:
        kv_scale = jnp.ones(2, jnp.float32)
    return {
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "sinks": None if sinks is None else jnp.asarray(sinks, jnp.float32),
        "kv_scale": kv_scale,
        "interpret": plgpu.InterpretGPUParams() if interpret else False,
    }


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
    config = _config_of(qkv.dtype, num_kv_heads * (parts - 2), head_dim, kv_cache, sliding_window, backend)
    is_whole = head_dim == kv_cache.shape[-1] and (rope is None or 2 * rope[0].shape[-1] == head_dim)
    if len(qkv) > matmul_sizes.FEW_ROWS or not is_whole or not takes_merged_qkv(parts - 2, head_dim):
        to_write = {"rope": rope, "norm": norm, "kv_scale": kv_scale, "backend": backend}
        q, kv_cache = rope_and_write_kv(qkv, kv_cache, slot_mapping, layer, **to_write)
        return paged_attention(q, kv_cache, layer, *rows, work, **options, backend=backend), kv_cache
    options |= {"rope": rope, "norm": norm, "config": config, "interpret": backend == "mosaic_gpu_interpret"}
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
    interpret: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """The one kernel with a given configuration, the one that cut `work`."""
    options = _kernel_options(kv_cache, interpret=interpret, **options) | {"rope": rope, "norm": norm}
    decode_work = work.decode_with(options["sliding_window"])
    rows = (block_tables, seq_lens, query_start_loc[-1])
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
    if kv_cache.dtype.itemsize == 1 and kv_scale is None:
        kv_scale = jnp.ones(2, jnp.float32)
    q, kv_cache = rope_write.rope_and_write_kv(
        qkv,
        kv_cache,
        slot_mapping,
        layer,
        rope=rope,
        norm=norm,
        kv_scale=kv_scale if kv_cache.dtype.itemsize == 1 else None,
        interpret=_interpret_params(backend),
    )
    return q[..., :head_dim], kv_cache


def rms_norm(x: jax.Array, weight: LayerArray, *, eps: float, unit_offset: bool, backend: Backend) -> jax.Array:
    """See ops.rms_norm."""
    reason = row_kernels.unsupported_norm(x.shape, x.dtype, unit_offset=unit_offset)
    if reason is not None:
        raise NotImplementedError(f"{backend} norm: no kernel for {reason}; use backend 'reference'")
    return row_kernels.rms_norm(x, weight, eps=eps, interpret=_interpret_params(backend))


def act_and_mul(gate_up: jax.Array, activation: Activation | None, *, backend: Backend) -> jax.Array:
    """See ops.act_and_mul."""
    reason = row_kernels.unsupported_activation(gate_up.shape, gate_up.dtype, activation)
    if reason is not None:
        raise NotImplementedError(f"{backend} activation: no kernel for {reason}; use backend 'reference'")
    return row_kernels.act_and_mul(gate_up, activation, interpret=_interpret_params(backend))


def make_arrivals(backend: Backend) -> jax.Array | None:
    """What matmul_stages counts in: once a step, for all layers. None for the reference."""
    num_counters = max(matmul_sizes.MAX_STAGES, row_matmul_sizes.NUM_COUNTERS)
    return None if backend == "reference" else jnp.zeros(num_counters, jnp.int32)


def _interpret_params(backend: Backend) -> Any:
    return plgpu.InterpretGPUParams() if backend == "mosaic_gpu_interpret" else False


def _has_norm_kernel(stage: MatmulStage, num_rows: int) -> bool:
    shape = (num_rows, stage.weight.shape[-1])
    is_served = row_kernels.unsupported_norm(shape, stage.weight.dtype, unit_offset=stage.unit_offset) is None
    return stage.norm_weight is not None and is_served


def _has_gate_kernel(stage: MatmulStage, num_rows: int) -> bool:
    shape = (num_rows, *stage.weight.shape[:-1])
    return stage.is_gated and row_kernels.unsupported_activation(shape, stage.weight.dtype, stage.activation) is None


def _have_row_kernels(stages: tuple[MatmulStage, ...], num_rows: int) -> bool:
    return any(_has_norm_kernel(stage, num_rows) or _has_gate_kernel(stage, num_rows) for stage in stages)


def has_product_kernels(num_rows: int) -> bool:
    """Whether products of so many rows are kernels and not XLA's, where the kernels serve them."""
    return num_rows <= tuning.MAX_PREFERRED_ROWS


def prefers_matmul_kernel(
    x: jax.Array | jax.ShapeDtypeStruct, stages: tuple[MatmulStage, ...], backend: Backend
) -> bool:
    """Whether matmul_stages of a backend can run these and was measured to be faster than what XLA makes of them."""
    if backend == "reference":
        return False
    if not has_product_kernels(x.shape[0]):
        return x.shape[0] >= MIN_PREFERRED_ROWS and _have_row_kernels(stages, x.shape[0])
    if _unsupported_products(x, stages) is not None:
        return False
    return x.shape[-1] <= MAX_PREFERRED_INPUT and sum(stage.weight.size for stage in stages) <= MAX_PREFERRED_WEIGHTS


def _unsupported_products(x: jax.Array | jax.ShapeDtypeStruct, stages: tuple[MatmulStage, ...]) -> str | None:
    """Why no kernel computes these products, in words."""
    sizes = matmul_sizes if x.shape[0] <= matmul_sizes.FEW_ROWS else row_matmul_sizes
    return sizes.unsupported_reason(x, stages)


def matmul_stages(
    x: jax.Array,
    stages: tuple[MatmulStage, ...],
    residual: jax.Array | None,
    arrivals: jax.Array,
    *,
    backend: Backend,
) -> tuple[jax.Array, ...]:
    """See ops.matmul_stages.

    For FEW_ROWS rows one kernel, or one a stage where thread blocks cannot wait for each other; for 16 to 256 one a
    stage. The products of more are XLA's, with kernels for the norms and gates around them where they have one.
    """
    reason = _unsupported_products(x, stages)
    if reason is not None:
        if len(x) > matmul_sizes.FEW_ROWS and _have_row_kernels(stages, len(x)):
            return _products_of_many_rows(x, stages, residual, backend)
        raise NotImplementedError(f"{backend} matmul: {reason}; use backend 'reference'")
    device = jax.devices()[0]
    # Where there is no GPU this compiles for one elsewhere.
    num_sms = getattr(device, "core_count", None) if device.platform == "gpu" else None
    few = len(x) == matmul_sizes.FEW_ROWS
    kernels, config_of = (skinny_matmul, matmul_config) if few else (row_matmul, row_matmul_config)
    config: Any = config_of(interpret=backend == "mosaic_gpu_interpret", num_sms=num_sms)
    return kernels.matmul_stages(x, stages, residual, arrivals, config=config, interpret=_interpret_params(backend))


def _products_of_many_rows(
    x: jax.Array, stages: tuple[MatmulStage, ...], residual: jax.Array | None, backend: Backend
) -> tuple[jax.Array, ...]:
    interpret = _interpret_params(backend)

    def norm(x: jax.Array, stage: MatmulStage) -> jax.Array:
        if not _has_norm_kernel(stage, len(x)):
            return reference_matmul.norm(x, stage)
        assert stage.norm_weight is not None
        return row_kernels.rms_norm(x, stage.norm_weight, eps=stage.eps, interpret=interpret)

    def gate(gate_up: jax.Array, stage: MatmulStage) -> jax.Array:
        if not _has_gate_kernel(stage, len(gate_up)):
            return reference_matmul.gate(gate_up, stage)
        return row_kernels.act_and_mul(gate_up, stage.activation, interpret=interpret)

    return reference_matmul.matmul_stages(x, stages, residual, norm=norm, gate=gate)
