"""Choosing a token on a GPU: one kernel, in which each row does what its own request asks and no more.

A greedy row looks at the group with the largest maximum. A drawing one looks at the candidates of the best groups, and
at the whole row if they might not be enough, as draw.py does it for all rows at once. Without filters it looks at what
is known of each group, and then at the tokens of one.

Letters: R rows  V vocab  G groups
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.random_bits import random_words
from jaxvllm.sampling.draw import NUM_GROUPS
from jaxvllm.sampling.groups import GROUP_SIZE, token_weights
from jaxvllm.sampling.noise import gumbel, of_group
from jaxvllm.sampling.row_kernel import (
    CHUNK,
    GroupStats,
    Ref,
    ScaledRow,
    call_kernel,
    first_group,
    largest_threshold,
    load_groups,
    num_groups,
    select_best,
)
from jaxvllm.sampling.row_search import RowSearch
from jaxvllm.sampling.rows import SamplingRows
from jaxvllm.sampling.thresholds import LIMB_BITS, combine_limbs, limbs, ordered_bits
from pallas_kernels.lazy import pl, triton
from scheduler.records import RecordField


def scales(rows: SamplingRows) -> jax.Array:
    """What the logits are multiplied with before the draw, f32[R]: 1 for greedy rows, 0 where no token is wanted."""
    scale = jnp.where(rows.is_greedy, 1.0, 1.0 / rows.floats(RecordField.TEMPERATURE))
    return jnp.where(rows.needs_sample, scale, 0.0)


def choose(logits: jax.Array, stats: GroupStats, rows: SamplingRows, *, interpret: bool = False) -> jax.Array:
    """One token id a row, i32[R], from f32[R, V] processed logits and their group_stats with `scales`."""
    num_rows, vocab_size = logits.shape

    def kernel(
        logits: Ref, maxima: Ref, weights: Ref, records: Ref, seq_lens: Ref, scales: Ref,
        ids: Ref, scratch: Ref, between: Ref,
    ) -> None:  # fmt: skip
        number = pl.program_id(0)
        request = _Request.load(records, seq_lens, number)
        row = ScaledRow(number, logits, scales[number], vocab_size)
        of_groups = load_groups(maxima, number, -jnp.inf)
        largest = jnp.max(of_groups)
        # An infinite logit has no share of the others: it is the choice.
        can_draw = (largest > -jnp.inf) & (row.scale(largest) < jnp.inf)
        is_random = (request.temperature > 0) & (row.factor != 0) & can_draw

        def pick() -> jax.Array:
            start = first_group(of_groups, largest) * GROUP_SIZE
            lanes = start + jnp.arange(GROUP_SIZE)
            values = triton.load(logits.at[number, lanes], mask=lanes < vocab_size, other=-jnp.inf)
            return start + first_group(values, largest)

        def draw() -> jax.Array:
            def among_kept() -> tuple[jax.Array, jax.Array]:
                threshold, is_certain = _threshold_among_best(request, row, of_groups, scratch, interpret=interpret)
                threshold = lax.cond(
                    is_certain,
                    lambda: threshold,
                    lambda: _threshold_among_all(request, row, row.scale(largest), between, interpret=interpret),
                )
                return _draw_group(request, row, threshold, is_certain, scratch), threshold

            def among_all() -> tuple[jax.Array, jax.Array]:
                # The weights are known of all groups; the threshold keeps all.
                groups = jnp.arange(of_groups.shape[0])
                scores = _scores(request, groups, row.scale(of_groups), load_groups(weights, number, 0))
                return _first_best(scores, groups)[1], request.seed[0] & jnp.uint32(0)

            return _draw_token(request, row, *lax.cond(request.has_filters, among_kept, among_all))

        # Whatever the logits are, NaN even: an id that exists.
        ids[number] = jnp.minimum(lax.cond(is_random, draw, pick), vocab_size - 1)

    outputs = (
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        jax.ShapeDtypeStruct((num_rows, NUM_GROUPS + 1), jnp.int32),
        jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32),
    )
    args = (logits, stats.maxima, stats.weights, rows.records, rows.seq_lens, scales(rows))
    return call_kernel("draw", kernel, (num_rows,), outputs, *args, interpret=interpret)[0]


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

    @property
    def has_filters(self) -> jax.Array:
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)

    def noise(self, counters: jax.Array) -> jax.Array:
        """f32 of the shape of the counters; see noise.gumbel_noise."""
        return gumbel(random_words(*self.seed, self.output_index, counters))

    def least_rank(self, largest: jax.Array) -> jax.Array:
        """Rank that min_p asks of a token."""
        return ordered_bits(largest + jnp.log(self.min_p))  # log(0) = -inf keeps all


def _scores(request: _Request, groups: jax.Array, largest: jax.Array, weights: jax.Array) -> jax.Array:
    """By which groups are drawn, of their largest scaled logits and their weights."""
    return largest + jnp.log(weights.astype(jnp.float32)) + request.noise(of_group(groups))


def _first_best(scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest score, and the lowest id that has it."""
    largest = jnp.max(scores)
    return largest, jnp.min(jnp.where(scores == largest, ids, jnp.iinfo(jnp.int32).max))


def _threshold_among_best(
    request: _Request, row: ScaledRow, maxima: jax.Array, best: Ref, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The least rank kept of the best groups' tokens, and whether that is the least of all; u32[], bool[].

    Writes down the best groups.
    """
    num_candidates = NUM_GROUPS * GROUP_SIZE
    is_narrow = ((request.top_k > 0) & (request.top_k < NUM_GROUPS)) | (request.top_p < 1) | (request.min_p > 0)

    def find() -> tuple[jax.Array, jax.Array]:
        values, bound = select_best(
            row.logits, maxima, best, row.number, NUM_GROUPS, row.vocab_size, interpret=interpret
        )[::2]
        values, bound, largest = row.scale(values), row.scale(bound), row.scale(jnp.max(maxima))
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
                lambda: _mass_of_row(row, largest, threshold),
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


def _draw_group(request: _Request, row: ScaledRow, threshold: jax.Array, is_certain: jax.Array, best: Ref) -> jax.Array:
    """The group of the token to draw, of those with tokens that are kept; the best groups alone if that is certain."""
    num_best = min(NUM_GROUPS, num_groups(row.vocab_size))
    per_chunk = CHUNK // GROUP_SIZE
    num_chunks = [jnp.int32(pl.cdiv(count, per_chunk)) for count in (num_best, num_groups(row.vocab_size))]
    num_chunks = jnp.where(is_certain, *num_chunks)

    def visit(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        places = i * per_chunk + jnp.arange(per_chunk)
        is_there = ~is_certain | (places < num_best)
        listed = triton.load(best.at[row.number, places], mask=is_certain & is_there, other=0)
        groups = jnp.where(is_certain, listed, places)
        ids = groups[:, None] * GROUP_SIZE + jnp.arange(GROUP_SIZE)[None, :]
        values = row.load(ids, is_there[:, None])
        values = jnp.where(ordered_bits(values) >= threshold, values, -jnp.inf)
        largest = jnp.max(values, axis=1)
        weights = jnp.sum(token_weights(values, largest[:, None]), axis=1, dtype=jnp.uint32)
        score, group = _first_best(_scores(request, groups, largest, weights), groups)
        is_better = score > found[0]
        return jnp.where(is_better, score, found[0]), jnp.where(is_better, group, found[1])

    return lax.fori_loop(0, num_chunks, visit, (jnp.float32(-jnp.inf), jnp.int32(0)))[1]


def _draw_token(request: _Request, row: ScaledRow, group: jax.Array, threshold: jax.Array) -> jax.Array:
    """One token of a group, of those that are kept."""
    ids = group * GROUP_SIZE + jnp.arange(GROUP_SIZE)
    values = row.load(ids)
    values = jnp.where(ordered_bits(values) >= threshold, values, -jnp.inf)
    return _first_best(values + request.noise(ids), ids)[1]


def _mass(digits: list[jax.Array], rank: jax.Array, lowest: jax.Array) -> jax.Array:
    """Sum of the weights of at least rank `lowest`, times a constant; see thresholds.mass_above."""
    return combine_limbs([jnp.sum(jnp.where(rank >= lowest, digit, jnp.uint32(0))) for digit in digits])


def _threshold_among_all(
    request: _Request, row: ScaledRow, largest: jax.Array, between: Ref, *, interpret: bool
) -> jax.Array:
    """The least rank kept, u32[]: some passes over the row for top_k, and for top_p."""
    one = jnp.uint32(1 << LIMB_BITS[0])

    def raise_by(stage: jax.Array, threshold: jax.Array) -> jax.Array:
        is_top_k = stage == 0

        def weigh(values: jax.Array) -> jax.Array:
            weights = jnp.where(ordered_bits(values) >= threshold, jnp.exp(values - largest), 0.0)
            return jnp.where(is_top_k, 1.0, weights)  # a count is a mass, too

        def is_enough(sums: list[jax.Array], totals: list[jax.Array]) -> jax.Array:
            is_mass = combine_limbs(sums) >= request.top_p * combine_limbs(totals)
            return jnp.where(is_top_k, sums[0] >= request.top_k.astype(jnp.uint32) * one, is_mass)

        share = jnp.where(is_top_k, request.top_k.astype(jnp.float32) / row.vocab_size, request.top_p)
        is_asked = jnp.where(is_top_k, (request.top_k > 0) & (request.top_k < row.vocab_size), request.top_p < 1)
        search = RowSearch(row, between, weigh, is_enough, share, interpret)
        return _raise_if(is_asked, threshold, search.threshold)

    # A loop, so that the search is compiled once.
    return lax.fori_loop(0, 2, raise_by, request.least_rank(largest))


def _mass_of_row(row: ScaledRow, largest: jax.Array, threshold: jax.Array) -> jax.Array:
    def add(values: jax.Array, _: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weights = jnp.where(ordered_bits(values) >= threshold, jnp.exp(values - largest), 0.0)
        return tuple(total + digit for total, digit in zip(sums, limbs(weights), strict=True))

    start = tuple(jnp.zeros(CHUNK, jnp.uint32) for _ in range(3))
    return combine_limbs([jnp.sum(total) for total in row.fold(add, start)])
