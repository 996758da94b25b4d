"""The randomness of a draw: counter-based, so it depends on the request's seed and the output index alone."""

import jax
import jax.numpy as jnp

from jaxvllm.random_bits import random_bits
from jaxvllm.sampling.rows import SamplingRows


def gumbel_noise(rows: SamplingRows, vocab_size: int) -> jax.Array:
    """f32[R, V] of the standard Gumbel distribution; row r depends on (seed, output_index) of the row only."""
    bits = random_bits(rows.seed, rows.output_index, vocab_size)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23  # in the open interval (0, 1)
    return -jnp.log(-jnp.log(uniform))
