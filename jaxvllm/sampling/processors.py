"""What changes a row's logits before a token is chosen, one function each, in the order in which they apply.

Letters: R rows  V vocab
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.rows import SamplingRows

_ROWS_PER_CHUNK = 16  # rows that mask_grammar treats at a time

Processor = Callable[[jax.Array, SamplingRows], jax.Array]


def mask_grammar(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """-inf at the tokens that a row's grammar does not allow; nothing is done where no row has one."""
    masks, row_numbers = rows.grammar_masks, rows.row_numbers
    if masks is None or row_numbers is None or masks.shape[1] == 0:
        return logits
    num_rows, vocab_size = logits.shape
    has_mask = rows.has_grammar & rows.needs_sample
    chunk = min(num_rows, _ROWS_PER_CHUNK)
    (masked_rows,) = jnp.nonzero(has_mask, size=-(-num_rows // chunk) * chunk, fill_value=num_rows)
    tokens = jnp.arange(vocab_size, dtype=jnp.uint32)

    def mask_chunk(i: jax.Array, logits: jax.Array) -> jax.Array:
        places = lax.dynamic_slice(masked_rows, (i * chunk,), (chunk,))
        words = masks.at[row_numbers.at[places].get(mode="fill", fill_value=0)].get(mode="fill", fill_value=0)
        is_allowed = (words[:, tokens >> 5] >> (tokens & 31).astype(jnp.int32)) & 1 == 1
        kept = jnp.where(is_allowed, logits.at[places].get(mode="clip"), -jnp.inf)
        return logits.at[places].set(kept, mode="drop")

    # Rows in place, in a loop that runs as often as there are such rows: a cond that passed the logits through would
    # copy them all, 70 us at [256, 151936] on an H200's memory.
    return lax.fori_loop(0, -(-jnp.sum(has_mask) // chunk), mask_chunk, logits)


def mask_stop_ids(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """-inf at EOS and stop ids in rows that have not reached min_tokens."""
    num_rows, vocab_size = logits.shape
    is_listed = jnp.arange(rows.stop_ids.shape[1]) < rows.num_stop_ids[:, None]
    is_masked = is_listed & (rows.output_index < rows.min_tokens)[:, None] & (rows.stop_ids >= 0)
    ids = jnp.where(is_masked, rows.stop_ids, vocab_size)
    return logits.at[jnp.arange(num_rows)[:, None], ids].set(-jnp.inf, mode="drop")


# As in vLLM's sampler (SEMANTICS 2.9).
PROCESSORS: tuple[Processor, ...] = (mask_grammar, mask_stop_ids)
