"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxvllm.input_processor import ProcessedRequest
from jaxvllm.outputs import CompletionOutput, RequestOutput
from jaxvllm.server.chat_prompt import prompt_of
from jaxvllm.server.errors import ApiError
from jaxvllm.server.logprobs import chat_logprobs, prompt_logprobs
from jaxvllm.server.protocol import ChatCompletionRequest
from jaxvllm.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    encode,
)
from jaxvllm.server.sampling import sampling_params
from jaxvllm.server.serving import Serving, UsageCounter, check_completion, check_num_choices, new_id
from jaxvllm.server.streaming import DONE, event, start_stream
from jaxvllm.server.tools import ToolMessageStream, ToolUse
from scheduler.sampling_params import SamplingParams


async def create_chat_completion(serving: Serving, request: ChatCompletionRequest, http: Request) -> Response:
    """Answer a conversation.

    Raises: ApiError, ValueError, NotImplementedError: what is wrong with it. EngineDeadError.
    """
    serving.check_open()
    model = serving.model_name(request.model)
    check_num_choices(1, request.n)
    tools = ToolUse(serving, request)
    params = _params(serving, request, tools)
    prompt = await prompt_of(serving, request, serving.truncate_to(request))
    [processed] = await serving.engine_requests(request, [prompt], params)
    answer_id = new_id("chatcmpl", http.headers.get("x-request-id"), request.request_id)
    job = _Job(serving, request, processed, tools, answer_id, model)
    if request.stream:
        return await start_stream(job.stream())
    return Response(encode(await job.run()), media_type="application/json")


def _params(serving: Serving, request: ChatCompletionRequest, tools: ToolUse) -> SamplingParams:
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError("prompt_logprobs cannot be streamed: leave out stream.", param="prompt_logprobs")
    if tools.structured_outputs is not None and (
        request.structured_outputs or (request.response_format and request.response_format.type != "text")
    ):
        raise ApiError(
            "response_format and structured_outputs cannot be combined with a tool_choice that demands a call.",
            param="tool_choice",
        )
    changes: dict[str, Any] = {}
    if tools.needs_special_tokens:
        changes["skip_special_tokens"] = False
    limit = request.max_completion_tokens
    return sampling_params(
        request,
        serving.engine.model,
        max_tokens=request.max_tokens if limit is None else limit,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        structured_outputs=tools.structured_outputs,
        **changes,
    )


@dataclass
class _Choice:
    """One answer while it is streamed."""

    tools: ToolMessageStream
    is_begun: bool = False


@dataclass
class _Job:
    """One conversation on its way to an answer."""

    serving: Serving
    request: ChatCompletionRequest
    processed: ProcessedRequest
    tools: ToolUse
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        config, request = self.serving.config, self.request
        last = (request.messages or [{}])[-1]
        self._role = config.response_role if request.add_generation_prompt else str(last.get("role"))
        has_echo = request.echo and last.get("role") == self._role and isinstance(last.get("content"), str)
        self._echo_text = str(last["content"]) if has_echo else ""
        self._names = self.serving.names_of_tokens(request)
        self._usage = UsageCounter([self.processed], config.enable_prompt_tokens_details)
        options = request.stream_options
        self._with_usage = config.enable_force_include_usage or bool(options and options.include_usage)
        self._with_usage_always = bool(options and options.continuous_usage_stats) and self._with_usage
        self._choices: dict[int, _Choice] = {}

    async def run(self) -> ChatCompletion:
        """All of it at once."""
        result: RequestOutput | None = None
        async with aclosing(self.serving.engine.stream([self.processed])) as stream:
            async for output in stream:
                result = output
        assert result is not None
        self._usage.add(result)
        choices = [self._whole_choice(completion) for completion in result.outputs]
        answer = ChatCompletion(self.id, self.created, self.model, choices, self._usage.usage())
        if self.request.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(result.prompt_logprobs) or UNSET
        if self.request.return_token_ids:
            answer.prompt_token_ids = result.prompt_token_ids
        return answer

    def _whole_choice(self, completion: CompletionOutput) -> ChatChoice:
        check_completion(completion, self.request)
        message = self.tools.message(self._role, completion.text)
        if self._echo_text:
            message.content = self._echo_text + (message.content or "")
        choice = ChatChoice(
            completion.index,
            message,
            self._logprobs(completion),
            self.tools.finish_reason(completion.finish_reason, message.tool_calls is not UNSET),
            completion.stop_reason,
        )
        if self.request.return_token_ids:
            choice.token_ids = completion.token_ids
        return choice

    async def stream(self) -> AsyncGenerator[bytes]:
        """Piece by piece, as server-sent events."""
        async with aclosing(self.serving.engine.stream([self.processed])) as stream:
            async for output in stream:
                self._usage.add(output)
                for completion in output.outputs:
                    check_completion(completion, self.request)
                    for chunk in self._chunks(output, completion):
                        yield event(chunk)
        if self._with_usage:
            yield event(self._chunk([], with_usage=True))
        yield DONE

    def _chunk(self, choices: list[ChatChunkChoice], with_usage: bool) -> ChatChunk:
        usage = self._usage.usage() if with_usage else UNSET
        return ChatChunk(self.id, self.created, self.model, choices, usage)

    def _chunks(self, output: RequestOutput, completion: CompletionOutput) -> list[ChatChunk]:
        """What an output says of one answer: its beginning if it is the first, its deltas, its end if it is the last.

        Log-probabilities and token ids go with the first delta; without any, with an empty one.
        """
        state = self._choices.get(completion.index)
        if state is None:
            state = self._choices[completion.index] = _Choice(self.tools.stream())
        chunks = [] if state.is_begun else self._beginning(output, completion.index)
        state.is_begun = True
        deltas = state.tools.push(completion.text)
        is_end = completion.finish_reason is not None
        if is_end:
            deltas += state.tools.finish()
        logprobs = self._logprobs(completion)
        has_extras = self.request.return_token_ids or logprobs is not None or self._with_usage_always
        if not deltas and (is_end or has_extras):
            deltas = [ChatDelta(content="")]
        choices = [ChatChunkChoice(completion.index, delta) for delta in deltas]
        if choices:
            choices[0].logprobs = logprobs
            if self.request.return_token_ids:
                choices[0].token_ids = completion.token_ids
        if is_end:
            choices[-1].finish_reason = self.tools.finish_reason(completion.finish_reason, state.tools.has_calls)
            choices[-1].stop_reason = completion.stop_reason
        chunks += [self._chunk([choice], self._with_usage_always) for choice in choices]
        return chunks

    def _beginning(self, output: RequestOutput, index: int) -> list[ChatChunk]:
        delta = ChatDelta(role=self._role, content=self._echo_text)
        chunk = self._chunk([ChatChunkChoice(index, delta)], self._with_usage_always)
        if self.request.return_token_ids:
            chunk.prompt_token_ids = output.prompt_token_ids
        return [chunk]

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self.request.logprobs or completion.logprobs is None:
            return None
        # With logprob_token_ids an entry holds those, and all of them are shown.
        num_top = -1 if self.request.logprob_token_ids else self.request.top_logprobs or 0
        return chat_logprobs(completion.token_ids, completion.logprobs, num_top, self._names)
