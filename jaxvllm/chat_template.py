"""Chat templates rendered as transformers renders them, without importing it (0.5 to 1.5 s).

A template comes with the model, so it runs in Jinja's sandbox and sees plain data only. What is rarely asked for, and
whatever is no plain data, is left to transformers itself: see can_render. tests/test_chat_template.py compares both.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jaxvllm.chat import TRANSFORMERS_ARGUMENTS

_PLAIN = (str, int, float, bool, type(None))
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names of one thing, the first the usual one


def can_render(messages: Sequence[Any], tools: list[Any] | None, variables: Mapping[str, Any]) -> bool:
    """Whether render() may be used: a conversation of plain dicts, and variables of plain data for the template."""
    is_conversation = bool(messages) and all(type(message) is dict for message in messages)
    return (
        is_conversation and not variables.keys() & TRANSFORMERS_ARGUMENTS and _is_plain([*messages, tools, variables])
    )


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """One conversation as text.

    Args:
      messages: a message's keys whose value is None are left out, as many templates would write "None".
      variables: special tokens by name (bos_token, ...) and what else the template may read.

    Raises: jinja2.TemplateError if the template is broken or refuses the messages.
    """
    return _compile(template).render(
        messages=[_with_reasoning({k: v for k, v in message.items() if v is not None}) for message in messages],
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        **{"documents": None, **variables},
    )


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(_is_plain(item) for item in value)
    return type(value) in _PLAIN


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read a message's reasoning under one of two names: both are there if it has any."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(Extension):
    """{% generation %}: marks what a model said, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # as Extension declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateDict:
    """dict() for templates; the class itself would lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """namespace() for templates, without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may name a variable "self"
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not have the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    return environment.from_string(template)
