"""OutputCollector: outputs on their way from the engine to one consumer, merged while the consumer is busy."""

import asyncio

from jaxvllm.outputs import CompletionOutput, RequestOutput
from scheduler.sampling_params import RequestOutputKind


class OutputCollector:
    """Holds what the consumer of some requests has not fetched yet: at most one output a request.

    So a consumer that is slow (a client that does not read) keeps no more than its requests' text in memory, gets
    fewer and larger pieces, and makes nobody wait. For one event loop.
    """

    def __init__(self) -> None:
        self._ready: dict[str, tuple[RequestOutput, RequestOutputKind]] = {}
        self._error: Exception | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput, kind: RequestOutputKind) -> None:
        """Take one in; mutates an output of the same request that still waits here."""
        waiting = self._ready.get(output.request_id)
        if waiting is None:
            self._ready[output.request_id] = (output, kind)
        else:
            merge(waiting[0], output, kind)
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """Let get() raise, at once and from now on."""
        self._error = error
        self._has_news.set()

    async def get(self) -> RequestOutput:
        """Wait for an output and take it out; requests take turns.

        Raises: what fail() was given.
        """
        while not self._ready and self._error is None:
            self._has_news.clear()
            await self._has_news.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)  # many share it: it would keep the frames of all of them
        output, _ = self._ready.pop(next(iter(self._ready)))
        return output


def merge(output: RequestOutput, newer: RequestOutput, kind: RequestOutputKind) -> None:
    """Make `output` say what it and the next output of the same request say together; mutates it."""
    output.finished = output.finished or newer.finished
    output.num_cached_tokens = newer.num_cached_tokens
    output.metrics = newer.metrics
    output.prompt_logprobs = output.prompt_logprobs or newer.prompt_logprobs
    places = {completion.index: place for place, completion in enumerate(output.outputs)}
    for completion in newer.outputs:
        place = places.get(completion.index)
        if place is None:
            output.outputs.append(completion)
        elif kind is RequestOutputKind.DELTA:
            _append(output.outputs[place], completion)
        else:
            output.outputs[place] = completion


def _append(completion: CompletionOutput, newer: CompletionOutput) -> None:
    completion.text += newer.text
    completion.token_ids.extend(newer.token_ids)
    if newer.logprobs:
        if completion.logprobs is None:
            completion.logprobs = newer.logprobs
        else:
            completion.logprobs.extend(newer.logprobs)
    completion.cumulative_logprob = newer.cumulative_logprob
    completion.finish_reason = newer.finish_reason
    completion.stop_reason = newer.stop_reason
