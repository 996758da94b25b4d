"""Sends one request to an OpenAI-compatible server and takes the times of its stream."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx2

from jaxvllm.bench.loads import BenchRequest
from jaxvllm.sse import DONE, EventReader


@dataclass(slots=True)
class RequestResult:
    """What became of one request; seconds, start_s after the benchmark's start.

    Attributes:
      error: why it failed; None: it did not.
      ttft_s, latency_s: from sending to the first and to the last piece.
      itls_s: between pieces; a server may put several tokens into one.
      num_prompt_tokens, num_output_tokens: the server's count where it gives one.
    """

    start_s: float = 0.0
    error: str | None = None
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""

    @property
    def tpot_s(self) -> float:
        """Mean time a token after the first; 0.0 if there is but one."""
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else 0.0


class BenchClient:
    """A server and the model that is asked of it; use it with `async with`.

    Args:
      base_url: without /v1.
      is_chat: send to /v1/chat/completions, with the prompt as a user's message.
      extra_body: further fields of every request: sampling parameters, ignore_eos.
    """

    def __init__(
        self,
        base_url: str,
        *,
        is_chat: bool,
        headers: dict[str, str],
        extra_body: dict[str, Any],
        endpoint: str | None = None,
    ) -> None:
        self._endpoint = endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions")
        self._is_chat = is_chat
        self._extra_body = extra_body
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        # A request may wait for hours in the server's queue; only an address nobody listens at is an error at once.
        timeout = httpx2.Timeout(None, connect=60.0)
        self._http = httpx2.AsyncClient(base_url=base_url, headers=headers, limits=limits, timeout=timeout)
        self.model = ""

    async def __aenter__(self) -> "BenchClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def first_model(self) -> str:
        """The first model that the server lists.

        Raises: httpx2.HTTPError, ValueError: it does not answer as such a server does.
        """
        response = await self._http.get("/v1/models")
        response.raise_for_status()
        models = response.json().get("data") or []
        if not models:
            raise ValueError(f"{response.url} lists no model: give --model.")
        return models[0]["id"]

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """The tokens of each text, as the server's /tokenize counts them."""
        return [
            (await self._post("/tokenize", {"prompt": text, "add_special_tokens": False}))["count"] for text in texts
        ]

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of ids, as the server's /detokenize makes it."""
        return (await self._post("/detokenize", {"tokens": token_ids}))["prompt"]

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = await self._http.post(path, json={"model": self.model, **body})
        if response.status_code != httpx2.codes.OK:
            raise ValueError(
                f"{response.url} answers {response.status_code}: this load needs a server with {path}; the random load "
                "and traces on /v1/completions do not."
            )
        return response.json()

    async def send(self, request: BenchRequest, zero: float) -> RequestResult:
        """Send a request and read its stream to the end; an error becomes the result's. zero: time.perf_counter()."""
        start = time.perf_counter()
        result = RequestResult(start - zero, num_prompt_tokens=request.num_prompt_tokens)
        try:
            async with aclosing(self._events(self._body(request))) as events:
                await self._read(events, start, result)
            if not result.ttft_s and result.error is None:
                result.error = "the stream ended without a token"
        except (httpx2.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
            result.error = f"{type(error).__name__}: {error}"
        return result

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self._is_chat:
            body |= {"messages": [{"role": "user", "content": request.prompt}]}
            body["max_completion_tokens"] = request.num_output_tokens
        else:
            body |= {"prompt": request.prompt, "max_tokens": request.num_output_tokens}
        return body | self._extra_body

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[Any]:
        reader = EventReader()
        async with self._http.stream("POST", self._endpoint, json=body) as response:
            if response.status_code != httpx2.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise ValueError(f"status {response.status_code}: {text[:1000]}")
            async for piece in response.aiter_raw():
                for event in reader.push(piece):
                    yield event

    async def _read(self, events: AsyncGenerator[Any], start: float, result: RequestResult) -> None:
        newest = start
        texts: list[str] = []
        async for event in events:
            if event == DONE:
                break
            if "error" in event:
                error = event["error"]
                result.error = str(error.get("message", error) if isinstance(error, dict) else error)
                return
            if (text := self._piece(event)) is not None:
                now = time.perf_counter()
                if result.ttft_s:
                    result.itls_s.append(now - newest)
                else:
                    result.ttft_s = now - start
                newest = now
                texts.append(text)
            if usage := event.get("usage"):
                result.num_prompt_tokens = usage["prompt_tokens"]
                result.num_output_tokens = usage["completion_tokens"]
        result.latency_s = newest - start
        result.text = "".join(texts)
        result.num_output_tokens = result.num_output_tokens or len(texts)

    def _piece(self, event: dict[str, Any]) -> str | None:
        """The text that an event brings; None if it brings no token."""
        if not event.get("choices"):
            return None
        choice = event["choices"][0]
        if not self._is_chat:
            return choice.get("text") or ""
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
        is_opening = "role" in delta and not text and choice.get("finish_reason") is None
        return None if is_opening else text
