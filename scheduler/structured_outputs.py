"""StructuredOutputsParams: the form that a request's text must have, with vLLM's names."""

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from scheduler.field_checks import as_bool, as_list, as_text

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


@dataclass(slots=True)
class StructuredOutputsParams:
    """One kind of constraint, and how JSON may look; field by field as in vLLM 0.22 (vllm/sampling_params.py).

    Attributes:
      json: a JSON schema, as a dict or as text.
      regex: the whole text matches it (syntax of Rust's regex crate: no look-around, no back references).
      choice: the text is one of these.
      grammar: a context-free grammar in Lark's syntax (rule `start`), or in EBNF/GBNF (rule `root`).
      json_object: True: any JSON object.
      structural_tag: JSON text that says which tags in free text hold which content.
      disable_any_whitespace: JSON without white space.
      disable_additional_properties: objects of the schema that do not speak of additionalProperties have none.
      whitespace_pattern: a regex for the white space between the tokens of JSON.

    Raises:
      ValueError: not exactly one kind, a field of the wrong type, or an option that the kind has no use for.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        self.json_object = self.json_object or None
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs sets {' and '.join(given) or 'no constraint'}: give exactly one of "
                f"{', '.join(KINDS)}."
            )
        self._check_types()
        kind = given[0]
        unused = [name for name in _JSON_OPTIONS if getattr(self, name) not in (None, False)]
        if unused and kind not in ("json", "json_object"):
            raise ValueError(f"structured_outputs: {unused[0]} has no meaning with {kind}: leave it out.")

    def _check_types(self) -> None:
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, as_text(f"structured_outputs: {name}", value))
                if not value:
                    raise ValueError(f"structured_outputs: {name}={value!r} must be a non-empty string.")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            setattr(self, name, as_bool(f"structured_outputs: {name}", getattr(self, name)))
        if self.json_object is not None:
            self.json_object = as_bool("structured_outputs: json_object", self.json_object)
        if isinstance(self.json, str):
            self.json = as_text("structured_outputs: json", self.json)
        elif not isinstance(self.json, dict | None):
            raise ValueError(f"structured_outputs: json={self.json!r} must be a JSON schema as a dict or a string.")
        if self.choice is None:
            return
        self.choice = [
            as_text("structured_outputs: choice", text) for text in as_list("structured_outputs: choice", self.choice)
        ]
        if not self.choice:
            raise ValueError("structured_outputs: choice=[] must hold at least one string.")

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def with_json_text(self) -> "StructuredOutputsParams":
        """The same with the schema as text: whatever keys and numbers it has, a message can carry it."""
        return replace(self, json=json.dumps(self.json)) if isinstance(self.json, dict) else self

    @classmethod
    def of(cls, value: Any) -> "StructuredOutputsParams":
        """The same, checked anew, or from a dict.

        Raises: ValueError for an unknown key or another type.
        """
        if isinstance(value, cls):
            return replace(value)
        return cls(**checked_keys("structured_outputs", cls, value))


def checked_keys(name: str, kind: type[Any], value: Any) -> dict[str, Any]:
    """A dict whose keys are fields of the dataclass `kind`, for a field of SamplingParams called `name`.

    Raises: ValueError if it is anything else.
    """
    known = [f.name for f in fields(kind)]
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r} must be a {kind.__name__} or a dict.")
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        raise ValueError(f"{name} has the unknown keys {unknown}: allowed are {known}.")
    return value
