"""EngineCore alone: the pipeline of steps, aborts at awkward times, requests that the scheduler refuses."""

from collections.abc import Callable

import pytest

from jaxvllm.config import EngineConfig, MemoryConfig
from jaxvllm.core import EngineCore
from jaxvllm.core_messages import EngineCoreRequest
from scheduler.config import SchedulerConfig
from scheduler.sampling_params import SamplingParams
from tests.engine.fake_executor import SuccessorExecutor


class RecordingExecutor(SuccessorExecutor):
    """Notes when steps are dispatched ("go") and waited for ("wait")."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.events: list[str] = []

    def execute(self, scheduler_output):
        handle = super().execute(scheduler_output)
        if handle is None:
            return None
        self.events.append("go")
        wait = handle.wait

        def noted_wait():
            self.events.append("wait")
            return wait()

        handle.wait = noted_wait
        return handle


def make_core(async_scheduling: bool = True, **limits) -> tuple[EngineCore, RecordingExecutor]:
    scheduler = SchedulerConfig(
        **{"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128} | limits,
        async_scheduling=async_scheduling,
    )
    config = EngineConfig(scheduler=scheduler, memory=MemoryConfig(num_blocks=33))
    executor = RecordingExecutor(config)
    return EngineCore(config, executor), executor


def add(core: EngineCore, request_id: str, prompt: list[int], **params) -> None:
    core.add_request(EngineCoreRequest(request_id, prompt, SamplingParams(seed=1, **params)))


def drain(core: EngineCore, read_inputs: Callable[[], None] = lambda: None) -> tuple[dict, dict]:
    """Runs to the end; returns the tokens and the ends by request."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    for _ in range(300):
        if not core.has_work():
            return tokens, ends
        outputs = core.step(read_inputs)
        if outputs is None:
            continue
        for request_id, token_id in zip(outputs.request_ids, outputs.new_token_ids, strict=True):
            assert request_id not in ends, "a token after the end"
            tokens.setdefault(request_id, []).append(token_id)
        for request_id, finished in outputs.finished.items():
            assert request_id not in ends, "two ends"
            ends[request_id] = finished.finish_reason
    raise AssertionError("the core never became idle")


@pytest.mark.parametrize(("async_scheduling", "first"), [(True, "go go wait go wait"), (False, "go wait go wait go")])
def test_next_step_is_dispatched_before_the_last_one_is_waited_for(async_scheduling, first):
    core, executor = make_core(async_scheduling)
    add(core, "a", [1, 2, 3], max_tokens=9)
    tokens, ends = drain(core)
    assert " ".join(executor.events[:5]) == first
    assert executor.events.count("go") == executor.events.count("wait") == 9
    assert (tokens, ends) == ({"a": list(range(4, 13))}, {"a": "length"})


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_abort_while_the_last_step_runs_ends_the_request_once(async_scheduling):
    core, executor = make_core(async_scheduling)
    add(core, "a", [1, 2, 3], max_tokens=5)
    add(core, "b", [7], max_tokens=8)

    def abort_in_step_5() -> None:
        if executor.events.count("wait") == 5:
            core.abort_requests(["a", "a", "nobody"])

    tokens, ends = drain(core, abort_in_step_5)
    assert ends == {"a": "abort", "b": "length"}
    assert len(tokens["a"]) == 4
    assert tokens["b"] == list(range(8, 16))


def test_request_that_can_never_fit_ends_with_an_error_and_costs_no_other():
    core, _ = make_core()
    add(core, "a", [1] * 20, max_tokens=4)
    add(core, "big", [1] * 128, max_tokens=4)
    add(core, "b", [2] * 20, max_tokens=4)
    tokens, ends = drain(core)
    assert ends == {"a": "length", "big": "error", "b": "length"}
    assert set(tokens) == {"a", "b"}


def test_abort_of_the_only_request_leaves_the_core_idle():
    core, _ = make_core()
    add(core, "a", [1] * 20, max_tokens=50)
    core.abort_requests(["a"])
    assert drain(core) == ({}, {"a": "abort"})
    assert core.reset_prefix_cache()


def test_shutdown_waits_for_every_step_in_flight():
    core, executor = make_core()
    add(core, "a", [1, 2, 3], max_tokens=9)
    for _ in range(4):
        core.step()
    assert executor.events.count("go") > executor.events.count("wait") > 0
    core.shutdown()
    assert executor.events.count("go") == executor.events.count("wait")
