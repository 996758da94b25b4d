"""Logprobs on a GPU: one kernel, in which each row computes as many entries as its own request asks.

Letters: R rows  V vocab  G groups
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxvllm.sampling.row_kernel import Ref, call_kernel, group_maxima, load_maxima, select_best
from scheduler.logprob_columns import LOGPROBS_WIDTH, LogprobColumn
from scheduler.records import MAX_STEP_LOGPROBS
from scheduler.sampling_params import MAX_LOGPROB_TOKEN_IDS

_NUM_GROUPS = 32  # at least MAX_STEP_LOGPROBS: then the first of equals are found among the best groups too
_CHUNK = 4096  # tokens of a row at a time


def position_logprobs(
    logits: jax.Array,
    targets: jax.Array,
    num_logprobs: jax.Array,
    listed_ids: jax.Array,
    num_listed: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The logprob and rank of one token a row, of the most likely tokens, and of listed ones.

    Args:
      logits: f32[R, V] as the model gave them.
      targets: i32[R] token ids.
      num_logprobs: i32[R] entries wanted, the target's included; a row with 0 is undefined.
      listed_ids: i32[R, MAX_LOGPROB_TOKEN_IDS].
      num_listed: i32[R] how many of them count.

    Returns: i32[R, LOGPROBS_WIDTH], see scheduler.logprob_columns; what nobody asked for is undefined.
    """
    num_rows, vocab_size = logits.shape
    listed_width = pl.next_power_of_2(MAX_LOGPROB_TOKEN_IDS)

    def kernel(
        logits: Ref, maxima: Ref, targets: Ref, num_logprobs: Ref, listed: Ref, num_listed: Ref, out: Ref, scratch: Ref
    ) -> None:
        row = pl.program_id(0)

        @pl.when(num_logprobs[row] > 0)
        def _() -> None:
            of_groups = load_maxima(maxima, row)
            largest = jnp.max(of_groups)
            target = logits[row, targets[row]]

            def add(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                ids = i * _CHUNK + jnp.arange(_CHUNK)
                values = triton.load(logits.at[row, ids], mask=ids < vocab_size, other=-jnp.inf)
                is_as_likely = (values >= target) & (ids < vocab_size)
                return state[0] + jnp.exp(values - largest), state[1] + is_as_likely.astype(jnp.int32)

            start = jnp.zeros(_CHUNK, jnp.float32), jnp.zeros(_CHUNK, jnp.int32)
            weights, ranks = lax.fori_loop(0, pl.cdiv(vocab_size, _CHUNK), add, start)
            normaliser = largest + jnp.log(jnp.sum(weights))
            out[row, int(LogprobColumn.RANK)] = jnp.sum(ranks)
            out[row, int(LogprobColumn.IDS)] = targets[row]
            out[row, int(LogprobColumn.VALUES)] = _bits(target - normaliser)
            count = jnp.minimum(num_logprobs[row] - 1, MAX_STEP_LOGPROBS)

            @pl.when(count > 0)
            def _() -> None:
                values, ids, _ = select_best(
                    logits, of_groups, scratch, row, _NUM_GROUPS, vocab_size, interpret=interpret
                )

                def take_next(i: jax.Array, rest: jax.Array) -> jax.Array:
                    value = jnp.max(rest)
                    token_id = jnp.min(jnp.where(rest == value, ids, jnp.iinfo(jnp.int32).max))
                    out[row, LogprobColumn.IDS + 1 + i] = token_id
                    out[row, LogprobColumn.VALUES + 1 + i] = _bits(value - normaliser)
                    return jnp.where(ids == token_id, -jnp.inf, rest)

                lax.fori_loop(0, count, take_next, values)

            @pl.when(num_listed[row] > 0)
            def _() -> None:
                lanes = jnp.arange(listed_width)
                is_listed = lanes < num_listed[row]
                ids = triton.load(listed.at[row, lanes], mask=is_listed, other=0)
                values = triton.load(logits.at[row, ids], mask=is_listed, other=0.0)
                triton.store(out.at[row, LogprobColumn.LISTED + lanes], _bits(values - normaliser), mask=is_listed)

    maxima = group_maxima(logits, num_logprobs, interpret=interpret)
    outputs = (
        jax.ShapeDtypeStruct((num_rows, LOGPROBS_WIDTH), jnp.int32),
        jax.ShapeDtypeStruct((num_rows, _NUM_GROUPS + 1), jnp.int32),
    )
    args = (logits, maxima, targets, num_logprobs, listed_ids, num_listed)
    return call_kernel(kernel, (num_rows,), outputs, *args, interpret=interpret)[0]


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.int32)
