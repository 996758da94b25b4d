"""How often each token of the vocabulary occurred in a row, and which tokens are not allowed: one word a token.

Letters: R rows  V vocab
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.rows import SamplingRows
from scheduler.records import RecordField
from scheduler.sampling_params import MAX_LISTED_IDS
from scheduler.token_lists import ListField

# The word of a token: its count in the output, plus IN_PROMPT; or FORBIDDEN or more.
IN_PROMPT = 1 << 29
FORBIDDEN = 1 << 30
_CHUNK = 512  # tokens of history a pass reads of each row


def count_tokens(rows: SamplingRows, vocab_size: int) -> jax.Array:
    """i32[R, V]. Prompts count only where a repetition penalty asks, outputs only where a penalty does."""
    num_rows = rows.seq_lens.shape[0]
    num_allowed = rows.ints(RecordField.NUM_ALLOWED_IDS)
    is_limited = (num_allowed > 0) & rows.needs_sample
    words = jnp.broadcast_to(jnp.where(is_limited, FORBIDDEN, 0)[:, None], (num_rows, vocab_size))
    allowed = rows.lists(ListField.ALLOWED_IDS, MAX_LISTED_IDS)
    allowed = jnp.where(jnp.arange(MAX_LISTED_IDS) < num_allowed[:, None], allowed, vocab_size)
    words = words.at[jnp.arange(num_rows)[:, None], allowed].set(0, mode="drop")

    no_tokens = jnp.zeros_like(rows.seq_lens)
    prompt_ends = jnp.where(rows.has_repetition_penalty & rows.needs_sample, rows.num_prompt_tokens, 0)
    # max: a forbidden token stays forbidden, and one that occurs twice is marked once.
    words = _scatter_history(words, rows, no_tokens, prompt_ends, IN_PROMPT, is_sum=False)
    output_ends = jnp.where(rows.has_penalties & rows.needs_sample, rows.seq_lens, rows.num_prompt_tokens)
    return _scatter_history(words, rows, rows.num_prompt_tokens, output_ends, 1, is_sum=True)


def _scatter_history(
    words: jax.Array, rows: SamplingRows, starts: jax.Array, ends: jax.Array, value: int, is_sum: bool
) -> jax.Array:
    """Add `value` at the tokens of positions [starts, ends), or raise their words to it. Integers: order is nothing."""
    num_rows, vocab_size = words.shape
    row_numbers = jnp.arange(num_rows)[:, None]

    def scatter_chunk(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, words = state
        positions = starts[:, None] + index * _CHUNK + jnp.arange(_CHUNK)
        token_ids = rows.history(positions, positions < ends[:, None], vocab_size)
        target = words.at[row_numbers, token_ids]
        words = target.add(value, mode="drop") if is_sum else target.max(value, mode="drop")
        return index + 1, words

    num_chunks = -(-jnp.max(ends - starts) // _CHUNK)
    return lax.while_loop(lambda state: state[0] < num_chunks, scatter_chunk, (jnp.int32(0), words))[1]


def penalise(
    logits: jax.Array, words: jax.Array, repetition: jax.Array, frequency: jax.Array, presence: jax.Array
) -> jax.Array:
    """Logits of some tokens after the penalties, which broadcast to them, as their words say; none is forbidden."""
    count = words & (IN_PROMPT - 1)
    x = jnp.where(words > 0, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    x -= frequency * count.astype(jnp.float32)
    return x - presence * (count > 0).astype(jnp.float32)
