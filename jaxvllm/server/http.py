"""The HTTP protocol of the server: uvicorn's, with a limit on what may come before a request's body."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65536  # request line and headers


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose request line and headers have no end; httptools itself would collect them for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._is_in_head = True

    def on_message_begin(self) -> None:
        """A request begins."""
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its body follows."""
        self._is_in_head = False
        self._num_head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next request may begin."""
        self._is_in_head = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The request line and headers are too large.")


def assert_supported(protocol: type[asyncio.Protocol]) -> None:
    """For start-up: uvicorn's class has the hooks that are used here."""
    for name in ("on_message_begin", "on_headers_complete", "on_message_complete", "send_400_response"):
        assert hasattr(protocol, name), name
