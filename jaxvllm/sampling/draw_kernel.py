"""Choosing a token on a GPU: one kernel, in which each row does what its own request asks and no more.

A greedy row looks at the group with the largest maximum. A drawing one looks at the candidates of the best groups, and
at the whole row if they might not be enough, as draw.py does it for all rows at once.

Letters: R rows  V vocab  G groups
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxvllm.random_bits import random_words
from jaxvllm.sampling.groups import GROUP_SIZE
from jaxvllm.sampling.noise import gumbel
from jaxvllm.sampling.row_kernel import (
    Ref,
    call_kernel,
    first_group,
    group_maxima,
    largest_threshold,
    load_maxima,
    num_groups,
    select_best,
)
from jaxvllm.sampling.rows import SamplingRows
from jaxvllm.sampling.thresholds import combine_limbs, limbs, ordered_bits
from scheduler.records import RecordField

NUM_GROUPS = 128  # top_k below it needs no more
_CHUNK = 4096  # tokens of a row at a time: sums of 9 digits of each stay in registers
_LARGEST_NOISE = 16.7


def choose(logits: jax.Array, rows: SamplingRows, *, interpret: bool = False) -> jax.Array:
    """One token id a row, i32[R], from f32[R, V] processed logits."""
    num_rows, vocab_size = logits.shape

    def kernel(
        logits: Ref, maxima: Ref, records: Ref, seq_lens: Ref, needs_sample: Ref, ids: Ref, scratch: Ref
    ) -> None:
        row = pl.program_id(0)
        request = _Request.load(records, seq_lens, row)
        of_groups = load_maxima(maxima, row)
        largest = jnp.max(of_groups)
        is_random = (request.temperature > 0) & (needs_sample[row] != 0) & (largest > -jnp.inf)

        def pick() -> jax.Array:
            start = first_group(of_groups, largest) * GROUP_SIZE
            lanes = start + jnp.arange(GROUP_SIZE)
            values = triton.load(logits.at[row, lanes], mask=lanes < vocab_size, other=-jnp.inf)
            return start + first_group(values, largest)

        def draw() -> jax.Array:
            best = _threshold_among_best(request, logits, of_groups, scratch, row, vocab_size, interpret=interpret)
            threshold, is_certain = best

            def among_all() -> jax.Array:
                return _threshold_among_all(request, logits, largest, row, vocab_size)

            threshold = lax.cond(is_certain, lambda: threshold, among_all)
            return _draw(request, logits, scratch, row, threshold, is_certain, vocab_size)

        # Whatever the logits are, NaN even: an id that exists.
        ids[row] = jnp.minimum(lax.cond(is_random, draw, pick), vocab_size - 1)

    maxima = group_maxima(logits, jnp.ones(num_rows, jnp.int32), interpret=interpret)
    outputs = (
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        jax.ShapeDtypeStruct((num_rows, NUM_GROUPS + 1), jnp.int32),
    )
    args = (logits, maxima, rows.records, rows.seq_lens, rows.needs_sample.astype(jnp.int32))
    return call_kernel(kernel, (num_rows,), outputs, *args, interpret=interpret)[0]


@dataclass(frozen=True)
class _Request:
    """What a row's request asks; scalars."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: tuple[jax.Array, jax.Array]  # u32 high and low word
    output_index: jax.Array

    @staticmethod
    def load(records: Ref, seq_lens: Ref, row: jax.Array) -> "_Request":
        def field(column: RecordField, dtype: jnp.dtype) -> jax.Array:
            return lax.bitcast_convert_type(records[row, int(column)], dtype)

        return _Request(
            temperature=field(RecordField.TEMPERATURE, jnp.float32),
            top_k=records[row, int(RecordField.TOP_K)],
            top_p=field(RecordField.TOP_P, jnp.float32),
            min_p=field(RecordField.MIN_P, jnp.float32),
            seed=(field(RecordField.SEED_HI, jnp.uint32), field(RecordField.SEED_LO, jnp.uint32)),
            output_index=seq_lens[row] - records[row, int(RecordField.NUM_PROMPT_TOKENS)],
        )

    def scale(self, logits: jax.Array) -> jax.Array:
        """Apply the temperature. A product keeps the order of the logits."""
        return logits * (1.0 / self.temperature)

    def noise(self, ids: jax.Array) -> jax.Array:
        """f32 of the shape of ids."""
        return gumbel(random_words(*self.seed, self.output_index, ids))

    def least_rank(self, largest: jax.Array) -> jax.Array:
        """Rank that min_p asks of a token."""
        return ordered_bits(largest + jnp.log(self.min_p))  # log(0) = -inf keeps all


def _threshold_among_best(
    request: _Request,
    logits: Ref,
    maxima: jax.Array,
    scratch: Ref,
    row: jax.Array,
    vocab_size: int,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """The least rank kept of the candidates, and whether that is the least of all; u32[], bool[]. Fills scratch."""
    num_candidates = NUM_GROUPS * GROUP_SIZE
    is_narrow = ((request.top_k > 0) & (request.top_k < NUM_GROUPS)) | (request.top_p < 1) | (request.min_p > 0)

    def find() -> tuple[jax.Array, jax.Array]:
        values, bound = select_best(logits, maxima, scratch, row, NUM_GROUPS, vocab_size, interpret=interpret)[::2]
        values, bound, largest = request.scale(values), request.scale(bound), request.scale(jnp.max(maxima))
        rank = ordered_bits(values)
        threshold = request.least_rank(largest)
        has_top_k = (request.top_k > 0) & (request.top_k <= num_candidates)

        def kth() -> jax.Array:
            return largest_threshold(lambda t: jnp.sum((rank >= t).astype(jnp.int32)) >= request.top_k)

        threshold = _raise_if(has_top_k, threshold, kth)
        # A threshold above the bound is certain: all tokens above it are candidates, so it was found among all.
        is_certain = (request.top_k <= 0) | (threshold > ordered_bits(bound))

        def top_p_threshold() -> jax.Array:
            # With top_k all that is kept before top_p is among the candidates.
            digits = limbs(jnp.where(rank >= threshold, jnp.exp(values - largest), 0.0))
            total = lax.cond(
                request.top_k > 0,
                lambda: _mass(digits, rank, jnp.uint32(0)),
                lambda: _mass_of_row(request, logits, row, largest, threshold, vocab_size),
            )
            target = request.top_p * total
            return largest_threshold(lambda t: _mass(digits, rank, t) >= target)

        threshold = _raise_if(request.top_p < 1, threshold, top_p_threshold)
        is_certain &= threshold > ordered_bits(bound)
        return threshold, is_certain | (bound == -jnp.inf)

    # No constants in a branch: Triton's lowering cannot return them.
    return lax.cond(is_narrow, find, lambda: (request.seed[0], is_narrow))


def _raise_if(is_asked: jax.Array, threshold: jax.Array, find: Callable[[], jax.Array]) -> jax.Array:
    return lax.cond(is_asked, lambda: jnp.maximum(threshold, find()), lambda: threshold)


def _draw(
    request: _Request,
    logits: Ref,
    scratch: Ref,
    row: jax.Array,
    threshold: jax.Array,
    is_certain: jax.Array,
    vocab_size: int,
) -> jax.Array:
    """The token whose sum of scaled logit and noise is the largest, the first of equals, of those that are kept.

    If the threshold is certain, scratch names the groups to look at.
    """
    num_best = min(NUM_GROUPS, num_groups(vocab_size))
    num_chunks = jnp.where(is_certain, jnp.int32(pl.cdiv(num_best * GROUP_SIZE, _CHUNK)), pl.cdiv(vocab_size, _CHUNK))

    def visit(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lanes = i * _CHUNK + jnp.arange(_CHUNK)
        groups = lanes // GROUP_SIZE
        is_there = ~is_certain | (groups < num_best)
        groups = triton.load(scratch.at[row, groups], mask=is_certain & is_there, other=0) + jnp.where(
            is_certain, 0, groups
        )
        ids = groups * GROUP_SIZE + lanes % GROUP_SIZE
        values = triton.load(logits.at[row, ids], mask=is_there & (ids < vocab_size), other=-jnp.inf)
        values = request.scale(values)
        values = jnp.where(ordered_bits(values) >= threshold, values, -jnp.inf)

        def look() -> tuple[jax.Array, jax.Array]:
            scores = values + request.noise(ids)
            largest = jnp.max(scores)
            drawn = jnp.min(jnp.where(scores == largest, ids, jnp.iinfo(jnp.int32).max))
            is_better = largest > best[0]
            return jnp.where(is_better, largest, best[0]), jnp.where(is_better, drawn, best[1])

        # Most tokens of a model's row cannot win whatever their noise, which is most of the work.
        return lax.cond(jnp.max(values) + _LARGEST_NOISE > best[0], look, lambda: best)

    return lax.fori_loop(0, num_chunks, visit, (jnp.float32(-jnp.inf), jnp.int32(0)))[1]


def _mass(digits: list[jax.Array], rank: jax.Array, lowest: jax.Array) -> jax.Array:
    """Sum of the weights of at least rank `lowest`, times a constant; see thresholds.mass_above."""
    return combine_limbs([jnp.sum(jnp.where(rank >= lowest, digit, jnp.uint32(0))) for digit in digits])


def _threshold_among_all(
    request: _Request, logits: Ref, largest: jax.Array, row: jax.Array, vocab_size: int
) -> jax.Array:
    """The least rank kept, u32[]: 16 passes over the row for top_k, and 17 for top_p."""
    largest = request.scale(largest)
    threshold = request.least_rank(largest)

    def chunks(visit: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], start: jax.Array) -> jax.Array:
        return _over_row(request, logits, row, vocab_size, visit, start)

    def kth() -> jax.Array:
        def counts(values: jax.Array, tried: jax.Array) -> list[jax.Array]:
            return [(ordered_bits(values) >= tried).astype(jnp.uint32)]

        return _threshold_of_row(chunks, counts, lambda sums: sums[0] >= request.top_k.astype(jnp.uint32), 1)

    threshold = _raise_if(request.top_k > 0, threshold, kth)

    def top_p_threshold() -> jax.Array:
        def masses(values: jax.Array, tried: jax.Array) -> list[jax.Array]:
            rank = ordered_bits(values)
            digits = limbs(jnp.where(rank >= threshold, jnp.exp(values - largest), 0.0))
            return [jnp.where(rank >= tried, digit, jnp.uint32(0)) for digit in digits]

        target = request.top_p * _mass_of_row(request, logits, row, largest, threshold, vocab_size)
        return _threshold_of_row(chunks, masses, lambda sums: combine_limbs(sums) >= target, 3)

    return _raise_if(request.top_p < 1, threshold, top_p_threshold)


def _over_row(request: _Request, logits: Ref, row: jax.Array, vocab_size: int, visit: Callable, start: Any) -> Any:
    """Fold visit(scaled values f32[_CHUNK], ids, state) over the chunks of a row; -inf behind the vocabulary."""

    def step(i: jax.Array, state: Any) -> Any:
        ids = i * _CHUNK + jnp.arange(_CHUNK)
        values = triton.load(logits.at[row, ids], mask=ids < vocab_size, other=-jnp.inf)
        return visit(request.scale(values), ids, state)

    return lax.fori_loop(0, pl.cdiv(vocab_size, _CHUNK), step, start)


def _mass_of_row(
    request: _Request, logits: Ref, row: jax.Array, largest: jax.Array, threshold: jax.Array, vocab_size: int
) -> jax.Array:
    def add(values: jax.Array, ids: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weights = jnp.where(ordered_bits(values) >= threshold, jnp.exp(values - largest), 0.0)
        return tuple(total + digit for total, digit in zip(sums, limbs(weights), strict=True))

    start = tuple(jnp.zeros(_CHUNK, jnp.uint32) for _ in range(3))
    return combine_limbs([jnp.sum(total) for total in _over_row(request, logits, row, vocab_size, add, start)])


def _threshold_of_row(
    chunks: Callable,
    parts: Callable[[jax.Array, jax.Array], list[jax.Array]],
    is_enough: Callable[[list[jax.Array]], jax.Array],
    num_parts: int,
) -> jax.Array:
    """As largest_threshold, with sums over the row: is_enough(sums of parts(values, t)). Two bits a pass."""

    def find_digit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        shift = (30 - 2 * i).astype(jnp.uint32)
        tried = [threshold | jnp.uint32(candidate) << shift for candidate in (1, 2, 3)]

        def add(values: jax.Array, ids: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            found = [part for t in tried for part in parts(values, t)]
            return tuple(total + part for total, part in zip(sums, found, strict=True))

        start = tuple(jnp.zeros(_CHUNK, jnp.uint32) for _ in range(3 * num_parts))
        sums = [jnp.sum(total) for total in chunks(add, start)]
        digit = jnp.uint32(0)
        for j in range(3):
            digit += is_enough(sums[j * num_parts : (j + 1) * num_parts]).astype(jnp.uint32)
        return threshold | digit << shift

    return lax.fori_loop(0, 16, find_digit, jnp.uint32(0))
