"""A trace's arrivals sped up until a wanted number of requests runs at once, and sizes tuned to the steps of that."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from scheduler.buckets import BucketPolicy
from scheduler.simulate import SimulationReport
from scheduler.trace import TraceRequest

Simulate = Callable[[Sequence[TraceRequest], BucketPolicy], SimulationReport]

TOLERANCE = 0.05
MAX_TRIES = 12
STEP = 1.6
MAX_SPEEDUP = 5000


def sped_up(trace: Sequence[TraceRequest], speedup: float) -> list[TraceRequest]:
    """The same requests, arriving `speedup` times faster."""
    return [replace(request, arrival_s=request.arrival_s / speedup) for request in trace]


def scale_to_running(
    trace: Sequence[TraceRequest],
    policy: BucketPolicy,
    simulate: Simulate,
    mean_running: float,
    first_try: float = 1.0,
) -> tuple[float, SimulationReport]:
    """The speedup at which `mean_running` requests run at once on average, to 5%, and the simulation of it.

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
