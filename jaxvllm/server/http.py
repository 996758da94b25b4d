"""The HTTP protocol of the server: uvicorn's, with a limit on what may come before a request's body."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65536  # request line and headers


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose request line and headers have no end; httptools itself would collect them for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._num_head_bytes = 0  # received in whole pieces of nothing else

    def on_headers_complete(self) -> None:
        """A body follows, if only an empty one."""
        self._is_in_head = False
        self._num_head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next request may begin."""
        self._is_in_head = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request line and headers are too large.")
