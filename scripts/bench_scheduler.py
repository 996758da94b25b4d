"""What scheduling costs the host: schedule, plan and update per running decode request, and admission of long prompts.

    python scripts/bench_scheduler.py [--sync] [--json PATH]

Each figure is measured twice, as CPU time of the thread and by the wall clock; where they differ, the machine was not
quiet. Compare only figures of one quiet machine.
"""

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import records

from scheduler.batch import BatchLimits
from scheduler.buckets import powers_of_two
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.outputs import ModelRunnerOutput
from scheduler.plan import Planner
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler, make_scheduler

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 1000
NUM_STEPS = 160  # ten blocks a request: what happens once a block is in the mean
CLOCKS = {"cpu": time.thread_time, "wall": time.perf_counter}


@dataclass
class DecodeCost:
    """Medians over runs of the mean time of a step, in microseconds per running request."""

    clock: str
    num_running: int
    schedule_us: float
    plan_us: float
    update_us: float

    @property
    def total_us(self) -> float:
        return self.schedule_us + self.plan_us + self.update_us


def build(num_running: int, async_scheduling: bool, num_blocks: int) -> tuple[Scheduler, Planner]:
    config = SchedulerConfig(
        max_num_seqs=max(num_running, 1),
        max_num_batched_tokens=max(8192, 64 * num_running),
        max_model_len=MAX_MODEL_LEN,
        async_scheduling=async_scheduling,
    )
    limits = BatchLimits(config.max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE)
    policy = powers_of_two(config.max_num_seqs, config.max_num_batched_tokens)
    return make_scheduler(config, CacheConfig(BLOCK_SIZE, num_blocks)), Planner(limits, policy, seed=0)


def prompt(index: int, length: int) -> list[int]:
    return [(index * 7919 + 31 * position) % 150_000 for position in range(length)]


def measure_decode(num_running: int, async_scheduling: bool, clock: Callable[[], float]) -> tuple[float, float, float]:
    """Mean microseconds per request and step of schedule, plan and update, in steady decode."""
    scheduler, planner = build(num_running, async_scheduling, num_blocks=40 * num_running + 2)
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    for index in range(num_running):
        # prompts of 33..48 tokens: blocks fill up at different steps
        scheduler.add_request(Request(f"request-{index}", prompt(index, 33 + index % 16), params, eos_token_id=2))
    in_flight = []
    spent = [0.0, 0.0, 0.0]
    for step in range(NUM_STEPS + 4):
        start = clock()
        output = scheduler.schedule()
        scheduled = clock()
        planner.build(output)
        planned = clock()
        sampled = dict.fromkeys(
            output.num_scheduled_tokens, 1000 + step
        )  # what the runner makes of the device's answer
        in_flight.append((output, ModelRunnerOutput(sampled)))
        before_update = clock()
        if len(in_flight) == 1 + async_scheduling:
            scheduler.update_from_output(*in_flight.pop(0))
        end = clock()
        if step >= 4:
            for index, seconds in enumerate((scheduled - start, planned - scheduled, end - before_update)):
                spent[index] += seconds
    assert len(scheduler.running) == num_running
    scale = 1e6 / NUM_STEPS / num_running
    return spent[0] * scale, spent[1] * scale, spent[2] * scale


def decode_cost(num_running: int, async_scheduling: bool, num_runs: int, clock: str) -> DecodeCost:
    runs = [measure_decode(num_running, async_scheduling, CLOCKS[clock]) for _ in range(num_runs)]
    return DecodeCost(clock, num_running, *(statistics.median(column) for column in zip(*runs, strict=True)))


def measure_admission(
    num_requests: int, prompt_length: int, async_scheduling: bool, clock_name: str
) -> dict[str, str | float]:
    """Microseconds per request to make and queue it, and to hash, admit and finish it (one token each)."""
    clock = CLOCKS[clock_name]
    scheduler, planner = build(MAX_NUM_SEQS, async_scheduling, num_blocks=MAX_NUM_SEQS * 126)
    prompts = [prompt(index, prompt_length) for index in range(num_requests)]
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    start = clock()
    for index in range(num_requests):
        scheduler.add_request(Request(f"request-{index}", prompts[index], params, eos_token_id=2))
    queued = clock()
    planning = 0.0
    in_flight = []
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        before_plan = clock()
        planner.build(output)
        planning += clock() - before_plan
        sampled = {
            i: 7 for i in output.num_scheduled_tokens if scheduler.requests[i].num_computed_tokens >= prompt_length
        }
        in_flight.append((output, ModelRunnerOutput(sampled)))
        if len(in_flight) == 1 + async_scheduling or not output.num_scheduled_tokens:
            scheduler.update_from_output(*in_flight.pop(0))
    end = clock()
    scale = 1e6 / num_requests
    return {
        "clock": clock_name,
        "num_requests": num_requests,
        "prompt_length": prompt_length,
        "add_us": (queued - start) * scale,
        "admit_us": (end - queued - planning) * scale,
        "plan_us": planning * scale,
    }


def waiting_bytes(num_requests: int, prompt_length: int) -> float:
    """Bytes that one more waiting request holds, its prompt included."""
    scheduler, _ = build(1, True, num_blocks=1000)
    params = SamplingParams(max_tokens=1)
    tracemalloc.start()
    for index in range(num_requests):
        scheduler.add_request(Request(f"request-{index}", prompt(index, prompt_length), params))
    scheduler.schedule()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / num_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sync", action="store_true", help="without async scheduling")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=10_000, help="waiting requests of the admission figure")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    costs = [decode_cost(n, not args.sync, args.runs, clock) for clock in CLOCKS for n in (1, 64, 256, 1000)]
    print("us per running decode request and step")
    print(f"{'time':>4}{'running':>9}{'schedule':>10}{'plan':>8}{'update':>8}{'total':>8}{'step ms':>9}")
    for cost in costs:
        print(
            f"{cost.clock:>4}{cost.num_running:>9}{cost.schedule_us:>10.2f}{cost.plan_us:>8.2f}{cost.update_us:>8.2f}"
            f"{cost.total_us:>8.2f}{cost.total_us * cost.num_running / 1000:>9.3f}"
        )
    admissions = [measure_admission(args.requests, 2000, not args.sync, clock) for clock in CLOCKS]
    print(f"us for each of {args.requests:,} waiting requests of 2,000 tokens; admit: hash, schedule and update")
    print(f"{'time':>4}{'add':>9}{'admit':>10}{'plan':>8}")
    for row in admissions:
        print(f"{row['clock']:>4}{row['add_us']:>9.1f}{row['admit_us']:>10.1f}{row['plan_us']:>8.1f}")
    print(f"a waiting request of 2,000 tokens holds {waiting_bytes(500, 2000) / 1024:.1f} KiB")
    if args.json:
        records.write(args.json, {"decode": [asdict(cost) for cost in costs], "admission": admissions})


if __name__ == "__main__":
    main()
