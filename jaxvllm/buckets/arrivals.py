"""A trace's arrivals sped up until a wanted number of requests runs at once, and sizes tuned to the steps of that."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from scheduler.buckets import BucketPolicy, StepShape
from scheduler.simulate import SimulationReport
from scheduler.trace import TraceRequest

Simulate = Callable[[Sequence[TraceRequest], BucketPolicy], SimulationReport]
Tune = Callable[[Mapping[StepShape, int]], BucketPolicy]

TOLERANCE = 0.03
MAX_TRIES = 12
STEP = 1.6
MAX_SPEEDUP = 5000
# Where the device is nearly busy, 2% more arrivals let half as many requests more run at once, and steps grow. So a
# policy is also tuned to steps of so many times the requests, which count as so large a share of those wanted.
HEAVIER = 2.0
HEAVIER_SHARE = 0.05


def sped_up(trace: Sequence[TraceRequest], speedup: float) -> list[TraceRequest]:
    """The same requests, arriving `speedup` times faster.

    Raises: ValueError if that is not above 0.
    """
    if not 0 < speedup < math.inf:
        raise ValueError(f"{speedup=} must be above 0, and finite; 1 leaves the arrivals as they are.")
    return [replace(request, arrival_s=request.arrival_s / speedup) for request in trace]


def from_start(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests with the first one at 0 s."""
    return [replace(request, arrival_s=request.arrival_s - trace[0].arrival_s) for request in trace]


def scale_to_running(
    trace: Sequence[TraceRequest],
    policy: BucketPolicy,
    simulate: Simulate,
    mean_running: float,
    first_try: float = 1.0,
) -> tuple[float, SimulationReport]:
    """The speedup at which `mean_running` requests run at once on average, to 3%, and the simulation of it.

    Where the device is nearly busy the number grows without measure, so the search halves an interval.

    Raises:
      ValueError: no speedup gives that many.
    """

    def run(speedup: float) -> SimulationReport:
        return simulate(sped_up(trace, speedup), policy)

    low = high = first_try
    if run(first_try).mean_running < mean_running:
        while high <= MAX_SPEEDUP:
            low, high = high, high * STEP
            if run(high).mean_running >= mean_running:
                break
    else:
        while low >= 1 / MAX_SPEEDUP:
            low, high = low / STEP, low
            if run(low).mean_running < mean_running:
                break
    if high > MAX_SPEEDUP or low < 1 / MAX_SPEEDUP:
        raise ValueError(f"no speedup makes {mean_running} requests of this trace run at once: take another number.")
    speedup, report = high, None
    for _ in range(MAX_TRIES):
        speedup = (low * high) ** 0.5
        report = run(speedup)
        if abs(report.mean_running / mean_running - 1) <= TOLERANCE:
            break
        low, high = (speedup, high) if report.mean_running < mean_running else (low, speedup)
    assert report is not None
    return speedup, report


def tune_to_trace(
    trace: Sequence[TraceRequest], base: BucketPolicy, simulate: Simulate, tune: Tune, mean_running: float,
    first_try: float, rounds: int,
) -> tuple[BucketPolicy, float, SimulationReport]:  # fmt: skip
    """A policy for the arrivals with which `mean_running` requests run at once under it, those arrivals' speedup, and
    what the simulation says of it.

    Args:
      base: whose steps the first round tunes to; the next ones take those of the tuned policy.
      tune: the best policy for some steps.

    Raises: ValueError if no speedup gives that many.
    """
    policy = base
    speedup, report = scale_to_running(trace, policy, simulate, mean_running, first_try)
    for _ in range(rounds):
        heavier = _heavier(trace, policy, simulate, HEAVIER * mean_running, speedup)
        policy = tune(_mixture(report.step_shapes, heavier.step_shapes))
        speedup, report = scale_to_running(trace, policy, simulate, mean_running, speedup)
    return policy, speedup, report


def _heavier(
    trace: Sequence[TraceRequest], policy: BucketPolicy, simulate: Simulate, mean_running: float, first_try: float
) -> SimulationReport:
    """What so many running requests do, or as many as the trace and the limits let run."""
    busiest = simulate(sped_up(trace, MAX_SPEEDUP), policy)
    if busiest.mean_running <= mean_running:
        return busiest
    return scale_to_running(trace, policy, simulate, mean_running, first_try)[1]


def _mixture(usual: Mapping[StepShape, int], heavier: Mapping[StepShape, int]) -> Mapping[StepShape, int]:
    """Both, the heavier ones as a share of the usual ones; counts are hundredths."""
    weight = HEAVIER_SHARE * sum(usual.values()) / max(sum(heavier.values()), 1)
    counts = Counter({shape: 100 * count for shape, count in usual.items()})
    for shape, count in heavier.items():
        counts[shape] += max(round(100 * weight * count), 1)
    return counts
