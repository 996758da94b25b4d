"""Logprobs on a GPU: one kernel, in which each row computes as many entries as its own request asks.

Letters: R rows  V vocab  G groups
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.groups import GROUP_SIZE, WEIGHT_SCALE
from jaxvllm.sampling.logprobs import MASKED, NUM_GROUPS
from jaxvllm.sampling.row_kernel import CHUNK, GroupStats, Ref, call_kernel, load_groups, select_best
from pallas_kernels.lazy import pl, triton
from scheduler.logprob_columns import LOGPROBS_WIDTH, LogprobColumn
from scheduler.records import MAX_STEP_LOGPROBS
from scheduler.sampling_params import MAX_LOGPROB_TOKEN_IDS


def position_logprobs(
    logits: jax.Array,
    stats: GroupStats,
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
      stats: their group_stats, unscaled, of rows that want an entry.
      targets: i32[R] token ids.
      num_logprobs: i32[R] entries wanted, the target's included; a row with 0 is undefined.
      listed_ids: i32[R, MAX_LOGPROB_TOKEN_IDS].
      num_listed: i32[R] how many of them count.

    Returns: i32[R, LOGPROBS_WIDTH], see scheduler.logprob_columns; what nobody asked for is undefined.
    """
    num_rows, vocab_size = logits.shape
    listed_width = pl.next_power_of_2(MAX_LOGPROB_TOKEN_IDS)

    def kernel(
        logits: Ref, maxima: Ref, weights: Ref, targets: Ref, num_logprobs: Ref, listed: Ref, num_listed: Ref,
        out: Ref, scratch: Ref,
    ) -> None:  # fmt: skip
        row = pl.program_id(0)

        @pl.when(num_logprobs[row] > 0)
        def _() -> None:
            of_groups = load_groups(maxima, row, -jnp.inf)
            largest = jnp.max(of_groups)
            masses = load_groups(weights, row, 0).astype(jnp.float32) / WEIGHT_SCALE
            normaliser = largest + jnp.log(jnp.sum(masses * jnp.exp(of_groups - largest)))
            target = logits[row, targets[row]]
            out[row, int(LogprobColumn.RANK)] = _rank(logits, of_groups, row, target, vocab_size)
            out[row, int(LogprobColumn.IDS)] = targets[row]
            out[row, int(LogprobColumn.VALUES)] = _bits(target - normaliser)
            count = jnp.minimum(num_logprobs[row] - 1, MAX_STEP_LOGPROBS)

            @pl.when(count > 0)
            def _() -> None:
                values, ids, _ = select_best(
                    logits, of_groups, scratch, row, NUM_GROUPS, vocab_size, interpret=interpret
                )

                def take_next(i: jax.Array, rest: jax.Array) -> jax.Array:
                    value = jnp.max(rest)
                    token_id = jnp.min(jnp.where(rest == value, ids, jnp.iinfo(jnp.int32).max))
                    out[row, LogprobColumn.IDS + 1 + i] = token_id
                    out[row, LogprobColumn.VALUES + 1 + i] = _bits(
                        jnp.where(value == MASKED, -jnp.inf, value - normaliser)
                    )
                    return jnp.where(ids == token_id, -jnp.inf, rest)

                lax.fori_loop(0, count, take_next, jnp.maximum(values, MASKED))

            @pl.when(num_listed[row] > 0)
            def _() -> None:
                lanes = jnp.arange(listed_width)
                is_listed = lanes < num_listed[row]
                ids = triton.load(listed.at[row, lanes], mask=is_listed, other=0)
                values = triton.load(logits.at[row, ids], mask=is_listed, other=0.0)
                triton.store(out.at[row, LogprobColumn.LISTED + lanes], _bits(values - normaliser), mask=is_listed)

    outputs = (
        jax.ShapeDtypeStruct((num_rows, LOGPROBS_WIDTH), jnp.int32),
        jax.ShapeDtypeStruct((num_rows, NUM_GROUPS + 1), jnp.int32),
    )
    args = (logits, stats.maxima, stats.weights, targets, num_logprobs, listed_ids, num_listed)
    return call_kernel("logprobs", kernel, (num_rows,), outputs, *args, interpret=interpret)[0]


def _rank(logits: Ref, maxima: jax.Array, row: jax.Array, target: jax.Array, vocab_size: int) -> jax.Array:
    """How many tokens of the row are at least as likely as one with the logit `target`.

    Looks only at chunks of groups with such a token: at one for the most likely token.
    """
    no_chunk = jnp.iinfo(jnp.int32).max
    chunks = jnp.arange(maxima.shape[0]) // (CHUNK // GROUP_SIZE)
    chunks = jnp.where(maxima >= target, chunks, no_chunk)

    def count_chunk(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        count, chunk = state
        ids = chunk * CHUNK + jnp.arange(CHUNK)
        is_token = ids < vocab_size
        values = triton.load(logits.at[row, ids], mask=is_token, other=-jnp.inf)
        count += jnp.sum(((values >= target) & is_token).astype(jnp.int32))
        return count, jnp.min(jnp.where(chunks > chunk, chunks, no_chunk))

    return lax.while_loop(lambda state: state[1] < no_chunk, count_chunk, (jnp.int32(0), jnp.min(chunks)))[0]


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.int32)
