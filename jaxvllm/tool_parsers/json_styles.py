"""Styles that write a call as a JSON object {"name": ..., "arguments": {...}}: Hermes (Qwen too) and Llama 3.

    Hermes:   <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>, once for each call
    Llama 3:  {"name": "f", "parameters": {"a": 1}}; {"name": "g", ...}, <|python_tag|> in front or not

A call stands once its name and the opening brace of its arguments are there: from then on arguments are handed out as
they come. Everything else is content, to the letter: an object without these two, other words between the tags, a call
that breaks off before. Arguments that break off or are no valid JSON stay what the model wrote, as with OpenAI's API.
"""

import re
from dataclasses import dataclass

from jaxvllm.tool_parsers.base import ContentDelta, Delta, ToolDelta, ToolParser, ToolStream, make_tool_call_id
from jaxvllm.tool_parsers.call_scanner import CallScanner


@dataclass(frozen=True)
class JsonStyle:
    """Where calls are found.

    Attributes:
      open_tag: announces a call.
      close_tag: ends what open_tag began; None if nothing does.
      needs_open_tag: an object without open_tag in front is no call.
      separators: characters that mean nothing around calls. "}" is a brace too many, a mistake that models make.
    """

    open_tag: str
    close_tag: str | None
    needs_open_tag: bool
    separators: str


class HermesToolParser(ToolParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes 2 Pro, Qwen2.5 and Qwen3 write it."""

    def stream(self) -> ToolStream:
        """See ToolParser."""
        return _JsonStream(JsonStyle("<tool_call>", "</tool_call>", True, " \t\r\n,;}"))


class Llama3JsonToolParser(ToolParser):
    """{"name": ..., "parameters": {...}}, as Llama 3.1 and 3.2 write it."""

    def stream(self) -> ToolStream:
        """See ToolParser."""
        return _JsonStream(JsonStyle("<|python_tag|>", None, False, " \t\r\n,;}[]"))


class _JsonStream(ToolStream):
    """Plain text and calls in turns.

    Attributes:
      _is_between: nothing but separators and tags since the start, the last call or an open tag.
      _held: those separators and tags; content if no call follows.
      _is_inside: an open tag has not been closed.
      _unread: the beginning of a tag that is not complete yet.
    """

    def __init__(self, style: JsonStyle) -> None:
        self._style = style
        self._tags = [tag for tag in (style.open_tag, style.close_tag) if tag is not None]
        # Where plain text may turn into something else.
        self._turn = re.compile("<" if style.needs_open_tag else "[<{]")
        self._held = ""
        self._unread = ""
        self._is_between = True
        self._is_inside = False
        self._call: CallScanner | None = None
        self._num_calls = 0
        self._deltas: list[Delta] = []

    def push(self, delta_text: str) -> list[Delta]:
        text, self._unread = self._unread + delta_text, ""
        position = 0
        while position < len(text):
            if self._call is not None:
                position = self._read_call(self._call, text, position)
            elif text[position] == "<" and self._may_become_tag(text[position:]):
                self._unread = text[position:]
                break
            else:
                position = self._read_text(text, position)
        return self._take_deltas()

    def finish(self) -> list[Delta]:
        if self._call is not None:
            if not self._call.is_call:
                self._give_up(self._call)
        elif not self._is_cut_close_tag():
            self._add_content(self._unread)
        if self._is_between and (self._num_calls == 0 or self._style.open_tag in self._held):
            held, self._held = self._held, ""
            self._add_content(held)
        return self._take_deltas()

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _may_become_tag(self, text: str) -> bool:
        return any(len(text) < len(tag) and tag.startswith(text) for tag in self._tags)

    def _is_cut_close_tag(self) -> bool:
        """Whether the text ends within the tag that closes a call: nothing to show."""
        closing = self._is_between and self._is_inside and self._style.close_tag
        return bool(closing and self._style.open_tag not in self._held and closing.startswith(self._unread))

    def _read_text(self, text: str, position: int) -> int:
        """Read on outside of a call, to the next place where something else may begin; returns where that is."""
        style = self._style
        if text.startswith(style.open_tag, position):
            self._held = (self._held if self._is_between else "") + style.open_tag
            self._is_between = self._is_inside = True
            return position + len(style.open_tag)
        if self._is_between and self._is_inside and style.close_tag and text.startswith(style.close_tag, position):
            if style.open_tag in self._held:  # nothing between the tags
                self._add_content(style.close_tag)
            self._held = ""
            self._is_inside = False
            return position + len(style.close_tag)
        char = text[position]
        if char == "{" and (self._is_inside or not style.needs_open_tag):
            if not self._is_between:
                self._is_between, self._held = True, ""
            self._call = CallScanner()
            return position
        if self._is_between and char in style.separators:
            self._held += char
            return position + 1
        turn = self._turn.search(text, position + 1)
        end = turn.start() if turn else len(text)
        self._add_content(text[position:end])
        return end

    def _read_call(self, call: CallScanner, text: str, position: int) -> int:
        was_call = call.is_call
        position, arguments = call.read(text, position)
        if call.is_call and not was_call:
            self._deltas.append(ToolDelta(self._num_calls, id=make_tool_call_id(), name=call.name))
            self._num_calls += 1
            self._held = ""
        if call.is_call and arguments:
            self._deltas.append(ToolDelta(self._num_calls - 1, arguments=arguments))
        if call.is_over:
            if not call.is_call:
                self._give_up(call)
            self._call = None
        return position

    def _give_up(self, call: CallScanner) -> None:
        self._call = None
        self._add_content(call.raw)

    def _add_content(self, text: str) -> None:
        """Add content, and what was held back before it."""
        if not text:
            return
        if self._is_between:
            text, self._held = self._held + text, ""
        self._is_between = self._is_inside = False
        self._deltas.append(ContentDelta(text))
