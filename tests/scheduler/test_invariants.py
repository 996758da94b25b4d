"""Random operations on tiny pools: references, free list, hashes, slots, budgets and outputs are checked after each."""

import logging
import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler.buckets import explicit
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.verify import EOS_TOKEN_ID, CheckedScheduler
from tests.scheduler.requests_for_tests import ids, make_request

FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz_scheduler.py"


@st.composite
def scheduler_configs(draw: st.DrawFn) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.sampled_from([4, 7, 33])),
        max_model_len=draw(st.sampled_from([13, 33])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 3])),
        reserve_full_isl=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        num_growth_tokens=draw(st.sampled_from([0, 0, 5])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """CheckedScheduler asserts the invariants; steps are taken in at once or, with async scheduling, one step late."""

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.WARNING)
        self.num_added = 0

    @initialize(
        config=scheduler_configs(),
        block_size=st.sampled_from([1, 3, 4]),
        usable_blocks=st.integers(3, 12),
        caching=st.sampled_from([True, True, False]),
        sizes=st.sampled_from([set(), {1, 2, 5, 11, 20}]),
    )
    def start(
        self, config: SchedulerConfig, block_size: int, usable_blocks: int, caching: bool, sizes: set[int]
    ) -> None:
        limits = config.max_num_seqs, config.max_num_batched_tokens
        policy = explicit(*limits, [], {size for size in sizes if size < limits[1]} | {limits[1]}) if sizes else None
        cache_config = CacheConfig(block_size, usable_blocks + 1, caching)
        self.checked = CheckedScheduler(config, cache_config, policy and replace(policy, pads_worth_a_step=0))
        self.max_prompt = min(config.max_model_len, usable_blocks * block_size) - 1

    @rule(
        template=st.integers(0, 2),
        num_shared=st.integers(0, 32),
        num_own=st.integers(0, 5),
        num_children=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.sampled_from([1, 2, 9, None]),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a", "b"]),
        ignore_eos=st.booleans(),
    )
    def add(
        self,
        template: int,
        num_shared: int,
        num_own: int,
        num_children: int,
        max_tokens: int | None,
        priority: int,
        salt: str | None,
        ignore_eos: bool,
    ) -> None:
        prompt = ids(32, seed=template)[:num_shared] + ids(num_own, seed=self.num_added)
        for _ in range(num_children):
            name = f"r{self.num_added}"
            self.num_added += 1
            fields = {"priority": priority, "salt": salt, "eos": EOS_TOKEN_ID, "ignore_eos": ignore_eos}
            self.checked.add(make_request(name, prompt[: self.max_prompt] or [3], max_tokens, **fields))

    @rule()
    def add_what_can_never_fit(self) -> None:
        with pytest.raises(ValueError, match="shorten it"):
            self.checked.add(make_request("too long", self.max_prompt + 1))
        self.checked.check()

    @rule(index=st.integers(0, 30))
    def abort(self, index: int) -> None:
        self.checked.abort([f"r{index}"])

    @precondition(lambda self: len(self.checked.in_flight) < self.checked.max_in_flight)
    @rule()
    def schedule(self) -> None:
        self.checked.schedule()

    @precondition(lambda self: self.checked.in_flight)
    @rule()
    def update(self) -> None:
        self.checked.update()

    @rule(turns=st.integers(1, 6))
    def step(self, turns: int) -> None:
        for _ in range(turns):
            self.checked.step()

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.checked.scheduler.reset_prefix_cache() == (not self.checked.scheduler.running)
        self.checked.check()

    def teardown(self) -> None:
        if hasattr(self, "checked"):
            self.checked.drain(3000)
            assert self.checked.scheduler.reset_prefix_cache()
        logging.disable(logging.NOTSET)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_slice_of_the_long_fuzz_run_covers_every_kind_of_operation():
    script = runpy.run_path(str(FUZZ))
    logging.disable(logging.WARNING)
    try:
        counts: Counter[str] = script["fuzz"](200_000, seed=0)
    finally:
        logging.disable(logging.NOTSET)
    num_ops = sum(counts[kind] for kind in script["WEIGHTS"])
    assert all(counts[kind] >= 0.01 * num_ops for kind in script["WEIGHTS"])
    assert counts["(pre-emption)"] >= 0.05 * counts["schedule"] and counts["(late update)"] >= 0.01 * num_ops
