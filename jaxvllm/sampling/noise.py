"""The randomness of a draw: counter-based, so it depends on the request's seed and the output index alone."""

import jax
import jax.numpy as jnp

from jaxvllm.random_bits import random_bits
from jaxvllm.sampling.rows import SamplingRows


def gumbel_noise(rows: SamplingRows, counters: jax.Array) -> jax.Array:
    """The noise of some tokens or groups: f32[R, n] of the standard Gumbel distribution.

    Args:
      rows: row r's noise depends on its (seed, output_index) only.
      counters: i32[n] or i32[R, n] token ids, or of_group; noise is the same among whichever others it is asked for.
    """
    return gumbel(random_bits(rows.seed, rows.output_index, counters))


def of_group(groups: jax.Array) -> jax.Array:
    """The counters of groups: none is a token's."""
    return -1 - groups


def gumbel(bits: jax.Array) -> jax.Array:
    """The noise made of u32 random words; between -2.82 and 16.64."""
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23  # in the open interval (0, 1)
    return -jnp.log(-jnp.log(uniform))
