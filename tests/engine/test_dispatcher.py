"""The dispatching thread: order, errors, and its end."""

import gc
import threading
import time
import weakref
from typing import Any

import pytest

from jaxvllm import Engine, EngineDeadError, SamplingParams
from jaxvllm.config import EngineConfig, MemoryConfig
from jaxvllm.core import EngineCore
from jaxvllm.core_messages import EngineCoreRequest
from jaxvllm.dispatcher import MAX_STEPS_ON_DEVICE, Dispatcher
from scheduler.config import SchedulerConfig
from scheduler.outputs import ModelRunnerOutput
from tests.engine.dense import random_tensors, write_folder
from tests.engine.fake_executor import Done, fails_in_dispatch_at_step_9
from tests.tiny_config import T_TINY

EXECUTOR = "tests.engine.fake_executor:fails_in_dispatch_at_step_9"
DEATH_S = 1.0


def step(number: int, events: list[str], gate: threading.Event | None = None) -> Any:
    """A function for submit(): waits for the gate, notes its number, and gives it as a token."""

    def dispatch() -> Done:
        if gate is not None:
            assert gate.wait(10)
        events.append(f"dispatched {number}")
        return Done({"a": number}, 0.0, None)

    return dispatch


def fail() -> Any:
    raise RuntimeError("no such program")


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "dispatch"}


def test_steps_are_dispatched_in_order_while_the_caller_goes_on():
    dispatcher, events, gate = Dispatcher(), [], threading.Event()
    steps = [dispatcher.submit(step(number, events, gate)) for number in range(5)]
    events.append("submitted")
    gate.set()
    # Waiting out of order, and twice, is no trouble.
    assert [steps[i].wait() for i in (4, 0, 1, 2, 3, 3)] == [ModelRunnerOutput({"a": i}) for i in (4, 0, 1, 2, 3, 3)]
    assert events == ["submitted", *(f"dispatched {number}" for number in range(5))]
    dispatcher.shutdown()


def test_an_error_is_raised_by_the_step_that_had_it_and_no_later_one_is_dispatched():
    dispatcher, events = Dispatcher(), []
    dispatches = [step(0, events), step(1, events), fail, step(3, events), step(4, events)]
    steps = [dispatcher.submit(dispatch) for dispatch in dispatches]
    for bad in steps[:1:-1]:
        with pytest.raises(RuntimeError, match="no such program"):
            bad.wait()
    assert [good.wait().sampled_token_ids for good in steps[:2]] == [{"a": 0}, {"a": 1}]
    assert events == ["dispatched 0", "dispatched 1"]
    with pytest.raises(RuntimeError, match="no such program"):
        dispatcher.submit(step(5, events)).wait()
    dispatcher.shutdown()


class OnDevice(Done):
    """A step that the device is done with when it is told so."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__({}, 0.0, error)
        self.is_done = threading.Event()

    def wait_until_done(self) -> None:
        assert self.is_done.wait(10)
        super().wait_until_done()


def test_the_device_never_has_more_steps_than_it_has_workspaces_for_and_the_next_one_as_soon_as_one_is_done():
    dispatcher, events = Dispatcher(), []
    handles = [OnDevice() for _ in range(5)]

    def dispatch(number: int) -> Any:
        def run() -> OnDevice:
            events.append(number)
            return handles[number]

        return run

    steps = [dispatcher.submit(dispatch(number)) for number in range(5)]
    for number in range(5):
        newest = steps[min(number + 1, 4)]
        assert newest._is_pending.acquire(timeout=10), "a step is dispatched although nobody waits for a result"
        newest._is_pending.release()
        time.sleep(0.01)
        assert events == list(range(min(number + MAX_STEPS_ON_DEVICE, 5)))
        handles[number].is_done.set()
    dispatcher.shutdown()


def test_a_step_is_not_dispatched_behind_one_that_failed_on_the_device():
    dispatcher, events = Dispatcher(), []
    bad = OnDevice(RuntimeError("the device is on fire"))
    steps = [dispatcher.submit(dispatch) for dispatch in (lambda: bad, step(1, events), step(2, events))]
    bad.is_done.set()
    with pytest.raises(RuntimeError, match="on fire"):
        steps[2].wait()
    with pytest.raises(RuntimeError, match="on fire"):
        steps[0].wait()
    assert steps[1].wait() == ModelRunnerOutput({"a": 1}) and events == ["dispatched 1"]
    dispatcher.shutdown()


def test_shutdown_dispatches_what_was_submitted_and_leaves_no_thread():
    before, dispatcher, events, gate = threads(), Dispatcher(), [], threading.Event()
    last = [dispatcher.submit(step(number, events, gate)) for number in range(3)][-1]
    threading.Timer(0.05, gate.set).start()
    dispatcher.shutdown()
    assert len(events) == 3 and threads() == before
    dispatcher.shutdown()
    assert last.wait() == ModelRunnerOutput({"a": 2})


def test_a_dispatcher_that_is_dropped_ends_its_thread_and_holds_nothing():
    before, dispatcher = threads(), Dispatcher()

    class Thing:
        def __call__(self) -> Any:
            return Done({}, 0.0, None)

    thing = Thing()
    reference = weakref.ref(thing)
    submitted = dispatcher.submit(thing)
    submitted.wait()
    del thing
    deadline = time.monotonic() + 5
    while reference() is not None and time.monotonic() < deadline:  # the thread lets go a moment after the wait
        time.sleep(0.001)
    assert reference() is None, "a step in the past keeps its arguments"
    del dispatcher
    gc.collect()
    while threads() - before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads() <= before


def test_time_of_dispatching_is_counted_and_time_of_waiting_is_not():
    dispatcher, slept = Dispatcher(), []

    def dispatch() -> None:
        begin = time.perf_counter()
        time.sleep(0.02)
        slept.append(time.perf_counter() - begin)

    for _ in range(2):
        dispatcher.submit(dispatch)  # pyright: ignore[reportArgumentType]
        time.sleep(0.1)
    dispatcher.shutdown()
    assert sum(slept) <= dispatcher.busy_s < sum(slept) + 0.1


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
def test_the_results_before_a_failed_dispatch_are_given_first(async_scheduling):
    config = EngineConfig(
        scheduler=SchedulerConfig(4, 64, 128, async_scheduling=async_scheduling), memory=MemoryConfig(num_blocks=33)
    )
    core = EngineCore(config, fails_in_dispatch_at_step_9(config))
    core.add_request(EngineCoreRequest("a", [1, 2], SamplingParams(seed=1, max_tokens=20)))  # pyright: ignore[reportArgumentType]
    tokens: list[int] = []
    with pytest.raises(RuntimeError, match="no such program"):
        while True:
            outputs = core.step()
            tokens += outputs.new_token_ids if outputs else []
    assert tokens == list(range(3, 11)), "eight steps were dispatched before the ninth"
    core.shutdown()


@pytest.mark.parametrize("multiprocess", [True, False])
def test_an_error_in_the_dispatching_thread_reaches_the_caller_within_a_second(model_folder, multiprocess):
    before = threads()
    options = {"skip_tokenizer_init": True, "device": "cpu", "multiprocess": multiprocess}
    with Engine(model_folder, executor=EXECUTOR, **options) as engine:
        start = time.monotonic()
        with pytest.raises(EngineDeadError, match="RuntimeError: no such program") as caught:
            engine.generate([[1]] * 3, SamplingParams(max_tokens=900), use_tqdm=False)
        assert time.monotonic() - start < 9 * 0.02 + DEATH_S
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(EngineDeadError, match="no such program"):
            engine.generate([[1]], use_tqdm=False)
    assert threads() == before


def test_an_engine_that_is_shut_down_with_steps_in_flight_leaves_no_thread(tmp_path):
    before = threads()
    folder = write_folder(tmp_path / "t-tiny", T_TINY, random_tensors(T_TINY))
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20}
    engine = Engine(folder, device="cpu", multiprocess=False, **sizes)
    assert len(threads() - before) == 1
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    engine.llm_engine.add_request("a", [1, 2, 3], params)
    for _ in range(3):
        engine.llm_engine.step()
    engine.shutdown()
    assert threads() == before
