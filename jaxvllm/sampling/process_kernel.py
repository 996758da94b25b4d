"""Changing logits on a GPU: one kernel, in which each row applies what its own request asks and leaves the rest alone.

vLLM's order, in place: allowed ids, bad words, stop ids before min_tokens, bias, penalties. Penalties touch the tokens
that occur and no others. A second kernel writes what the thinking budget forces, behind custom processors. Grammars are
processors.mask_grammar.

Letters: R rows of the step  N persistent rows  V vocab
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxvllm.sampling.row_kernel import Ref, call_kernel
from jaxvllm.sampling.rows import SamplingRows
from jaxvllm.sampling.thinking import CERTAIN
from jaxvllm.sampling.token_counts import IN_PROMPT, penalised
from scheduler.records import RecordField
from scheduler.sampling_params import MAX_LISTED_IDS, MAX_THINK_IDS
from scheduler.token_lists import MAX_MASKED_IDS, ListField

_CHUNK = 1024  # tokens of a row or of its history at a time


@dataclass(frozen=True)
class _Row:
    """One row: its request's numbers, and where its lists, its tokens and its mask lie."""

    number: jax.Array  # i32[] among the R
    place: jax.Array  # i32[] among the N
    seq_len: jax.Array
    records: Ref
    token_ids: Ref
    token_lists: Ref
    vocab_size: int
    interpret: bool

    def integer(self, column: RecordField) -> jax.Array:
        return self.records[self.number, int(column)]

    def number_of(self, column: RecordField) -> jax.Array:
        return lax.bitcast_convert_type(self.integer(column), jnp.float32)

    @property
    def num_prompt_tokens(self) -> jax.Array:
        return self.integer(RecordField.NUM_PROMPT_TOKENS)

    def listed(self, start: int, length: int, count: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`count` entries: lanes, values, which of them are there."""
        lanes = jnp.arange(pl.next_power_of_2(length))
        is_there = lanes < count
        return lanes, triton.load(self.token_lists.at[self.place, start + lanes], mask=is_there, other=0), is_there

    def tokens(self, positions: jax.Array, is_valid: jax.Array) -> jax.Array:
        """History; -1 where it is not asked for."""
        return triton.load(self.token_ids.at[self.place, positions], mask=is_valid, other=-1)

    def store(self, target: Ref, ids: jax.Array, values: Any, is_meant: jax.Array) -> None:
        """Write the values of the lanes that are meant."""
        # The interpreter writes back what it read for the others: not where one that is meant writes.
        ids = jnp.where(is_meant, ids, self.vocab_size)
        triton.store(target.at[self.number, ids], jnp.broadcast_to(values, ids.shape), mask=is_meant)

    def wait(self) -> None:
        """What the row's threads have written is there for all of them."""
        if not self.interpret:  # which runs one thing after the other
            triton.debug_barrier()


def edit_logits(logits: jax.Array, rows: SamplingRows, *, interpret: bool = False) -> jax.Array:
    """Apply all that the rows ask for but grammars, custom processors and thinking budgets; f32[R, V] to f32[R, V]."""
    num_rows, vocab_size = logits.shape

    def kernel(
        _: Ref, records: Ref, seq_lens: Ref, needs_sample: Ref, places: Ref, token_ids: Ref, token_lists: Ref,
        out: Ref, words: Ref, scratch: Ref,
    ) -> None:  # fmt: skip
        number = pl.program_id(0)
        is_wanted = needs_sample[number] != 0
        place = jnp.where(is_wanted, places[number], 0)
        row = _Row(number, place, seq_lens[number], records, token_ids, token_lists, vocab_size, interpret)
        num_outputs = row.seq_len - row.num_prompt_tokens
        is_held_back = (num_outputs < row.integer(RecordField.MIN_TOKENS)) & (row.integer(RecordField.NUM_STOP_IDS) > 0)
        has_repetition = row.number_of(RecordField.REPETITION_PENALTY) != 1
        has_penalties = has_repetition | (row.number_of(RecordField.FREQUENCY_PENALTY) != 0)
        has_penalties |= row.number_of(RecordField.PRESENCE_PENALTY) != 0

        pl.when(is_wanted & (row.integer(RecordField.NUM_ALLOWED_IDS) > 0))(lambda: _keep_allowed(row, out))
        pl.when(is_wanted & (row.integer(RecordField.NUM_BAD_WORD_IDS) > 0))(lambda: _mask_bad_words(row, out, scratch))
        pl.when(is_wanted & is_held_back)(lambda: _hold_back(row, out))
        pl.when(is_wanted & (row.integer(RecordField.NUM_BIAS_IDS) > 0))(lambda: _add_bias(row, out))
        pl.when(is_wanted & has_penalties)(lambda: _penalise(row, out, words, has_repetition))

    outputs = (
        jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        jax.ShapeDtypeStruct(logits.shape, jnp.int32),
        jax.ShapeDtypeStruct((num_rows, MAX_LISTED_IDS), jnp.int32),
    )
    args = (rows.records, rows.seq_lens, rows.needs_sample.astype(jnp.int32), rows.rows, rows.token_ids)
    args = (logits, *args, rows.token_lists)
    return call_kernel(kernel, (num_rows,), outputs, *args, aliases={0: 0}, interpret=interpret)[0]


def _keep_allowed(row: _Row, out: Ref) -> None:
    count = row.integer(RecordField.NUM_ALLOWED_IDS)
    _, ids, is_listed = row.listed(ListField.ALLOWED_IDS, MAX_LISTED_IDS, count)
    is_listed &= ids < row.vocab_size
    kept = triton.load(out.at[row.number, ids], mask=is_listed, other=-jnp.inf)
    row.wait()

    def fill(ids: jax.Array, is_real: jax.Array) -> None:
        row.store(out, ids, -jnp.inf, is_real)

    _over_chunks(jnp.int32(0), jnp.int32(row.vocab_size), fill)
    row.wait()
    row.store(out, ids, kept, is_listed)
    row.wait()


def _mask_bad_words(row: _Row, out: Ref, scratch: Ref) -> None:
    """See processors.bad_word_ids."""
    count = row.integer(RecordField.NUM_BAD_WORD_IDS)
    lanes, ids, is_listed = row.listed(ListField.BAD_WORD_IDS, MAX_LISTED_IDS, count)
    _, places, _ = row.listed(ListField.BAD_WORD_PLACES, MAX_LISTED_IDS, count)
    is_last = places <= 0
    positions = row.seq_len - places
    is_output = positions >= row.num_prompt_tokens
    found = row.tokens(positions, is_listed & ~is_last & is_output)
    num_wrong = jnp.cumsum((~is_last & (found != ids)).astype(jnp.int32))
    triton.store(scratch.at[row.number, lanes], num_wrong)
    row.wait()
    before = lanes + places
    wrong_before = triton.load(scratch.at[row.number, jnp.maximum(before - 1, 0)], mask=before > 0, other=0)
    is_bad = is_listed & is_last & (num_wrong == wrong_before) & (ids < row.vocab_size)
    row.store(out, ids, -jnp.inf, is_bad)
    row.wait()


def _hold_back(row: _Row, out: Ref) -> None:
    count = row.integer(RecordField.NUM_STOP_IDS)
    _, ids, is_listed = row.listed(ListField.STOP_IDS, MAX_MASKED_IDS, count)
    is_token = is_listed & (ids >= 0) & (ids < row.vocab_size)
    row.store(out, ids, -jnp.inf, is_token)
    row.wait()


def _add_bias(row: _Row, out: Ref) -> None:
    count = row.integer(RecordField.NUM_BIAS_IDS)
    _, ids, is_listed = row.listed(ListField.BIAS_IDS, MAX_LISTED_IDS, count)
    _, bias, _ = row.listed(ListField.BIAS_VALUES, MAX_LISTED_IDS, count)
    is_listed &= ids < row.vocab_size
    old = triton.load(out.at[row.number, ids], mask=is_listed, other=0.0)
    row.store(out, ids, old + lax.bitcast_convert_type(bias, jnp.float32), is_listed)
    row.wait()


def _penalise(row: _Row, out: Ref, words: Ref, has_repetition: jax.Array) -> None:
    """Count the tokens that occur, in words that are set to 0 beforehand where they occur; then take each word once."""
    num_prompt = row.num_prompt_tokens
    start = jnp.where(has_repetition, 0, num_prompt)

    def over_history(visit: Callable[[jax.Array, jax.Array, jax.Array], None]) -> None:
        def step(positions: jax.Array, is_real: jax.Array) -> None:
            ids = row.tokens(positions, is_real)
            visit(jnp.maximum(ids, 0), positions, is_real & (ids >= 0) & (ids < row.vocab_size))

        _over_chunks(start, row.seq_len, step)
        row.wait()

    def clear(ids: jax.Array, _: jax.Array, is_real: jax.Array) -> None:
        row.store(words, ids, jnp.int32(0), is_real)

    def count(ids: jax.Array, positions: jax.Array, is_real: jax.Array) -> None:
        is_prompt = positions < num_prompt
        _count(row, words, ids, is_real & is_prompt, is_real & ~is_prompt)

    def apply(ids: jax.Array, _: jax.Array, is_real: jax.Array) -> None:
        word = _take(row, words, ids, is_real)
        is_taken = is_real & (word > 0)
        old = triton.load(out.at[row.number, ids], mask=is_taken, other=0.0)
        columns = (RecordField.REPETITION_PENALTY, RecordField.FREQUENCY_PENALTY, RecordField.PRESENCE_PENALTY)
        new = penalised(old, word, *(row.number_of(column) for column in columns))
        row.store(out, ids, new, is_taken)

    over_history(clear)
    over_history(count)
    over_history(apply)


def _count(row: _Row, words: Ref, ids: jax.Array, is_prompt: jax.Array, is_output: jax.Array) -> None:
    if row.interpret:  # which knows no atomic operations on many places
        whole = words[row.number, :]
        in_prompt = jnp.zeros_like(whole).at[jnp.where(is_prompt, ids, row.vocab_size)].set(IN_PROMPT, mode="drop")
        words[row.number, :] = (whole | in_prompt).at[ids].add(is_output.astype(jnp.int32))
        return
    triton.atomic_or(words, (row.number, ids), jnp.full(_CHUNK, IN_PROMPT, jnp.int32), mask=is_prompt)
    triton.atomic_add(words, (row.number, ids), jnp.ones(_CHUNK, jnp.int32), mask=is_output)


def _take(row: _Row, words: Ref, ids: jax.Array, is_real: jax.Array) -> jax.Array:
    """The words of tokens, 0 from now on: of several lanes with one token a single one gets it."""
    if row.interpret:
        whole, lanes = words[row.number, :], jnp.arange(_CHUNK)
        places = jnp.where(is_real, ids, row.vocab_size)
        winner = jnp.zeros_like(whole).at[places].set(lanes, mode="drop")
        words[row.number, :] = whole.at[places].set(0, mode="drop")
        return jnp.where(is_real & (winner[ids] == lanes), whole[ids], 0)
    return triton.atomic_xchg(words, (row.number, ids), jnp.zeros(_CHUNK, jnp.int32), mask=is_real)


def _over_chunks(start: jax.Array, end: jax.Array, visit: Callable[[jax.Array, jax.Array], None]) -> None:
    """visit(numbers i32[_CHUNK], which of them are below `end`) from start on."""

    def step(i: jax.Array, state: Any) -> Any:
        numbers = start + i * _CHUNK + jnp.arange(_CHUNK)
        visit(numbers, numbers < end)
        return state

    lax.fori_loop(0, (end - start + _CHUNK - 1) // _CHUNK, step, ())


def force_tokens(logits: jax.Array, rows: SamplingRows, *, interpret: bool = False) -> jax.Array:
    """Make sure of the tokens that close a thinking beyond its budget; see thinking.forced_ids. In place."""
    num_rows, vocab_size = logits.shape

    def kernel(
        _: Ref, records: Ref, seq_lens: Ref, needs_sample: Ref, places: Ref, token_ids: Ref, token_lists: Ref, out: Ref
    ) -> None:
        number = pl.program_id(0)
        is_wanted = needs_sample[number] != 0
        place = jnp.where(is_wanted, places[number], 0)
        row = _Row(number, place, seq_lens[number], records, token_ids, token_lists, vocab_size, interpret)
        budget = row.integer(RecordField.THINKING_BUDGET)

        @pl.when(is_wanted & (budget >= 0))
        def _() -> None:
            opened = _end_of_last(row, ListField.NUM_THINK_START)
            closed = _end_of_last(row, ListField.NUM_THINK_END)
            num_forced = row.seq_len - opened - budget
            num_ids = token_lists[place, int(ListField.NUM_THINK_END)]

            @pl.when((opened > closed) & (num_forced >= 0) & (num_forced < num_ids))
            def _() -> None:
                token_id = token_lists[place, ListField.THINK_END + num_forced]
                # Triton's lowering cannot store a constant.
                out[number, token_id] = jnp.where(token_id >= 0, jnp.float32(CERTAIN), jnp.float32(0))

    args = (rows.records, rows.seq_lens, rows.needs_sample.astype(jnp.int32), rows.rows, rows.token_ids)
    outputs = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
    args = (logits, *args, rows.token_lists)
    return call_kernel(kernel, (num_rows,), outputs, *args, aliases={0: 0}, interpret=interpret)


def _end_of_last(row: _Row, start: int) -> jax.Array:
    """The position behind the last place where the row's tokens are the ids listed from `start` on; 0: nowhere."""
    num_ids = row.token_lists[row.place, int(start)]

    def look(i: jax.Array, found: jax.Array) -> jax.Array:
        first = i * _CHUNK + jnp.arange(_CHUNK)

        def compare(j: jax.Array, is_equal: jax.Array) -> jax.Array:
            tokens = row.tokens(first + j, first + j < row.seq_len)
            return is_equal & (tokens == row.token_lists[row.place, start + 1 + j])

        is_equal = (first + num_ids <= row.seq_len) & (num_ids > 0)
        is_equal = lax.fori_loop(0, jnp.minimum(num_ids, MAX_THINK_IDS), compare, is_equal)
        return jnp.maximum(found, jnp.max(jnp.where(is_equal, first + num_ids, 0)))

    return lax.fori_loop(0, (row.seq_len + _CHUNK - 1) // _CHUNK, look, jnp.int32(0))
