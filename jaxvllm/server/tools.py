"""tool_choice: what the model may write, and how calls are found in what it wrote."""

from collections.abc import Iterable
from typing import Any, Literal

from jaxvllm.server.errors import ApiError
from jaxvllm.server.protocol import ChatCompletionRequest, NamedToolChoice, Tool
from jaxvllm.server.responses import (
    ChatDelta,
    ChatMessage,
    ChatToolCall,
    FunctionCall,
    FunctionDelta,
    ToolCallDelta,
)
from jaxvllm.server.serving import Serving
from jaxvllm.tool_parsers import (
    ContentDelta,
    Llama3JsonToolParser,
    ToolDelta,
    ToolParser,
    ToolStream,
    make_tool_call_id,
)

# What parameters refer to from the root of their schema: in the present draft of JSON Schema, and up to draft 7.
_DEFINITIONS = ("$defs", "definitions")
Kind = Literal["none", "auto", "required", "named"]


class ToolUse:
    """How one request uses tools.

    Attributes:
      kind: "auto": the model decides, and a parser finds calls in its text; "required" and "named": the text is held
        to calls by structured output; "none": text is text.
      structured_outputs: what holds the text to calls.

    Raises: ApiError: a choice that this server cannot offer.
    """

    def __init__(self, serving: Serving, request: ChatCompletionRequest) -> None:
        choice = request.tool_choice or ("auto" if request.tools else "none")
        self.kind: Kind = "named" if isinstance(choice, NamedToolChoice) else choice
        self.structured_outputs: dict[str, Any] | None = None
        self._name = choice.function.name if isinstance(choice, NamedToolChoice) else ""
        self._only_first = request.parallel_tool_calls is False
        self._parser: type[ToolParser] | None = None
        self._tokenizer = serving.engine.tokenizer
        if self.kind == "auto":
            if serving.tool_parser is None:
                raise ApiError(
                    "tool_choice='auto' needs a server with --enable-auto-tool-choice and --tool-call-parser.",
                    param="tool_choice",
                )
            self._parser = serving.tool_parser
        elif self.kind == "required":
            self._parser = Llama3JsonToolParser  # a list of {"name", "parameters"} is that style, too
            self.structured_outputs = {"json": _calls_schema(request.tools or [], self._only_first)}
        elif self.kind == "named":
            tool = next(tool for tool in request.tools or [] if tool.function.name == self._name)
            self.structured_outputs = {"json": _parameters(tool)}

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the marks of calls may be special tokens, which the text must then hold."""
        return self._parser is not None and self.kind == "auto" and self._parser.needs_special_tokens

    def stream(self) -> "ToolMessageStream":
        """For the pieces of one message."""
        if self.kind == "named":
            return ToolMessageStream(None, self._name, only_first=False)
        stream = self._parser(self._tokenizer).stream() if self._parser else None
        return ToolMessageStream(stream, None, self._only_first)

    def message(self, role: str, text: str) -> ChatMessage:
        """A whole message: the sum of its deltas."""
        stream = self.stream()
        content, calls = "", []
        for delta in (*stream.push(text), *stream.finish()):
            if isinstance(delta.content, str):
                content += delta.content
            for call in delta.tool_calls or ():
                _add(calls, call)
        message = ChatMessage(role, content or (None if calls else ""))
        if calls:
            message.tool_calls = calls
        return message

    def finish_reason(self, reason: str | None, has_calls: bool) -> str | None:
        """OpenAI's word for the end of a message that made calls of the model's own choice."""
        return "tool_calls" if has_calls and reason == "stop" and self.kind != "named" else reason


class ToolMessageStream:
    """The pieces of one message as deltas of content and of calls.

    Args:
      stream: finds calls; None: there are none to find.
      name: of the function whose arguments all of the text is.
      only_first: calls behind the first are left out.

    Attributes:
      has_calls: a call has begun.
    """

    def __init__(self, stream: ToolStream | None, name: str | None, only_first: bool) -> None:
        self._stream = stream
        self._name = name
        self._only_first = only_first
        self.has_calls = False

    def push(self, text: str) -> list[ChatDelta]:
        """Take in more text."""
        if self._name is not None:
            return self._arguments(text)
        if self._stream is None:
            return [ChatDelta(content=text)] if text else []
        return self._deltas(self._stream.push(text))

    def finish(self) -> list[ChatDelta]:
        """The text is at its end."""
        return self._deltas(self._stream.finish()) if self._stream is not None else []

    def _arguments(self, text: str) -> list[ChatDelta]:
        function = FunctionDelta(arguments=text)
        call = ToolCallDelta(0, function=function)
        if not self.has_calls:
            self.has_calls = True
            function.name = self._name or ""
            call.id, call.type = make_tool_call_id(), "function"
        return [ChatDelta(tool_calls=[call])]

    def _deltas(self, found: Iterable[ContentDelta | ToolDelta]) -> list[ChatDelta]:
        deltas = []
        for part in found:
            if isinstance(part, ContentDelta):
                deltas.append(ChatDelta(content=part.text))
            elif part.index == 0 or not self._only_first:
                self.has_calls = True
                deltas.append(ChatDelta(tool_calls=[_call_delta(part)]))
        return deltas


def _call_delta(part: ToolDelta) -> ToolCallDelta:
    call = ToolCallDelta(part.index, function=FunctionDelta())
    assert isinstance(call.function, FunctionDelta)
    if part.name is not None:
        call.id, call.type, call.function.name = part.id or make_tool_call_id(), "function", part.name
        call.function.arguments = part.arguments or ""
    elif part.arguments is not None:
        call.function.arguments = part.arguments
    return call


def _add(calls: list[ChatToolCall], delta: ToolCallDelta) -> None:
    function = delta.function
    assert isinstance(function, FunctionDelta)
    if isinstance(delta.id, str):
        calls.append(ChatToolCall(delta.id, FunctionCall(str(function.name), "")))
    if isinstance(function.arguments, str):
        calls[-1].function.arguments += function.arguments


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _calls_schema(tools: list[Tool], only_one: bool) -> dict[str, Any]:
    """A list of calls, each of one of the tools with arguments of its schema."""
    shared: dict[str, dict[str, Any]] = {}
    kinds = []
    for tool in tools:
        parameters = dict(_parameters(tool))
        for keyword in _DEFINITIONS:
            own = parameters.pop(keyword, {})
            if not isinstance(own, dict):
                raise ApiError(f"tools: {keyword} of parameters must be an object.", param="tools")
            for name, definition in own.items():
                if shared.setdefault(keyword, {}).setdefault(name, definition) != definition:
                    raise ApiError(f"tools define {keyword}/{name} in two ways: give them two names.", param="tools")
        kinds.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": kinds}}
    if only_one:
        schema["maxItems"] = 1
    return schema | shared
