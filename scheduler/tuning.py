"""The buckets that cost the steps of a trace the least time, under a budget of programs.

A step runs in the cheapest of the chosen buckets that hold it, so the choice is a k-median problem. The bucket that
saves the most is added until the budget is spent; then single buckets are exchanged as long as that saves anything.

Arrays here: D demands (sizes of steps), C candidates (buckets that might be chosen).
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scheduler.buckets import DEFAULT_MAX_PROGRAMS, BucketKey, BucketPolicy, StepKind, StepShape
from scheduler.cost_model import CostModel

# Rows that mixed buckets may have, besides max_num_seqs.
ROW_CHOICES = (16, 32, 64, 128, 256, 512)
TOLERATED = 2.0  # times the best there could be, that an assumed step may cost free of charge
PRIOR_RATIO = 1.4  # of neighbouring sizes among the assumed steps


@dataclass(frozen=True)
class TuningOptions:
    """What a tuned policy may look like.

    Attributes:
      max_programs: budget.
      decode_granule, mixed_granule: sizes are multiples of these (the limits themselves may be none).
      padding_price: what a token of a bucket is charged beyond the time that it takes, in times of what a token takes
        in the largest buckets. Where a step's time does not depend on its size, waste would be free without it.
      prior_share: what steps that the trace does not have may cost, as a share of the trace's time. They are of all
        sizes alike, by their logarithms, and cost as much as the time of their bucket exceeds TOLERATED times that of
        the best candidate. Without them everything rare is left to the largest bucket, and a burst of requests runs
        into a state of steps so slow that it does not leave it.
    """

    max_programs: int = DEFAULT_MAX_PROGRAMS
    decode_granule: int = 8
    mixed_granule: int = 32
    padding_price: float = 2.0
    prior_share: float = 0.03

    def __post_init__(self) -> None:
        for name in ("padding_price", "prior_share"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0, and finite.")


def tune(
    steps: Mapping[StepShape, int],
    cost: CostModel,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    options: TuningOptions | None = None,
) -> BucketPolicy:
    """The policy of at most max_programs buckets with the least expected step time.

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
        raise ValueError("the trace has no steps to tune for: it has no request that fits the limits and the KV pool.")
    candidates = _candidates(max_num_seqs, max_num_batched_tokens, options)
    price = options.padding_price * _ms_a_token(cost, max_num_seqs, max_num_batched_tokens)
    charges = np.array([cost.step_ms(key, 0) + price * key.T for key in candidates])
    # A decode step in a mixed bucket is no faster than in a decode bucket of as many rows.
    as_decode = np.array([cost.step_ms(BucketKey("decode", key.T, key.T), 0) + price * key.T for key in candidates])
    charges_of_decode = np.maximum(charges, as_decode)

    def charges_of(demands: list[BucketKey]) -> np.ndarray:
        holds, is_decode = _holds(candidates, demands), np.array([key.kind == "decode" for key in demands])
        return np.where(holds, np.where(is_decode[:, None], charges_of_decode, charges), np.inf)

    seen = _rounded_up(steps, candidates)
    rows = charges_of(list(seen)) * np.array([*seen.values()])[:, None]
    if options.prior_share:
        prior = charges_of(_assumed_steps(candidates))
        excess = np.maximum(prior / prior.min(axis=1, keepdims=True) - TOLERATED, 0.0)
        price_of_excess = options.prior_share * rows.min(axis=1).sum() / len(excess)
        rows = np.concatenate([rows, excess * price_of_excess])
    chosen = _choose(rows, options.max_programs, len(candidates) - 1)
    keys = [candidates[i] for i in chosen]
    return BucketPolicy(
        "tuned",
        max_num_seqs,
        max_num_batched_tokens,
        tuple(sorted(key.T for key in keys if key.kind == "decode")),
        tuple(sorted((key.T, key.R) for key in keys if key.kind == "mixed")),
        row_cost_tokens=_row_cost_tokens(cost, max_num_batched_tokens, max_num_seqs),
    )


def _candidates(max_num_seqs: int, max_num_batched_tokens: int, options: TuningOptions) -> list[BucketKey]:
    """All buckets that might be chosen; the last one holds every step."""
    decode = [*range(options.decode_granule, max_num_seqs, options.decode_granule), max_num_seqs]
    mixed = [*range(options.mixed_granule, max_num_batched_tokens, options.mixed_granule), max_num_batched_tokens]
    rows = [*filter(max_num_seqs.__gt__, ROW_CHOICES), max_num_seqs]
    keys = [BucketKey("decode", T, T) for T in decode]
    return keys + [BucketKey("mixed", T, R) for T in mixed for R in sorted({min(T, R) for R in rows})]


def _rounded_up(steps: Mapping[StepShape, int], candidates: list[BucketKey]) -> Counter[BucketKey]:
    """How many steps have each candidate as the smallest one of their kind that holds them."""
    sizes: dict[StepKind, list[int]] = {
        kind: sorted({key.T for key in candidates if key.kind == kind}) for kind in ("decode", "mixed")
    }
    rows = sorted({key.R for key in candidates if key.T == candidates[-1].T and key.kind == "mixed"})
    counts: Counter[BucketKey] = Counter()
    for (kind, num_tokens, num_reqs), count in steps.items():
        T = sizes[kind][np.searchsorted(sizes[kind], num_tokens)]
        R = T if kind == "decode" else min(T, rows[np.searchsorted(rows, num_reqs)])
        counts[BucketKey(kind, T, R)] += count
    return counts


def _assumed_steps(candidates: list[BucketKey]) -> list[BucketKey]:
    """Candidates whose tokens and rows lie about PRIOR_RATIO apart."""
    kept: set[tuple[StepKind, int]] = set()
    for kind in ("decode", "mixed"):
        least = 0.0
        for T in sorted({key.T for key in candidates if key.kind == kind}):
            if least <= T:
                kept.add((kind, T))
                least = PRIOR_RATIO * T
    return [key for key in candidates if (key.kind, key.T) in kept]


def _holds(candidates: list[BucketKey], demands: list[BucketKey]) -> np.ndarray:
    """bool[D, C]: whether a step of each size can run in each candidate."""
    key_T, key_R, key_is_decode = _columns(candidates)
    T, R, is_decode = _columns(demands)
    return (key_T >= T[:, None]) & (key_R >= R[:, None]) & (is_decode[:, None] | ~key_is_decode)


def _columns(keys: list[BucketKey]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([key.T for key in keys]),
        np.array([key.R for key in keys]),
        np.array([key.kind == "decode" for key in keys]),
    )


def _choose(charges: np.ndarray, budget: int, always: int) -> list[int]:
    """Up to `budget` columns of f64[D, C] whose least charges add up to little: no exchange of one column helps.

    Args:
      always: a column that is chosen in any case, finite in every row.
    """
    chosen = [always]
    least = charges[:, always]
    while len(chosen) < min(budget, charges.shape[1]):
        added = int(np.minimum(least[:, None], charges).sum(axis=0).argmin())
        if added in chosen:  # nothing more to save
            return chosen
        chosen.append(added)
        least = np.minimum(least, charges[:, added])
    total, is_better = least.sum(), True
    while is_better:
        is_better = False
        for place in range(1, len(chosen)):
            others = charges[:, chosen[:place] + chosen[place + 1 :]].min(axis=1)
            totals = np.minimum(others[:, None], charges).sum(axis=0)
            best = int(totals.argmin())
            if totals[best] < total * (1 - 1e-9):
                chosen[place], total, is_better = best, totals[best], True
    return chosen


def _ms_a_token(cost: CostModel, max_num_seqs: int, max_num_batched_tokens: int) -> float:
    """What a token takes in the largest buckets."""
    half = max_num_batched_tokens // 2
    if not half:
        return 0.0
    keys = [BucketKey("mixed", T, min(max_num_seqs, half)) for T in (half, max_num_batched_tokens)]
    low, high = (cost.step_ms(key, 0) for key in keys)
    return max(high - low, 0.0) / (max_num_batched_tokens - half)


def _row_cost_tokens(cost: CostModel, num_tokens: int, num_rows: int) -> float:
    """What a row of a mixed step costs, in tokens."""
    few_rows, few_tokens = max(num_rows // 4, 1), max(num_tokens // 4, num_rows)
    whole = cost.step_ms(BucketKey("mixed", num_tokens, num_rows), 0)
    of_rows = whole - cost.step_ms(BucketKey("mixed", num_tokens, few_rows), 0)
    of_tokens = whole - cost.step_ms(BucketKey("mixed", few_tokens, num_rows), 0)
    if of_tokens <= 0 or num_rows == few_rows:
        return 0.0
    return max(of_rows / (num_rows - few_rows), 0.0) * (num_tokens - few_tokens) / of_tokens
