"""From logits to token ids, inside the step's program.

Order as in vLLM (SEMANTICS 2.9): min_tokens mask, then greedy rows take the argmax; others: temperature, min_p, top_k,
top_p, draw. The three filters each keep an upper set of a row's logits, so each is one threshold; it is found digit by
digit over the bits of the float, which needs no sort. Tokens that tie with the last one kept are kept.

A draw depends on the row's logits, parameters and output index only, bit for bit: counts and masses are sums of
integers, which no reduction order can change, and the noise is counter-based.

Letters: R rows  V vocab
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.random_bits import random_bits
from scheduler.records import RecordField

_BITS_PER_PASS = 2  # a pass over the logits tests 3 thresholds at once: 16 passes instead of 32
# A probability is held as three integers of 13, 14 and 14 bits: sums over 2**18 tokens fit 32 bits, and a tail of
# tokens far below float32's epsilon still counts.
_LIMB_BITS = (13, 14, 14)


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of a step's rows."""

    temperature: jax.Array  # f32[R] 0: greedy
    top_k: jax.Array  # i32[R] 0: off
    top_p: jax.Array  # f32[R] 1: off
    min_p: jax.Array  # f32[R] 0: off
    seed: jax.Array  # u32[R, 2] high and low word
    output_index: jax.Array  # i32[R] number of output tokens so far
    min_tokens: jax.Array  # i32[R]
    num_stop_ids: jax.Array  # i32[R]
    stop_ids: jax.Array  # i32[R, MAX_MASKED_IDS] masked while output_index < min_tokens
    needs_sample: jax.Array  # bool[R] False: the row's token is not wanted

    @staticmethod
    def from_records(records: jax.Array, seq_lens: jax.Array, needs_sample: jax.Array) -> "SamplingRows":
        """Read the columns of i32[R, RECORD_WIDTH] records."""

        def floats(column: int) -> jax.Array:
            return lax.bitcast_convert_type(records[:, column], jnp.float32)

        high_low = jnp.stack([records[:, RecordField.SEED_HI], records[:, RecordField.SEED_LO]], axis=1)
        return SamplingRows(
            temperature=floats(RecordField.TEMPERATURE),
            top_k=records[:, RecordField.TOP_K],
            top_p=floats(RecordField.TOP_P),
            min_p=floats(RecordField.MIN_P),
            seed=lax.bitcast_convert_type(high_low, jnp.uint32),
            output_index=seq_lens - records[:, RecordField.NUM_PROMPT_TOKENS],
            min_tokens=records[:, RecordField.MIN_TOKENS],
            num_stop_ids=records[:, RecordField.NUM_STOP_IDS],
            stop_ids=records[:, RecordField.STOP_IDS :],
            needs_sample=needs_sample,
        )


def sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """One token id a row.

    Args:
      logits: f32[R, V].
      rows: parameters of the rows; what comes out of a row without needs_sample is arbitrary.

    Returns: i32[R].
    """
    # One cond over everything beyond argmax, and it returns ids: a branch that passed logits through would copy them.
    is_plain = (rows.temperature <= 0) & (rows.output_index >= rows.min_tokens)
    return lax.cond(jnp.all(is_plain | ~rows.needs_sample), _greedy, _process_and_sample, logits, rows)


def _greedy(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    del rows
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _process_and_sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    logits = mask_stop_ids(logits, rows)
    greedy_ids = jnp.argmax(logits, axis=-1)
    is_greedy = rows.temperature <= 0
    logits = logits / jnp.where(is_greedy, 1.0, rows.temperature)[:, None]
    is_kept = kept_tokens(logits, rows)
    noise = gumbel_noise(rows, logits.shape[1])
    drawn_ids = jnp.argmax(jnp.where(is_kept, logits + noise, -jnp.inf), axis=-1)
    return jnp.where(is_greedy, greedy_ids, drawn_ids).astype(jnp.int32)


def mask_stop_ids(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """-inf at EOS and stop ids in rows that have not reached min_tokens."""
    num_rows, vocab_size = logits.shape
    is_listed = jnp.arange(rows.stop_ids.shape[1]) < rows.num_stop_ids[:, None]
    is_masked = is_listed & (rows.output_index < rows.min_tokens)[:, None] & (rows.stop_ids >= 0)
    ids = jnp.where(is_masked, rows.stop_ids, vocab_size)
    return logits.at[jnp.arange(num_rows)[:, None], ids].set(-jnp.inf, mode="drop")


def gumbel_noise(rows: SamplingRows, vocab_size: int) -> jax.Array:
    """f32[R, V] of the standard Gumbel distribution; row r depends on (seed, output_index) of the row only."""
    bits = random_bits(rows.seed, rows.output_index, vocab_size)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23  # in the open interval (0, 1)
    return -jnp.log(-jnp.log(uniform))


def kept_tokens(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """The tokens that min_p, then top_k, then top_p leave.

    Args:
      logits: f32[R, V], temperature applied.
      rows: parameters.

    Returns: bool[R, V]; at least one token a row.
    """
    rank = ordered_bits(logits)
    highest = jnp.max(logits, axis=-1)
    threshold = ordered_bits(highest + jnp.log(rows.min_p))  # log(0) = -inf keeps all

    has_top_k = (rows.top_k > 0) & (rows.top_k < logits.shape[1])
    top_k = jnp.where(has_top_k, rows.top_k, 0).astype(jnp.uint32)
    top_k_threshold = lax.cond(
        jnp.any(has_top_k & rows.needs_sample), _top_k_threshold, lambda *args: threshold, logits, top_k
    )
    threshold = jnp.maximum(threshold, jnp.where(has_top_k, top_k_threshold, 0))

    has_top_p = rows.top_p < 1.0
    top_p_threshold = lax.cond(
        jnp.any(has_top_p & rows.needs_sample), _top_p_threshold, lambda *args: threshold, logits, threshold, rows.top_p
    )
    threshold = jnp.maximum(threshold, jnp.where(has_top_p, top_p_threshold, 0))
    return rank >= threshold[:, None]


def ordered_bits(x: jax.Array) -> jax.Array:
    """u32 that order like the floats x (no NaN); -0.0 and 0.0 are equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x).astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


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
    """Rank of the k-th largest token, u32[R]."""

    def is_enough(logits: jax.Array, threshold: jax.Array) -> jax.Array:
        return jnp.sum(ordered_bits(logits) >= threshold[:, None], axis=-1, dtype=jnp.uint32) >= top_k

    return _largest_threshold(is_enough, logits)


def _top_p_threshold(logits: jax.Array, threshold: jax.Array, top_p: jax.Array) -> jax.Array:
    """Rank of the least likely token of the smallest upper set with a share of top_p of the mass above `threshold`."""
    rank = ordered_bits(logits)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.where(rank >= threshold[:, None], weights, 0.0)
    target = top_p * _mass(weights, jnp.zeros_like(threshold))
    # The search runs over the weights, which order like the logits: no exp in the loop, one array to read.
    lowest = _largest_threshold(lambda weights, t: _mass(weights, t) >= target, weights)
    is_kept = ordered_bits(weights) >= lowest[:, None]
    return jnp.min(jnp.where(is_kept, rank, jnp.uint32(0xFFFFFFFF)), axis=-1)


def _mass(weights: jax.Array, lowest: jax.Array) -> jax.Array:
    """Sum of the weights (in [0, 1], f32[R, V]) of at least rank `lowest`, times a constant; f32[R]."""
    rest = jnp.where(ordered_bits(weights) >= lowest[:, None], weights, 0.0)
    total = jnp.zeros(lowest.shape, jnp.float32)
    for bits in _LIMB_BITS:
        rest = rest * 2.0**bits
        limb = jnp.floor(rest)
        rest = rest - limb
        # Rounding is monotone, so a smaller set never gets a larger mass.
        total = total * 2.0**bits + jnp.sum(limb.astype(jnp.uint32), axis=-1).astype(jnp.float32)
    return total
