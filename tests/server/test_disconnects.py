"""Clients that go away, and clients that read slowly."""

import asyncio
import random
import time
from pathlib import Path

import numpy as np

from tests.server.process import Server
from tests.server.raw_client import RawClient, stream_ids

NUM_REQUESTS = 300
LEAVE_AT = ["at once", "after the headers", "after the first delta", "in the middle", "right before the end"]


def open_sockets(pid: int) -> int:
    links = (path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir())
    return sum(str(link).startswith("socket:") for link in links)


def expected(last: int, count: int) -> list[int]:
    return [(last + 1 + i) % 264 for i in range(count)]


async def visit(port: int, prompt: list[int], max_tokens: int, streamed: bool, leave_at: str | None) -> None:
    """One request; a client that stays checks what it gets."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": streamed,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    client = RawClient(port, "/v1/completions", body)
    await client.send()
    try:
        if leave_at == "at once" or (leave_at and not streamed):
            if leave_at != "at once":
                await asyncio.sleep(0.005 * LEAVE_AT.index(leave_at) * max_tokens / 4)
            return
        assert await client.headers() == 200
        if not streamed:
            answer = await client.body()
            assert answer["choices"][0]["token_ids"] == expected(prompt[-1], max_tokens)
            return
        if leave_at == "after the headers":
            return
        ids: list[int] = []
        async for event in client.events():
            ids += event["choices"][0]["token_ids"] if event else []
            limit = {
                "after the first delta": 1,
                "in the middle": max_tokens // 2,
                "right before the end": max_tokens - 1,
            }
            if leave_at and len(ids) >= limit[leave_at]:
                return
        assert ids == expected(prompt[-1], max_tokens)
    finally:
        client.close()


async def burst(port: int) -> None:
    rng = np.random.default_rng(0)
    gaps = rng.gamma(0.25, 0.020 / 0.25, NUM_REQUESTS)
    sizes = np.minimum(rng.zipf(1.3, (NUM_REQUESTS, 2)) * 7, 200)
    tasks = []
    for i in range(NUM_REQUESTS):
        leave_at = LEAVE_AT[i % 5] if rng.random() < 0.4 else None
        prompt = [int(t) for t in rng.integers(0, 256, sizes[i, 0])]
        tasks.append(asyncio.create_task(visit(port, prompt, int(sizes[i, 1]), bool(i % 2), leave_at)))
        await asyncio.sleep(gaps[i])
    await asyncio.gather(*tasks)


def test_e05_requests_of_clients_that_left_are_gone_within_a_second_and_the_others_are_right(slow_server: Server):
    slow_server.wait_until_idle()
    time.sleep(0.3)  # the last connections are closed
    sockets = open_sockets(slow_server.process.pid)
    asyncio.run(burst(slow_server.port))
    slow_server.wait_until_idle(limit_s=1.0)
    time.sleep(0.3)
    assert open_sockets(slow_server.process.pid) <= sockets
    assert slow_server.get("/load").json() == {"server_load": 0}


def test_e05_a_client_that_leaves_in_mid_stream_costs_two_more_steps_at_most(slow_server: Server):
    async def leave() -> None:
        body = {"prompt": [7] * 40, "max_tokens": 900, "stream": True, "ignore_eos": True}
        client = RawClient(slow_server.port, "/v1/completions", body)
        await client.send()
        assert await client.headers() == 200
        async for _ in client.events():
            break
        client.close()

    asyncio.run(leave())
    before = slow_server.gauges()["jaxvllm:num_steps"]  # the abort may overtake this answer, or be overtaken
    slow_server.wait_until_idle(limit_s=0.5)
    assert slow_server.gauges()["jaxvllm:num_steps"] - before <= 4


def test_e05_a_waiting_request_whose_client_leaves_never_runs(slow_server: Server):
    async def scenario() -> None:
        body = {"max_tokens": 300, "ignore_eos": True}
        running = [asyncio.create_task(stream_ids(slow_server.port, body | {"prompt": [i]})) for i in range(16)]
        await asyncio.sleep(0.3)
        waiting = [
            RawClient(slow_server.port, "/v1/completions", body | {"prompt": [99] * 50, "stream": streamed})
            for streamed in (True, False)
        ]
        for client in waiting:
            await client.send()
        await asyncio.sleep(0.2)
        assert slow_server.gauges()["vllm:num_requests_waiting"] == 2
        for client in waiting:
            client.close()
        await asyncio.sleep(0.3)
        assert slow_server.gauges()["vllm:num_requests_waiting"] == 0
        for i, ids in enumerate(await asyncio.gather(*running)):
            assert ids == expected(i, 300)

    prompt_tokens = slow_server.gauges()["vllm:prompt_tokens"]
    asyncio.run(scenario())
    assert slow_server.gauges()["vllm:prompt_tokens"] - prompt_tokens == 16


def test_slow_readers_stall_nobody_and_get_all_of_it_in_larger_pieces(server: Server):
    """What a client does not read waits in its request's one slot of the server, merged."""

    async def scenario() -> None:
        body = {"prompt": [5], "max_tokens": 1000, "ignore_eos": True, "n": 8, "temperature": 1.0}
        body |= {"stream": True, "return_token_ids": True}
        # Each piece has the id, so that 8,000 pieces are 4 MB: as much as a system keeps for a client at most.
        sleepers = [RawClient(server.port, "/v1/completions", body | {"request_id": f"{i:0256}"}) for i in range(8)]
        for client in sleepers:
            await client.send(receive_bytes=4096)
        await asyncio.sleep(0.2)
        start = time.monotonic()
        for i in range(5):
            assert await stream_ids(server.port, {"prompt": [i], "max_tokens": 50}) == expected(i, 50)
        assert time.monotonic() - start < 5.0
        while server.gauges()["vllm:num_requests_running"] + server.gauges()["vllm:num_requests_waiting"]:
            await asyncio.sleep(0.05)
        for client in sleepers:
            assert await client.headers() == 200
            ids: list[list[int]] = [[] for _ in range(8)]
            num_events = 0
            async for event in client.events():
                num_events += 1
                if event is not None:
                    choice = event["choices"][0]
                    ids[choice["index"]] += choice["token_ids"]
            assert ids == [expected(5, 1000)] * 8
            assert num_events < 8 * 1000, "nothing was merged: the client was not slow"
            client.close()

    asyncio.run(scenario())


def test_200_streams_at_once(server: Server):
    """scripts/hold_connections.py does this with 1,000."""

    async def scenario() -> list[list[int]]:
        bodies = [{"prompt": [i % 200], "max_tokens": 20, "ignore_eos": True} for i in range(200)]
        return await asyncio.gather(*(stream_ids(server.port, body) for body in bodies))

    results = asyncio.run(scenario())
    random.Random(0).shuffle(results)
    assert sorted(map(tuple, results)) == sorted(tuple(expected(i, 20)) for i in range(200))
    server.wait_until_idle()
