"""Changing logits on a GPU: one kernel, in which each row applies what its own request asks and leaves the rest alone.

It writes into a copy of the logits. As in processors.py, tokens that occur are penalised first, biased ones then
written anew from the model's logits, and masks come last. What a pass writes depends only on what the passes before it
have finished, so it does not matter how often a token occurs, nor in which order threads write.

Letters: R rows of the step  N persistent rows  V vocab
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.row_kernel import Ref, call_kernel
from jaxvllm.sampling.rows import SamplingRows
from jaxvllm.sampling.token_counts import IN_PROMPT, penalise
from pallas_kernels.lazy import pl, triton
from scheduler.records import RecordField
from scheduler.sampling_params import MAX_LISTED_IDS, MAX_THINK_IDS
from scheduler.token_lists import MAX_MASKED_IDS, ListField

_CHUNK = 1024  # tokens of a row or of its history at a time
# Words are floats here, IN_PROMPT too: Triton's lowering in JAX 0.11 makes a sum of floats of every atomic_add, and one
# of integers would add nothing. Floats count to 2**24.
_IN_PROMPT = 2.0**23


def edit_logits(logits: jax.Array, rows: SamplingRows, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Apply all that the rows ask for but grammars and custom processors.

    Args:
      logits: f32[R, V].
      rows: the requests.
      interpret: run where there is no GPU.

    Returns: f32[R, V]; i32[R] the tokens that thinking budgets force, see thinking.forced_ids.
    """
    num_rows, vocab_size = logits.shape

    def kernel(
        _: Ref, logits: Ref, records: Ref, seq_lens: Ref, needs_sample: Ref, places: Ref, token_ids: Ref,
        token_lists: Ref, out: Ref, forced: Ref, words: Ref, scratch: Ref,
    ) -> None:  # fmt: skip
        number = pl.program_id(0)
        is_wanted = needs_sample[number] != 0
        place = jnp.where(is_wanted, places[number], 0)  # a pad's is no row
        row = _Row(number, place, seq_lens[number], records, token_ids, token_lists, vocab_size, interpret)
        has_bias = row.count(RecordField.NUM_BIAS_IDS) > 0
        pl.when(is_wanted & (row.has_penalties | has_bias))(lambda: _penalise(row, logits, out, words))
        pl.when(is_wanted & (row.count(RecordField.NUM_BAD_WORD_IDS) > 0))(lambda: _mask_bad_words(row, out, scratch))
        pl.when(is_wanted & row.is_held_back)(lambda: _hold_back(row, out))
        pl.when(is_wanted & (row.count(RecordField.NUM_ALLOWED_IDS) > 0))(lambda: _keep_allowed(row, out))
        has_budget = is_wanted & (row.count(RecordField.THINKING_BUDGET) >= 0)
        # No constants in a branch: Triton's lowering cannot return them.
        nothing = jnp.minimum(number, 0) - 1
        forced[number] = lax.cond(has_budget, lambda: _forced_id(row, nothing), lambda: nothing)

    outputs = (
        jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        jax.ShapeDtypeStruct((num_rows, MAX_LISTED_IDS), jnp.int32),
    )
    args = (rows.records, rows.seq_lens, rows.needs_sample.astype(jnp.int32), rows.rows, rows.token_ids)
    args = (logits, logits, *args, rows.token_lists)
    return tuple(call_kernel("process", kernel, (num_rows,), outputs, *args, aliases={0: 0}, interpret=interpret)[:2])


@dataclass(frozen=True)
class _Row:
    """One row: its request's numbers, and where its lists and its tokens lie."""

    number: jax.Array  # i32[] among the R
    place: jax.Array  # i32[] among the N
    seq_len: jax.Array
    records: Ref
    token_ids: Ref
    token_lists: Ref
    vocab_size: int
    interpret: bool

    def count(self, column: RecordField) -> jax.Array:
        """An integer of the record."""
        return self.records[self.number, int(column)]

    def factor(self, column: RecordField) -> jax.Array:
        """A float of the record."""
        return lax.bitcast_convert_type(self.count(column), jnp.float32)

    @property
    def num_prompt_tokens(self) -> jax.Array:
        return self.count(RecordField.NUM_PROMPT_TOKENS)

    @property
    def has_repetition_penalty(self) -> jax.Array:
        return self.factor(RecordField.REPETITION_PENALTY) != 1

    @property
    def has_penalties(self) -> jax.Array:
        others = RecordField.FREQUENCY_PENALTY, RecordField.PRESENCE_PENALTY
        return self.has_repetition_penalty | (self.factor(others[0]) != 0) | (self.factor(others[1]) != 0)

    @property
    def is_held_back(self) -> jax.Array:
        num_outputs = self.seq_len - self.num_prompt_tokens
        return (num_outputs < self.count(RecordField.MIN_TOKENS)) & (self.count(RecordField.NUM_STOP_IDS) > 0)

    def listed(self, start: int, length: int, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`count` entries of a list: values, and which lanes have one."""
        lanes = jnp.arange(pl.next_power_of_2(length))
        is_there = lanes < count
        return triton.load(self.token_lists.at[self.place, start + lanes], mask=is_there, other=0), is_there

    def history(self, positions: jax.Array, is_valid: jax.Array) -> jax.Array:
        """The tokens at positions; -1 where they are not valid."""
        return triton.load(self.token_ids.at[self.place, positions], mask=is_valid, other=-1)

    def load(self, source: Ref, ids: jax.Array, is_meant: jax.Array) -> jax.Array:
        """The entries of the row at ids; 0 in the lanes that are not meant."""
        return triton.load(source.at[self.number, ids], mask=is_meant, other=0)

    def store(self, target: Ref, ids: jax.Array, values: Any, is_meant: jax.Array) -> None:
        """Write the values of the lanes that are meant into the row."""
        # The interpreter writes back what it read for the others: not where one that is meant writes.
        ids = jnp.where(is_meant, ids, self.vocab_size)
        triton.store(target.at[self.number, ids], jnp.broadcast_to(values, ids.shape), mask=is_meant)

    def wait(self) -> None:
        """What the row's threads have written is there for all of them."""
        if not self.interpret:  # which runs one thing after the other
            triton.debug_barrier()

    def is_token(self, ids: jax.Array) -> jax.Array:
        return (ids >= 0) & (ids < self.vocab_size)


def _penalise(row: _Row, logits: Ref, out: Ref, words: Ref) -> None:
    """Count the tokens that occur, in words that are cleared where they are needed; penalise those, and biased ones."""
    bias_ids, is_biased = row.listed(ListField.BIAS_IDS, MAX_LISTED_IDS, row.count(RecordField.NUM_BIAS_IDS))
    bias, _ = row.listed(ListField.BIAS_VALUES, MAX_LISTED_IDS, row.count(RecordField.NUM_BIAS_IDS))
    is_biased &= row.is_token(bias_ids)
    num_prompt = row.num_prompt_tokens
    prompt_end = jnp.where(row.has_repetition_penalty, num_prompt, 0)
    output_end = jnp.where(row.has_penalties, row.seq_len, num_prompt)

    def over_history(start: Any, end: jax.Array, visit: Callable[[jax.Array, jax.Array], None]) -> None:
        def step(positions: jax.Array, is_real: jax.Array) -> None:
            ids = row.history(positions, is_real)
            visit(ids, row.is_token(ids))

        _over_chunks(start, end, step)

    def clear(ids: jax.Array, is_meant: jax.Array) -> None:
        row.store(words, ids, jnp.float32(0), is_meant)

    def mark(ids: jax.Array, is_meant: jax.Array) -> None:
        row.store(words, ids, jnp.float32(_IN_PROMPT), is_meant)

    def count(ids: jax.Array, is_meant: jax.Array) -> None:
        if row.interpret:  # which knows no atomic operations on many places
            places = jnp.where(is_meant, ids, row.vocab_size)
            words[row.number, :] = words[row.number, :].at[places].add(1.0, mode="drop")
        else:
            triton.atomic_add(words, (row.number, ids), jnp.ones(_CHUNK, jnp.float32), mask=is_meant)

    def write(ids: jax.Array, is_meant: jax.Array, added: Any = 0.0) -> None:
        columns = (RecordField.REPETITION_PENALTY, RecordField.FREQUENCY_PENALTY, RecordField.PRESENCE_PENALTY)
        old, found = row.load(logits, ids, is_meant) + added, row.load(words, ids, is_meant)
        is_marked = found >= _IN_PROMPT
        word = jnp.where(is_marked, found - _IN_PROMPT, found).astype(jnp.int32) + jnp.where(is_marked, IN_PROMPT, 0)
        row.store(out, ids, penalise(old, word, *(row.factor(column) for column in columns)), is_meant)

    clear(bias_ids, is_biased)
    over_history(num_prompt, output_end, clear)
    row.wait()
    over_history(jnp.int32(0), prompt_end, mark)
    row.wait()
    over_history(num_prompt, output_end, count)
    row.wait()
    over_history(jnp.int32(0), prompt_end, write)
    over_history(num_prompt, output_end, write)
    row.wait()
    write(bias_ids, is_biased, lax.bitcast_convert_type(bias, jnp.float32))
    row.wait()


def _mask_bad_words(row: _Row, out: Ref, scratch: Ref) -> None:
    """See processors.bad_word_ids."""
    count = row.count(RecordField.NUM_BAD_WORD_IDS)
    ids, is_listed = row.listed(ListField.BAD_WORD_IDS, MAX_LISTED_IDS, count)
    places, _ = row.listed(ListField.BAD_WORD_PLACES, MAX_LISTED_IDS, count)
    lanes = jnp.arange(ids.shape[0])
    is_last = places <= 0
    positions = row.seq_len - places
    is_output = positions >= row.num_prompt_tokens
    found = row.history(positions, is_listed & ~is_last & is_output)
    num_wrong = jnp.cumsum((~is_last & (found != ids)).astype(jnp.int32))
    triton.store(scratch.at[row.number, lanes], num_wrong)
    row.wait()
    before = lanes + places
    wrong_before = triton.load(scratch.at[row.number, jnp.maximum(before - 1, 0)], mask=before > 0, other=0)
    row.store(out, ids, -jnp.inf, is_listed & is_last & (num_wrong == wrong_before) & row.is_token(ids))
    row.wait()


def _hold_back(row: _Row, out: Ref) -> None:
    ids, is_listed = row.listed(ListField.STOP_IDS, MAX_MASKED_IDS, row.count(RecordField.NUM_STOP_IDS))
    row.store(out, ids, -jnp.inf, is_listed & row.is_token(ids))
    row.wait()


def _keep_allowed(row: _Row, out: Ref) -> None:
    ids, is_listed = row.listed(ListField.ALLOWED_IDS, MAX_LISTED_IDS, row.count(RecordField.NUM_ALLOWED_IDS))
    is_listed &= row.is_token(ids)
    kept = row.load(out, ids, is_listed)
    row.wait()
    _over_chunks(jnp.int32(0), jnp.int32(row.vocab_size), lambda ids, is_real: row.store(out, ids, -jnp.inf, is_real))
    row.wait()
    row.store(out, ids, kept, is_listed)


def _forced_id(row: _Row, nothing: jax.Array) -> jax.Array:
    """See thinking.forced_ids."""
    opened = _end_of_last(row, ListField.NUM_THINK_START)
    closed = _end_of_last(row, ListField.NUM_THINK_END)
    num_forced = row.seq_len - opened - row.count(RecordField.THINKING_BUDGET)
    num_ids = row.token_lists[row.place, int(ListField.NUM_THINK_END)]
    is_forced = (opened > closed) & (num_forced >= 0) & (num_forced < num_ids)
    token_id = row.token_lists[row.place, ListField.THINK_END + jnp.clip(num_forced, 0, MAX_THINK_IDS - 1)]
    return jnp.where(is_forced, token_id, nothing)


def _end_of_last(row: _Row, start: int) -> jax.Array:
    """The position behind the last place where the row's tokens are the ids listed from `start` on; 0: nowhere."""
    num_ids = row.token_lists[row.place, int(start)]

    def look(i: jax.Array, found: jax.Array) -> jax.Array:
        first = i * _CHUNK + jnp.arange(_CHUNK)

        def compare(j: jax.Array, is_equal: jax.Array) -> jax.Array:
            tokens = row.history(first + j, first + j < row.seq_len)
            return is_equal & (tokens == row.token_lists[row.place, start + 1 + j])

        is_equal = (first + num_ids <= row.seq_len) & (num_ids > 0)
        is_equal = lax.fori_loop(0, jnp.minimum(num_ids, MAX_THINK_IDS), compare, is_equal)
        return jnp.maximum(found, jnp.max(jnp.where(is_equal, first + num_ids, 0)))

    return lax.fori_loop(0, (row.seq_len + _CHUNK - 1) // _CHUNK, look, jnp.int32(0))


def _over_chunks(start: Any, end: jax.Array, visit: Callable[[jax.Array, jax.Array], None]) -> None:
    """visit(numbers i32[_CHUNK], which of them are below `end`) from start on."""

    def step(i: jax.Array, state: Any) -> Any:
        numbers = start + i * _CHUNK + jnp.arange(_CHUNK)
        visit(numbers, numbers < end)
        return state

    lax.fori_loop(0, (end - start + _CHUNK - 1) // _CHUNK, step, ())
