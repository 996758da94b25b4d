"""The bucket sizes that cost the least time for the steps of a trace, under a budget of programs.

Decode sizes and mixed sizes are lines of sizes: the best k sizes on a line are found exactly, by dynamic programming
over the candidates, for every k; then the budget is split over the lines where they cost the least together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.buckets import BucketKey, BucketPolicy, StepKind, StepShape
from scheduler.cost_model import CostModel

# Rows of the mixed buckets for few requests.
ROW_CHOICES = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class TuningOptions:
    """What a tuned policy may look like.

    Attributes:
      max_programs: budget.
      decode_granule, mixed_granule: sizes are multiples of these (the limits themselves may be none).
      padding_price: what a token of a bucket is charged beyond the time that it takes, in times of what a token takes
        in the largest buckets. Where a step's time does not depend on its size, waste would be free without it.
      prior_share: so many more steps, as a share of the trace's, are assumed to spread evenly over the logarithms of
        tokens and of requests, so that what the trace does not have is not left to the largest bucket.
    """

    max_programs: int = 24
    decode_granule: int = 8
    mixed_granule: int = 32
    padding_price: float = 1.0
    prior_share: float = 0.01


@dataclass(frozen=True)
class _Line:
    """The steps that one line of sizes serves: counts[i] of them have sizes[i] as their smallest candidate."""

    sizes: np.ndarray
    counts: np.ndarray


# Index k: the cost and the sizes of the best k sizes; None where k sizes cannot cover the limit.
_Choices = list[tuple[float, list[int]] | None]


def tune(
    steps: Mapping[StepShape, int],
    cost: CostModel,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    options: TuningOptions | None = None,
) -> BucketPolicy:
    """The policy of at most max_programs buckets with the least expected step time.

    Mixed steps of few requests have a line of sizes of their own, with few rows, where that pays: the logits of
    max_num_seqs rows can cost as much as the step. How few is one of ROW_CHOICES.

    Args:
      steps: the shapes of the steps of a trace and how often each ran.
      cost: gives the time of a bucket. The time of the context is the same in every bucket and does not matter.
      max_num_seqs, max_num_batched_tokens: the limits to cover.

    Raises:
      ValueError: there are no steps, or the budget is below two programs.
    """
    options = options or TuningOptions()
    if options.max_programs < 2:
        raise ValueError(f"max_programs={options.max_programs} must be at least 2: a decode and a mixed bucket.")
    if not steps:
        raise ValueError("the trace has no steps to tune for.")
    budget = options.max_programs
    half, rows = max_num_batched_tokens // 2, min(max_num_seqs, max_num_batched_tokens // 2)
    large = (
        [cost.step_ms(BucketKey("mixed", T, rows), 0) for T in (half, max_num_batched_tokens)] if half else [0.0, 0.0]
    )
    token_price_ms = options.padding_price * max(large[1] - large[0], 0.0) / max(max_num_batched_tokens - half, 1)

    def choices(kind: StepKind, fewest: int, most: int) -> _Choices:
        """Sizes for the steps of `fewest` to `most` requests, whose buckets have `most` rows."""
        limit = max_num_seqs if kind == "decode" else max_num_batched_tokens
        granule = options.decode_granule if kind == "decode" else options.mixed_granule
        of_kind = {s: n for s, n in steps.items() if s.kind == kind}
        mine = {s: n for s, n in of_kind.items() if fewest <= s.num_reqs <= most}
        share = np.log((most + 1) / fewest) / np.log(max_num_seqs + 1)
        line = _line(mine, limit, granule, options.prior_share * max(sum(of_kind.values()), 1) * share)
        ms = [step_ms(kind, T, most) for T in line.sizes.tolist()]
        if kind == "mixed" and most < max_num_seqs:
            ms[-1] = step_ms(kind, limit, max_num_seqs)
        return _best_sizes(line, np.array(ms), budget)

    def step_ms(kind: StepKind, T: int, rows: int) -> float:
        key = BucketKey(kind, T, T if kind == "decode" else min(T, rows))
        return cost.step_ms(key, 0) + token_price_ms * T

    decode, mixed = choices("decode", 1, max_num_seqs), choices("mixed", 1, max_num_seqs)
    total, sizes = _best_split([decode, mixed], budget)
    best = (total, sizes, 0)
    for few in (rows for rows in ROW_CHOICES if rows < max_num_seqs):
        # The line of few requests ends in the other line's largest bucket, which costs no program more.
        few_line = choices("mixed", 1, few)[1:]
        total, sizes = _best_split([decode, choices("mixed", few + 1, max_num_seqs), few_line], budget)
        best = min(best, (total, sizes, few), key=lambda found: found[0])
    _, (decode_sizes, many_sizes, *few_sizes), few = best
    buckets = {(T, min(T, max_num_seqs)) for T in many_sizes}
    buckets |= {(T, min(T, few)) for sizes in few_sizes for T in sizes[:-1]}
    return BucketPolicy(
        "tuned",
        max_num_seqs,
        max_num_batched_tokens,
        tuple(decode_sizes),
        tuple(sorted(buckets)),
        row_cost_tokens=_row_cost_tokens(cost, max_num_batched_tokens, max_num_seqs),
    )


def _row_cost_tokens(cost: CostModel, num_tokens: int, num_rows: int) -> float:
    """What a row of a mixed step costs, in tokens."""
    few_rows, few_tokens = max(num_rows // 4, 1), max(num_tokens // 4, num_rows)
    whole = cost.step_ms(BucketKey("mixed", num_tokens, num_rows), 0)
    of_rows = whole - cost.step_ms(BucketKey("mixed", num_tokens, few_rows), 0)
    of_tokens = whole - cost.step_ms(BucketKey("mixed", few_tokens, num_rows), 0)
    if of_tokens <= 0 or num_rows == few_rows:
        return 0.0
    return max(of_rows / (num_rows - few_rows), 0.0) * (num_tokens - few_tokens) / of_tokens


def _line(steps: Mapping[StepShape, int], limit: int, granule: int, num_prior_steps: float) -> _Line:
    sizes = np.array(sorted({*range(granule, limit, granule), limit}))
    counts = np.zeros(len(sizes))
    np.add.at(counts, np.searchsorted(sizes, [shape.num_tokens for shape in steps]), np.array([*steps.values()], float))
    prior = np.diff(np.log(np.concatenate([[granule / 2], sizes])))
    return _Line(sizes, counts + prior * (num_prior_steps / prior.sum()))


def _best_sizes(line: _Line, ms: np.ndarray, budget: int) -> _Choices:
    """For each number of sizes up to `budget`, those that cover the line at the least cost.

    Args:
      ms: f64[m] the time of a step of each candidate size.
    """
    num_sizes = len(line.sizes)
    sums = np.concatenate([[0.0], np.cumsum(line.counts)])
    best = np.full((budget + 1, num_sizes + 1), np.inf)
    best[0, 0] = 0.0
    begins = np.zeros((budget + 1, num_sizes + 1), int)
    for end in range(1, num_sizes + 1):
        costs = (sums[end] - sums[:end]) * ms[end - 1]
        totals = best[:-1, :end] + costs
        begins[1:, end] = totals.argmin(axis=1)
        best[1:, end] = totals.min(axis=1)
    result: _Choices = []
    for k in range(budget + 1):
        sizes, end, left = [], num_sizes, k
        while end and np.isfinite(best[k, num_sizes]):
            sizes.append(int(line.sizes[end - 1]))
            end, left = int(begins[left, end]), left - 1
        result.append((float(best[k, num_sizes]), sizes[::-1]) if sizes else None)
    return result


def _best_split(lines: Sequence[_Choices], budget: int) -> tuple[float, list[list[int]]]:
    """The division of the budget over the lines that costs the least in all; inf if it cannot cover them."""
    best: dict[int, tuple[float, list[list[int]]]] = {0: (0.0, [])}
    for line in lines:
        longer: dict[int, tuple[float, list[list[int]]]] = {}
        for used, (total, chosen) in best.items():
            for k, choice in enumerate(line[: budget - used + 1]):
                if choice is not None and total + choice[0] < longer.get(used + k, (np.inf, []))[0]:
                    longer[used + k] = (total + choice[0], [*chosen, choice[1]])
        best = longer
    return min(best.values(), default=(np.inf, [[] for _ in lines]), key=lambda split: split[0])
