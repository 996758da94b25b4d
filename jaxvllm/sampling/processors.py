"""What changes a row's logits before a token is chosen.

vLLM's order (vllm/v1/sample/sampler.py): grammar, and logprobs are of what it leaves; then allowed ids, bad words, stop
ids before min_tokens, bias, penalties, thinking budget. Masks are -inf, which bias and penalties leave as it is, so
some come later here. Custom processors see what these leave.

Letters: R rows  V vocab
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.custom import LogitsProcessor
from jaxvllm.sampling.rows import SamplingRows
from jaxvllm.sampling.token_counts import FORBIDDEN, count_tokens, penalise
from scheduler.records import RecordField
from scheduler.sampling_params import MAX_LISTED_IDS
from scheduler.token_lists import MAX_MASKED_IDS, ListField


def edit_logits(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Apply all that the rows ask for but grammars, custom processors and thinking budgets.

    Args:
      logits: f32[R, V].
      rows: the requests.

    Returns: f32[R, V]; a row that asks for nothing is bit-equal.
    """
    words = count_tokens(rows, logits.shape[1])
    edited = _bias(_penalise(logits, words, rows), logits, words, rows)
    # A copy of the logits is made once, above; these write in place.
    edited = _mask(edited, held_back_ids(rows, logits.shape[1]))
    return _mask(edited, bad_word_ids(rows, logits.shape[1]))


def apply_custom(logits: jax.Array, rows: SamplingRows, processors: tuple[LogitsProcessor, ...]) -> jax.Array:
    """Apply custom processors, in the order of their bits, to the rows that ask for them."""
    start = int(ListField.PROCESSORS)
    for index, processor in enumerate(processors):
        logits = _apply_one(logits, rows, processor, index, start)
        start += processor.num_params
    return logits


def mask_grammar(logits: jax.Array, places: jax.Array, masks: jax.Array) -> jax.Array:
    """-inf at the tokens that rows' grammars do not allow.

    Args:
      logits: f32[R, V].
      places: i32[A] in the step; R and more: a pad.
      masks: i32[A, words] bit b of word w: token 32 * w + b may come next; words beyond V do not count.
    """
    # Not by looking up each token's word: XLA makes that a gather of columns, and transposes it.
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1 == 1
    is_allowed = bits.reshape(len(places), -1)[:, : logits.shape[1]]
    kept = jnp.where(is_allowed, logits.at[places].get(mode="clip"), -jnp.inf)
    return logits.at[places].set(kept, mode="drop")


def _penalise(logits: jax.Array, words: jax.Array, rows: SamplingRows) -> jax.Array:
    """The penalties of f32[R, n] logits of some tokens with i32[R, n] words, and -inf for forbidden ones."""
    columns = (RecordField.REPETITION_PENALTY, RecordField.FREQUENCY_PENALTY, RecordField.PRESENCE_PENALTY)
    penalised = penalise(logits, words, *(rows.floats(column)[:, None] for column in columns))
    return jnp.where(words >= FORBIDDEN, -jnp.inf, penalised)


def _bias(penalised: jax.Array, logits: jax.Array, words: jax.Array, rows: SamplingRows) -> jax.Array:
    """Write the biased tokens anew: bias comes before the penalties."""
    num_rows, vocab_size = logits.shape
    ids = rows.lists(ListField.BIAS_IDS, MAX_LISTED_IDS)
    values = lax.bitcast_convert_type(rows.lists(ListField.BIAS_VALUES, MAX_LISTED_IDS), jnp.float32)
    is_listed = jnp.arange(MAX_LISTED_IDS) < rows.ints(RecordField.NUM_BIAS_IDS)[:, None]
    ids = jnp.where(is_listed, ids, vocab_size)
    row_numbers = jnp.arange(num_rows)[:, None]
    old = logits.at[row_numbers, ids].get(mode="fill", fill_value=0)
    words_of_ids = words.at[row_numbers, ids].get(mode="fill", fill_value=0)
    new = _penalise(old + jnp.where(is_listed, values, 0), words_of_ids, rows)
    return penalised.at[row_numbers, ids].set(new, mode="drop")


def _mask(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """-inf at i32[R, n] ids; V is no id."""
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")


def held_back_ids(rows: SamplingRows, vocab_size: int) -> jax.Array:
    """EOS and stop ids of rows that have not reached min_tokens; i32[R, MAX_MASKED_IDS], V: none."""
    ids = rows.lists(ListField.STOP_IDS, MAX_MASKED_IDS)
    is_listed = jnp.arange(MAX_MASKED_IDS) < rows.ints(RecordField.NUM_STOP_IDS)[:, None]
    return jnp.where(is_listed & rows.is_held_back[:, None] & (ids >= 0), ids, vocab_size)


def bad_word_ids(rows: SamplingRows, vocab_size: int) -> jax.Array:
    """Last tokens of bad words that they would complete; i32[R, MAX_LISTED_IDS], V: none.

    A word's other tokens must be the row's last output tokens; the prompt does not count, as in vLLM.
    """
    ids = rows.lists(ListField.BAD_WORD_IDS, MAX_LISTED_IDS)
    places = rows.lists(ListField.BAD_WORD_PLACES, MAX_LISTED_IDS)
    is_listed = jnp.arange(MAX_LISTED_IDS) < rows.ints(RecordField.NUM_BAD_WORD_IDS)[:, None]
    is_last = places <= 0
    positions = rows.seq_lens[:, None] - places
    is_output = positions >= rows.num_prompt_tokens[:, None]
    found = rows.history(positions, is_listed & ~is_last & is_output, -1)
    num_wrong = jnp.cumsum(jnp.where(is_last, 0, found != ids), axis=1)
    # Of the -place tokens before a last one: how many are wrong.
    before = jnp.arange(MAX_LISTED_IDS) + places
    wrong_before = jnp.take_along_axis(jnp.pad(num_wrong, ((0, 0), (1, 0))), jnp.maximum(before, 0), axis=1)
    is_bad = is_listed & is_last & (num_wrong == wrong_before)
    return jnp.where(is_bad, ids, vocab_size)


def _apply_one(logits: jax.Array, rows: SamplingRows, processor: LogitsProcessor, index: int, start: int) -> jax.Array:
    is_user = (rows.ints(RecordField.PROCESSORS) >> index & 1 == 1) & rows.needs_sample

    def apply(logits: jax.Array) -> jax.Array:
        params = lax.bitcast_convert_type(rows.lists(start, processor.num_params), jnp.float32)
        return jnp.where(is_user[:, None], processor.apply(logits, params), logits)

    return lax.cond(jnp.any(is_user), apply, lambda logits: logits, logits)
