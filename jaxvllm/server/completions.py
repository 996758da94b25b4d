"""POST /v1/completions."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxvllm.input_processor import ProcessedRequest
from jaxvllm.outputs import CompletionOutput, RequestOutput
from jaxvllm.server.errors import ApiError
from jaxvllm.server.logprobs import CompletionLogprobsBuilder, TokenNames, prompt_logprobs
from jaxvllm.server.protocol import CompletionRequest
from jaxvllm.server.responses import Completion, CompletionChoice, CompletionLogprobs, encode
from jaxvllm.server.sampling import sampling_params
from jaxvllm.server.serving import (
    Serving,
    UsageCounter,
    check_completion,
    check_num_choices,
    new_id,
    truncated,
)
from jaxvllm.server.streaming import DONE, event, start_stream
from scheduler.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16


async def create_completion(serving: Serving, request: CompletionRequest, http: Request) -> Response:
    """Answer a request for completions.

    Raises: ApiError, ValueError, NotImplementedError: what is wrong with it. EngineDeadError.
    """
    serving.check_open()
    model = serving.model_name(request.model)
    params = _params(serving, request)
    prompts = await _prompts(serving, request)
    requests = await serving.engine_requests(request, prompts, params)
    job = _Job(serving, request, requests, new_id("cmpl", http.headers.get("x-request-id"), request.request_id), model)
    if request.stream:
        return await start_stream(job.stream())
    return Response(encode(await job.run()), media_type="application/json")


def _params(serving: Serving, request: CompletionRequest) -> SamplingParams:
    if request.max_tokens == 0 and not request.echo:
        raise ApiError("max_tokens=0 must be at least 1, unless echo=true.", param="max_tokens")
    changes: dict[str, Any] = {}
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        changes["prompt_logprobs"] = request.logprobs
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError("prompt_logprobs cannot be streamed: leave out stream.", param="prompt_logprobs")
    default = serving.engine.model.default_sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
    max_tokens = default if request.max_tokens is None else max(1, request.max_tokens)
    return sampling_params(
        request,
        serving.engine.model,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        **changes,
    )


async def _prompts(serving: Serving, request: CompletionRequest) -> list[tuple[str | None, list[int]]]:
    """The request's prompts, tokenised: (text if there is one, ids)."""
    given = request.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    prompts = [given] if is_one else given
    check_num_choices(len(prompts), request.n)
    limit = serving.truncate_to(request)
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            found.append((prompt, await serving.tokenize(prompt, request.add_special_tokens, limit)))
        else:
            found.append((None, truncated(prompt, limit)))
    return found


@dataclass
class _Choice:
    """A choice while it is made."""

    index: int
    request: ProcessedRequest
    echo_text: str = ""
    logprobs: CompletionLogprobsBuilder | None = None
    is_begun: bool = False


@dataclass
class _Job:
    """One request for completions on its way to an answer."""

    serving: Serving
    request: CompletionRequest
    requests: Sequence[ProcessedRequest]
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        config, request = self.serving.config, self.request
        self._n = request.n or 1
        self._numbers = {r.caller.request_id: number for number, r in enumerate(self.requests)}
        self._names: TokenNames = self.serving.names_of_tokens(request)
        self._is_echo_only = request.max_tokens == 0
        self._usage = UsageCounter(self.requests, config.enable_prompt_tokens_details)
        options = request.stream_options
        self._with_usage = config.enable_force_include_usage or bool(options and options.include_usage)
        self._with_usage_always = bool(options and options.continuous_usage_stats) and self._with_usage
        self._choices: dict[int, _Choice] = {}
        self._waits_for_prompt = bool(request.echo) and request.logprobs is not None
        self._prompt_logprobs: dict[str, Any] = {}
        self._held: dict[str, list[RequestOutput]] = {}

    async def run(self) -> Completion:
        """All of it at once."""
        outputs: list[RequestOutput | None] = [None] * len(self.requests)
        async with aclosing(self.serving.engine.stream(self.requests)) as stream:
            async for output in stream:
                for completion in output.outputs:
                    check_completion(completion, self.request)
                outputs[self._numbers[output.request_id]] = output
        choices = []
        for output in filter(None, outputs):
            self._count(output)
            for completion in output.outputs:
                choice = self._choice(output, completion)
                choice.prompt_logprobs = UNSET
                if self.request.prompt_logprobs is not None:
                    choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs) or UNSET
                choices.append(choice)
        return self._answer(choices, with_usage=True)

    async def stream(self) -> AsyncGenerator[bytes]:
        """Piece by piece, as server-sent events."""
        async with aclosing(self.serving.engine.stream(self.requests)) as stream:
            async for output in stream:
                for completion in output.outputs:
                    check_completion(completion, self.request)
                for ready in self._with_prompt_known(output):
                    self._count(ready)
                    for choice in (self._choice(ready, completion) for completion in ready.outputs):
                        if self._says_something(choice):
                            yield event(self._answer([choice], with_usage=self._with_usage_always))
        if self._with_usage:
            yield event(self._answer([], with_usage=True))
        yield DONE

    def _with_prompt_known(self, output: RequestOutput) -> list[RequestOutput]:
        """An output, or what must wait: every choice begins with the prompt, whose logprobs come with one of them."""
        if not self._waits_for_prompt or output.request_id in self._prompt_logprobs:
            return [output]
        held = self._held.setdefault(output.request_id, [])
        held.append(output)
        if output.prompt_logprobs is None and not output.finished:  # an abort may come before them
            return []
        self._prompt_logprobs[output.request_id] = output.prompt_logprobs
        return self._held.pop(output.request_id)

    def _count(self, output: RequestOutput) -> None:
        if self._is_echo_only:
            for completion in output.outputs:
                completion.text, completion.token_ids = "", []
                completion.logprobs = completion.logprobs and []
        self._usage.add(output)

    def _answer(self, choices: list[CompletionChoice], with_usage: bool) -> Completion:
        usage = self._usage.usage() if with_usage else UNSET
        return Completion(self.id, self.created, self.model, choices, usage)

    def _says_something(self, choice: CompletionChoice) -> bool:
        has_tokens = bool(choice.logprobs and choice.logprobs.tokens) or bool(choice.token_ids)
        return bool(choice.text or choice.finish_reason is not None or has_tokens or self._with_usage_always)

    def _choice(self, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        """What an output says of one choice; the first time, with the prompt if that is wanted."""
        number = self._numbers[output.request_id]
        index = number * self._n + completion.index
        state = self._choices.get(index)
        if state is None:
            state = self._choices[index] = self._new_choice(index, self.requests[number])
        text, logprobs = completion.text, self._logprobs(state, completion)
        if not state.is_begun and self.request.echo:
            text = state.echo_text + text
            logprobs = self._with_prompt(output, logprobs) if logprobs is not None else None
        choice = CompletionChoice(index, text, logprobs, completion.finish_reason, completion.stop_reason)
        if self.request.return_token_ids:
            choice.token_ids = completion.token_ids
            if not state.is_begun:
                choice.prompt_token_ids = output.prompt_token_ids
        state.is_begun = True
        return choice

    def _new_choice(self, index: int, processed: ProcessedRequest) -> _Choice:
        state = _Choice(index, processed)
        ids = processed.caller.prompt_token_ids
        if self.request.echo:
            text = processed.caller.prompt
            state.echo_text = self.serving.tokenizer.decode(ids, skip_special_tokens=False) if text is None else text
        if self.request.logprobs is not None:
            state.logprobs = self._builder(ids, len(state.echo_text))
        return state

    def _builder(self, context_ids: Sequence[int], offset: int, *, skip_special_tokens: bool | None = None):
        skip = processed_skip(self.request) if skip_special_tokens is None else skip_special_tokens
        tokenizer = self.serving.engine.tokenizer
        num_top = -1 if self.request.logprob_token_ids else self.request.logprobs or 0
        return CompletionLogprobsBuilder(tokenizer, self._names, num_top, context_ids, offset, skip)

    def _logprobs(self, state: _Choice, completion: CompletionOutput) -> CompletionLogprobs | None:
        if state.logprobs is None or completion.logprobs is None:
            return None
        return state.logprobs.build(completion.token_ids, completion.logprobs)

    def _with_prompt(self, output: RequestOutput, logprobs: CompletionLogprobs) -> CompletionLogprobs:
        """The prompt's log-probabilities with those of the first output behind them."""
        has_text = output.prompt is not None  # then special tokens are not in it
        builder = self._builder([], 0, skip_special_tokens=has_text)
        entries = output.prompt_logprobs or self._prompt_logprobs.get(output.request_id)
        ids = output.prompt_token_ids
        own = builder.build(ids, entries or [None] * len(ids))  # aborted before they were known
        for name in CompletionLogprobs.__struct_fields__:
            getattr(own, name).extend(getattr(logprobs, name))
        return own


def processed_skip(request: CompletionRequest) -> bool:
    """Whether a request leaves special tokens out of its text."""
    return True if request.skip_special_tokens is None else request.skip_special_tokens
