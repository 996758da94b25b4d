"""What a tool parser gives, and the interface of one."""

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments` is the text of a JSON object as the model wrote it: whitespace and mistakes included."""

    name: str
    arguments: str


@dataclass(slots=True)
class ParsedMessage:
    """A whole message. `content` is what is no tool call; None if there is nothing but calls."""

    content: str | None
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text that is no tool call; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """More of the call number `index`: first its id and name, then pieces of its arguments, never empty."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str | None = None


Delta = ContentDelta | ToolDelta


class ToolStream(ABC):
    """One message while it is written. What the deltas add up to does not depend on how the text was cut up."""

    @abstractmethod
    def push(self, delta_text: str) -> list[Delta]:
        """Take in more text; returns what is certain by now. Text that may be part of a call is held back."""

    @abstractmethod
    def finish(self) -> list[Delta]:
        """The text is at its end; returns what was held back. Call once, last."""


class ToolParser(ABC):
    """Finds the tool calls of one style. Nothing that a model can write makes it raise.

    Args:
      tokenizer: for styles that are written in special tokens; those that are text do not look at it.

    Attributes:
      needs_special_tokens: the marks of a call may be special tokens: serve with skip_special_tokens=False.
    """

    needs_special_tokens = True

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

    @abstractmethod
    def stream(self) -> ToolStream:
        """Start to read a message piece by piece."""

    def parse(self, text: str) -> ParsedMessage:
        """Read a whole message: the sum of its deltas."""
        stream = self.stream()
        return join([*stream.push(text), *stream.finish()])


def join(deltas: list[Delta]) -> ParsedMessage:
    """The message that deltas add up to."""
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
            continue
        if delta.name is not None:
            names.append(delta.name)
            arguments.append([])
        if delta.arguments is not None:
            arguments[delta.index].append(delta.arguments)
    calls = [ToolCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True)]
    return ParsedMessage("".join(content) or (None if calls else ""), calls)


def make_tool_call_id() -> str:
    """A new id for a call, in vLLM's form."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"
