"""What the engine has done so far, as numbers with vLLM's metric names."""

from collections import Counter as CounterDict
from dataclasses import dataclass, field

from scheduler.outputs import SchedulerStats


@dataclass(frozen=True, slots=True)
class Metric:
    """One number with its name, e.g. vllm:num_requests_running, and the labels that tell it from its siblings."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Grows from the engine's start."""


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """The present state."""


@dataclass
class FrontEndStats:
    """Counts since the engine's start; scheduler is what the core said last."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_finished: CounterDict[str] = field(default_factory=CounterDict)
    scheduler: SchedulerStats = field(default_factory=SchedulerStats)

    def count_finished(self, finish_reason: str) -> None:
        """One more completion has ended."""
        self.num_finished[finish_reason] += 1

    def to_metrics(self, device: dict[str, float]) -> list[Metric]:
        """All of it as a list; `device` holds the executor's numbers by name."""
        state = self.scheduler
        metrics: list[Metric] = [
            Gauge("vllm:num_requests_running", state.num_running_reqs),
            Gauge("vllm:num_requests_waiting", state.num_waiting_reqs),
            Gauge("vllm:kv_cache_usage_perc", state.kv_cache_usage),
            Counter("vllm:prefix_cache_queries", state.prefix_cache_queries),
            Counter("vllm:prefix_cache_hits", state.prefix_cache_hits),
            Counter("vllm:num_preemptions", state.num_preemptions),
            Counter("vllm:prompt_tokens", self.num_prompt_tokens),
            Counter("vllm:generation_tokens", self.num_generation_tokens),
        ]
        for reason, count in sorted(self.num_finished.items()):
            metrics.append(Counter("vllm:request_success", count, {"finished_reason": reason}))
        metrics.extend(Gauge(f"jaxvllm:{name}", value) for name, value in sorted(device.items()))
        return metrics
