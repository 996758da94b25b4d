"""Choosing a token: the argmax for greedy rows, a draw among the tokens that the filters keep for the others.

A draw takes a group of tokens first, then one of its tokens, each time the one whose weight's logarithm plus Gumbel
noise is the largest: a token has the probability that softmax gives it, and most tokens need no noise. As with noise on
tokens alone, logits that change a little seldom change the choice.

A draw looks at the best groups; if for some row they might not be enough (a large top_k, a wide top_p, no filter at
all), the step looks at all of them. Both ways give the same tokens, bit for bit.

Letters: R rows  V vocab  N groups
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.groups import (
    GROUP_SIZE,
    Candidates,
    best_groups,
    first_largest,
    has_groups,
    in_groups,
    token_weights,
)
from jaxvllm.sampling.noise import gumbel_noise, of_group
from jaxvllm.sampling.rows import SamplingRows
from jaxvllm.sampling.thresholds import (
    combine_limbs,
    from_ordered_bits,
    kept_tokens,
    limbs,
    mass_above,
    min_p_threshold,
    ordered_bits,
)
from scheduler.records import RecordField

NUM_GROUPS = 128  # top_k below it needs no more


def greedy(logits: jax.Array) -> jax.Array:
    """i32[R] of f32[R, V]; the first of equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def choose(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """One token id a row, i32[R], from f32[R, V] processed logits. Whatever these are, NaN even: an id that exists."""
    is_random = ~rows.is_greedy & rows.needs_sample
    ids = lax.cond(jnp.any(is_random), lambda logits: _draw(logits, rows), greedy, logits)
    return jnp.minimum(ids, logits.shape[1] - 1)


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    scaled = logits / jnp.where(rows.is_greedy, 1.0, rows.floats(RecordField.TEMPERATURE))[:, None]
    ids = _draw_scaled(scaled, rows)
    # An infinite logit has no share of the others: it is the choice.
    can_draw = jnp.max(scaled, axis=1) < jnp.inf
    return lax.cond(jnp.all(can_draw), lambda: ids, lambda: jnp.where(can_draw, ids, greedy(logits)))


def _draw_scaled(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    if not has_groups(logits.shape[1], NUM_GROUPS):
        return _draw_among_all(logits, rows)
    top_k = rows.ints(RecordField.TOP_K)
    is_narrow = ((top_k > 0) & (top_k < NUM_GROUPS)) | (rows.floats(RecordField.TOP_P) < 1)
    is_narrow |= (rows.floats(RecordField.MIN_P) > 0) | rows.is_greedy | ~rows.needs_sample
    nothing = jnp.zeros_like(rows.seq_lens), jnp.zeros_like(is_narrow)
    ids, is_certain = lax.cond(
        jnp.all(is_narrow), lambda logits: _draw_among_best(logits, rows), lambda _: nothing, logits
    )
    return lax.cond(
        jnp.all(is_certain | ~rows.needs_sample), lambda _: ids, lambda logits: _draw_among_all(logits, rows), logits
    )


def _draw_among_all(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    values = in_groups(jnp.where(kept_tokens(logits, rows), logits, -jnp.inf))
    drawn = _draw_from_groups(values, jnp.broadcast_to(jnp.arange(values.shape[1]), values.shape[:2]), rows)
    return jnp.where(rows.is_greedy, greedy(logits), drawn)


def _draw_among_best(logits: jax.Array, rows: SamplingRows) -> tuple[jax.Array, jax.Array]:
    """The token ids, and for which rows the filters provably keep candidates only; i32[R], bool[R]."""
    best = best_groups(logits, NUM_GROUPS)
    threshold, is_certain = _candidate_threshold(logits, best, rows)
    values = jnp.where(ordered_bits(best.values) >= threshold[:, None], best.values, -jnp.inf)
    values = values.reshape(len(values), NUM_GROUPS, GROUP_SIZE)
    drawn = _draw_from_groups(values, best.ids[:, ::GROUP_SIZE] // GROUP_SIZE, rows)
    # Of equal maxima the best groups are the first ones.
    _, most_likely = first_largest(best.values, best.ids)
    return jnp.where(rows.is_greedy, most_likely, drawn), rows.is_greedy | is_certain


def _draw_from_groups(values: jax.Array, groups: jax.Array, rows: SamplingRows) -> jax.Array:
    """Token ids, i32[R].

    Args:
      values: f32[R, N, GROUP_SIZE] logits with the temperature applied, -inf in the place of tokens that are not kept.
      groups: i32[R, N] which groups these are.
      rows: parameters.
    """
    largest = values.max(axis=2)
    weights = jnp.sum(token_weights(values, largest[:, :, None]), axis=2, dtype=jnp.uint32)
    scores = largest + jnp.log(weights.astype(jnp.float32)) + gumbel_noise(rows, of_group(groups))
    _, group = first_largest(scores, groups)
    index = jnp.argmax(groups == group[:, None], axis=1)
    tokens = jnp.take_along_axis(values, index[:, None, None], axis=1)[:, 0]
    ids = group[:, None] * GROUP_SIZE + jnp.arange(GROUP_SIZE)
    return first_largest(tokens + gumbel_noise(rows, ids), ids)[1]


def _candidate_threshold(logits: jax.Array, best: Candidates, rows: SamplingRows) -> tuple[jax.Array, jax.Array]:
    """Rank of the least candidate kept, and whether it is that of the least token kept; u32[R], bool[R].

    A threshold above the bound is certain: all tokens above the bound are candidates, so it was found among complete
    sets. Sorted candidates show every threshold at once.
    """
    rank = ~lax.sort(~ordered_bits(best.values), is_stable=False)  # descending
    values, bound = from_ordered_bits(rank), ordered_bits(best.bound)
    top_k, top_p = rows.ints(RecordField.TOP_K), rows.floats(RecordField.TOP_P)
    has_top_k = (top_k > 0) & (top_k <= values.shape[1])
    kth = jnp.take_along_axis(rank, jnp.clip(top_k - 1, 0, values.shape[1] - 1)[:, None], axis=1)[:, 0]
    threshold = jnp.maximum(min_p_threshold(best.largest, rows), jnp.where(has_top_k, kth, 0))
    is_certain = (top_k <= 0) | (threshold > bound)

    has_top_p = (top_p < 1.0) & rows.needs_sample
    weights = jnp.where(rank >= threshold[:, None], jnp.exp(values - best.largest[:, None]), 0.0)
    masses = combine_limbs([jnp.cumsum(limb, axis=1) for limb in limbs(weights)])

    def mass_of_all() -> jax.Array:
        is_kept = ordered_bits(logits) >= threshold[:, None]
        weights = jnp.where(is_kept, jnp.exp(logits - best.largest[:, None]), 0.0)
        return mass_above(weights, jnp.zeros_like(threshold))

    # With top_k all that is kept before top_p is among the candidates.
    needs_all = has_top_p & (top_k <= 0)
    total = lax.cond(
        jnp.any(needs_all), lambda: jnp.where(needs_all, mass_of_all(), masses[:, -1]), lambda: masses[:, -1]
    )
    num_short = jnp.sum(masses < (top_p * total)[:, None], axis=1)  # upper sets that have too little mass
    last = jnp.take_along_axis(rank, jnp.minimum(num_short, values.shape[1] - 1)[:, None], axis=1)[:, 0]
    last = jnp.where(num_short < values.shape[1], last, 0)
    threshold = jnp.maximum(threshold, jnp.where(has_top_p, last, 0))
    is_certain = (is_certain & (threshold > bound)) | (best.bound == -jnp.inf)
    return threshold, is_certain & (best.largest > -jnp.inf)
