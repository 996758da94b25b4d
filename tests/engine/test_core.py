"""EngineCore alone: the pipeline of steps, aborts at awkward times, requests that the scheduler refuses."""

import threading
from collections.abc import Callable
from itertools import accumulate

import pytest

import jaxvllm.core
from jaxvllm.background import Background
from jaxvllm.config import EngineConfig, MemoryConfig
from jaxvllm.core import EngineCore
from jaxvllm.core_messages import EngineCoreRequest
from jaxvllm.structured_output.manager import GrammarManager, GrammarTokenizer, make_grammar_tokenizer
from jaxvllm.tokenizer import Tokenizer
from scheduler.config import SchedulerConfig
from scheduler.sampling_params import SamplingParams
from scheduler.structured_outputs import StructuredOutputsParams
from tests.engine.fake_executor import SuccessorExecutor
from tests.engine.tokenizers_fixture import EOS

MODES = ["sync", "async", "late"]


class RecordingExecutor(SuccessorExecutor):
    """Notes when steps are dispatched ("go") and waited for ("wait").

    is_late: each result is there as soon as it is waited for, although its step took a second to be dispatched.
    """

    def __init__(self, config: EngineConfig, is_late: bool) -> None:
        super().__init__(config)
        self.events: list[str] = []
        self._dispatch_s = float(is_late)

    def execute(self, scheduler_output):
        handle = super().execute(scheduler_output)
        if handle is None:
            return None
        self.events.append("go")
        wait = handle.wait

        def noted_wait():
            self.events.append("wait")
            return wait()

        handle.wait, handle.dispatch_s = noted_wait, self._dispatch_s
        return handle


def make_core(mode: str = "async", num_blocks: int = 33, **limits) -> tuple[EngineCore, RecordingExecutor]:
    scheduler = SchedulerConfig(
        **{"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128} | limits,
        async_scheduling=mode != "sync",
    )
    memory = MemoryConfig(num_blocks=num_blocks)
    config = EngineConfig(scheduler=scheduler, memory=memory)
    executor = RecordingExecutor(config, is_late=mode == "late")
    core = EngineCore(config, executor)
    core._max_depth = 3
    return core, executor


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


@pytest.mark.parametrize(
    ("mode", "first"),
    [
        ("sync", "go wait go wait go wait"),
        ("async", "go go wait go wait go wait"),
        # One step more as soon as a result has come late; the first results tell.
        ("late", "go go wait go go wait go wait"),
    ],
)
def test_next_step_is_dispatched_before_the_last_one_is_waited_for(mode, first):
    core, executor = make_core(mode)
    add(core, "a", [1, 2, 3], max_tokens=9)
    tokens, ends = drain(core)
    assert " ".join(executor.events).startswith(first)
    assert executor.events.count("go") == executor.events.count("wait") == 9
    assert (tokens, ends) == ({"a": list(range(4, 13))}, {"a": "length"})


@pytest.mark.parametrize("mode", MODES)
def test_what_a_step_gave_is_returned_before_the_next_result_is_waited_for(mode):
    core, executor = make_core(mode)
    add(core, "a", [1, 2, 3], max_tokens=9)
    add(core, "b", [7], max_tokens=4)
    num_given = 0
    while core.has_work():
        outputs = core.step()
        if outputs is not None and outputs.request_ids:
            num_given += 1
            assert executor.events.count("wait") == num_given, "a token waited for a later step"
    assert num_given == 9


@pytest.mark.parametrize("mode", ["async", "late"])
def test_what_requests_get_does_not_depend_on_the_steps_in_flight(mode):
    def run(mode: str) -> tuple[dict, dict, int]:
        # A pool that holds a third of what the requests grow to.
        limits = {"max_num_batched_tokens": 20, "max_model_len": 64, "num_growth_tokens": 0}
        core, executor = make_core(mode, num_blocks=6, **limits)
        for i in range(8):
            # Text ends by a stop token in the middle of a block, by length, or by an abort from outside.
            stop_token_ids = [57 + 3 * i] if i % 2 else None
            add(core, f"r{i}", [i, 40 + 3 * i] * (i + 1), max_tokens=30 + i, stop_token_ids=stop_token_ids)

        def abort() -> None:
            if executor.events.count("wait") == 12:
                core.abort_requests(["r2"])

        tokens, ends = drain(core, abort)
        num_aborted = len(tokens.pop("r2", []))
        assert num_aborted <= 12 and ends.pop("r2") == "abort"
        assert executor.events.count("go") == executor.events.count("wait")
        return tokens, ends, core.metrics().scheduler.num_preemptions

    tokens, ends, num_preemptions = run(mode)
    assert num_preemptions > 1
    assert {end: list(ends.values()).count(end) for end in ends.values()} == {"stop": 4, "length": 3}
    assert (tokens, ends) == run("sync")[:2]


def most_in_flight(events: list[str]) -> int:
    return max(accumulate(1 if event == "go" else -1 for event in events))


def test_a_third_step_needs_evidence_of_this_burst_and_nobody_with_a_grammar(model_folder, monkeypatch):
    def load() -> GrammarTokenizer:
        return make_grammar_tokenizer(Tokenizer.from_folder(model_folder), [EOS])

    monkeypatch.setattr(jaxvllm.core, "_make_grammar_manager", lambda model: GrammarManager(load))
    core, executor = make_core("late")
    for _ in range(2):  # what was measured before a pause does not count behind it
        executor.events.clear()
        add(core, "plain", [7], max_tokens=6)
        drain(core)
        assert executor.events[:6] == ["go", "go", "wait", "go", "go", "wait"]
    executor.events.clear()
    # It takes part in a step once its last token is known: with three in flight in every third one.
    add(core, "structured", [64], max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[A-Z]+"))

    def step_until(num_tokens: int) -> None:
        count = 0
        while count < num_tokens:
            outputs = core.step()
            count += outputs.request_ids.count("structured") if outputs else 0

    step_until(1)  # or the other one would end while the grammar compiles
    add(core, "plain", [7], max_tokens=40)
    step_until(8)
    assert most_in_flight(executor.events) == 2
    drain(core)
    assert most_in_flight(executor.events) == 3
    core.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_abort_while_the_last_step_runs_ends_the_request_once(mode):
    core, executor = make_core(mode)
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


class BusyAtStart(SuccessorExecutor):
    """Calls what is to be done meanwhile as DeviceExecutor does."""

    def initialize(self, meanwhile: Callable[[], None]) -> int:
        with Background(meanwhile):
            return super().initialize(meanwhile)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_a_gpu_loads_the_vocabulary_of_grammars_beside_its_start_and_a_cpu_when_it_is_needed(
    device, model_folder, monkeypatch
):
    loads, may_load = [], threading.Event()

    def load() -> GrammarTokenizer:
        loads.append(threading.current_thread())
        assert may_load.wait(10)
        return make_grammar_tokenizer(Tokenizer.from_folder(model_folder), [EOS])

    monkeypatch.setattr(jaxvllm.core, "_make_grammar_manager", lambda model: GrammarManager(load))
    config = EngineConfig(scheduler=SchedulerConfig(4, 64, 128), memory=MemoryConfig(num_blocks=33), device=device)
    core = EngineCore(config, BusyAtStart(config))
    # The core serves although its vocabulary is not there yet.
    add(core, "plain", [7], max_tokens=3)
    assert drain(core) == ({"plain": [8, 9, 10]}, {"plain": "length"})
    assert len(loads) == (device == "gpu")
    add(core, "structured", [64], max_tokens=3, structured_outputs=StructuredOutputsParams(regex="[A-Z]+"))
    may_load.set()
    assert drain(core) == ({"structured": [65, 66, 67]}, {"structured": "length"})
    assert len(loads) == 1 and loads[0] is not threading.main_thread()
    core.shutdown()


def test_a_vocabulary_that_cannot_be_loaded_ends_the_requests_that_need_it_and_no_other(monkeypatch):
    def load() -> GrammarTokenizer:
        raise ValueError("there is no tokenizer")

    monkeypatch.setattr(jaxvllm.core, "_make_grammar_manager", lambda model: GrammarManager(load))
    config = EngineConfig(scheduler=SchedulerConfig(4, 64, 128), memory=MemoryConfig(num_blocks=33), device="gpu")
    core = EngineCore(config, BusyAtStart(config))
    add(core, "structured", [64], max_tokens=3, structured_outputs=StructuredOutputsParams(regex="[A-Z]+"))
    add(core, "plain", [7], max_tokens=3)
    assert drain(core) == ({"plain": [8, 9, 10]}, {"plain": "length", "structured": "error"})
    core.shutdown()
