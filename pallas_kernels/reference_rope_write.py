"""What rope_and_write_kv means, in plain XLA, and the two operations that the engine's layers share with it.

Letters: T tokens  K kv heads  G query heads of a kv head  H head_dim
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.layer_slice import LayerArray, as_array


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm of the query and key heads."""

    q_weight: LayerArray  # [H]
    k_weight: LayerArray  # [H]
    eps: float = field(metadata={"static": True})
    unit_offset: bool = field(default=False, metadata={"static": True})  # the factor is 1 + weight


def rms_norm(x: jax.Array, weight: LayerArray, *, eps: float, unit_offset: bool = False) -> jax.Array:
    """See ops.rms_norm."""
    weight = as_array(weight)
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    if unit_offset:
        return (wide * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return wide.astype(x.dtype) * weight


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate [T, ..., H] by its token's angles; dimensions beyond the rotated ones pass through. Keeps x's dtype.

    Args:
      cos, sin: f32[T, rotated / 2].
    """
    half = cos.shape[-1]
    middle = (1,) * (x.ndim - 2)
    cos, sin = (table.reshape(len(table), *middle, half) for table in (cos, sin))
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def norm_and_rotate(
    qkv: jax.Array, rope: tuple[jax.Array, jax.Array] | None, norm: HeadNorm | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split [T, K, G + 2, H]: q [T, K, G, H] and k [T, K, H], both normed and rotated, and v [T, K, H]."""
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    if norm is not None:
        q = rms_norm(q, norm.q_weight, eps=norm.eps, unit_offset=norm.unit_offset)
        k = rms_norm(k, norm.k_weight, eps=norm.eps, unit_offset=norm.unit_offset)
    if rope is not None:
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    return q, k, v


def to_cache_dtype(x: jax.Array, dtype: jnp.dtype, scale: jax.Array | None) -> jax.Array:
    """x / scale in the cache's dtype; clipped to the range of 8 bits, where too large a number would become NaN."""
    if jnp.dtype(dtype).itemsize > 1:
        return x.astype(dtype)
    limit = float(jnp.finfo(dtype).max)
    wide = x.astype(jnp.float32) * (1.0 if scale is None else 1.0 / scale)
    return jnp.clip(wide, -limit, limit).astype(dtype)


def write_kv_cache(
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    kv_scale: LayerArray | None = None,
) -> jax.Array:
    """Scatter k and v [T, K, H] into their slots: one scatter, in place when the cache is donated or a loop carry."""
    block_size = kv_cache.shape[4]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    scales = (None, None) if kv_scale is None else as_array(kv_scale)
    kv = jnp.stack([to_cache_dtype(x, kv_cache.dtype, scale) for x, scale in zip((k, v), scales, strict=True)], axis=1)
    kv = jnp.pad(kv, ((0, 0), (0, 0), (0, 0), (0, kv_cache.shape[5] - k.shape[2])))
    return kv_cache.at[layer, block, :, :, offset].set(kv, mode="drop")


def rope_and_write_kv(
    qkv: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    *,
    rope: tuple[jax.Array, jax.Array] | None,
    norm: HeadNorm | None,
    kv_scale: LayerArray | None,
) -> tuple[jax.Array, jax.Array]:
    """See ops.rope_and_write_kv."""
    q, k, v = norm_and_rotate(qkv, rope, norm)
    kv_cache = write_kv_cache(k, v, kv_cache, slot_mapping, layer, kv_scale)
    return q.reshape(len(q), -1, q.shape[-1]), kv_cache
