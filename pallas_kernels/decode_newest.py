"""The newest key of a decode item, which starts its softmax and never comes from the cache.

The item's rows of the merged qkv (queries of the group, key, value) are columns of one window [columns, H]. It is
normed and rotated in registers, where a column is a head and a thread holds rows of all of them; then the key's and the
value's columns are taken out. The roundings are those of reference_rope_write.

Letters: T tokens  G query heads of a kv head  H head_dim
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import MIN_SCORE, PRODUCT_ROWS, across_columns, across_rows, capped, div, full, pl, plgpu
from pallas_kernels.decode_copy import DecodeInputs, DecodeScratch
from pallas_kernels.decode_sizes import DecodeSizes
from pallas_kernels.layer_slice import place_in

_WGMMA = plgpu.Layout.WGMMA

# Parts [64, columns] of the window, or [64] of one head, as float32.
Parts = list[jax.Array]


@dataclass(frozen=True)
class Tables:
    """What norm, rotation and write take of global memory; in parts [64] as float32."""

    slot: jax.Array
    q_weight: Parts
    k_weight: Parts
    cos: Parts
    sin: Parts


def load_tables(inputs: DecodeInputs, row: jax.Array) -> Tables:
    """Read them before the wait for q, behind which they would come late."""

    def parts(ref: Any, place: Any) -> Parts:
        if ref is None:
            return []
        here = ref.at[place]
        rows = [pl.ds(i, PRODUCT_ROWS) for i in range(0, here.shape[0], PRODUCT_ROWS)]
        loaded = [plgpu.load(here.at[r], layout=_WGMMA.reduce(1), optimized=False) for r in rows]
        return [x.astype(jnp.float32) for x in loaded]

    layer = inputs.layer[0]
    q_weight, k_weight = (
        parts(w, None if w is None else place_in(w, layer)) for w in (inputs.q_weight, inputs.k_weight)
    )
    return Tables(inputs.slots[row], q_weight, k_weight, parts(inputs.cos, row), parts(inputs.sin, row))


def take_newest(
    sizes: DecodeSizes,
    inputs: DecodeInputs,
    scratch: DecodeScratch,
    q_slot: jax.Array,
    item: jax.Array,
    is_first: jax.Array,
    tables: Tables,
    factor: Any,
) -> tuple[Parts, tuple[Any, ...]]:
    """Norm and rotate the item's window; the CTA with the item's first tile also writes key and value to the cache.

    Args:
      is_first: whether this CTA has the item's first tile, and with it the newest key.
      factor: of the scores.

    Returns:
      The window as the products take it, in parts [64, columns] as float32, and what the softmax over the tiles
      starts from: maximum, sums of weights, accumulators.
    """
    shape = (PRODUCT_ROWS, sizes.columns)
    raw = [_load(scratch.q.at[q_slot, :, pl.ds(part * PRODUCT_ROWS, PRODUCT_ROWS)]) for part in range(sizes.parts)]
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_WGMMA)
    key_column = sizes.first_column(item) + sizes.group
    is_key, is_value = column == key_column, column == key_column + 1
    turned = _rotate(sizes, _normalise(sizes, raw, tables, is_key), tables, scratch)
    keys, values = turned, raw
    if sizes.is_narrow:
        scale = place_in(inputs.kv_scale, inputs.layer[0])
        keys, values = (
            [_narrowed(sizes, x, 1.0 / inputs.kv_scale[scale, kv]) for x in parts]
            for kv, parts in enumerate((keys, values))
        )
    key, value = (
        [jnp.where(mask, x, 0.0).sum(axis=1) for x in parts] for mask, parts in ((is_key, keys), (is_value, values))
    )
    pl.when(is_first)(lambda: _write(sizes, inputs, item, tables.slot, key, value))
    products = [x * across_columns(k, x) for x, k in zip(turned, key, strict=True)]
    score = functools.reduce(operator.add, products).sum(axis=0) * factor
    if sizes.soft_cap is not None:
        score = capped(score, sizes.soft_cap)
    highest = jnp.where(is_first, score, MIN_SCORE)
    # Sums are kept a row each until the end: the newest key's weight, 1, counts in one of them.
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)
    total = jnp.where(jnp.logical_and(is_first, row == 0), 1.0, full(shape, 0.0, _WGMMA))
    acc = tuple(jnp.where(is_first, across_columns(v, total), 0.0) for v in value)
    return turned, (highest, total, acc)


def _load(heads: Any) -> jax.Array:
    """A part [columns, 64] of the window, transposed."""
    return plgpu.load(heads.transpose((1, 0)), layout=_WGMMA, optimized=False).astype(jnp.float32)


def _rounded(sizes: DecodeSizes, x: jax.Array) -> jax.Array:
    return x.astype(sizes.dtype).astype(jnp.float32)


def _normalise(sizes: DecodeSizes, parts: Parts, tables: Tables, is_key: jax.Array) -> Parts:
    """RMSNorm of each column, with the key's weight or the queries'."""
    merged = sizes.merged
    if merged is None or not tables.q_weight:
        return parts
    squares = functools.reduce(operator.add, [x * x for x in parts]).sum(axis=0)
    factor = across_rows(lax.rsqrt(squares * (1.0 / sizes.head_dim) + merged.eps), parts[0])
    out = []
    for x, q_weight, k_weight in zip(parts, tables.q_weight, tables.k_weight, strict=True):
        weight = jnp.where(is_key, across_columns(k_weight, x), across_columns(q_weight, x))
        if merged.unit_offset:
            out.append(_rounded(sizes, x * factor * (1.0 + weight)))
        else:  # the product of two 16-bit numbers is exact in float32
            out.append(_rounded(sizes, _rounded(sizes, x * factor) * weight))
    return out


def _rotate(sizes: DecodeSizes, parts: Parts, tables: Tables, scratch: DecodeScratch) -> Parts:
    """Turn the pairs of each column; in heads of at least 128 a thread has both of a pair."""
    if not tables.cos:
        return parts
    if sizes.parts == 1:
        return [_rotate_part(sizes, parts[0], tables, scratch)]
    half = sizes.parts // 2
    first, second = [], []
    for x, y, cos, sin in zip(parts[:half], parts[half:], tables.cos, tables.sin, strict=True):
        cos, sin = across_columns(cos, x), across_columns(sin, x)
        first.append(_rounded(sizes, x * cos - y * sin))
        second.append(_rounded(sizes, y * cos + x * sin))
    return first + second


def _rotate_part(sizes: DecodeSizes, x: jax.Array, tables: Tables, scratch: DecodeScratch) -> jax.Array:
    """Turn the pairs of heads of 64, whose halves different warps have: they meet in shared memory.

    There the head lies twice in a row, so that the rows from the middle on begin with its second half.
    """
    for copy in range(2):
        scratch.turned.at[:, pl.ds(copy * PRODUCT_ROWS, PRODUCT_ROWS)].transpose((1, 0))[...] = x.astype(sizes.dtype)
    plgpu.commit_smem()
    other = _load(scratch.turned.at[:, pl.ds(PRODUCT_ROWS // 2, PRODUCT_ROWS)])
    cos, sin = across_columns(tables.cos[0], x), across_columns(tables.sin[0], x)
    return _rounded(sizes, x * cos + other * sin)


def _narrowed(sizes: DecodeSizes, x: jax.Array, inverse_scale: jax.Array) -> jax.Array:
    """What 8 bits keep of x / scale; clipped to their range as in reference_rope_write.to_cache_dtype."""
    limit = float(jnp.finfo(sizes.cache_dtype).max)
    clipped = jnp.minimum(jnp.maximum(x * inverse_scale, -limit), limit)
    return clipped.astype(sizes.cache_dtype).astype(jnp.float16).astype(jnp.float32)


def _write(
    sizes: DecodeSizes, inputs: DecodeInputs, item: jax.Array, slot: jax.Array, key: Parts, value: Parts
) -> None:
    """Key and value of the new token into their slot, unless it is in the null block."""
    block = div(slot, sizes.block_size)
    head = lax.rem(item, jnp.int32(sizes.num_kv_heads))

    @pl.when(block > 0)
    def _():
        for kv, parts in enumerate((key, value)):
            target = inputs.kv_cache.at[inputs.layer[0], block, kv, head, slot - block * sizes.block_size]
            for i, x in enumerate(parts):
                target.at[pl.ds(i * PRODUCT_ROWS, PRODUCT_ROWS)][...] = x.astype(sizes.cache_dtype)
