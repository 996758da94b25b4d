"""Runs a load against a server: each request at its time, at most so many at once."""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

import httpx2
from tqdm import tqdm

from jaxvllm.bench.client import BenchClient, RequestResult
from jaxvllm.bench.loads import BenchRequest

READY_INTERVAL_S = 1.0


async def wait_until_ready(client: BenchClient, timeout_s: float) -> str:
    """The server's first model, as soon as it answers; says so once if that is not at once.

    Raises:
      TimeoutError: it does not within timeout_s seconds (0: one try).
      ValueError: the address is none, or what answers there refuses.
    """
    end = time.monotonic() + timeout_s
    is_silent = True
    while True:
        try:
            return await client.first_model()
        except (httpx2.UnsupportedProtocol, httpx2.HTTPStatusError, httpx2.InvalidURL) as error:
            raise ValueError(f"the server's models cannot be read: {error}") from error
        except httpx2.HTTPError as error:
            if time.monotonic() + READY_INTERVAL_S > end:
                raise TimeoutError(f"the server does not answer: {type(error).__name__}: {error}") from error
            if is_silent:
                message = f"jaxvllm: the server does not answer yet: {type(error).__name__}: {error}"
                print(f"{message}. Waiting for up to {timeout_s:g} s (--ready-check-timeout-sec).", file=sys.stderr)
                is_silent = False
        await asyncio.sleep(READY_INTERVAL_S)


async def as_text(client: BenchClient, requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    """The same requests with text in the place of ids, as chats need it."""
    return [replace(r, prompt=await client.detokenize(r.prompt)) if isinstance(r.prompt, list) else r for r in requests]


async def run_load(
    client: BenchClient, requests: Sequence[BenchRequest], *, max_concurrency: int | None, use_tqdm: bool
) -> tuple[list[RequestResult], float]:
    """Send all requests, each at its arrival_s (later if max_concurrency are under way).

    Returns: one result a request, in order, and the seconds from the start to the last one's end.
    """
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else nullcontext()
    zero = time.perf_counter()
    with tqdm(total=len(requests), disable=not use_tqdm, unit="request") as progress:

        async def run(request: BenchRequest) -> RequestResult:
            async with slots:
                result = await client.send(request, zero)
            progress.update()
            return result

        tasks = []
        try:
            for request in sorted(requests, key=lambda request: request.arrival_s):
                delay = zero + request.arrival_s - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                tasks.append((request, asyncio.create_task(run(request))))
            await asyncio.gather(*(task for _, task in tasks))
        except BaseException:
            for _, task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
            raise
    results = {id(request): task.result() for request, task in tasks}
    return [results[id(request)] for request in requests], time.perf_counter() - zero
