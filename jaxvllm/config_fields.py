"""Typed reads from a config dict, with errors that name the file, the field and the remedy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ConfigFields:
    """A config dict, what an absent key means, and other names of the same key.

    Attributes:
      values: the parsed file.
      defaults: used for a key that is absent; a key that is present and null stays None.
      spellings: key -> the names under which files have it, tried in order.
      origin: the file, for messages.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    spellings: Mapping[str, tuple[str, ...]]
    origin: str

    def get(self, key: str) -> Any:
        """The value under the first spelling that the file has, else the default, else None."""
        for name in self.spellings.get(key, (key,)):
            if name in self.values:
                return self.values[name]
        return self.defaults.get(key)

    def optional_positive_int(self, key: str) -> int | None:
        """A positive integer, or None if the file says null or nothing."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value <= 0:
            raise ValueError(
                f'{self.origin}: field "{key}" must be a positive integer, got {value!r}; correct the file'
            )
        return int(value)

    def positive_int(self, key: str) -> int:
        """A positive integer that must be there."""
        value = self.optional_positive_int(key)
        if value is None:
            names = " or ".join(f'"{name}"' for name in self.spellings.get(key, (key,)))
            raise ValueError(
                f"{self.origin}: field {names} is missing; add it, or get the file anew from the model's repository"
            )
        return value

    def number(self, key: str) -> float:
        """A positive number; JSON integers count."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f'{self.origin}: field "{key}" must be a positive number, got {value!r}; correct the file')
        return float(value)

    def boolean(self, key: str) -> bool:
        """true or false; null is false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f'{self.origin}: field "{key}" must be true or false, got {value!r}; correct the file')
        return bool(value)

    def text(self, key: str) -> str:
        """A string that must be there."""
        value = self.get(key)
        if not isinstance(value, str):
            raise ValueError(f'{self.origin}: field "{key}" must be a string, got {value!r}; correct the file')
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or null, as a tuple without repeats."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise ValueError(
                f'{self.origin}: field "{key}" must be a token id or a list of them, got {value!r}; correct the file'
            )
        return tuple(dict.fromkeys(i for i in ids if i >= 0))
