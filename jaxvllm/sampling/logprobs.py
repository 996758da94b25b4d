"""Log-probabilities of a token and of the most likely ones, from the model's own logits (vLLM's raw_logprobs).

Letters: R rows  V vocab
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.groups import best_groups, first_largest, has_groups
from scheduler.records import MAX_STEP_LOGPROBS

NUM_GROUPS = 32  # at least MAX_STEP_LOGPROBS: then the first of equals are found among the best groups too

MASKED = float(jnp.finfo(jnp.float32).min)  # while the most likely tokens are taken, one after the other


def position_logprobs(
    logits: jax.Array, targets: jax.Array, num_logprobs: jax.Array, listed_ids: jax.Array, num_listed: jax.Array
) -> jax.Array:
    """The logprob and rank of one token a row, of the most likely tokens, and of listed ones.

    Args:
      logits: f32[R, V] as the model gave them.
      targets: i32[R] token ids.
      num_logprobs: i32[R] entries wanted, the target's included; as many as the largest asks are computed for all.
      listed_ids: i32[R, MAX_LOGPROB_TOKEN_IDS].
      num_listed: i32[R] how many of them count; 0 everywhere: their logprobs are 0.

    Returns: i32[R, LOGPROBS_WIDTH], see scheduler.logprob_columns.
    """
    vocab_size = logits.shape[1]
    if has_groups(vocab_size, NUM_GROUPS):
        best = best_groups(logits, NUM_GROUPS)
        values, ids, largest = best.values, best.ids, best.largest
    else:
        values, ids, largest = logits, jnp.broadcast_to(jnp.arange(vocab_size), logits.shape), logits.max(axis=1)
    target = jnp.take_along_axis(logits, targets[:, None], axis=1)
    rank = jnp.sum(logits >= target, axis=1, dtype=jnp.int32)
    normaliser = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[:, None]), axis=1))
    top_ids, top = _most_likely(values, ids, jnp.clip(jnp.max(num_logprobs) - 1, 0, MAX_STEP_LOGPROBS))
    listed = lax.cond(
        jnp.any(num_listed > 0),
        lambda: jnp.take_along_axis(logits, listed_ids, axis=1) - normaliser[:, None],
        lambda: jnp.zeros(listed_ids.shape, jnp.float32),
    )
    all_values = jnp.concatenate([target, top], axis=1) - normaliser[:, None]
    return jnp.concatenate([rank[:, None], targets[:, None], top_ids, _bits(all_values), _bits(listed)], axis=1)


def _most_likely(values: jax.Array, ids: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of [R, n] values in order, the lowest id first; ids and values [R, MAX_STEP_LOGPROBS]."""

    def take_next(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rest, out_ids, out_values = state
        value, token_id = first_largest(rest, ids)
        rest = jnp.where(ids == token_id[:, None], -jnp.inf, rest)
        return rest, out_ids.at[:, i].set(token_id), out_values.at[:, i].set(value)

    shape = (values.shape[0], MAX_STEP_LOGPROBS)
    # Masked tokens are larger than taken ones, or the first token would come again and again in their place.
    start = jnp.maximum(values, MASKED), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    _, out_ids, out_values = lax.fori_loop(0, count, take_next, start)
    return out_ids, jnp.where(out_values == MASKED, -jnp.inf, out_values)


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
