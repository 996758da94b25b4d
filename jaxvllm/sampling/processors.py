"""What changes a row's logits before a token is chosen, one function each, in the order in which they apply.

Letters: R rows  V vocab
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxvllm.sampling.rows import SamplingRows

Processor = Callable[[jax.Array, SamplingRows], jax.Array]


def mask_stop_ids(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """-inf at EOS and stop ids in rows that have not reached min_tokens."""
    num_rows, vocab_size = logits.shape
    is_listed = jnp.arange(rows.stop_ids.shape[1]) < rows.num_stop_ids[:, None]
    is_masked = is_listed & (rows.output_index < rows.min_tokens)[:, None] & (rows.stop_ids >= 0)
    ids = jnp.where(is_masked, rows.stop_ids, vocab_size)
    return logits.at[jnp.arange(num_rows)[:, None], ids].set(-jnp.inf, mode="drop")


# As in vLLM's sampler (SEMANTICS 2.9).
PROCESSORS: tuple[Processor, ...] = (mask_stop_ids,)
