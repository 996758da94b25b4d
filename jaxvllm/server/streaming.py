"""Work that ends when the client goes away, and answers as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxvllm.server.errors import ApiError, to_api_error
from jaxvllm.server.responses import encode

DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def while_connected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do work for a client whose request has been read; cancel it as soon as the client has gone.

    Raises: ClientGoneError then; otherwise what work raises.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


class EventStream(Response):
    """Server-sent events from a generator; an error ends them with an event of its own.

    Args:
      first: what the generator has yielded already.
      events: owned: closed when the client goes or the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes], headers: Mapping[str, str] | None = None) -> None:
        self._first = first
        self._events = events
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; stop when the client goes."""
        try:
            await while_connected(receive, self._send(send))
        except ClientGoneError:
            pass
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        failure = None
        try:
            async for body in self._events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:
            known = to_api_error(error)
            failure = None if known else error
            body = event((known or ApiError("the server failed; its log says more.", status=500)).body()) + DONE
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if failure is not None:
            raise failure


async def start_stream(events: AsyncGenerator[bytes], headers: Mapping[str, str] | None = None) -> EventStream:
    """Wait for the first event, so that an error before it has a status of its own, and stream."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, headers)
