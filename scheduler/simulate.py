"""Run the real scheduler against a trace and a cost model, without a device: what would callers have waited for?

The clock is the device's: it runs dispatched steps one after the other, and the host's own time is a constant a step.
With async scheduling the next step is scheduled while one runs, as in the engine.
"""

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from scheduler.buckets import BucketKey, BucketPolicy, PaddingWaste, StepShape
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.cost_model import CostModel
from scheduler.outputs import ModelRunnerOutput, SchedulerOutput, SchedulerStats
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import make_scheduler
from scheduler.trace import TraceRequest

TIMELINE_INTERVAL_S = 1.0
TOKEN_ID = 7  # every output token: what is sampled does not matter here


@dataclass(slots=True)
class Timeline:
    """The state about once a second of simulated time; parallel columns."""

    time_s: list[float] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)
    kv_cache_usage: list[float] = field(default_factory=list)


@dataclass(slots=True)
class SimulationReport:
    """What a simulation measured. Times are simulated seconds, except host_s.

    Attributes:
      num_refused: requests that could never fit.
      duration_s: from the first arrival to the last token.
      host_s: real time that the simulation took.
      ttft_s: from arrival to first token, one a request.
      inter_token_s: between consecutive tokens of a request, one a token but the first.
      queue_s: from arrival to the first scheduled token, one a request.
      bucket_steps: how often each program ran.
      step_shapes: how often each real size of a step occurred.
    """

    policy: str
    num_requests: int
    num_refused: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    duration_s: float
    busy_s: float
    host_s: float
    ttft_s: np.ndarray
    inter_token_s: np.ndarray
    queue_s: np.ndarray
    padding: PaddingWaste
    bucket_steps: dict[BucketKey, int]
    step_shapes: dict[StepShape, int]
    stats: SchedulerStats
    timeline: Timeline

    @property
    def mean_running(self) -> float:
        """Requests that ran at once, by Little's law: time spent running over time in all."""
        seconds = self.ttft_s.sum() - self.queue_s.sum() + self.inter_token_s.sum()
        return float(seconds) / max(self.duration_s, 1e-9)

    def rows(self) -> dict[str, str]:
        """The report as words and figures, in the order of a table."""
        seconds = max(self.duration_s, 1e-9)
        hits, queries = self.stats.prefix_cache_hits, self.stats.prefix_cache_queries
        return {
            "requests (refused)": f"{self.num_requests:,} ({self.num_refused:,})",
            "simulated time, s": f"{self.duration_s:,.1f}",
            "host time, s": f"{self.host_s:,.1f}",
            "times real time": f"{seconds / max(self.host_s, 1e-9):,.0f}",
            "device busy": f"{self.busy_s / seconds:.1%}",
            "output tokens/s": f"{self.num_output_tokens / seconds:,.0f}",
            "prompt tokens/s": f"{self.num_prompt_tokens / seconds:,.0f}",
            "TTFT p50 / p99, ms": _percentiles_ms(self.ttft_s),
            "inter-token p50 / p99, ms": _percentiles_ms(self.inter_token_s),
            "queueing p50 / p99, ms": _percentiles_ms(self.queue_s),
            "pre-emptions": f"{self.stats.num_preemptions:,}",
            "recomputed tokens": f"{self.stats.num_recomputed_tokens:,}",
            "prefix hits": f"{hits / max(queries, 1):.1%}",
            "padding of tokens / rows": f"{self.padding.tokens:.1%} / {self.padding.rows:.1%}",
            "steps": f"{self.num_steps:,}",
            "programs used": f"{len(self.bucket_steps)}",
        }


def _percentiles_ms(seconds: np.ndarray) -> str:
    if not len(seconds):
        return "-"
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000
    return f"{p50:,.1f} / {p99:,.1f}"


class _Calls:
    """What the callers see: when each request came, was first scheduled, and got its tokens."""

    def __init__(self) -> None:
        self.arrival_s: dict[str, float] = {}
        self.ttft_s, self.inter_token_s, self.queue_s = array("d"), array("d"), array("d")
        self._last_token_s: dict[str, float] = {}

    def scheduled(self, output: SchedulerOutput, now: float) -> None:
        for new in output.scheduled_new_requests:
            self.queue_s.append(now - self.arrival_s[new.request_id])

    def got_tokens(self, request_ids: Sequence[str], now: float) -> None:
        last_token_s = self._last_token_s
        for request_id in request_ids:
            last = last_token_s.get(request_id)
            if last is None:
                self.ttft_s.append(now - self.arrival_s[request_id])
            else:
                self.inter_token_s.append(now - last)
            last_token_s[request_id] = now

    def ended(self, request_id: str) -> None:
        del self._last_token_s[request_id], self.arrival_s[request_id]


class Simulation:
    """One run over a trace; call run() once."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        policy: BucketPolicy,
        cost_model: CostModel,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        host_ms: float = 0.0,
    ) -> None:
        """Prepare a run.

        Args:
          trace: in the order of arrival.
          policy: chooses the bucket of each step; must cover the limits of `config`.
          cost_model: gives the time of a step.
          host_ms: time of the host a step, before it can be dispatched; hidden by the device with async scheduling.

        Raises: ValueError if host_ms is below 0, or not finite.
        """
        if not 0 <= host_ms < math.inf:
            raise ValueError(f"{host_ms=} must be at least 0, and finite.")
        self.scheduler = make_scheduler(config, cache_config, policy)
        self._trace = trace
        self._policy = policy
        self._cost = cost_model.completed(policy.keys())
        self._host_s = host_ms / 1000
        self._depth = 2 if config.async_scheduling else 1
        self._now = 0.0
        self._device_free_s = 0.0
        self._busy_s = 0.0
        self._num_arrived = 0
        self._num_refused = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._shapes: dict[StepShape, int] = {}
        self._calls = _Calls()
        self._timeline = Timeline()

    def run(self) -> SimulationReport:
        """Simulate until every request has ended."""
        start = perf_counter()
        in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, float]] = deque()
        while True:
            self._add_arrivals()
            output = self.scheduler.schedule()
            self._now += self._host_s
            if output.num_scheduled_tokens:
                self._calls.scheduled(output, self._now)
                in_flight.append((output, self._sample(output), self._dispatch(output)))
            elif not in_flight:
                if self._num_arrived == len(self._trace):
                    break
                self._now = max(self._now, self._trace[self._num_arrived].arrival_s)
                continue
            if len(in_flight) == self._depth or not output.num_scheduled_tokens:
                self._take_in(*in_flight.popleft())
        return self._report(perf_counter() - start)

    def _add_arrivals(self) -> None:
        while self._num_arrived < len(self._trace) and self._trace[self._num_arrived].arrival_s <= self._now:
            index, arrived = self._num_arrived, self._trace[self._num_arrived]
            self._num_arrived += 1
            request = Request(
                str(index),
                arrived.prompt_token_ids(index),
                SamplingParams(temperature=0.0, max_tokens=arrived.num_output_tokens, ignore_eos=True),
                arrival_time=arrived.arrival_s,
            )
            try:
                self.scheduler.add_request(request)
            except ValueError:  # can never fit: part of the report
                self._num_refused += 1
                continue
            self._num_prompt_tokens += arrived.num_prompt_tokens
            self._calls.arrival_s[request.request_id] = arrived.arrival_s

    def _dispatch(self, output: SchedulerOutput) -> float:
        """Let the device run a step; the time at which it ends."""
        known, new = output.scheduled_cached_requests, output.scheduled_new_requests
        num_tokens, num_reqs = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        is_decode = num_tokens == num_reqs and not new and not known.resumed_request_ids
        shape = StepShape("decode" if is_decode else "mixed", num_tokens, num_reqs)
        self._shapes[shape] = self._shapes.get(shape, 0) + 1
        context_tokens = sum(known.num_computed_tokens) + sum(r.num_computed_tokens for r in new) + num_tokens
        step_s = self._cost.step_ms(self._policy.select(*shape), context_tokens) / 1000
        self._busy_s += step_s
        self._device_free_s = max(self._device_free_s, self._now) + step_s
        return self._device_free_s

    def _sample(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """A token for each request whose known tokens are all computed by this step."""
        requests = self.scheduler.requests
        return ModelRunnerOutput(
            {
                i: TOKEN_ID
                for i in output.num_scheduled_tokens
                if requests[i].num_computed_tokens >= requests[i].num_tokens
            }
        )

    def _take_in(self, output: SchedulerOutput, sampled: ModelRunnerOutput, end_s: float) -> None:
        self._now = max(self._now, end_s)
        outputs = self.scheduler.update_from_output(output, sampled)
        self._num_output_tokens += len(outputs.request_ids)
        self._calls.got_tokens(outputs.request_ids, self._now)
        for request_id in outputs.finished:
            self._calls.ended(request_id)
        self._note_state()

    def _note_state(self) -> None:
        timeline = self._timeline
        if timeline.time_s and self._now < timeline.time_s[-1] + TIMELINE_INTERVAL_S:
            return
        stats = self.scheduler.make_stats()
        timeline.time_s.append(self._now)
        timeline.num_running.append(stats.num_running_reqs)
        timeline.num_waiting.append(stats.num_waiting_reqs)
        timeline.kv_cache_usage.append(stats.kv_cache_usage)

    def _report(self, host_s: float) -> SimulationReport:
        bucket_steps: dict[BucketKey, int] = {}
        for shape, count in self._shapes.items():
            key = self._policy.select(*shape)
            bucket_steps[key] = bucket_steps.get(key, 0) + count
        return SimulationReport(
            policy=self._policy.name,
            num_requests=len(self._trace) - self._num_refused,
            num_refused=self._num_refused,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_steps=sum(self._shapes.values()),
            duration_s=self._now,
            busy_s=self._busy_s,
            host_s=host_s,
            ttft_s=np.array(self._calls.ttft_s),
            inter_token_s=np.array(self._calls.inter_token_s),
            queue_s=np.array(self._calls.queue_s),
            padding=self._policy.padding_waste(shape for shape, count in self._shapes.items() for _ in range(count)),
            bucket_steps=bucket_steps,
            step_shapes=self._shapes,
            stats=self.scheduler.make_stats(),
            timeline=self._timeline,
        )
