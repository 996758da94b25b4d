"""What happens to every request before it reaches its route: keys, request ids, the count of what is in progress."""

import uuid
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxvllm.server.config import Keys
from jaxvllm.server.errors import ApiError

# What a prober or a scraper may see without a key; everything else needs one.
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/load", "/metrics"})
_COUNTED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


@dataclass
class Load:
    """How many requests for text are in progress."""

    num_requests: int = 0


class KeyCheck:
    """Turns away requests without a valid key."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or _path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if self._keys.accept(given):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'.",
            status=401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)


class LoadCount:
    """Counts the requests for text that are in progress."""

    def __init__(self, app: ASGIApp, load: Load) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or _path(scope) not in _COUNTED_PATHS:
            await self._app(scope, receive, send)
            return
        self._load.num_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._load.num_requests -= 1


class RequestIdHeader:
    """Gives every answer the X-Request-Id of its request, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        given = next((value for name, value in scope.get("headers", ()) if name == b"x-request-id"), None)
        request_id = given.decode("latin-1") if given else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _path(scope: Scope) -> str:
    return scope["path"].removeprefix(scope.get("root_path", ""))
