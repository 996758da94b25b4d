"""From merged qkv to rotated queries and a written KV cache, as one Pallas Mosaic GPU kernel.

A thread block takes one token: it loads the heads of the token, norms and rotates queries and keys in registers, and
stores each where it belongs. The two halves of a head, which rotate together, are separate arrays of one layout, so
that a thread holds both elements of a pair. Nothing goes through shared memory and no thread waits for another one
except for the sum of squares, which stays within a warp.

Letters: T tokens  K kv heads  G query heads of a kv head  M heads of one kv head that are worked on together
H head_dim
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import Ref, pl, plgpu
from pallas_kernels.layer_slice import LayerArray, as_stack, place_in
from pallas_kernels.reference_rope_write import HeadNorm

_WARPS, _LANES = 4, 32


@dataclass(frozen=True)
class _Statics:
    """Sizes that the kernel is compiled for, and what it does besides the write."""

    group: int
    half: int
    block_size: int
    num_kv_heads: int
    has_rope: bool
    has_norm: bool
    eps: float
    unit_offset: bool
    cache_dtype: Any

    @property
    def layout(self) -> Any:
        return _row_layout(self.num_kv_heads, self.half)


def rope_and_write_kv(
    qkv: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    *,
    rope: tuple[jax.Array, jax.Array] | None,
    norm: HeadNorm | None,
    kv_scale: LayerArray | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See ops.rope_and_write_kv. Rotates whole heads only.

    Args:
      qkv: bf16 or f16[T, K, G + 2, H].
      kv_cache: [L, num_blocks, 2, K, block_size, H] of qkv's dtype, or float8_e4m3fn; consumed, and
        written in place where nothing else reads it.
      slot_mapping: i32[T] flat slot of each token; slots of the null block (block 0, pads) are not written.
      layer: i32[].
      rope: cos and sin, f32[T, H / 2] each, or None.
      norm: of the query and key heads, or None.
      kv_scale: f32[2] of keys and values, with a float8_e4m3fn cache only.
      interpret: False, or InterpretGPUParams.

    Returns:
      q [T, K * G, H], and kv_cache.
    """
    num_tokens, num_kv_heads, parts, head_dim = qkv.shape
    statics = _Statics(
        group=parts - 2,
        half=head_dim // 2,
        block_size=kv_cache.shape[4],
        num_kv_heads=num_kv_heads,
        has_rope=rope is not None,
        has_norm=norm is not None,
        eps=norm.eps if norm else 0.0,
        unit_offset=norm.unit_offset if norm else False,
        cache_dtype=kv_cache.dtype,
    )
    operands = [qkv, slot_mapping, layer.reshape(1), *(rope or ())]
    operands += [as_stack(norm.q_weight, layer), as_stack(norm.k_weight, layer)] if norm else []
    # The inverse: the scale is divided by once here and not in every thread block.
    operands += [] if kv_scale is None else [1.0 / as_stack(kv_scale, layer)]
    cache_ref = jax.new_ref(kv_cache, memory_space=plgpu.GMEM)
    q = pl.kernel(
        functools.partial(_write_token, statics),
        out_type=jax.ShapeDtypeStruct((num_tokens, num_kv_heads, parts - 2, head_dim), qkv.dtype),
        mesh=plgpu.Mesh(grid=(num_tokens,), grid_names=("token",)),
        # Without shared memory there is nothing for barriers around loads and stores to keep in order.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        name="rope_and_write_kv",
    )(*operands, cache_ref)
    return q.reshape(num_tokens, -1, head_dim), jax.freeze(cache_ref)


@functools.cache
def _row_layout(num_kv_heads: int, half: int) -> Any:
    """[K, M, half] over the 128 threads: as many kv heads side by side as divide K, each by lanes of one warp.

    With fewer than 4 heads side by side warps do the same work twice and store the same bits twice.
    """
    from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout

    rows = math.gcd(num_kv_heads, 4 * _WARPS)
    rows_of_warp = max(rows // _WARPS, 1)
    vector = half * rows_of_warp // _LANES
    tiling = plgpu.Tiling(((rows, 1, half), (rows_of_warp, 1, half), (1, 1, vector)))
    warp_dims = (-9,) if rows >= _WARPS else (plgpu.Replicated(_WARPS // rows), -9)
    layout = TiledLayout(tiling, warp_dims, (-6, -4), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _write_token(statics: _Statics, *refs: Ref) -> None:
    """The body of the kernel: all heads of one token."""
    qkv_ref, slots_ref, layer_ref, *optional, cache_ref, q_ref = refs
    tables = optional[:2] if statics.has_rope else ()
    inverse_scale_ref = optional.pop() if jnp.dtype(statics.cache_dtype).itemsize == 1 else None
    norms = optional[-2:] if statics.has_norm else (None, None)
    group, block_size = statics.group, statics.block_size
    # The last first: what the product before wrote last may still lie in the L2 cache.
    token = slots_ref.shape[0] - 1 - lax.axis_index("token")
    # All loads before the first store: the compiler cannot know that they do not overlap.
    slot, layer = slots_ref[token], layer_ref[0]
    q, k, v = (
        _load_halves(statics, qkv_ref.at[token, :, heads])
        for heads in (pl.ds(0, group), pl.ds(group, 1), pl.ds(group + 1, 1))
    )
    table = [_load_row(statics, ref.at[token]) for ref in tables]
    q_weight, k_weight = (
        None if ref is None else [_load_row(statics, ref.at[place_in(ref, layer), _half(statics, i)]) for i in range(2)]
        for ref in norms
    )
    q, k = (_rotate(statics, _normalise(statics, x, w), table) for x, w in ((q, q_weight), (k, k_weight)))
    if inverse_scale_ref is not None:
        k, v = (
            _narrowed(statics, x, inverse_scale_ref[place_in(inverse_scale_ref, layer), kv])
            for kv, x in enumerate((k, v))
        )
    block = lax.div(slot, jnp.int32(block_size))

    @pl.when(block > 0)
    def _():
        for kv, halves in enumerate((k, v)):
            target = cache_ref.at[layer, block, kv, :, pl.ds(slot - block * block_size, 1)]
            _store_halves(statics, halves, target)

    _store_halves(statics, q, q_ref.at[token])


def _half(statics: _Statics, index: int) -> Any:
    return pl.ds(index * statics.half, statics.half)


def _load_halves(statics: _Statics, ref: Ref) -> list[jax.Array]:
    """[K, M, H] of global memory as two arrays [K, M, H / 2]."""
    return [plgpu.load(ref.at[:, :, _half(statics, i)], layout=statics.layout, optimized=False) for i in range(2)]


def _store_halves(statics: _Statics, halves: list[jax.Array], ref: Ref) -> None:
    for i, values in enumerate(halves):
        ref[:, :, _half(statics, i)] = values


def _narrowed(statics: _Statics, halves: list[jax.Array], inverse_scale: jax.Array) -> list[jax.Array]:
    """In 8 bits, clipped to their range as in reference_rope_write.to_cache_dtype."""
    limit = float(jnp.finfo(statics.cache_dtype).max)
    wide = [x.astype(jnp.float32) * inverse_scale for x in halves]
    return [jnp.minimum(jnp.maximum(x, -limit), limit).astype(statics.cache_dtype) for x in wide]


def _load_row(statics: _Statics, ref: Ref) -> jax.Array:
    """[H / 2] of global memory, the same for all heads, as float32."""
    row = plgpu.load(ref, layout=statics.layout.reduce((0, 1)), optimized=False)
    return row.astype(jnp.float32)


def _across_heads(statics: _Statics, row: jax.Array, like: jax.Array) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(row, like.shape, [2]), statics.layout)


def _normalise(statics: _Statics, halves: list[jax.Array], weights: list[jax.Array] | None) -> list[jax.Array]:
    """RMSNorm of each head with the roundings of reference_rope_write.rms_norm; [K, M, H / 2] twice."""
    if weights is None:
        return halves
    dtype = halves[0].dtype
    wide = [x.astype(jnp.float32) for x in halves]
    squares = (wide[0] * wide[0] + wide[1] * wide[1]).sum(axis=2)
    factor = lax.rsqrt(squares * (0.5 / statics.half) + statics.eps)
    factor = plgpu.layout_cast(lax.broadcast_in_dim(factor, wide[0].shape, [0, 1]), statics.layout)
    wide = [x * factor for x in wide]
    weights = [_across_heads(statics, w, wide[0]) for w in weights]
    if statics.unit_offset:
        return [(x * (1.0 + w)).astype(dtype) for x, w in zip(wide, weights, strict=True)]
    # The product of two 16-bit numbers is exact in float32.
    rounded = [x.astype(dtype).astype(jnp.float32) for x in wide]
    return [(x * w).astype(dtype) for x, w in zip(rounded, weights, strict=True)]


def _rotate(statics: _Statics, halves: list[jax.Array], table: list[jax.Array]) -> list[jax.Array]:
    """Rotate the pairs of each head by cos and sin, f32[H / 2] each, if there are any."""
    if not table:
        return halves
    dtype = halves[0].dtype
    first, second = (x.astype(jnp.float32) for x in halves)
    cos, sin = (_across_heads(statics, row, first) for row in table)
    return [(first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)]
