"""From logits to token ids: what processors, thresholds and noise make together."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.noise import gumbel_noise
from jaxvllm.sampling.processors import PROCESSORS
from jaxvllm.sampling.rows import SamplingRows
from jaxvllm.sampling.thresholds import kept_tokens


def sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """One token id a row.

    Args:
      logits: f32[R, V].
      rows: parameters of the rows; what comes out of a row without needs_sample is arbitrary.

    Returns: i32[R].
    """
    # One cond over everything beyond argmax, and it returns ids: a branch that passed logits through would copy them.
    is_plain = (rows.temperature <= 0) & (rows.output_index >= rows.min_tokens) & ~rows.has_grammar
    return lax.cond(jnp.all(is_plain | ~rows.needs_sample), _greedy, _process_and_sample, logits, rows)


def _greedy(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    del rows
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _process_and_sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    for process in PROCESSORS:
        logits = process(logits, rows)
    greedy_ids = jnp.argmax(logits, axis=-1)
    is_greedy = rows.temperature <= 0
    logits = logits / jnp.where(is_greedy, 1.0, rows.temperature)[:, None]
    is_kept = kept_tokens(logits, rows)
    noise = gumbel_noise(rows, logits.shape[1])
    drawn_ids = jnp.argmax(jnp.where(is_kept, logits + noise, -jnp.inf), axis=-1)
    return jnp.where(is_greedy, greedy_ids, drawn_ids).astype(jnp.int32)
