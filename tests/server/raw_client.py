"""A client on a bare socket, for everything that a well-behaved client does not do."""

import asyncio
import json
import socket
from typing import Any


class RawClient:
    """One POST on a connection of its own."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        self._port, self._path, self._body = port, path, json.dumps(body).encode()

    async def send(self, receive_bytes: int | None = None) -> None:
        """Connects and sends the request; receive_bytes: how much the system takes in that is not read here."""
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
        limit = 1 << 24 if receive_bytes is None else receive_bytes
        self.reader, self.writer = await asyncio.open_connection(sock=connection, limit=limit)
        head = f"POST {self._path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(self._body)}\r\n\r\n".encode() + self._body)
        await self.writer.drain()

    async def headers(self) -> int:
        """Reads the head of the answer; returns the status."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        self.length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None
        )
        return int(head.split()[1])

    async def events(self):
        """The events of a stream in chunked encoding, as they come; None for [DONE]."""
        rest = b""
        while size := int(await self.reader.readline(), 16):
            rest += (await self.reader.readexactly(size + 2))[:-2]
            *whole, rest = rest.split(b"\n\n")
            for event in whole:
                text = event.removeprefix(b"data: ")
                yield None if text == b"[DONE]" else json.loads(text)
        await self.reader.readline()

    async def body(self) -> Any:
        assert self.length is not None
        return json.loads(await self.reader.readexactly(self.length))

    def close(self) -> None:
        """Goes away at once."""
        self.writer.transport.abort()


async def stream_ids(port: int, body: dict[str, Any]) -> list[int]:
    """All ids of a streamed completion (return_token_ids is set)."""
    client = RawClient(port, "/v1/completions", body | {"stream": True, "return_token_ids": True})
    await client.send()
    assert await client.headers() == 200
    ids: list[int] = []
    async for event in client.events():
        if event is not None:
            assert "error" not in event, event
            ids += event["choices"][0]["token_ids"]
    client.close()
    return ids
