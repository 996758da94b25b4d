"""SamplingParams: what a request asks of sampling and of its text, with vLLM's names, ranges and defaults."""

import math
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from scheduler.repetition import RepetitionDetectionParams
from scheduler.structured_outputs import StructuredOutputsParams

MAX_N = 16384
SEED_RANGE = (-(2**63), 2**64 - 1)
MAX_STOP_TOKEN_IDS = 128
GREEDY_TEMPERATURE = 1e-5  # below: greedy
MIN_TEMPERATURE = 1e-2  # between the two: raised to this, or float32 logits overflow


class RequestOutputKind(IntEnum):
    """What each RequestOutput of a request carries: all text so far, the new piece, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, field by field as in vLLM 0.22 (vllm/sampling_params.py).

    Raises:
      ValueError: a field has the wrong type or is out of its range; the message names field, value and range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._normalise()

    def _check_types(self) -> None:
        ints = ("n", "top_k", "min_tokens")
        optional_ints = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "thinking_token_budget")
        floats = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
        bools = (
            "ignore_eos",
            "flat_logprobs",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        )
        for name in ints + optional_ints:
            value = getattr(self, name)
            if value is None and name in optional_ints:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}={value!r} must be an integer.")
        for name in floats:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name}={value!r} must be a number.")
            if not math.isfinite(value):
                raise ValueError(f"{name}={value!r} must be finite.")
        for name in bools:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")

    def _check_ranges(self) -> None:
        ranges = {
            "n": (1, MAX_N),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
            "min_p": (0.0, 1.0),
            "seed": SEED_RANGE,
        }
        for name, (low, high) in ranges.items():
            if getattr(self, name) is not None and not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)} must be in [{low}, {high}].")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0.")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative; 0 is greedy.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 turns it off.")
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or 0 or -1 to turn it off.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1, or None to fill the context.")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens={self.min_tokens} must not be negative.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}.")
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n={self.n} must be 1 for greedy sampling (temperature={self.temperature}).")

    def _normalise(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else _as_list("stop", self.stop)
        if not all(isinstance(s, str) for s in stops):
            raise ValueError(f"stop={self.stop!r} must be a string or a list of strings.")
        if "" in stops:
            raise ValueError(f"stop={self.stop!r} must not hold an empty string.")
        if stops and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs detokenize=True: stop strings are found in the text.")
        self.stop = stops
        ids = _as_list("stop_token_ids", self.stop_token_ids)
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r} must be a list of integers.")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids holds {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed.")
        self.stop_token_ids = ids
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        if self.repetition_detection is not None:
            self.repetition_detection = RepetitionDetectionParams.of(self.repetition_detection)
        if self.seed == -1:
            self.seed = None
        self.output_kind = RequestOutputKind(self.output_kind)
        if self.is_greedy:
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if self.top_k == -1:
            self.top_k = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    def changed_fields(self) -> dict[str, Any]:
        """The fields that differ from their defaults, for messages and for rejecting what is not applied yet."""
        default = SamplingParams()
        return {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)
        }


def _as_list(name: str, value: Any) -> list[Any]:
    """A list out of a list-like value; None is the empty one."""
    if value is not None and not isinstance(value, list | tuple | set | frozenset):
        raise ValueError(f"{name}={value!r} must be a list.")
    return list(value or ())
