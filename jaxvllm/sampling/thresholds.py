"""min_p, top_k and top_p: each keeps an upper set of a row's logits, so each is one threshold.

It is found digit by digit over the bits of the float, which needs no sort. Tokens that tie with the last one kept are
kept. Counts and masses are sums of integers, which no reduction order can change: bit for bit the same in any batch.

Letters: R rows  V vocab
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.rows import SamplingRows
from scheduler.records import RecordField

_BITS_PER_PASS = 2  # a pass over the logits tests 3 thresholds at once: 16 passes instead of 32
# A probability is held as three integers of 13, 14 and 14 bits: sums over 2**18 tokens fit 32 bits, and a tail of
# tokens far below float32's epsilon still counts.
LIMB_BITS = (13, 14, 14)


def kept_tokens(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """The tokens that min_p, then top_k, then top_p leave.

    Args:
      logits: f32[R, V], temperature applied.
      rows: parameters.

    Returns: bool[R, V]; at least one token a row.
    """
    rank = ordered_bits(logits)
    highest = jnp.max(logits, axis=-1)
    threshold = min_p_threshold(highest, rows)

    top_k = rows.ints(RecordField.TOP_K)
    has_top_k = (top_k > 0) & rows.needs_sample
    wanted = jnp.where(has_top_k, top_k, 0).astype(jnp.uint32)
    top_k_threshold = lax.cond(jnp.any(has_top_k), _top_k_threshold, lambda *args: threshold, logits, wanted)
    threshold = jnp.maximum(threshold, jnp.where(has_top_k, top_k_threshold, 0))

    top_p = rows.floats(RecordField.TOP_P)
    has_top_p = (top_p < 1.0) & rows.needs_sample
    top_p_threshold = lax.cond(
        jnp.any(has_top_p), _top_p_threshold, lambda *args: threshold, logits, highest, threshold, top_p
    )
    threshold = jnp.maximum(threshold, jnp.where(has_top_p, top_p_threshold, 0))
    return rank >= threshold[:, None]


def min_p_threshold(highest: jax.Array, rows: SamplingRows) -> jax.Array:
    """Rank that min_p asks of a token; u32[R]."""
    return ordered_bits(highest + jnp.log(rows.floats(RecordField.MIN_P)))  # log(0) = -inf keeps all


def ordered_bits(x: jax.Array) -> jax.Array:
    """u32 that order like the floats x (no NaN); -0.0 and 0.0 are equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x).astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def from_ordered_bits(rank: jax.Array) -> jax.Array:
    """The floats of ordered_bits."""
    bits = jnp.where(rank >> 31 == 1, rank ^ jnp.uint32(1 << 31), ~rank)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _largest_threshold(is_enough: Callable[[jax.Array, jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """The largest t, u32[R], for which is_enough(values, t) holds, if it holds for 0 and never again once it fails."""

    def find_digit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        # The barrier keeps what is derived from the values inside the loop: hoisted, a pass would read it from memory.
        x, i = lax.optimization_barrier((values, i))
        shift = (32 - _BITS_PER_PASS * (i + 1)).astype(jnp.uint32)
        digit = jnp.zeros_like(threshold)
        for candidate in range(1, 1 << _BITS_PER_PASS):
            digit += is_enough(x, threshold | jnp.uint32(candidate) << shift).astype(jnp.uint32)
        return threshold | digit << shift

    return lax.fori_loop(0, 32 // _BITS_PER_PASS, find_digit, jnp.zeros(values.shape[0], jnp.uint32))


def _top_k_threshold(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    """Rank of the k-th largest token, u32[R]; 0 if there are fewer."""

    def is_enough(logits: jax.Array, threshold: jax.Array) -> jax.Array:
        return jnp.sum(ordered_bits(logits) >= threshold[:, None], axis=-1, dtype=jnp.uint32) >= top_k

    return _largest_threshold(is_enough, logits)


def _top_p_threshold(logits: jax.Array, highest: jax.Array, threshold: jax.Array, top_p: jax.Array) -> jax.Array:
    """Rank of the least likely token of the smallest upper set with a share of top_p of the mass above `threshold`."""
    rank = ordered_bits(logits)
    weights = jnp.where(rank >= threshold[:, None], jnp.exp(logits - highest[:, None]), 0.0)
    target = top_p * mass_above(weights, jnp.zeros_like(threshold))
    # The search runs over the weights, which order like the logits: no exp in the loop, one array to read.
    lowest = _largest_threshold(lambda weights, t: mass_above(weights, t) >= target, weights)
    is_kept = ordered_bits(weights) >= lowest[:, None]
    return jnp.min(jnp.where(is_kept, rank, jnp.uint32(0xFFFFFFFF)), axis=-1)


def mass_above(weights: jax.Array, lowest: jax.Array) -> jax.Array:
    """Sum of the weights (in [0, 1], f32[R, V]) of at least rank `lowest`, times a constant; f32[R]."""
    kept = jnp.where(ordered_bits(weights) >= lowest[:, None], weights, 0.0)
    return combine_limbs([jnp.sum(limb, axis=-1) for limb in limbs(kept)])


def limbs(weights: jax.Array) -> list[jax.Array]:
    """The digits, highest first, of weights in [0, 1] as integers; u32, of the weights' shape."""
    found, rest = [], weights
    for bits in LIMB_BITS:
        rest = rest * 2.0**bits
        found.append(jnp.floor(rest).astype(jnp.uint32))
        rest = rest - jnp.floor(rest)
    return found


def combine_limbs(sums: list[jax.Array]) -> jax.Array:
    """Sums of limbs as one number, f32. Rounding is monotone, so a smaller set never gets a larger mass."""
    total = jnp.zeros(sums[0].shape, jnp.float32)
    for bits, limb in zip(LIMB_BITS, sums, strict=True):
        total = total * 2.0**bits + limb.astype(jnp.float32)
    return total
