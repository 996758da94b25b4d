"""Structural tags: free text in which certain tags hold content of a certain form, as a Lark grammar.

Two forms of description are read: vLLM's first one, {"structures": [{"begin", "schema", "end"}], "triggers": [...]},
and {"type": "structural_tag", "format": {...}} with the formats that _Lark.part lists.
"""

import json
import re
from collections.abc import Callable, Set
from typing import Any

from llguidance import regex_to_lark

_FREE_TEXT = r"/(.|\n)*/"


def structural_tag_to_lark(tag: Any, special: Set[str]) -> str:
    """The Lark grammar of a structural tag.

    Args:
      tag: the parsed JSON.
      special: texts that are tokens of their own and never spelled out; see grammar.special_texts.

    Raises: ValueError for a form that is not known; names it.
    """
    if not isinstance(tag, dict):
        raise ValueError(f"a structural tag must be a JSON object, got {type(tag).__name__}.")
    if "structures" in tag:
        tags = [
            {"begin": _field(s, "begin"), "content": {"type": "json_schema", "json_schema": s.get("schema", {})},
             "end": _field(s, "end")}
            for s in _field(tag, "structures")
        ]  # fmt: skip
        tag = {"format": {"type": "triggered_tags", "triggers": _field(tag, "triggers"), "tags": tags}}
    lark = _Lark(special)
    start = lark.part(_field(tag, "format"))
    return "\n".join(["%llguidance {}", f"start: {start}", *lark.rules])


class _Lark:
    """Rules of a grammar while it is written; each method gives what stands for its argument in another rule."""

    def __init__(self, special: Set[str]) -> None:
        names = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self.rules: list[str] = []

    def part(self, form: Any) -> str:
        """Any format."""
        kind = _field(form, "type")
        parts: dict[str, Callable[[Any], str]] = {
            "const_string": lambda form: self.literal(_field(form, "value")),
            "json_schema": lambda form: f"%json {json.dumps(_field(form, 'json_schema'))}",
            "regex": lambda form: f"/{regex_to_lark(_field(form, 'pattern'))}/",
            "any_text": lambda form: _FREE_TEXT,
            "sequence": lambda form: self.sequence(_field(form, "elements")),
            "or": lambda form: f"({' | '.join(map(self.part, _field(form, 'elements')))})",
            "tag": self.tag,
            "triggered_tags": self.triggered_tags,
            "tags_with_separator": self.tags_with_separator,
        }
        if kind not in parts:
            raise ValueError(f"structural tag format {kind!r} is not supported: supported are {', '.join(parts)}.")
        return parts[kind](form)

    def literal(self, text: str) -> str:
        """Text with special tokens in it."""
        if self._special is None:
            return _quote(text)
        names = [name.removeprefix("<").removesuffix(">") for name in self._special.findall(text)]
        pieces = [_quote(piece) if piece else "" for piece in self._special.split(text)]
        mixed = [pieces[0]]
        for name, piece in zip(names, pieces[1:], strict=True):
            mixed += [f"<{name}>", piece]
        return " ".join(filter(None, mixed)) or '""'

    def sequence(self, elements: list[Any]) -> str:
        """One after the other; free text swallows what comes behind it, so it stands last."""
        if any(_field(element, "type") == "any_text" for element in elements[:-1]):
            raise ValueError("structural tag: any_text may only be the last element of a sequence.")
        return f"({' '.join(map(self.part, elements))})"

    def tag(self, form: Any, num_matched: int = 0) -> str:
        """A tag with its content, without the first num_matched characters."""
        begin, content, end = _field(form, "begin")[num_matched:], _field(form, "content"), _field(form, "end")
        ends = [end] if isinstance(end, str) else list(end)
        if _field(content, "type") == "any_text" and ends != [""]:
            if any(self._special and self._special.search(text) for text in ends):
                body = f"{_FREE_TEXT} ({' | '.join(map(self.literal, ends))})"
            else:
                body = self._rule("[lazy]", f"{_FREE_TEXT} ({' | '.join(map(_quote, ends))})")
        else:
            close = "" if ends == [""] else f"({' | '.join(map(self.literal, ends))})"
            body = f"{self.part(content)} {close}"
        return f"({self.literal(begin) if begin else ''} {body})"

    def triggered_tags(self, form: Any) -> str:
        """Free text; where it comes to a trigger, one of the tags that begin with it must follow."""
        triggers, tags = _field(form, "triggers"), _field(form, "tags")
        options = []
        for trigger in triggers:
            own = [tag for tag in tags if _field(tag, "begin").startswith(trigger)]
            if not own:
                raise ValueError(f"structural tag: no tag begins with the trigger {trigger!r}.")
            bodies = " | ".join(self.tag(tag, len(trigger)) for tag in own)
            if self._special and self._special.search(trigger):
                options.append(f"{_FREE_TEXT} {self.literal(trigger)} ({bodies})")
            else:
                options.append(f"{self._rule('[lazy]', f'{_FREE_TEXT} {_quote(trigger)}')} ({bodies})")
        orphans = [tag["begin"] for tag in tags if not any(tag["begin"].startswith(trigger) for trigger in triggers)]
        if orphans:
            raise ValueError(f"structural tag: {orphans[0]!r} begins with none of the triggers {triggers}.")
        tagged = f"({' | '.join(options)})"
        if form.get("stop_after_first"):
            return tagged if form.get("at_least_one") else f"({tagged} | {_FREE_TEXT})"
        return f"{tagged}{'+' if form.get('at_least_one') else '*'} {_FREE_TEXT}"

    def tags_with_separator(self, form: Any) -> str:
        """Tags alone, with a separator between them."""
        any_tag = f"({' | '.join(self.tag(tag) for tag in _field(form, 'tags'))})"
        rest = "" if form.get("stop_after_first") else f"({self.literal(_field(form, 'separator'))} {any_tag})*"
        return f"({any_tag} {rest}){'' if form.get('at_least_one') else '?'}"

    def _rule(self, attributes: str, body: str) -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _field(form: Any, name: str) -> Any:
    if not isinstance(form, dict) or name not in form:
        raise ValueError(f"structural tag: {name!r} is missing in {json.dumps(form)[:100]}.")
    return form[name]
