"""What the engine has done so far, as numbers with vLLM's metric names; jaxvllm.prometheus writes them as text."""

import re
from collections import Counter as CounterDict
from dataclasses import dataclass, field

from jaxvllm.config import EngineConfig
from jaxvllm.core_messages import CoreMetrics, EngineCoreInfo
from jaxvllm.distribution import Distribution, one_two_five

# vLLM's bounds.
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TPOT_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
ITERATION_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BOUNDS = (1, 2, 5, 10, 20)
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")

# What each number is, for Prometheus's HELP lines.
HELP = {
    "vllm:num_requests_running": "Requests in the running batch.",
    "vllm:num_requests_waiting": "Requests that wait for admission.",
    "vllm:kv_cache_usage_perc": "Share of the KV blocks in use; 1 is all of them.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:num_preemptions": "Requests that lost their blocks to others.",
    "vllm:prompt_tokens": "Prompt tokens of requests that got their first token.",
    "vllm:prompt_tokens_cached": "Of these, tokens that came out of the prefix cache.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:request_success": "Completions that ended, by reason.",
    "vllm:cache_config_info": "How the KV cache is set up, in the labels; always 1.",
    "vllm:time_to_first_token_seconds": "From a request's arrival to its first token.",
    "vllm:inter_token_latency_seconds": "From one token of a request to its next.",
    "vllm:request_time_per_output_token_seconds": "Mean time between the tokens of a request.",
    "vllm:e2e_request_latency_seconds": "From a request's arrival to its end.",
    "vllm:request_queue_time_seconds": "From a request's arrival in the core to its first step.",
    "vllm:request_prefill_time_seconds": "From a request's first step to its first token.",
    "vllm:request_decode_time_seconds": "From a request's first token to its last one.",
    "vllm:request_inference_time_seconds": "From a request's first step to its last token.",
    "vllm:request_prompt_tokens": "Prompt tokens of a request.",
    "vllm:request_prefill_kv_computed_tokens": "Prompt tokens of a request that were not in the prefix cache.",
    "vllm:request_generation_tokens": "Tokens that a request generated.",
    "vllm:request_max_num_generation_tokens": "Tokens of the longest of a request's n completions.",
    "vllm:request_params_n": "The parameter n of a request.",
    "vllm:request_params_max_tokens": "The parameter max_tokens of a request.",
    "vllm:iteration_tokens_total": "Tokens that a step brought to an end: prompts with their first token, and outputs.",
    "jaxvllm:num_recomputed_tokens": "Tokens computed again after a pre-emption.",
    "jaxvllm:step_host_time_seconds": "Work of the core's loop a step: scheduling, planning, updating.",
    "jaxvllm:dispatch_seconds": "Time that the thread beside the loop dispatched steps, or waited for grammar masks.",
    "jaxvllm:step_wait_time_seconds": "How long the host waited for the device in a step; near 0: the host is slower.",
    "jaxvllm:steps": "Steps run, by bucket.",
    "jaxvllm:step_tokens": "Real tokens in steps, by bucket.",
    "jaxvllm:step_padding_tokens": "Tokens that a bucket was larger than its step.",
    "jaxvllm:step_padding_rows": "Rows that a bucket was larger than its step.",
    "jaxvllm:num_programs": "Compiled programs.",
    "jaxvllm:num_loaded_programs": "Programs that an earlier start had compiled.",
    "jaxvllm:late_compiles": "Programs that were compiled while serving.",
    "jaxvllm:compile_seconds": "Time spent lowering and compiling.",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A number or a distribution with its name, and the labels that tell it from its siblings."""

    name: str
    labels: dict[str, str] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Grows from the engine's start. The name is without Prometheus's _total."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """The present state."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """How values are distributed. buckets: upper bound, as text ("+Inf" too) -> how many values lie at or below it."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass(slots=True)
class RequestTimes:
    """One completion's history, as count_finished takes it; seconds of time.monotonic(), 0.0: it did not happen."""

    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0


class FrontEndStats:
    """Counts since the engine's start.

    Attributes:
      cache_config: labels of vllm:cache_config_info.
      core: what the core said last; whoever asks the core sets it.
    """

    def __init__(self, max_model_len: int = 8192, cache_config: dict[str, str] | None = None) -> None:
        self.cache_config = cache_config or {}
        self.core = CoreMetrics()
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_finished: CounterDict[str] = CounterDict()
        lengths = one_two_five(max_model_len)
        self.time_to_first_token = Distribution(TTFT_BOUNDS)
        self.inter_token_latency = Distribution(TPOT_BOUNDS)
        self.time_per_output_token = Distribution(TPOT_BOUNDS)
        self.e2e_latency = Distribution(LATENCY_BOUNDS)
        self.queue_time = Distribution(LATENCY_BOUNDS)
        self.prefill_time = Distribution(LATENCY_BOUNDS)
        self.decode_time = Distribution(LATENCY_BOUNDS)
        self.inference_time = Distribution(LATENCY_BOUNDS)
        self.request_prompt_tokens = Distribution(lengths)
        self.request_computed_tokens = Distribution(lengths)
        self.request_generation_tokens = Distribution(lengths)
        self.request_max_generation_tokens = Distribution(lengths)
        self.params_n = Distribution(N_BOUNDS)
        self.params_max_tokens = Distribution(lengths)
        self.iteration_tokens = Distribution(ITERATION_BOUNDS)
        self._step_ts = 0.0
        self._num_step_tokens = 0

    @classmethod
    def of_engine(cls, config: EngineConfig, info: EngineCoreInfo) -> "FrontEndStats":
        """For an engine whose core has started."""
        cache_config = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "enable_prefix_caching": str(config.memory.enable_prefix_caching),
            "gpu_memory_utilization": str(config.memory.gpu_memory_utilization),
        }
        return cls(info.max_model_len, cache_config)

    def count_first_token(self, latency_s: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A completion has its first token, latency_s after the request's arrival."""
        self.time_to_first_token.observe(latency_s)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_prompt_tokens += num_cached_tokens
        self.request_computed_tokens.observe(num_prompt_tokens - num_cached_tokens)

    def count_step(self, timestamp: float, num_prompt_tokens: int, last_times: dict[float, int]) -> None:
        """A step's tokens have come, or a part of them.

        Args:
          timestamp: when the core had them; parts of one step have the same.
          num_prompt_tokens: of the completions that got their first one.
          last_times: when their completions got the token before (0.0: never) -> how many of them.
        """
        num_tokens = sum(last_times.values())
        self.num_generation_tokens += num_tokens
        if timestamp != self._step_ts:
            self._end_step()
            self._step_ts = timestamp
        if num_tokens:
            self._num_step_tokens += num_prompt_tokens + num_tokens
        for last_time, times in last_times.items():
            if last_time:
                self.inter_token_latency.observe(timestamp - last_time, times)

    def _end_step(self) -> None:
        if self._num_step_tokens:
            self.iteration_tokens.observe(self._num_step_tokens)
            self._num_step_tokens = 0

    def count_finished(
        self, reason: str, e2e_s: float, times: RequestTimes, num_prompt: int, num_generated: int, max_tokens: int
    ) -> None:
        """One more completion has ended; what it never came to is not counted."""
        self.num_finished[reason] += 1
        self.e2e_latency.observe(e2e_s)
        self.request_prompt_tokens.observe(num_prompt)
        self.request_generation_tokens.observe(num_generated)
        self.params_max_tokens.observe(max_tokens)
        if times.scheduled_ts:
            self.queue_time.observe(times.scheduled_ts - times.queued_ts)
        if times.first_token_ts:
            decode_s = times.last_token_ts - times.first_token_ts
            self.prefill_time.observe(times.first_token_ts - times.scheduled_ts)
            self.decode_time.observe(decode_s)
            self.inference_time.observe(times.last_token_ts - times.scheduled_ts)
            if num_generated > 1:
                self.time_per_output_token.observe(decode_s / (num_generated - 1))

    def count_request_finished(self, n: int, max_num_generated: int) -> None:
        """The last of a request's n completions has ended; the longest had max_num_generated tokens."""
        self.params_n.observe(n)
        self.request_max_generation_tokens.observe(max_num_generated)

    def to_metrics(self) -> list[Metric]:
        """All of it as a list, with the core's state as it was when it was asked last."""
        self._end_step()
        state = self.core.scheduler
        metrics: list[Metric] = [
            Gauge("vllm:num_requests_running", state.num_running_reqs),
            Gauge("vllm:num_requests_waiting", state.num_waiting_reqs),
            Gauge("vllm:kv_cache_usage_perc", state.kv_cache_usage),
            Counter("vllm:prefix_cache_queries", state.prefix_cache_queries),
            Counter("vllm:prefix_cache_hits", state.prefix_cache_hits),
            Counter("vllm:num_preemptions", state.num_preemptions),
            Counter("vllm:prompt_tokens", self.num_prompt_tokens),
            Counter("vllm:prompt_tokens_cached", self.num_cached_prompt_tokens),
            Counter("vllm:generation_tokens", self.num_generation_tokens),
        ]
        for reason in FINISHED_REASONS:
            metrics.append(
                Counter("vllm:request_success", self.num_finished[reason], labels={"finished_reason": reason})
            )
        if self.cache_config:
            metrics.append(Gauge("vllm:cache_config_info", 1, labels=self.cache_config))
        metrics.extend(_histogram(name, values) for name, values in self._distributions().items())
        metrics.append(Counter("jaxvllm:num_recomputed_tokens", state.num_recomputed_tokens))
        metrics.extend(_device_metric(name, value) for name, value in sorted(self.core.device.items()))
        return metrics

    def _distributions(self) -> dict[str, Distribution]:
        return {
            "vllm:time_to_first_token_seconds": self.time_to_first_token,
            "vllm:inter_token_latency_seconds": self.inter_token_latency,
            "vllm:request_time_per_output_token_seconds": self.time_per_output_token,
            "vllm:e2e_request_latency_seconds": self.e2e_latency,
            "vllm:request_queue_time_seconds": self.queue_time,
            "vllm:request_prefill_time_seconds": self.prefill_time,
            "vllm:request_decode_time_seconds": self.decode_time,
            "vllm:request_inference_time_seconds": self.inference_time,
            "vllm:request_prompt_tokens": self.request_prompt_tokens,
            "vllm:request_prefill_kv_computed_tokens": self.request_computed_tokens,
            "vllm:request_generation_tokens": self.request_generation_tokens,
            "vllm:request_max_num_generation_tokens": self.request_max_generation_tokens,
            "vllm:request_params_n": self.params_n,
            "vllm:request_params_max_tokens": self.params_max_tokens,
            "vllm:iteration_tokens_total": self.iteration_tokens,
            "jaxvllm:step_host_time_seconds": self.core.step_host_time,
            "jaxvllm:step_wait_time_seconds": self.core.step_wait_time,
        }


def _histogram(name: str, values: Distribution) -> Histogram:
    buckets, total = {}, 0
    for bound, count in zip([*values.bounds, float("inf")], values.counts, strict=True):
        total += count
        buckets["+Inf" if bound == float("inf") else str(float(bound))] = total
    return Histogram(name, total, values.sum, buckets)


_LABEL = re.compile(r'(\w+)="([^"]*)"')


def _device_metric(name: str, value: float) -> Metric:
    """One of Executor.metrics(): a counter's name ends in _total, labels stand behind in braces."""
    name, _, labels = name.partition("{")
    is_counter = name.endswith("_total")
    kind = Counter if is_counter else Gauge
    return kind(f"jaxvllm:{name.removesuffix('_total')}", value, labels=dict(_LABEL.findall(labels)))
