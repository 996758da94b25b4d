"""Chat messages as the caller writes them, made into what a chat template takes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Message = Mapping[str, Any]
# Types of content parts that are text, and where they have it: what models answer is sent back as such parts too.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
# Variables with a meaning for transformers beyond the template.
TRANSFORMERS_ARGUMENTS = frozenset(
    {
        "conversation",
        "messages",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)


def read_chat_template(template: str | None) -> str | None:
    """A chat template's text, from the text itself or from the file that holds it.

    Raises: ValueError if it is neither.
    """
    if template is None or any(mark in template for mark in "{}\n"):
        return template
    if not Path(template).is_file():
        raise ValueError(f"chat_template={template!r} is neither a file nor Jinja text ('{{{{ ... }}}}').")
    return Path(template).read_text(encoding="utf-8")


def split_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[dict[str, Any]]]:
    """One conversation or a list of them, each as a list of plain messages.

    Raises: ValueError for something that is no message; NotImplementedError for content that is not text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(
            f"messages must be a list of messages such as {{'role': 'user', 'content': 'Hello'}}, or a list of such "
            f"lists, got {type(messages).__name__}."
        )
    is_single = any(isinstance(message, Mapping) for message in messages)
    conversations = [messages] if is_single else messages
    return [[_plain(message) for message in conversation] for conversation in conversations]


def _plain(message: Any) -> dict[str, Any]:
    """A message as templates expect it: its content as text, the arguments of its tool calls as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {message!r} must be a dict with a 'role' and a 'content'.")
    plain = {**message, "content": _text(message.get("content"))}
    calls = plain.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list | tuple):
            raise ValueError("messages: tool_calls must be a list of calls.")
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object, not the JSON text that APIs have in its place."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("messages: a tool call must be an object with a function that has a name.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"messages: the arguments of the tool call of {function['name']!r} are no valid JSON: {error}."
            ) from error
    if not isinstance(arguments, Mapping | None):
        raise ValueError("messages: the arguments of a tool call must be a JSON object.")
    return {**call, "function": {**function, "arguments": dict(arguments or {})}}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:  # of a message that only calls tools, for example; templates add strings to it
        return ""
    if not isinstance(content, Sequence):
        raise ValueError(f"message content {content!r} must be text or a list of parts.")
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    name = _TEXTS.get(kind) if isinstance(kind, str) else None
    if name is None or not isinstance(part, Mapping):
        raise NotImplementedError(f"message part of type {kind!r} is not supported: only text is.")
    if not isinstance(part.get(name), str):
        raise ValueError(f"message part {part!r} must have a {name!r} that is a string.")
    return part[name]
