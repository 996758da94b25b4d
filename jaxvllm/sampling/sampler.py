"""From logits to token ids and logprobs: what processors, draw and logprobs make together."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.custom import LogitsProcessor
from jaxvllm.sampling.draw import choose, greedy
from jaxvllm.sampling.logprobs import sampled_logprobs
from jaxvllm.sampling.processors import process_logits
from jaxvllm.sampling.rows import SamplingRows
from jaxvllm.sampling.thinking import forced_ids
from scheduler.logprob_columns import LOGPROBS_WIDTH


def sample(
    logits: jax.Array, rows: SamplingRows, processors: tuple[LogitsProcessor, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """One token a row, and its logprobs.

    Args:
      logits: f32[R, V].
      rows: the requests; what comes out of a row without needs_sample is arbitrary.
      processors: custom ones, in the order of their bits.

    Returns: i32[R] token ids; i32[R, LOGPROBS_WIDTH] logprobs, zeros if no row wants any.
    """
    # One cond over everything beyond argmax, and it returns ids: a branch that passed logits through would copy them.
    is_plain = rows.is_greedy & ~rows.has_processing
    is_unseen = ~rows.needs_sample
    no_logprobs = jnp.zeros((logits.shape[0], LOGPROBS_WIDTH), jnp.int32)

    def work(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        token_ids = lax.cond(
            jnp.all(is_plain | is_unseen), greedy, lambda logits: _process_and_choose(logits, rows, processors), logits
        )
        return token_ids, lax.cond(
            jnp.any(rows.num_logprobs > 0),
            lambda logits: sampled_logprobs(logits, token_ids, rows),
            lambda _: no_logprobs,
            logits,
        )

    is_trivial = jnp.all((is_plain & (rows.num_logprobs == 0)) | is_unseen)
    return lax.cond(is_trivial, sample_plainly, work, logits)


def sample_plainly(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `sample` gives where every row is greedy and asks for nothing else; f32[R, V] logits."""
    return greedy(logits), jnp.zeros((logits.shape[0], LOGPROBS_WIDTH), jnp.int32)


def _process_and_choose(logits: jax.Array, rows: SamplingRows, processors: tuple[LogitsProcessor, ...]) -> jax.Array:
    # Passed through unprocessed, the logits are copied once: cheaper to start with than two programs for a draw.
    is_processed = jnp.any(rows.has_processing & rows.needs_sample)
    logits = lax.cond(
        is_processed, lambda logits: process_logits(logits, rows, processors), lambda logits: logits, logits
    )
    token_ids = choose(logits, rows)
    forced = lax.cond(is_processed, lambda: forced_ids(rows), lambda: jnp.full_like(token_ids, -1))
    return jnp.where(forced >= 0, forced, token_ids)
