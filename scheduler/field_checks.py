"""What counts as an integer, a number, a truth value or a text where a caller gives one, and Python's own for it.

Messages between processes carry Python's own types alone, so a NumPy scalar or a member of an enum is converted here
(without NumPy, whose import a front end does without).
"""

import numbers
import operator
from typing import Any


def as_int(name: str, value: Any) -> int:
    """An integer, of NumPy or another library too.

    Raises: ValueError for anything else: True, 1.0 and "1" are none.
    """
    if type(value) is int:
        return value
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ValueError(f"{name}={value!r} must be an integer, got {type(value).__name__}.")


def as_float(name: str, value: Any) -> float:
    """A real number, of NumPy too; it may be infinite or no number (nan).

    Raises: ValueError for anything else, True and "1" among it, and for an integer beyond float's range.
    """
    if type(value) is float:
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise ValueError(f"{name}={value!r} must be a number.")


def as_bool(name: str, value: Any) -> bool:
    """True or False, of NumPy too.

    Raises: ValueError for anything else: 1 is none.
    """
    plain = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(plain, bool):
        return plain
    raise ValueError(f"{name}={value!r} must be True or False.")


def as_text(name: str, value: Any) -> str:
    """A string that UTF-8 can hold.

    Raises: ValueError for anything else, and for half of a surrogate pair, which is no character.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} must be a string.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start]
            raise ValueError(
                f"{name} holds {half!r} at {error.start}: half of a surrogate pair is no character."
            ) from None
    return str.__str__(value)


def as_list(name: str, value: Any) -> list[Any]:
    """A list out of a list, tuple, set, range or array; None is the empty one.

    Raises: ValueError for anything else.
    """
    if value is None:
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple | set | frozenset | range):
        raise ValueError(f"{name}={value!r} must be a list.")
    return list(value)


def as_int_list(name: str, value: Any) -> list[int]:
    """As as_list, of integers."""
    items = as_list(name, value)
    if not items or set(map(type, items)) <= {int}:
        return items
    return [as_int(f"{name}[{i}]", item) for i, item in enumerate(items)]
