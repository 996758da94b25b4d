"""Where the time of a step goes: host parts, dispatch, the device, and each kernel.

    python scripts/profile_step.py --model qwen3-0.6b --requests 1 256 --context 384 800

Prefills the requests with random tokens, then times decode steps of the scheduler, planner, dispatcher and runner as
the engine's core drives them: "ahead" has three steps in flight, dispatched by a thread, of which the device has two
at most (what the core does when results come late), "thread" two, "one thread" two that the loop's own thread
dispatches. Then the last decode plan, and the last prefill plan that was full, dispatched back to back, and a few
traced steps of each for the kernels. Tracing turns CUDA graphs off, so kernel times add up to the device's work, not to
the step. Each number of requests has its context.
"""

import argparse
import logging
import sys
import time
from collections import defaultdict, deque
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import records
import workloads
from kernel_trace import Kernel, trace_kernels

from jaxvllm.attention_backend import choose_backend
from jaxvllm.core_process import SWITCH_INTERVAL_S
from jaxvllm.dispatcher import Dispatcher
from jaxvllm.kv_cache import KVCacheSpec
from jaxvllm.layers.layer_context import Attended
from jaxvllm.layers.parameter import bind, param_specs
from jaxvllm.model_runner import ModelRunner, RunnerConfig
from jaxvllm.model_source import resolve
from jaxvllm.models.registry import get_model_class
from jaxvllm.step_handle import StepHandle
from jaxvllm.weights.dummy import dummy_params
from scheduler.batch import BatchLimits
from scheduler.buckets import explicit
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.plan import Planner, StepPlan
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import make_scheduler

MIN_ROWS = 8
BLOCK_SIZE = 16
WARM_UP_STEPS = 5
FORMS = {"ahead": 3, "thread": 2, "one thread": 2}  # what dispatches, and how many steps are in flight


class Loop:
    """Scheduler, planner, dispatcher and runner; adds up the time of each part of the loop's thread.

    Attributes:
      form: one of FORMS.
    """

    def __init__(
        self, name: str, num_requests: int, context: int, prefill_tokens: int, sampling: SamplingParams
    ) -> None:
        config = resolve(workloads.write_config(name)).config
        rows = max(num_requests, MIN_ROWS)
        assert sampling.max_tokens is not None
        max_model_len = context + sampling.max_tokens + BLOCK_SIZE
        self.limits = BatchLimits(rows, max_model_len, BLOCK_SIZE)
        blocks = num_requests * (self.limits.max_blocks + 1) + 1
        tokens = max(min(prefill_tokens, num_requests * context), rows)
        policy = explicit(rows, tokens, [rows], [tokens])
        spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, jnp.dtype(config.dtype))
        backend = choose_backend(None, jax.devices()[0], config, self.limits)
        model = get_model_class(config.architecture)(config)
        specs = param_specs(model)
        params = dummy_params(specs)
        self.runner = ModelRunner(
            lambda traced: bind(model, traced),  # type: ignore[arg-type]
            params,
            RunnerConfig(
                self.limits,
                policy,
                spec,
                config.num_heads,
                config.vocab_size,
                backend,
                attended=Attended.of_one_token(config, is_finished=not model.unroll_layers),
            ),
        )
        self.runner.initialize_kv_cache(blocks)
        self.planner = Planner(self.limits, policy, seed=0)
        scheduler_config = SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=max_model_len, async_scheduling=True
        )
        self.scheduler = make_scheduler(scheduler_config, CacheConfig(BLOCK_SIZE, blocks, False))
        rng = np.random.default_rng(0)
        for i in range(num_requests):
            prompt = rng.integers(10, config.vocab_size, context).tolist()
            self.scheduler.add_request(Request(f"r{i}", prompt, sampling))
        self.dispatcher = Dispatcher()
        self.form = "thread"
        self.in_flight: deque = deque()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.plans: dict[str, StepPlan] = {}  # by kind, the last one of most tokens

    def step(self) -> str:
        """One turn of the loop; returns the kind of step dispatched."""
        t0 = time.perf_counter()
        scheduled = self.scheduler.schedule()
        t1 = time.perf_counter()
        plan = self.planner.build(scheduled)
        t2 = time.perf_counter()
        assert plan is not None, "max_tokens covers all steps"
        is_threaded = self.form != "one thread"
        if is_threaded:
            handle = self.dispatcher.submit(partial(self.dispatch, plan, time.perf_counter()))
        else:
            handle = self.runner.execute(plan)
        t3 = time.perf_counter()
        self.in_flight.append((scheduled, handle))
        self.seconds["schedule"] += t1 - t0
        self.seconds["plan"] += t2 - t1
        self.seconds["hand over" if is_threaded else "dispatch"] += t3 - t2
        if len(self.in_flight) == FORMS[self.form]:
            self.take_oldest()
        kind = plan.key.kind
        if kind not in self.plans or plan.num_tokens >= self.plans[kind].num_tokens:
            self.plans[kind] = plan
        return kind

    def dispatch(self, plan: StepPlan, handed_over_at: float) -> StepHandle:
        """In the dispatching thread: run a plan."""
        self.seconds["until dispatch begins"] += time.perf_counter() - handed_over_at
        return self.runner.execute(plan)

    def take_oldest(self) -> None:
        """Wait for the oldest step and tell the scheduler."""
        scheduled, handle = self.in_flight.popleft()
        t0 = time.perf_counter()
        output = handle.wait()
        t1 = time.perf_counter()
        self.scheduler.update_from_output(scheduled, output)
        self.seconds["wait"] += t1 - t0
        self.seconds["update"] += time.perf_counter() - t1

    def time(self, form: str, num_steps: int) -> dict:
        """Milliseconds a step in one of FORMS, and of each part of it."""
        while self.in_flight:
            self.take_oldest()
        self.form = form
        for _ in range(WARM_UP_STEPS):
            self.step()
        self.seconds.clear()
        busy_s, cpu_s, start = self.dispatcher.busy_s, time.thread_time(), time.perf_counter()
        for _ in range(num_steps):
            self.step()
        wall_s, cpu_s = time.perf_counter() - start, time.thread_time() - cpu_s
        parts = {name: 1e3 * seconds / num_steps for name, seconds in self.seconds.items()}
        if form != "one thread":
            parts["dispatching thread"] = 1e3 * (self.dispatcher.busy_s - busy_s) / num_steps
        return {"loop_ms": 1e3 * wall_s / num_steps, "loop_cpu_ms": 1e3 * cpu_s / num_steps, "host_ms": parts}


def time_plan(runner: ModelRunner, plan, repeats: int) -> tuple[float, float]:
    """(seconds a step, host seconds a dispatch) of one plan dispatched back to back."""
    jax.block_until_ready(runner.execute(plan)._token_ids)
    start, host, handle = time.perf_counter(), 0.0, None
    for _ in range(repeats):
        before = time.perf_counter()
        handle = runner.execute(plan)
        host += time.perf_counter() - before
    assert handle is not None
    handle.wait()
    return (time.perf_counter() - start) / repeats, host / repeats


def kernel_times(runner: ModelRunner, plan, repeats: int = 3) -> list[tuple[str, int, float]]:
    """(kernel, calls a step, microseconds a step) from a trace, the longest first."""
    found: dict[str, Kernel] = {}
    for name, kernel in trace_kernels(lambda: runner.execute(plan).wait(), repeats).items():
        total = found.setdefault(name.rstrip("0123456789_."), Kernel(0, 0, {}))
        total.calls += kernel.calls
        total.us += kernel.us
    return sorted(((name, round(kernel.calls), kernel.us) for name, kernel in found.items()), key=lambda row: -row[2])


def profile_plan(runner: ModelRunner, plan: StepPlan, with_trace: bool) -> dict:
    """Times of one plan dispatched again and again; it writes what it wrote before."""
    print(f"{plan.key}, {plan.num_tokens} tokens")
    seconds, host = time_plan(runner, plan, 40)
    print(f"  back to back {1e3 * seconds:.3f} ms a step, dispatch {1e3 * host:.3f} ms")
    on_device = replace(plan, buffer=jax.device_put(plan.buffer))
    resident, host_resident = time_plan(runner, on_device, 40)
    print(f"  plan already on the device {1e3 * resident:.3f} ms a step, dispatch {1e3 * host_resident:.3f} ms")
    result: dict = {
        "num_tokens": plan.num_tokens,
        "back_to_back_ms": 1e3 * seconds,
        "dispatch_ms": 1e3 * host,
        "resident_plan_ms": 1e3 * resident,
    }
    if with_trace:
        kernels = kernel_times(runner, plan)
        result["kernels"] = [{"name": n, "calls": c, "us": us} for n, c, us in kernels]
        print(f"  kernels: {sum(c for _, c, _ in kernels)} calls, {sum(us for *_, us in kernels):.0f} us")
        for name, count, micros in kernels[:16]:
            print(f"  {micros:9.1f} us {count:5d} x {name[:90]}")
    return result


def profile(loop: Loop, args: argparse.Namespace) -> dict:
    """Everything about one batch, printed too."""
    start = time.perf_counter()
    while loop.step() != "decode":
        pass
    print(f"prefill and compile {time.perf_counter() - start:.1f} s", flush=True)
    result: dict = {"forms": {form: loop.time(form, args.steps) for form in FORMS}}
    for form, times in result["forms"].items():
        parts = ", ".join(f"{name} {ms:.3f}" for name, ms in times["host_ms"].items())
        print(f"{form}: {times['loop_ms']:.3f} ms a step, {times['loop_cpu_ms']:.3f} ms CPU of the loop; {parts}")
    while loop.in_flight:
        loop.take_oldest()
    loop.dispatcher.shutdown()
    for kind in args.kind:
        result[kind] = profile_plan(loop.runner, loop.plans[kind], with_trace=not args.no_trace)
    return result


def main() -> None:
    """Parse the command line and print the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=workloads.MODELS, default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[384])
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each form")
    parser.add_argument("--prefill-tokens", type=int, default=8192, help="tokens a prefill step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument(
        "--kind", nargs="+", choices=("decode", "mixed"), default=["decode"], help="steps to take apart"
    )
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    max_tokens = len(FORMS) * (args.steps + WARM_UP_STEPS + 8)
    sampling = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, max_tokens=max_tokens, ignore_eos=True
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as the core does
    results = []
    for num_requests, context in zip(args.requests, args.context, strict=True):
        results.append(profile(Loop(args.model, num_requests, context, args.prefill_tokens, sampling), args))
        results[-1] = {"model": args.model, "requests": num_requests, "context": context} | results[-1]
    if args.out:
        records.write(args.out, {"results": results})


if __name__ == "__main__":
    main()
