"""What the computing warpgroup of the decode kernel does with the key tiles of one item.

Keys are the rows of the products, 64 at a time, and the query heads of the group their columns.

Letters: N query heads  K kv heads  H head_dim  G = N / K
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import LOG2E, MIN_SCORE, PRODUCT_ROWS, Ref, across_rows, capped, full, pl, plgpu, widened
from pallas_kernels.decode_copy import DecodeInputs, DecodeScratch
from pallas_kernels.decode_keys import keys_in_registers, store_q
from pallas_kernels.decode_newest import Tables, take_newest
from pallas_kernels.decode_sizes import DecodeSizes
from pallas_kernels.layer_slice import place_in

_WGMMA = plgpu.Layout.WGMMA


@dataclass(frozen=True)
class ItemTiles:
    """Tiles [begin, end) of one item; the CTA has done `done` tiles before them."""

    item: jax.Array
    length: jax.Array  # keys of the item's row
    begin: jax.Array
    end: jax.Array
    done: jax.Array


def attend_tiles(
    sizes: DecodeSizes,
    inputs: DecodeInputs,
    scratch: DecodeScratch,
    q_slot: jax.Array,
    tiles: ItemTiles,
    tables: Tables | None,
) -> tuple[list[jax.Array], jax.Array]:
    """The part of an item that its tiles give; releases the slot of q.

    Args:
      tables: of load_tables, with merged qkv.

    Returns:
      Normalised O^T in 64-row parts, f32[64, columns] each, and the base-2 log-sum-exp of each column's scores.
    """
    factor = sizes.scale * (1.0 if sizes.soft_cap else LOG2E)
    if inputs.kv_scale is not None:
        factor = factor * inputs.kv_scale[place_in(inputs.kv_scale, inputs.layer[0]), 0]
    q, start = _take_q(sizes, inputs, scratch, q_slot, tiles, tables, factor)

    def step(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        highest, total, acc = carry
        slot = lax.rem(tiles.done + (i - tiles.begin), jnp.int32(sizes.config.stages))
        first_key = (sizes.first_tile(tiles.length) + i) * sizes.config.tile
        plgpu.barrier_wait(scratch.k_full.at[slot])
        scores = _scores(sizes, scratch, slot, q)
        plgpu.barrier_arrive(scratch.k_free.at[slot])
        if sizes.soft_cap is not None:
            scores = [capped(s, sizes.soft_cap, 1.0 if sizes.is_narrow else factor) for s in scores]
        elif not sizes.is_narrow:
            scores = [s * factor for s in scores]
        scores = [
            jnp.where(_is_seen(sizes, s.shape, tiles.length, first_key + part * PRODUCT_ROWS), s, MIN_SCORE)
            for part, s in enumerate(scores)
        ]
        new_highest = jnp.maximum(highest, functools.reduce(jnp.maximum, scores).max(axis=0))
        rescale = jnp.exp2(highest - new_highest)
        total = total * across_rows(rescale, total)
        for part, s in enumerate(scores):
            p = jnp.exp2(s - across_rows(new_highest, s))
            # Summed over keys only once, at the end: a sum across warps costs more than these additions.
            total = total + p
            rows = scratch.p.at[:, pl.ds(part * PRODUCT_ROWS, PRODUCT_ROWS)] if len(scores) > 1 else scratch.p
            rows.transpose((1, 0))[...] = p.astype(sizes.product_dtype)
        if not sizes.is_narrow:
            plgpu.barrier_wait(scratch.v_full.at[slot])
        update = _values(sizes, scratch, slot, tiles.length, first_key)
        acc = tuple(a * across_rows(rescale, a) + u for a, u in zip(acc, update, strict=True))
        return new_highest, total, acc

    highest, total, acc = lax.fori_loop(tiles.begin, tiles.end, step, start)
    plgpu.barrier_arrive(scratch.q_free.at[q_slot])
    total = total.sum(axis=0)
    total = jnp.where(total == 0, 1.0, total)
    factor_of_values = 1.0 / total
    if inputs.kv_scale is not None:
        factor_of_values = factor_of_values * inputs.kv_scale[place_in(inputs.kv_scale, inputs.layer[0]), 1]
    return [a * across_rows(factor_of_values, a) for a in acc], highest + jnp.log2(total)


def _take_q(
    sizes: DecodeSizes,
    inputs: DecodeInputs,
    scratch: DecodeScratch,
    q_slot: jax.Array,
    tiles: ItemTiles,
    tables: Tables | None,
    factor: Any,
) -> tuple[Ref, tuple[Any, ...]]:
    """The item's q, [columns, H], as the products take it, and what its softmax starts from.

    With 8-bit keys q is in float16 and times the factor, and on the card its columns are in the order of decode_keys.
    """
    columns = sizes.columns
    here = scratch.q.at[q_slot]
    parts = [pl.ds(part * PRODUCT_ROWS, PRODUCT_ROWS) for part in range(sizes.parts)]
    if tables is not None:
        values, start = take_newest(sizes, inputs, scratch, q_slot, tiles.item, tiles.begin == 0, tables, factor)
    else:
        zeros = tuple(full((PRODUCT_ROWS, columns), 0.0, _WGMMA) for _ in parts)
        start = (full((columns,), MIN_SCORE, _WGMMA.reduce(0)), full((PRODUCT_ROWS, columns), 0.0, _WGMMA), zeros)
        if not sizes.is_narrow:
            return here, start
        loads = [plgpu.load(here.at[:, rows].transpose((1, 0)), layout=_WGMMA, optimized=False) for rows in parts]
        values = [x.astype(jnp.float32) for x in loads]
    q = here
    if sizes.is_narrow:
        q, limit = scratch.q_half, float(jnp.finfo(jnp.float16).max)
        values = [jnp.minimum(jnp.maximum(x * factor, -limit), limit) for x in values]
    for rows, x in zip(parts, values, strict=True):
        x = x.astype(sizes.product_dtype)
        if sizes.is_narrow and sizes.on_card:
            store_q(x, q.at[:, rows])
        else:
            q.at[:, rows].transpose((1, 0))[...] = x
    plgpu.commit_smem()
    return q, start


def _scores(sizes: DecodeSizes, scratch: DecodeScratch, slot: jax.Array, q: Ref) -> list[jax.Array]:
    """K Q^T of a tile in parts f32[64, columns]; values of 8 bits are widened beside the last product."""
    keys, q = scratch.k.at[slot], q.transpose((1, 0))

    def product(k: Any, is_last: bool) -> jax.Array:
        def body(acc: Ref) -> jax.Array:
            plgpu.wgmma(acc, k, q)
            if sizes.is_narrow and is_last:
                _widen_values(sizes, scratch, slot)
            return acc[...]

        return pl.run_scoped(body, plgpu.ACC((PRODUCT_ROWS, sizes.columns), jnp.float32))

    out = []
    for part in range(0, sizes.config.tile, PRODUCT_ROWS):
        k = keys.at[pl.ds(part, PRODUCT_ROWS)] if sizes.config.tile > PRODUCT_ROWS else keys
        if sizes.is_narrow and sizes.on_card:
            k = keys_in_registers(k)
        elif sizes.is_narrow:  # the interpreter takes operands from shared memory
            scratch.k_wide[...] = widened(k, sizes.product_dtype)
            plgpu.commit_smem()
            k = scratch.k_wide
        out.append(product(k, part + PRODUCT_ROWS == sizes.config.tile))
    return out


def _widen_values(sizes: DecodeSizes, scratch: DecodeScratch, slot: jax.Array) -> None:
    """Wait for the values, 8-bit numbers, and put them into scratch.v_wide; releases the slot."""
    plgpu.barrier_wait(scratch.v_full.at[slot])
    for part in range(0, sizes.config.tile, PRODUCT_ROWS):
        rows = pl.ds(part, PRODUCT_ROWS)
        scratch.v_wide[rows] = widened(scratch.v.at[slot, rows], sizes.product_dtype)
    plgpu.barrier_arrive(scratch.v_free.at[slot])


def _values(
    sizes: DecodeSizes, scratch: DecodeScratch, slot: jax.Array, length: jax.Array, first_key: jax.Array
) -> tuple[jax.Array, ...]:
    """V^T P^T of a tile in parts f32[64, columns]; releases the slot."""
    values = scratch.v_wide if sizes.is_narrow else scratch.v.at[slot]
    has_unseen = sizes.num_seen(length) - first_key < sizes.config.tile
    if sizes.sliding_window is not None:
        has_unseen = jnp.logical_or(has_unseen, length - sizes.sliding_window > first_key)

    @pl.when(has_unseen)
    def _():
        # The weights there are 0, but 0 * NaN is NaN.
        for part in range(0, sizes.config.tile, PRODUCT_ROWS):
            here = values.at[pl.ds(part, PRODUCT_ROWS)]
            loaded = plgpu.load(here, layout=_WGMMA)
            seen = _is_seen(sizes, loaded.shape, length, first_key + part)
            here[...] = jnp.where(seen, loaded, jnp.zeros_like(loaded))

    plgpu.commit_smem()

    def body(*accs: Ref) -> tuple[jax.Array, ...]:
        for part, acc in enumerate(accs):
            rows = values.at[:, pl.ds(part * PRODUCT_ROWS, PRODUCT_ROWS)].transpose((1, 0))
            plgpu.wgmma(acc, rows, scratch.p.transpose((1, 0)))
        return tuple(acc[...] for acc in accs)

    update = pl.run_scoped(body, *[plgpu.ACC((PRODUCT_ROWS, sizes.columns), jnp.float32) for _ in range(sizes.parts)])
    if not sizes.is_narrow:
        plgpu.barrier_arrive(scratch.v_free.at[slot])
    return update


def _is_seen(sizes: DecodeSizes, shape: tuple[int, ...], length: jax.Array, first_key: jax.Array) -> jax.Array:
    """Which rows, keys from `first_key` on, the query sees."""
    key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)
    seen = key < sizes.num_seen(length) - first_key
    if sizes.sliding_window is None:
        return seen
    return jnp.logical_and(seen, key >= length - sizes.sliding_window - first_key)
