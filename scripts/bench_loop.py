"""What the step loop adds to a device: milliseconds a token beside the ideal, and how old a token is at the caller.

    python scripts/bench_loop.py --requests 1 256 --device-ms 0.88 5 --dispatch-ms 0.58 0.7

The real core process (loop, scheduler, planner, dispatching thread, messages) and the real front end, with a pretended
device: dispatching takes some Python and then a wait without Python's lock, a step on the device a fixed time behind
the one before it. The ideal is max(device, dispatch). A token is its step's end on the clock, so that the caller sees
how old it is. Compare only runs that take turns on one machine.
"""

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import workloads
from pretended_device import PretendedStep, sleep_until

import jaxvllm.core
from jaxvllm import Engine, SamplingParams
from jaxvllm.config import EngineConfig
from jaxvllm.core import MAX_STEPS_IN_FLIGHT
from jaxvllm.dispatcher import DispatchedStep, Dispatcher
from scheduler.batch import BatchLimits
from scheduler.buckets import powers_of_two
from scheduler.outputs import SchedulerOutput
from scheduler.plan import Planner, StepPlan
from scheduler.sampling_params import RequestOutputKind

PROMPT_TOKENS = 128
PYTHON_OF_DISPATCH_S = 80e-6  # before C++ takes over
PR_SET_TIMERSLACK = 29
CLOCK_TOKENS = 1 << 17  # a token is a time in microseconds, modulo this
TIMES = "times.json"
SETTLED, WINDOW = 16, 12  # steps


class PretendedDevice:
    """An Executor whose device and dispatch take the times that the model's folder says."""

    def __init__(self, config: EngineConfig) -> None:
        # Threads wake when they ask to, not up to 50 us later; those that come inherit it.
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)
        times = json.loads((Path(config.model.model or "") / TIMES).read_text())
        jaxvllm.core.MAX_STEPS_IN_FLIGHT = times["steps_in_flight"]  # the core is made behind its executor
        self._device_s, self._dispatch_s = times["device_ms"] / 1e3, times["dispatch_ms"] / 1e3
        limits, block_size = config.scheduler, config.memory.block_size
        self.bucket_policy = powers_of_two(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._num_blocks = limits.max_num_seqs * (limits.max_model_len // block_size + 1)
        self._planner = Planner(BatchLimits(limits.max_num_seqs, limits.max_model_len, block_size), self.bucket_policy)
        self._dispatcher = Dispatcher()
        self._is_free_at = 0.0

    def initialize(self, meanwhile: Callable[[], None]) -> int:
        """See Executor."""
        return self._num_blocks

    def execute(self, scheduler_output: SchedulerOutput) -> DispatchedStep | None:
        """See Executor."""
        plan = self._planner.build(scheduler_output)
        return None if plan is None else self._dispatcher.submit(partial(self._dispatch, plan))

    def _dispatch(self, plan: StepPlan) -> PretendedStep:
        start = time.monotonic()
        while time.monotonic() < start + PYTHON_OF_DISPATCH_S:
            pass
        sleep_until(start + self._dispatch_s)
        self._is_free_at = max(self._is_free_at, time.monotonic()) + self._device_s
        token_id = int(self._is_free_at * 1e6) % CLOCK_TOKENS
        sampled = plan.needs_sample.tolist()
        tokens = {i: token_id for i, is_sampled in zip(plan.request_ids, sampled, strict=True) if is_sampled}
        return PretendedStep(self._is_free_at, tokens)

    def metrics(self) -> dict[str, float]:
        """See Executor."""
        return {}

    def shutdown(self) -> None:
        """See Executor."""
        self._dispatcher.shutdown()


def make_pretended(config: EngineConfig) -> PretendedDevice:
    """The executor's factory, for the core's process."""
    return PretendedDevice(config)


def measure(engine: Engine, num_requests: int, num_tokens: int) -> tuple[list[float], list[float]]:
    """Ends of the steps on the device, and how old their tokens were at the caller, in seconds."""
    llm = engine.llm_engine
    kind = RequestOutputKind.DELTA
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False, output_kind=kind)
    prompt = {"prompt_token_ids": [7] * PROMPT_TOKENS}
    ends, ages = [], []
    llm.add_requests([llm.process_request(f"r{i}", prompt, params) for i in range(num_requests)])
    while llm.has_unfinished_requests():
        outputs = llm.step()
        now = time.monotonic()
        for token_id in (output.outputs[0].token_ids[-1] for output in outputs if output.request_id == "r0"):
            ages.append((int(now * 1e6) - token_id) % CLOCK_TOKENS / 1e6)
            ends.append(now - ages[-1])
    assert len(ends) == num_tokens
    return ends, ages


def undisturbed(ends: list[float], longest: float) -> list[float]:
    """Mean seconds a step of those WINDOWs in a row of which none took longer than `longest`."""
    means = []
    for start in range(SETTLED, len(ends) - WINDOW, WINDOW):
        window = ends[start : start + WINDOW + 1]
        if max(after - before for before, after in pairwise(window)) < longest:
            means.append((window[-1] - window[0]) / WINDOW)
    return means


def run(num_requests: int, device_ms: float, dispatch_ms: float, args: argparse.Namespace) -> dict:
    """The medians over some runs of one engine."""
    with tempfile.TemporaryDirectory() as folder:
        model = workloads.write_config("qwen3-0.6b", Path(folder))
        times = {"device_ms": device_ms, "dispatch_ms": dispatch_ms, "steps_in_flight": args.steps_in_flight}
        (model / TIMES).write_text(json.dumps(times))
        engine = Engine(
            model,
            executor="bench_loop:make_pretended",
            device="gpu",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=max(num_requests, 8),
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
        )
        with engine:
            runs = [measure(engine, num_requests, args.tokens) for _ in range(1 + args.repeats)][1:]
    ideal_s = max(device_ms, dispatch_ms) / 1e3
    steps = [s for ends, _ in runs for s in undisturbed(ends, 2.5 * ideal_s)]
    ages = sorted(age for _, run_ages in runs for age in run_ages[SETTLED:])
    return {
        "requests": num_requests,
        "ideal_ms": ideal_s * 1e3,
        "step_ms": statistics.median(steps) * 1e3 if steps else None,
        "num_steps": len(steps) * WINDOW,
        "with_disturbances_ms": statistics.median((ends[-1] - ends[0]) / (len(ends) - 1) for ends, _ in runs) * 1e3,
        "age_us": ages[len(ages) // 4] * 1e6,
    }


def main() -> None:
    """Parse the command line and print a line for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--device-ms", type=float, nargs="+", default=[0.88, 5.0])
    parser.add_argument("--dispatch-ms", type=float, nargs="+", default=[0.58, 0.7])
    parser.add_argument("--steps-in-flight", type=int, choices=(2, 3), default=MAX_STEPS_IN_FLIGHT, help="at most")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for load in zip(args.requests, args.device_ms, args.dispatch_ms, strict=True):
        print(json.dumps({k: v and round(v, 4) for k, v in run(*load, args).items()}), flush=True)


if __name__ == "__main__":
    main()
