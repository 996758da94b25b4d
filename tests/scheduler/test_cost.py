"""The cost of a steady decode step, in what no machine changes; scripts/bench_scheduler.py takes the times."""

import gc
import sys
import time
import tracemalloc

import pytest

from scheduler.batch import BatchLimits
from scheduler.buckets import powers_of_two
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.outputs import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from scheduler.plan import Planner, StepPlan
from scheduler.request import RequestStatus
from scheduler.scheduler import Scheduler, make_scheduler
from tests.scheduler.requests_for_tests import make_request


class SteadyDecode:
    """num_running requests that only decode; block boundaries are spread evenly over the steps."""

    def __init__(self, num_running: int, async_scheduling: bool) -> None:
        config = SchedulerConfig(num_running, 32 * num_running, max_model_len=256, async_scheduling=async_scheduling)
        self.scheduler: Scheduler = make_scheduler(config, CacheConfig(16, 20 * num_running))
        policy = powers_of_two(config.max_num_seqs, config.max_num_batched_tokens)
        self.planner = Planner(BatchLimits(num_running, config.max_model_len, 16), policy, seed=0)
        for index in range(num_running):
            self.scheduler.add_request(make_request(f"r{index}", 1 + index % 16, max_tokens=200, eos=2))
        self.depth = 2 if async_scheduling else 1
        self.in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        for _ in range(3):
            self.step()

    def step(self) -> tuple[SchedulerOutput, StepPlan | None, EngineCoreOutputs | None]:
        output = self.scheduler.schedule()
        plan = self.planner.build(output)
        self.in_flight.append((output, ModelRunnerOutput(dict.fromkeys(output.num_scheduled_tokens, 1000))))
        full = len(self.in_flight) == self.depth
        return output, plan, self.scheduler.update_from_output(*self.in_flight.pop(0)) if full else None


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steady_decode_creates_no_tracked_object_per_request(async_scheduling: bool):
    num_running = 320
    decode = SteadyDecode(num_running, async_scheduling)
    gc.collect()
    gc.disable()
    try:
        kept = []
        before = gc.get_count()[0]
        for _ in range(16):
            kept.append(decode.step())
        created = gc.get_count()[0] - before
    finally:
        gc.enable()
    blocks = num_running  # each request gets one block in 16 steps, reported as a list
    assert created <= blocks + 16 * 40, f"{created} objects in 16 steps of {num_running} requests"


def count_calls(num_running: int, async_scheduling: bool) -> int:
    """Calls of Python and C functions in 16 steps."""
    decode = SteadyDecode(num_running, async_scheduling)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(16):
            decode.step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_work_of_a_steady_decode_step_is_small_and_linear(async_scheduling: bool):
    few, many = count_calls(100, async_scheduling), count_calls(500, async_scheduling)
    per_request = (many - few) / 400 / 16
    assert per_request <= 15
    assert few <= 100 * 16 * per_request + 16 * 100


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_among_many_costs_no_more_than_among_few(async_scheduling: bool):
    """One call can scan a whole list inside C: only time shows that. Without any scan the ratio is 0.85."""
    per_request = {}
    for num_running in (150, 1500):
        decode = SteadyDecode(num_running, async_scheduling)
        seconds = []
        for _ in range(16):
            start = time.thread_time()
            decode.step()
            seconds.append(time.thread_time() - start)
        per_request[num_running] = min(seconds) / num_running
    assert per_request[1500] <= 2.5 * per_request[150]


def test_a_waiting_request_holds_its_tokens_and_little_else_and_an_aborted_one_nothing():
    num_requests, num_tokens = 400, 1999
    scheduler = make_scheduler(SchedulerConfig(1, 64, 8192), CacheConfig(16, 1000))
    prompts = [[100 + index] * num_tokens for index in range(num_requests)]
    names = [f"r{index}" for index in range(num_requests)]
    tracemalloc.start()
    try:
        for name, prompt in zip(names, prompts, strict=True):
            scheduler.add_request(make_request(name, prompt))
        waiting = tracemalloc.get_traced_memory()[0] / num_requests
        scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput())
        left = tracemalloc.get_traced_memory()[0] / num_requests
    finally:
        tracemalloc.stop()
    assert waiting <= 4 * num_tokens + 1500
    assert left <= 200  # tables of dicts that do not shrink
