"""From StructuredOutputsParams to the text that llguidance compiles, and the check of it at submission."""

import json
import re
from collections.abc import Set
from typing import Any

from llguidance import LLMatcher, grammar_from
from tokenizers import Tokenizer

from jaxvllm.structured_output.structural_tag import structural_tag_to_lark
from scheduler.structured_outputs import StructuredOutputsParams

MAX_CONSTRAINT_CHARS = 1 << 18  # an object of 10,000 properties, a little more, takes 9 s to check and 20 to compile
_MAX_SHOWN = 200  # characters of a caller's schema in a message
_NOT_LITERAL = re.compile(r"([!-/:;=?@\[-`{-~])")  # ASCII punctuation but for < and >, which have no escape
_ESCAPED = r"\\\1"


def special_texts(tokenizer: Tokenizer) -> frozenset[str]:
    """The tokens that a grammar matches by name and never by their letters, as llguidance chooses them."""
    added = tokenizer.get_added_tokens_decoder().values()
    return frozenset(t.content for t in added if t.special or (t.content[:1] == "<" and t.content[-1:] == ">"))


def check(params: StructuredOutputsParams, special: Set[str]) -> None:
    """Whether the constraint can be compiled.

    Args:
      special: see special_texts.

    Raises: ValueError: what is wrong with it.
    """
    given = getattr(params, params.kind)
    if isinstance(given, str):
        _check_length(params, given)
    grammar = to_llguidance(params, special)
    _check_length(params, grammar)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise _refusal(params, messages[0])


def to_llguidance(params: StructuredOutputsParams, special: Set[str]) -> str:
    """The constraint in llguidance's own form.

    Args:
      special: see special_texts; a structural tag may be made of them, all else spells them out.

    Raises: ValueError for text that is no JSON, no grammar or no structural tag; what else may be wrong shows when it
      is compiled.
    """
    kind, value = params.kind, getattr(params, params.kind)
    try:
        if kind == "json":
            grammar = _from_schema(params, json.loads(value) if isinstance(value, str) else value)
        elif kind == "json_object":
            grammar = _from_schema(params, {"type": "object"})
        elif kind == "regex":
            grammar = LLMatcher.grammar_from_regex(value)
        elif kind == "choice":
            # Not as alternatives of a grammar: with 10,000 of them its first mask takes 0.17 s.
            grammar = LLMatcher.grammar_from_regex(f"({'|'.join(_NOT_LITERAL.sub(_ESCAPED, text) for text in value)})")
        elif kind == "grammar":
            grammar = grammar_from("grammar", value)  # reads Lark, EBNF and GBNF
        else:
            return LLMatcher.grammar_from_lark(structural_tag_to_lark(json.loads(value), special))
        plain = grammar.replace("\\", "")
        return _spelled_out(grammar) if any(text in plain for text in special) else grammar
    except (ValueError, TypeError, RecursionError) as error:
        raise _refusal(params, str(error)) from error


def _spelled_out(grammar: str) -> str:
    """The grammar with no text forced: llguidance forces the tokens of the tokenizer, which makes special ones of their
    names, and then does not take these for the text."""
    if grammar.startswith("{"):
        [part] = json.loads(grammar)["grammars"]
        grammar = part.get("lark_grammar") or f"start: %json {json.dumps(part['json_schema'])}"
    return f'%llguidance {{"no_forcing": true}}\n{grammar}'


def _check_length(params: StructuredOutputsParams, text: str) -> None:
    if len(text) > MAX_CONSTRAINT_CHARS:
        raise ValueError(
            f"structured_outputs: {params.kind} makes {len(text)} characters; at most {MAX_CONSTRAINT_CHARS} are "
            "compiled: shorten it."
        )


def _from_schema(params: StructuredOutputsParams, schema: Any) -> str:
    json.dumps(schema, allow_nan=False)  # raises for what is no JSON
    if params.disable_additional_properties:
        schema = _without_additional_properties(schema)
    options: dict[str, Any] = {}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    if not options:  # which only a schema that is an object can have
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # pyright: ignore[reportArgumentType]


def _without_additional_properties(schema: Any) -> Any:
    """A copy in which every object that lists properties, and says nothing about others, has no others."""
    if isinstance(schema, list):
        return [_without_additional_properties(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: _without_additional_properties(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        copy.setdefault("additionalProperties", False)
    return copy


def _refusal(params: StructuredOutputsParams, reason: str) -> ValueError:
    try:
        shown = str(getattr(params, params.kind))
    except RecursionError:
        shown = "(nested too deeply to show)"
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
    return ValueError(f"structured_outputs: {params.kind}={shown} cannot be followed: {reason.strip()}")
