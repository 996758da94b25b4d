"""A core that dies or hangs: health tells, waiting clients hear of it, the process ends or gets a new core."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxvllm import AsyncEngine
from tests.engine.conftest import write_model
from tests.engine.test_core_process import wait_until_gone
from tests.server.process import EXECUTORS, ROOT, SCRIPT, Server, running_server
from tests.server.raw_client import RawClient

HEARD_S = 2.0
STEP_TIMEOUT_S = 1.0
BODY = {"prompt": [7], "max_tokens": 900, "ignore_eos": True}


def core_pid(server: Server) -> int:
    """Of the core, which any thread of the server may have started."""
    files = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    children = [int(pid) for file in files for pid in file.read_text().split()]
    [pid] = [pid for pid in children if b"jaxvllm.core" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


async def in_flight(server: Server, break_it) -> list[dict]:
    """The errors that 3 streams and 2 plain requests end with, all within HEARD_S of the fault."""
    clients = [RawClient(server.port, "/v1/completions", BODY | {"stream": i < 3}) for i in range(5)]
    for client in clients:
        await client.send()
    for client in clients[:3]:
        assert await client.headers() == 200
    break_it()
    start = time.monotonic()

    async def last_event(client: RawClient) -> dict:
        events = [event async for event in client.events()]
        assert events[-1] is None, "a stream ends with [DONE] whatever happens"
        return events[-2]["error"]

    async def status(client: RawClient) -> dict:
        assert await client.headers() == 503
        return (await client.body())["error"]

    errors = await asyncio.gather(*map(last_event, clients[:3]), *map(status, clients[3:]))
    assert time.monotonic() - start < HEARD_S + STEP_TIMEOUT_S
    for client in clients:
        client.close()
    return list(errors)


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        ("fails_at_step_9", "the device is on fire"),
        ("slow", "killed by SIGKILL"),
        ("hangs_at_step_9", "no step has ended for 1 s"),
    ],
)
def test_e09_death_of_the_core_reaches_everybody_and_ends_the_process(model_folder, executor, words):
    options = ("--step-timeout", str(STEP_TIMEOUT_S))
    with running_server(model_folder, executor, *options, stops=False) as server:
        assert server.get("/health").status == 200
        pid = core_pid(server)
        errors = asyncio.run(in_flight(server, lambda: executor == "slow" and os.kill(pid, signal.SIGKILL)))
        assert all(words in error["message"] and error["code"] == 503 for error in errors), errors
        assert server.get("/health").error()["code"] == 503
        assert server.post("/ping", {}).status == 503
        assert server.post("/v1/completions", BODY).error()["code"] == 503
        assert "vllm:num_requests_running" in server.gauges()
        assert server.process.wait(10) == 1
        assert not Path(f"/proc/{pid}").exists(), "the core must not outlive the server"


def test_restart_engine_puts_a_new_core_in_the_place_of_a_dead_one(model_folder):
    with running_server(model_folder, "slow", "--restart-engine") as server:
        old = core_pid(server)
        errors = asyncio.run(in_flight(server, lambda: os.kill(old, signal.SIGKILL)))
        assert len(errors) == 5
        deadline = time.monotonic() + 20
        while server.get("/health").status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert core_pid(server) != old
        answer = server.post("/v1/completions", BODY | {"max_tokens": 3, "prompt": "A"}).json()
        assert answer["choices"][0]["text"] == "BCD"


async def tell_num_engines(request, call_next):
    """A middleware."""
    gc.collect()
    response = await call_next(request)
    response.headers["x-num-engines"] = str(sum(isinstance(thing, AsyncEngine) for thing in gc.get_objects()))
    return response


def test_a_new_core_leaves_nothing_of_the_dead_one_in_memory(model_folder):
    """Its tokenizer, above all. The requests that it took along, and the error they heard, do not keep it either."""
    options = ("--restart-engine", "--middleware", f"{__name__}.tell_num_engines")
    with running_server(model_folder, "slow", *options) as server:
        for _ in range(2):
            pid = core_pid(server)
            asyncio.run(in_flight(server, lambda pid=pid: os.kill(pid, signal.SIGKILL)))
            deadline = time.monotonic() + 10
            while (health := server.get("/health")).status != 200 or health.headers["x-num-engines"] != "1":
                assert time.monotonic() < deadline, health  # a timer of the dead one's may run for a second
                time.sleep(0.1)


@pytest.mark.parametrize("timeout_s", [0, 20])
def test_sigterm_aborts_running_requests_or_waits_for_them(model_folder, timeout_s):
    async def scenario(server: Server) -> tuple[int, str]:
        client = RawClient(
            server.port, "/v1/completions", BODY | {"max_tokens": 60, "stream": True, "return_token_ids": True}
        )
        await client.send()
        assert await client.headers() == 200
        server.process.terminate()
        events = [event async for event in client.events() if event is not None]
        return sum(len(e["choices"][0]["token_ids"]) for e in events), events[-1]["choices"][0]["finish_reason"]

    with running_server(model_folder, "slow", "--shutdown-timeout", str(timeout_s), stops=False) as server:
        num_tokens, reason = asyncio.run(scenario(server))
        assert server.process.wait(10) == 0
    assert (num_tokens, reason) == (60, "length") if timeout_s else (num_tokens < 60 and reason == "abort")


def test_sigterm_ends_requests_whose_prompt_has_no_logprobs_yet(model_folder):
    """They wait for the one request that may run; what was asked for about their prompts was never computed."""

    async def scenario(server: Server) -> list[dict]:
        waiting = {"prompt": "AB", "echo": True, "logprobs": 1, "n": 2}
        bodies = [BODY, BODY | waiting, BODY | waiting | {"stream": True}]
        clients = [RawClient(server.port, "/v1/completions", body) for body in bodies]
        for client in clients:
            await client.send()
        while server.gauges()["vllm:num_requests_waiting"] < 4:
            await asyncio.sleep(0.05)
        server.process.terminate()
        assert [await client.headers() for client in clients] == [200] * 3
        choices = (await clients[1].body())["choices"]
        return choices + [choice async for event in clients[2].events() if event for choice in event["choices"]]

    with running_server(model_folder, "slow", "--max-num-seqs", "1", stops=False) as server:
        choices = asyncio.run(scenario(server))
        assert server.process.wait(10) == 0
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices] == [
        (0, "AB", "abort"), (1, "AB", "abort")
    ] * 2  # fmt: skip
    for choice in choices:
        assert choice["logprobs"]["tokens"] == ["A", "B"] and choice["logprobs"]["token_logprobs"] == [None, None]


async def end_of_stream(server: Server, signal_it) -> str:
    """The reason that a long stream ends with."""
    client = RawClient(server.port, "/v1/completions", BODY | {"stream": True})
    await client.send()
    assert await client.headers() == 200
    signal_it()
    events = [event async for event in client.events() if event is not None]
    client.close()
    return events[-1]["error"]["message"] if "error" in events[-1] else events[-1]["choices"][0]["finish_reason"]


def test_sigterm_to_all_processes_at_once_aborts_running_requests(model_folder):
    def to_all():
        for pid in (core_pid(server), server.process.pid):
            os.kill(pid, signal.SIGTERM)

    with running_server(model_folder, "slow", stops=False) as server:
        assert asyncio.run(end_of_stream(server, to_all)) == "abort"
        assert server.process.wait(10) == 0


def test_no_new_core_is_started_for_a_server_that_is_ending(model_folder):
    def end_then_kill():
        pid = core_pid(server)
        server.process.terminate()
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)

    options = ("--restart-engine", "--shutdown-timeout", "30")
    with running_server(model_folder, "slow", *options, stops=False) as server:
        assert "SIGKILL" in asyncio.run(end_of_stream(server, end_then_kill))
        assert server.process.wait(10) == 1
    assert not any("Starting a new engine core" in line for line in server.lines)


def test_sigterm_while_a_new_core_loads_does_not_wait_for_it(tmp_path):
    folder = write_model(tmp_path)
    with running_server(folder, "sleeps_at_second_start", "--restart-engine", stops=False) as server:
        os.kill(core_pid(server), signal.SIGKILL)
        deadline = time.monotonic() + 30
        while not (folder / "starts again").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        new = core_pid(server)
        assert server.get("/health").status == 503
        server.process.terminate()
        assert server.process.wait(30) == 0  # loading takes 60 s
        assert wait_until_gone(new)


def test_a_second_ctrl_c_ends_the_wait_for_running_requests(model_folder):
    def twice():
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGINT)

    with running_server(model_folder, "slow", "--shutdown-timeout", "60", stops=False) as server:
        start = time.monotonic()
        assert asyncio.run(end_of_stream(server, twice)) == "abort"
        assert server.process.wait(10) == 0 and time.monotonic() - start < 5.0


def test_sigterm_while_the_model_loads_ends_server_and_core_and_leaves_no_socket(model_folder, tmp_path):
    path = tmp_path / "socket"
    command = [sys.executable, "-c", SCRIPT, f"{EXECUTORS}:sleeps_at_start", "serve", str(model_folder)]
    process = subprocess.Popen([*command, "--device", "cpu", "--uds", str(path)], cwd=ROOT)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 20
        while not children.read_text():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
        pid = core_pid(Server(process))
        assert path.exists()
        process.terminate()
        assert process.wait(10) == 0
        assert not path.exists() and wait_until_gone(pid)
    finally:
        process.kill()
        process.wait()


def test_an_address_in_use_is_an_error_before_the_model_is_loaded(server: Server, model_folder):
    command = [sys.executable, "-m", "jaxvllm.cli", "serve", str(model_folder), "--port", str(server.port)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{server.port}" in result.stderr


def test_errors_of_a_stream_are_json(server: Server):
    """The message of an error that came from far away may hold anything; what arrives is one JSON object."""
    error = server.post("/v1/completions", {"prompt": "A", "model": 'x"\n\n\\'}).error()
    assert json.loads(json.dumps(error))["param"] == "model"
