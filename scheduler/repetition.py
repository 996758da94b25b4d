"""Repetition detection: a request ends when its last tokens are one pattern over and over."""

from array import array
from dataclasses import dataclass, replace
from typing import Any

from scheduler.field_checks import as_int
from scheduler.structured_outputs import checked_keys

MAX_SIZE = 2**31 - 1  # no text is longer


@dataclass(slots=True)
class RepetitionDetectionParams:
    """When the end of a text counts as a loop, with vLLM's names.

    Attributes:
      max_pattern_size: longest pattern looked for, in tokens; 0 turns the detection off.
      min_pattern_size: shortest one; 0 means 1.
      min_count: the pattern stands at the end so many times in a row, at least 2.

    Raises:
      ValueError: sizes or count out of range; names field, value and range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            value = as_int(f"repetition_detection: {name}", getattr(self, name))
            if not 0 <= value <= MAX_SIZE:
                raise ValueError(f"repetition_detection: {name}={value} must be an integer in [0, {MAX_SIZE}].")
            setattr(self, name, value)
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"repetition_detection: min_pattern_size={self.min_pattern_size} must not exceed "
                f"max_pattern_size={self.max_pattern_size}."
            )
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise ValueError(
                f"repetition_detection: min_count={self.min_count} must be at least 2; max_pattern_size=0 turns the "
                "detection off."
            )

    @classmethod
    def of(cls, value: Any) -> "RepetitionDetectionParams":
        """The same, checked anew, or from a dict.

        Raises: ValueError for an unknown key or another type.
        """
        if isinstance(value, cls):
            return replace(value)
        return cls(**checked_keys("repetition_detection", cls, value))


def ends_in_repetition(token_ids: "array[int]", num_prompt_tokens: int, params: RepetitionDetectionParams) -> bool:
    """Whether the output ends in min_count copies of a pattern of one of the sizes; the prompt does not count."""
    if not params.max_pattern_size:
        return False
    num_outputs = len(token_ids) - num_prompt_tokens
    longest = min(params.max_pattern_size, num_outputs // params.min_count)
    last = token_ids[-1]
    for size in range(max(params.min_pattern_size, 1), longest + 1):
        if token_ids[-1 - size] == last:  # most sizes end here
            tail = token_ids[-size * params.min_count :]
            if tail[size:] == tail[:-size]:
                return True
    return False
