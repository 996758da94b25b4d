"""One workload under several bucket policies: padding, programs, compile time, memory, step times, throughput, gaps.

The engine core runs as it serves, two steps in flight, with a planner for each policy and one runner for all: a program
that two policies share is compiled once. Where requests arrive by step number the steps do not depend on how long they
take, so what a policy would take can also be estimated: by scheduling its steps, and from measured step times.
"""

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxvllm.buckets.measure import measure_steps
from jaxvllm.config import EngineConfig
from jaxvllm.core import EngineCore
from jaxvllm.core_messages import EngineCoreRequest
from jaxvllm.model_runner import ModelRunner
from scheduler.buckets import BucketKey, BucketPolicy, StepShape
from scheduler.cost_model import CostModel, StepSample
from scheduler.outputs import ModelRunnerOutput, SchedulerOutput
from scheduler.plan import Planner
from scheduler.sampling_params import SamplingParams
from scheduler.trace import TraceRequest


@dataclass(frozen=True)
class Workload:
    """Requests in the order of arrival.

    Attributes:
      arrivals: of each request: a step number, or seconds.
      in_seconds: what arrivals are.
    """

    prompts: list[list[int]]
    num_outputs: list[int]
    arrivals: list[float]
    in_seconds: bool = False


@dataclass
class Result:
    """What one policy did with the workload, or would do. Times in seconds unless the name says otherwise."""

    policy: str
    is_estimated: bool
    num_programs: int
    compile_s: float | None  # lowering and compiling of its programs, added up; None: they were not compiled
    workspace_bytes: int | None  # of its largest program, beside weights and pool
    num_steps: int
    token_waste: float
    row_waste: float
    total_s: float
    tokens_per_s: float
    mean_step_ms: float
    p99_inter_token_ms: float
    mean_running: float
    step_ms: dict[str, float] = field(default_factory=dict)  # median by bucket
    steps: dict[str, int] = field(default_factory=dict)  # count by bucket
    mixed_sizes: list[tuple[int, int]] = field(default_factory=list)
    decode_sizes: list[int] = field(default_factory=list)


@dataclass
class StepLog:
    """The steps of one run: real shapes, buckets, and milliseconds from the result before (or the dispatch)."""

    shapes: list[StepShape] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)  # tokens that the step's requests attend to
    keys: list[BucketKey] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)

    def note(self, scheduler_output: SchedulerOutput) -> None:
        """Remember the shape of a step, and what its requests attend to."""
        known, new = scheduler_output.scheduled_cached_requests, scheduler_output.scheduled_new_requests
        num_tokens, num_reqs = scheduler_output.total_num_scheduled_tokens, len(scheduler_output.num_scheduled_tokens)
        is_decode = num_tokens == num_reqs and not (new or known.resumed_request_ids)
        self.shapes.append(StepShape("decode" if is_decode else "mixed", num_tokens, num_reqs))
        computed = sum(known.num_computed_tokens) + sum(request.num_computed_tokens for request in new)
        self.contexts.append(computed + num_tokens)

    def counts(self) -> dict[StepShape, int]:
        """How often each shape occurred."""
        counts: dict[StepShape, int] = defaultdict(int)
        for shape in self.shapes:
            counts[shape] += 1
        return dict(counts)


def synthetic_workload(
    num_requests: int, mean_input: int, mean_output: int, arrivals_per_step: float, vocab_size: int, max_model_len: int,
    seed: int = 0,
) -> Workload:  # fmt: skip
    """Log-normal lengths, exponential gaps between arrivals, which are step numbers.

    Raises: ValueError if a number or a length is below 1, or requests do not arrive.
    """
    for name, value in (("num_requests", num_requests), ("input_len", mean_input), ("output_len", mean_output)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    if not arrivals_per_step > 0:
        raise ValueError(f"{arrivals_per_step=} must be above 0.")
    rng = np.random.default_rng(seed)

    def lengths(mean: int) -> np.ndarray:
        drawn = rng.lognormal(np.log(mean) - 0.5, 1.0, num_requests)
        return np.clip(drawn.astype(int), 1, max_model_len // 2 - 1)

    prompt_lens, num_outputs = lengths(mean_input), lengths(mean_output)
    arrivals = np.cumsum(rng.exponential(1 / arrivals_per_step, num_requests)).astype(int)
    prompts = [rng.integers(1, vocab_size, n).tolist() for n in prompt_lens]
    return Workload(prompts, num_outputs.tolist(), (arrivals - arrivals[0]).tolist())


def trace_workload(trace: Sequence[TraceRequest], vocab_size: int, max_model_len: int, seed: int = 0) -> Workload:
    """The requests of a trace at their times; longer ones are cut to max_model_len."""
    rng = np.random.default_rng(seed)
    num_outputs = [min(request.num_output_tokens, max_model_len // 2) for request in trace]
    lengths = [
        min(request.num_prompt_tokens, max_model_len - n - 1) for request, n in zip(trace, num_outputs, strict=True)
    ]
    prompts = [rng.integers(1, vocab_size, n).tolist() for n in lengths]
    return Workload(prompts, num_outputs, [request.arrival_s for request in trace], in_seconds=True)


def run_policy(
    runner: ModelRunner, config: EngineConfig, num_blocks: int, policy: BucketPolicy, workload: Workload
) -> tuple[Result, StepLog, list[StepSample]]:
    """Time the buckets, run the workload, and measure; the policy's programs are compiled."""
    keys = policy.keys()
    runner.initialize_kv_cache(num_blocks)
    samples = list(measure_steps(runner, keys, repeats=8))  # first runs also allocate, and make graphs
    runner.initialize_kv_cache(num_blocks)
    executor = _PolicyExecutor(runner, policy, num_blocks, config.seed)
    core = EngineCore(config, executor)
    gaps, running_s, total_s = serve(core, workload)
    core.shutdown()
    log = executor.log
    result = _result(policy, log, sum(workload.num_outputs), total_s, running_s)
    result.compile_s = sum(runner.programs.compile_seconds.get(key, 0.0) for key in keys)
    result.workspace_bytes = max(runner.programs.workspace_bytes(key) or 0 for key in keys)
    result.p99_inter_token_ms = float(np.percentile(gaps, 99)) * 1e3 if gaps else 0.0
    return result, log, samples


def estimate_policy(
    config: EngineConfig,
    num_blocks: int,
    policy: BucketPolicy,
    workload: Workload,
    cost: CostModel,
    measured: Result,
    measured_log: StepLog,
) -> Result:
    """What a policy would do with a workload that arrives by step number.

    Args:
      cost: of the buckets.
      measured, measured_log: another policy's run. As much as it took longer than by `cost`, this one is taken to take
        longer too.
    """
    executor = _ShapesExecutor(policy, num_blocks)
    serve(EngineCore(config, executor), workload)
    log = executor.log
    log.keys = [policy.select(*shape) for shape in log.shapes]
    cost = cost.completed([*log.keys, *measured_log.keys])

    def by_cost(log: StepLog) -> list[float]:
        return [cost.step_ms(key, context) for key, context in zip(log.keys, log.contexts, strict=True)]

    scale = sum(measured_log.ms) / sum(by_cost(measured_log))
    log.ms = [scale * ms for ms in by_cost(log)]
    total_s = measured.total_s + (sum(log.ms) - sum(measured_log.ms)) / 1e3
    result = _result(policy, log, sum(workload.num_outputs), total_s, measured.mean_running * total_s)
    result.is_estimated = True
    # A step's time is the gap of each request in it, less those that it begins.
    order = np.argsort(log.ms)
    rows = np.cumsum([log.shapes[i].num_reqs for i in order])
    result.p99_inter_token_ms = log.ms[order[np.searchsorted(rows, 0.99 * rows[-1])]]
    return result


def _result(policy: BucketPolicy, log: StepLog, num_outputs: int, total_s: float, running_s: float) -> Result:
    waste = policy.padding_waste(log.shapes)
    by_bucket: dict[str, list[float]] = defaultdict(list)
    for key, ms in zip(log.keys, log.ms, strict=True):
        by_bucket[str(key)].append(ms)
    return Result(
        policy=policy.name,
        is_estimated=False,
        num_programs=len(policy.keys()),
        compile_s=None,
        workspace_bytes=None,
        num_steps=len(log.shapes),
        token_waste=waste.tokens,
        row_waste=waste.rows,
        total_s=total_s,
        tokens_per_s=num_outputs / total_s,
        mean_step_ms=float(np.mean(log.ms)),
        p99_inter_token_ms=0.0,
        mean_running=running_s / total_s,
        step_ms={name: float(np.median(times)) for name, times in sorted(by_bucket.items())},
        steps={name: len(times) for name, times in sorted(by_bucket.items())},
        mixed_sizes=list(policy.mixed_sizes),
        decode_sizes=list(policy.decode_sizes),
    )


def serve(core: EngineCore, workload: Workload) -> tuple[list[float], float, float]:
    """Run the workload to its end: seconds between a request's tokens, request-seconds run, seconds in all."""
    waiting = list(zip(workload.arrivals, workload.prompts, workload.num_outputs, strict=True))[::-1]
    last_token_at: dict[str, float] = {}
    first_token_at: dict[str, float] = {}
    gaps: list[float] = []
    running_s, step, begin = 0.0, 0, time.perf_counter()
    while waiting or core.has_work():
        now = time.perf_counter() - begin if workload.in_seconds else step
        while waiting and waiting[-1][0] <= now:
            _, prompt, n = waiting.pop()
            core.add_request(_request(f"r{len(waiting)}", prompt, n))
        step += 1
        outputs = core.step()
        if outputs is None:
            continue
        now = time.perf_counter()
        gaps += [now - last_token_at[i] for i in outputs.request_ids if i in last_token_at]
        for request_id in outputs.request_ids:
            first_token_at.setdefault(request_id, now)
            last_token_at[request_id] = now
        for request_id in outputs.finished:
            running_s += now - first_token_at.get(request_id, now)
            last_token_at.pop(request_id, None)
    return gaps, running_s, time.perf_counter() - begin


def _request(request_id: str, prompt: list[int], num_outputs: int) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    return EngineCoreRequest(request_id, array("i", prompt), params)


class _TimedHandle:
    dispatch_s = 0.0  # the loop's own thread does it

    def __init__(self, executor: "_PolicyExecutor", handle: object, key: BucketKey) -> None:
        self._executor, self._handle, self._key = executor, handle, key
        self._begin = time.perf_counter()

    def wait(self) -> ModelRunnerOutput:
        output = self._handle.wait()  # type: ignore[attr-defined]
        self._executor.finished(self._key, self._begin)
        return output


class _PolicyExecutor:
    """An Executor that plans by one policy and runs on a runner that outlives it."""

    def __init__(self, runner: ModelRunner, policy: BucketPolicy, num_blocks: int, seed: int | None) -> None:
        self._runner, self._num_blocks = runner, num_blocks
        self._planner = Planner(runner.config.limits, policy, seed)
        self.bucket_policy = policy
        self._last = 0.0
        self.log = StepLog()

    def initialize(self, meanwhile: Callable[[], None]) -> int:
        return self._num_blocks

    def execute(self, scheduler_output: SchedulerOutput) -> _TimedHandle | None:
        plan = self._planner.build(scheduler_output)
        if plan is None:
            return None
        self.log.note(scheduler_output)
        return _TimedHandle(self, self._runner.execute(plan), plan.key)

    def finished(self, key: BucketKey, begin: float) -> None:
        now = time.perf_counter()
        self.log.keys.append(key)
        self.log.ms.append((now - max(begin, self._last)) * 1e3)
        self._last = now

    def metrics(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        return


class _Tokens(NamedTuple):
    """A StepHandle whose tokens are there at once."""

    output: ModelRunnerOutput
    dispatch_s: float = 0.0

    def wait(self) -> ModelRunnerOutput:
        return self.output


class _ShapesExecutor:
    """An Executor that notes the shapes of steps and runs none."""

    def __init__(self, policy: BucketPolicy, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_tokens: dict[str, int] = {}  # of each request, with the tokens that the steps so far gave
        self.bucket_policy = policy
        self.log = StepLog()

    def initialize(self, meanwhile: Callable[[], None]) -> int:
        return self._num_blocks

    def execute(self, scheduler_output: SchedulerOutput) -> _Tokens | None:
        if not scheduler_output.num_scheduled_tokens:
            return None
        self.log.note(scheduler_output)
        known = scheduler_output.scheduled_cached_requests
        num_computed = dict(zip(known.request_ids, known.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_requests:
            self._num_tokens[new.request_id] = len(new.prompt_token_ids)
            num_computed[new.request_id] = new.num_computed_tokens
        sampled = {}
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            if num_computed[request_id] + num_scheduled == self._num_tokens[request_id]:
                self._num_tokens[request_id] += 1
                sampled[request_id] = 0
        return _Tokens(ModelRunnerOutput(sampled))

    def metrics(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        return
