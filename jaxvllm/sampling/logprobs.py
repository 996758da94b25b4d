"""Log-probabilities of a token and of the most likely ones, from the model's own logits (vLLM's raw_logprobs).

Letters: R rows  V vocab
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.groups import best_groups, first_largest, has_groups
from jaxvllm.sampling.rows import SamplingRows
from scheduler.logprob_columns import LogprobColumn
from scheduler.records import MAX_STEP_LOGPROBS, RecordField
from scheduler.sampling_params import MAX_LOGPROB_TOKEN_IDS
from scheduler.token_lists import ListField

_NUM_GROUPS = 32  # at least MAX_STEP_LOGPROBS: then the first of equals are found among the best groups too


def sampled_logprobs(logits: jax.Array, token_ids: jax.Array, rows: SamplingRows) -> jax.Array:
    """The logprobs of a step's sampled tokens.

    Args:
      logits: f32[R, V] as the model gave them.
      token_ids: i32[R] sampled.
      rows: the requests.

    Returns: i32[R, LOGPROBS_WIDTH], see scheduler.logprob_columns.
    """
    num_listed = jnp.where(rows.needs_sample, rows.ints(RecordField.NUM_LISTED_IDS), 0)
    packed = position_logprobs(logits, token_ids, jnp.where(num_listed > 0, 1, rows.num_logprobs))

    def listed(logits: jax.Array) -> jax.Array:
        ids = rows.lists(ListField.LISTED_IDS, MAX_LOGPROB_TOKEN_IDS)
        values = jnp.take_along_axis(logits, ids, axis=1) - _log_normaliser(logits)[:, None]
        return _bits(values)

    empty = jnp.zeros((logits.shape[0], MAX_LOGPROB_TOKEN_IDS), jnp.int32)
    values = lax.cond(jnp.any(num_listed > 0), listed, lambda _: empty, logits)
    return packed.at[:, LogprobColumn.LISTED :].set(values)


def position_logprobs(logits: jax.Array, targets: jax.Array, num_logprobs: jax.Array) -> jax.Array:
    """The logprob and rank of one token a row, and the most likely tokens.

    Args:
      logits: f32[R, V] as the model gave them.
      targets: i32[R] token ids.
      num_logprobs: i32[R] entries wanted, the target's included; as many as the largest asks are computed for all.

    Returns: i32[R, LOGPROBS_WIDTH], see scheduler.logprob_columns; the LISTED columns are 0.
    """
    num_rows, vocab_size = logits.shape
    if has_groups(vocab_size, _NUM_GROUPS):
        best = best_groups(logits, _NUM_GROUPS)
        values, ids, largest = best.values, best.ids, best.largest
    else:
        values, ids, largest = logits, jnp.broadcast_to(jnp.arange(vocab_size), logits.shape), logits.max(axis=1)
    target = jnp.take_along_axis(logits, targets[:, None], axis=1)
    rank = jnp.sum(logits >= target, axis=1, dtype=jnp.int32)
    normaliser = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[:, None]), axis=1))
    top_ids, top = _most_likely(values, ids, jnp.clip(jnp.max(num_logprobs) - 1, 0, MAX_STEP_LOGPROBS))
    all_values = jnp.concatenate([target, top], axis=1) - normaliser[:, None]
    return jnp.concatenate(
        [
            rank[:, None],
            targets[:, None],
            top_ids,
            _bits(all_values),
            jnp.zeros((num_rows, MAX_LOGPROB_TOKEN_IDS), jnp.int32),
        ],
        axis=1,
    )


def _most_likely(values: jax.Array, ids: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of [R, n] values in order, the lowest id first; ids and values [R, MAX_STEP_LOGPROBS]."""

    def take_next(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rest, out_ids, out_values = state
        value, token_id = first_largest(rest, ids)
        rest = jnp.where(ids == token_id[:, None], -jnp.inf, rest)
        return rest, out_ids.at[:, i].set(token_id), out_values.at[:, i].set(value)

    shape = (values.shape[0], MAX_STEP_LOGPROBS)
    start = values, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    _, out_ids, out_values = lax.fori_loop(0, count, take_next, start)
    return out_ids, out_values


def _log_normaliser(logits: jax.Array) -> jax.Array:
    """f32[R] such that logit - normaliser is the logprob."""
    return jax.nn.logsumexp(logits, axis=1)


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
