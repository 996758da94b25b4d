"""Who answers in `jaxvllm chat`: an engine of this process, or a server."""

import itertools
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import httpx2

from jaxvllm.sse import DONE, EventReader
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxvllm.engine import Engine

Messages = list[dict[str, Any]]
TIMEOUT = httpx2.Timeout(None, connect=10.0)  # an answer may wait in the server's queue


class ChatBackend(Protocol):
    """Answers conversations, one at a time."""

    def answer(self, messages: Messages) -> Generator[str]:
        """The answer, piece by piece; closing the generator stops it.

        Raises: ValueError: this conversation cannot be answered, a later one may.
        """
        ...


class EngineChat:
    """Answers with an engine. sampling_params must be of RequestOutputKind.DELTA."""

    def __init__(self, engine: "Engine", sampling_params: SamplingParams) -> None:
        self._engine = engine
        self._params = sampling_params
        self._numbers = itertools.count()

    def answer(self, messages: Messages) -> Generator[str]:
        """See ChatBackend."""
        core, request_id = self._engine.llm_engine, str(next(self._numbers))
        core.add_request(request_id, self._engine.render_chat(messages), self._params)
        try:
            while core.has_unfinished_requests():
                for output in core.step():
                    (completion,) = output.outputs
                    if completion.finish_reason == "error":
                        raise ValueError(str(completion.stop_reason))
                    yield completion.text
        finally:
            core.drop_requests([request_id])


class ServerChat:
    """Answers with an OpenAI-compatible server.

    Attributes:
      model: its name there.
    """

    def __init__(self, http: httpx2.Client, model: str, fields: dict[str, Any]) -> None:
        self._http = http
        self._fields = fields
        self.model = model

    def answer(self, messages: Messages) -> Generator[str]:
        """See ChatBackend."""
        body = {"model": self.model, "messages": messages, "stream": True, **self._fields}
        try:
            with self._http.stream("POST", "chat/completions", json=body) as response:
                _check(response)
                reader = EventReader()
                for piece in response.iter_raw():
                    for event in reader.push(piece):
                        if event == DONE:
                            return
                        yield _text(event)
        except httpx2.HTTPError as error:
            raise ValueError(f"the server does not answer: {type(error).__name__}: {error}") from error


@contextmanager
def server_chat(url: str, api_key: str | None, model: str | None, fields: dict[str, Any]) -> Iterator[ServerChat]:
    """A ServerChat while the context lasts.

    Args:
      url: of the API, with /v1 or without.
      model: None: the first that the server lists.
      fields: further fields of each request.

    Raises: ValueError: there is no such server.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base_url = url.rstrip("/").removesuffix("/v1") + "/v1/"
    with httpx2.Client(base_url=base_url, headers=headers, timeout=TIMEOUT) as http:
        try:
            response = http.get("models")
            _check(response)
            names = [entry["id"] for entry in response.json()["data"]]
        except (httpx2.HTTPError, httpx2.InvalidURL, KeyError, TypeError) as error:
            raise ValueError(f"--url {url}: no server's models there: {type(error).__name__}: {error}") from error
        if model is None and not names:
            raise ValueError(f"--url {url}: the server lists no model: give --model-name.")
        yield ServerChat(http, model or names[0], fields)


def _check(response: httpx2.Response) -> None:
    """Raises ValueError with the server's own words unless it said yes."""
    if response.status_code == httpx2.codes.OK:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:1000]
    raise ValueError(f"the server answers {response.status_code}: {message}")


def _text(event: Any) -> str:
    if isinstance(event, dict) and "error" in event:
        error = event["error"]
        raise ValueError(str(error.get("message", error) if isinstance(error, dict) else error))
    try:
        choices = event["choices"]
        return (choices[0]["delta"].get("content") or "") if choices else ""
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"the server sent {event!r}, which is no piece of an answer.") from error
