"""AsyncEngine over scripted executors: streams, ends, merging, death, loops."""

import asyncio
import gc
import os
import signal
import time
import traceback
import weakref

import pytest

from jaxvllm import AsyncEngine, AsyncLLMEngine, EngineArgs, EngineDeadError, RequestOutputKind, SamplingParams
from jaxvllm.async_engine import MAX_OUTPUTS_AT_ONCE
from jaxvllm.core_reader import split_outputs
from jaxvllm.metrics import Counter, Gauge
from jaxvllm.output_collector import OutputCollector
from jaxvllm.outputs import CompletionOutput, RequestOutput
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.serving import Serving
from scheduler.outputs import EngineCoreOutputs, FinishedRequest
from tests.engine.test_core_process import is_running, wait_until_gone

DELTA = RequestOutputKind.DELTA


def make_engine(folder, executor: str = "successor", **kwargs) -> AsyncEngine:
    options = {"step_timeout_s": kwargs.pop("step_timeout_s", 300.0)}
    args = EngineArgs(folder, executor=f"tests.engine.fake_executor:{executor}", device="cpu", **kwargs)
    return AsyncEngine(args, **options)


@pytest.fixture(scope="module")
def engine(model_folder):
    engine = make_engine(model_folder, max_num_seqs=300, max_num_batched_tokens=512)
    yield engine
    engine.shutdown()


def params(max_tokens: int, kind: RequestOutputKind = DELTA, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, output_kind=kind, ignore_eos=True, **more)


def expected(last: int, count: int) -> list[int]:
    return [(last + 1 + i) % 264 for i in range(count)]


async def ids_of(engine: AsyncEngine, prompt, request_id: str, sampling: SamplingParams) -> list[int]:
    ids: list[int] = []
    async for output in engine.generate(prompt, sampling, request_id):
        ids += output.outputs[0].token_ids
    return ids


async def numbers(engine: AsyncEngine) -> dict[str, float]:
    return {m.name: m.value for m in await engine.get_metrics() if isinstance(m, Counter | Gauge)}


def test_every_request_has_its_own_stream_and_many_run_together(engine):
    async def scenario():
        tasks = [ids_of(engine, [i % 200], str(i), params(30)) for i in range(2 * MAX_OUTPUTS_AT_ONCE + 7)]
        return await asyncio.gather(*tasks)

    assert AsyncLLMEngine is AsyncEngine
    assert asyncio.run(scenario()) == [expected(i % 200, 30) for i in range(2 * MAX_OUTPUTS_AT_ONCE + 7)]
    assert engine.num_unfinished_requests == 0


def test_kinds_of_output_are_those_of_the_synchronous_engine(engine):
    async def scenario():
        texts = {}
        for kind in RequestOutputKind:
            outputs = [o async for o in engine.generate("A", params(5, kind), kind.name)]
            assert outputs[-1].finished and not any(o.finished for o in outputs[:-1])
            texts[kind.name] = [o.outputs[0].text for o in outputs]
        return texts

    texts = asyncio.run(scenario())
    assert texts["FINAL_ONLY"] == ["BCDEF"] and texts["CUMULATIVE"][-1] == "BCDEF"
    assert "".join(texts["DELTA"]) == "BCDEF"


def test_a_consumer_that_stops_ends_the_request_within_two_steps(model_folder):
    engine = make_engine(model_folder, "slow")

    async def scenario():
        task = asyncio.create_task(ids_of(engine, [7], "b", params(900)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = await numbers(engine)  # asked behind the abort: the core reads in order
        await asyncio.sleep(0.3)
        after = await numbers(engine)
        assert after["vllm:num_requests_running"] == after["vllm:kv_cache_usage_perc"] == 0
        assert after["jaxvllm:num_steps"] - before["jaxvllm:num_steps"] <= 2

    asyncio.run(scenario())
    assert engine.num_unfinished_requests == 0
    engine.shutdown()


def test_outputs_wait_merged_for_a_slow_consumer_and_others_go_on(engine):
    async def scenario():
        slow = engine.generate([5], params(500, n=3), "slow")
        first = await anext(slow)
        fast = await asyncio.gather(*(ids_of(engine, [i], f"fast{i}", params(50)) for i in range(5)))
        assert fast == [expected(i, 50) for i in range(5)]
        while (await numbers(engine))["vllm:num_requests_running"]:
            await asyncio.sleep(0.01)
        rest = [output async for output in slow]
        assert len(rest) == 1, "one slot, whatever came"
        ids = [[], [], []]
        for output in (first, *rest):
            for completion in output.outputs:
                ids[completion.index] += completion.token_ids
        assert ids == [expected(5, 500)] * 3
        assert rest[0].finished and {c.finish_reason for c in rest[0].outputs} == {"length"}

    asyncio.run(scenario())


def test_abort_ends_a_stream_with_its_reason(engine):
    async def scenario():
        outputs = engine.generate([5], params(900), "a")
        await anext(outputs)
        await engine.abort(["a", "unknown"])
        return [output async for output in outputs][-1]

    last = asyncio.run(scenario())
    assert last.finished and last.outputs[0].finish_reason == "abort"


def test_bad_requests_and_ids_in_use_are_refused_and_cost_nobody_anything(engine):
    async def scenario():
        outputs = engine.generate([5], params(300), "a")
        await anext(outputs)
        for prompt, request_id in (([5], "a"), ("", "b"), ([264], "c"), ("x" * 100_000, "d")):
            with pytest.raises(ValueError):
                await anext(engine.generate(prompt, params(3), request_id))
        requests = [await engine.process_request("twin", [5], params(3)) for _ in range(2)]
        with pytest.raises(ValueError, match="in use"):
            await anext(engine.stream(requests))
        return [token for o in [o async for o in outputs] for token in o.outputs[0].token_ids]

    ids = asyncio.run(scenario())
    assert ids and ids == expected(5, 300)[-len(ids) :]
    assert engine.num_unfinished_requests == 0


def test_several_requests_of_one_stream_take_turns(engine):
    async def scenario():
        requests = [await engine.process_request(f"r{i}", [i], params(20)) for i in range(4)]
        ids: dict[str, list[int]] = {f"r{i}": [] for i in range(4)}
        async for output in engine.stream(requests):
            ids[output.request_id] += output.outputs[0].token_ids
        return ids

    assert asyncio.run(scenario()) == {f"r{i}": expected(i, 20) for i in range(4)}


def test_one_loop_after_another_may_use_the_engine_but_not_two_at_once(engine):
    async def leave_one_running():
        await anext(engine.generate([5], params(900), "left"))

    asyncio.run(leave_one_running())
    assert asyncio.run(ids_of(engine, [5], "left", params(3))) == expected(5, 3)

    async def other_loop_meanwhile():
        outputs = engine.generate([5], params(900), "a")
        await anext(outputs)
        with pytest.raises(RuntimeError, match="one event loop"):
            await asyncio.to_thread(asyncio.run, ids_of(engine, [5], "b", params(3)))
        await outputs.aclose()

    asyncio.run(other_loop_meanwhile())


def test_tokens_that_a_loop_did_not_get_to_do_not_hold_up_the_next_loop(model_folder, monkeypatch):
    monkeypatch.setattr("jaxvllm.async_engine.MAX_OUTPUTS_AT_ONCE", 1)
    engine = make_engine(model_folder)

    async def leave_a_backlog():
        tasks = [asyncio.create_task(ids_of(engine, [i], str(i), params(900))) for i in range(97)]
        while len(engine._backlog) < 53:
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)

    for _ in range(2):
        asyncio.run(leave_a_backlog())
        assert asyncio.run(asyncio.wait_for(ids_of(engine, [5], "a", params(3)), 5)) == expected(5, 3)
    engine.shutdown()


def test_what_an_open_loop_waits_for_is_cancelled_when_another_one_takes_over(model_folder):
    engine = make_engine(model_folder, "slow", step_timeout_s=0.2)
    with asyncio.Runner() as first:

        async def leave_calls_open():
            waits = [asyncio.create_task(wait) for wait in (engine.wait_until_dead(), engine.get_metrics())]
            await asyncio.sleep(0)
            return waits

        async def end(waits):
            return await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 5)

        waits = first.run(leave_calls_open())
        assert asyncio.run(ids_of(engine, [5], "a", params(3))) == expected(5, 3)
        assert [type(error) for error in first.run(end(waits))] == [asyncio.CancelledError] * 2
    engine.shutdown()


def test_a_stream_that_is_closed_late_leaves_the_next_request_of_its_name_alone(engine):
    async def scenario():
        first = engine.generate([5], params(900), "a")
        await anext(first)
        await engine.abort("a")
        await engine.drain(5.0)
        second = asyncio.create_task(ids_of(engine, [5], "a", params(300)))
        while not engine.num_unfinished_requests:
            await asyncio.sleep(0)
        await first.aclose()
        return await asyncio.wait_for(second, 5)

    assert asyncio.run(scenario()) == expected(5, 300)


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        ("fails_at_step_9", "on fire"),
        ("slow", "SIGKILL"),
        ("hangs_at_step_9", "hangs"),
        ("speaks_nonsense_from_step_9", "cannot be read"),
    ],
)
def test_death_of_the_core_reaches_every_caller_within_a_second(model_folder, executor, words):
    engine = make_engine(model_folder, executor, step_timeout_s=0.5)

    async def caller(i: int) -> float:
        with pytest.raises(EngineDeadError, match=words):
            await ids_of(engine, [i], str(i), params(900))
        return time.monotonic()

    async def scenario():
        deaths = asyncio.create_task(engine.wait_until_dead())
        callers = [asyncio.create_task(caller(i)) for i in range(5)]
        await asyncio.sleep(0.3)
        start = time.monotonic()
        if executor == "slow":
            os.kill(engine._client.pid, signal.SIGKILL)
        ends = await asyncio.gather(*callers)
        # A core that hangs is asked once a second, and given half a second to answer.
        assert max(ends) - start < (2.0 if words == "hangs" else 1.0)
        assert words in str(await deaths) and engine.errored and not engine.is_running
        with pytest.raises(EngineDeadError, match=words):
            await engine.check_health()
        await caller(9)
        assert (await engine.get_metrics())[0].name == "vllm:num_requests_running"

    asyncio.run(scenario())
    assert engine.num_unfinished_requests == 0
    engine.shutdown()


def test_who_no_longer_waits_for_the_death_of_the_core_is_forgotten(engine):
    async def scenario():
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.wait_until_dead(), 0.01)

    asyncio.run(scenario())
    assert not engine._deaths


def test_the_error_of_a_dead_core_does_not_grow_with_those_who_hear_it(model_folder):
    """Each raise adds frames to an error's traceback, and with them all that the callers had: their prompts, say."""
    engine = make_engine(model_folder, "slow")
    serving = Serving(engine, ServerConfig(("m",)))

    async def ask() -> None:
        with pytest.raises(EngineDeadError):
            await ids_of(engine, [5], "a", params(9))
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            serving.check_open()

    async def scenario() -> list[int]:
        running = [asyncio.create_task(ids_of(engine, [5], str(i), params(900))) for i in range(20)]
        await asyncio.sleep(0.2)
        engine.shutdown()
        errors = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(error, EngineDeadError) for error in errors)
        sizes = []
        for _ in range(3):
            assert engine.dead_error is not None
            sizes.append(len(list(traceback.walk_tb(engine.dead_error.__traceback__))))
            await ask()
        return sizes

    assert max(asyncio.run(scenario())) < 10


def test_abort_of_a_core_whose_death_was_not_yet_heard_of_is_no_error(model_folder):
    engine = make_engine(model_folder, "slow")

    async def scenario():
        task = asyncio.create_task(ids_of(engine, [5], "a", params(900)))
        await asyncio.sleep(0.2)
        os.kill(engine._client.pid, signal.SIGKILL)
        engine._client._process.wait()
        assert engine.is_running
        await engine.abort("a")
        await engine.abort_all()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await task

    asyncio.run(scenario())
    engine.shutdown()


def test_shutdown_ends_the_core_and_every_stream(model_folder):
    engine = make_engine(model_folder, "slow")
    pid = engine._client.pid

    async def scenario():
        task = asyncio.create_task(ids_of(engine, [5], "a", params(900)))
        await asyncio.sleep(0.2)
        engine.shutdown()
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task

    asyncio.run(scenario())
    assert not is_running(pid)


def test_shutdown_ends_the_core_though_a_closed_loop_left_a_request(model_folder):
    engine = make_engine(model_folder, "slow")

    async def wait_and_leave():
        request = await engine.process_request("a", [5], params(900))
        waiting = engine._start([request]).get()
        waiting.send(None).add_done_callback(lambda _: None)  # as in a task, which the loop's end would cancel
        return waiting

    waiting = asyncio.run(wait_and_leave())
    engine.shutdown()
    assert not is_running(engine._client.pid) and not engine.num_unfinished_requests
    waiting.close()


def test_drain_waits_for_running_requests(model_folder):
    engine = make_engine(model_folder, "slow")

    async def scenario():
        task = asyncio.create_task(ids_of(engine, [5], "a", params(20)))
        await asyncio.sleep(0.1)
        assert not await engine.drain(0.05)
        assert await engine.drain(5.0)
        assert await task == expected(5, 20)

    asyncio.run(scenario())
    engine.shutdown()


def test_an_engine_that_is_dropped_takes_its_core_with_it(model_folder):
    engine = make_engine(model_folder)
    asyncio.run(ids_of(engine, [5], "a", params(3)))
    pid, gone = engine._client.pid, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None and wait_until_gone(pid)


def test_an_engine_in_this_process_is_refused(model_folder):
    with pytest.raises(NotImplementedError, match="multiprocess=False"):
        make_engine(model_folder, multiprocess=False)


def test_outputs_are_split_without_loss():
    ids = [f"r{i}" for i in range(10)]
    finished = {i: FinishedRequest("stop") for i in ("r0", "r5", "x")}
    outputs = EngineCoreOutputs(ids, list(range(10)), {"r7": 3}, finished, timestamp=7.5)
    assert all(part.timestamp == 7.5 for part in split_outputs(outputs, 4))
    parts = split_outputs(outputs, 4)
    assert [part.request_ids for part in parts] == [ids[:4], ids[4:8], ids[8:]]
    assert [token for part in parts for token in part.new_token_ids] == list(range(10))
    assert [list(part.finished) for part in parts] == [["r0"], ["r5"], ["x"]]
    assert [part.num_cached_tokens for part in parts] == [{}, {"r7": 3}, {}]
    assert split_outputs(outputs, 10) == [outputs]


def test_collector_merges_by_kind():
    def output(text: str, index: int = 0, **fields) -> RequestOutput:
        completion = CompletionOutput(
            index, text, [ord(c) for c in text], logprobs=[{ord(c): 0} for c in text], **fields
        )
        return RequestOutput("r", None, [1], [completion], finished="finish_reason" in fields)

    async def scenario(kind: RequestOutputKind):
        collector = OutputCollector()
        for piece in (output("a"), output("b"), output("x", 1), output("c", finish_reason="stop", stop_reason="c")):
            collector.put(piece, kind)
        return await collector.get()

    merged = asyncio.run(scenario(DELTA))
    assert [(c.index, c.text, c.token_ids) for c in merged.outputs] == [(0, "abc", [97, 98, 99]), (1, "x", [120])]
    assert merged.outputs[0].logprobs == [{97: 0}, {98: 0}, {99: 0}]
    assert merged.finished and merged.outputs[0].stop_reason == "c"
    replaced = asyncio.run(scenario(RequestOutputKind.CUMULATIVE))
    assert [(c.index, c.text) for c in replaced.outputs] == [(0, "c"), (1, "x")]
