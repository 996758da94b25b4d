"""A small OpenAI-compatible server in a thread: it speaks at times that the test sets, and notes what it was asked."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeServer:
    """Attributes:
    ttft_s, itl_s: before the first piece and between pieces.
    tokens_per_piece: how many tokens a piece of the stream stands for.
    fail_from: requests from this number on are refused with a 400.
    default_tokens: of a request that does not say how many.
    error_after: an error event comes behind so many pieces of a stream.
    """

    ttft_s: float = 0.1
    itl_s: float = 0.03
    tokens_per_piece: int = 1
    fail_from: int = 10**9
    error_after: int = 10**9
    says_usage: bool = True
    default_tokens: int = 1
    text: str = "é"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    _num_running: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                headers = {}
                while (line := await reader.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
                await self._answer(method, path, headers, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, headers: dict, body: dict, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            return self._send(writer, {"data": [{"id": "fake"}]})
        if path == "/tokenize":
            return self._send(writer, {"count": len(body["prompt"].split())})
        if path == "/detokenize":
            return self._send(writer, {"prompt": "".join(chr(97 + i % 26) for i in body["tokens"])})
        self.bodies.append(body)
        self.headers.append(headers)
        if len(self.bodies) > self.fail_from:
            return self._send(writer, {"error": {"message": "too much"}}, "400 Bad Request")
        self._num_running += 1
        self.most_at_once = max(self.most_at_once, self._num_running)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            await self._stream(path.endswith("/chat/completions"), body, writer)
        finally:
            self._num_running -= 1
        return None

    async def _stream(self, is_chat: bool, body: dict, writer: asyncio.StreamWriter) -> None:
        num_tokens = body.get("max_completion_tokens", body.get("max_tokens", self.default_tokens))
        num_pieces = -(-num_tokens // self.tokens_per_piece)
        await asyncio.sleep(self.ttft_s)
        if is_chat:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(num_pieces):
            if index == self.error_after:
                return self._event(writer, {"error": {"message": "the engine died", "code": 500}}, is_last=True)
            if index:
                await asyncio.sleep(self.itl_s)
            choice = {"delta": {"content": self.text}} if is_chat else {"text": self.text}
            self._event(writer, {"choices": [choice]})
            await writer.drain()
        if self.says_usage:
            self._event(writer, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_tokens}})
        return self._event(writer, "[DONE]", is_last=True)

    def _event(self, writer: asyncio.StreamWriter, event: Any, is_last: bool = False) -> None:
        text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
        data = f"data: {text}\n\n".encode()
        for piece in (data[:11], data[11:]):  # a character may be torn apart
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        if is_last:
            writer.write(b"0\r\n\r\n")

    def _send(self, writer: asyncio.StreamWriter, body: Any, status: str = "200 OK") -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)


@contextmanager
def running(**settings: Any):
    """A FakeServer with these settings, while the context lasts."""
    server = FakeServer(**settings)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def main() -> None:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        started.set()
        async with listening:
            await asyncio.Event().wait()

    task = loop.create_task(main())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
