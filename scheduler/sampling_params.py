"""SamplingParams: what a request asks of sampling and of its text, with vLLM's names, ranges and defaults."""

import copy
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Self

from scheduler.field_checks import as_bool, as_float, as_int, as_int_list, as_list, as_text
from scheduler.repetition import RepetitionDetectionParams
from scheduler.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

MAX_N = 16384
SEED_RANGE = (-(2**63), 2**64 - 1)
MAX_STOP_TOKEN_IDS = 128
MAX_THINK_IDS = 16  # of one end of the thinking
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LISTED_IDS = 1024  # of logit_bias, of allowed_token_ids, and of all bad words together
MAX_LOGIT_BIAS = 100.0
GREEDY_TEMPERATURE = 1e-5  # below: greedy
MIN_TEMPERATURE = 1e-2  # between the two: raised to this, or float32 logits overflow
_INTS = ("n", "top_k", "min_tokens")
_OPTIONAL_INTS = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "thinking_token_budget")
_FLOATS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
_BOOLS = (
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


class RequestOutputKind(IntEnum):
    """What each RequestOutput of a request carries: all text so far, the new piece, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(IntEnum):
    """How a request draws, as vLLM names it."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


@dataclass(slots=True, kw_only=True)
class DerivedParams:
    """What the front end made of a request's fields and the model, for the core.

    Attributes:
      ignored_ends: the model's end ids beside EOS, where ignore_eos and min_tokens are set: masked, as EOS is.
      bad_words: token ids of each spelling.
      think_start, think_end: token ids that open and close the model's thinking.
      processors: custom logits processor -> its parameters.
    """

    ignored_ends: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    think_start: list[int] = field(default_factory=list)
    think_end: list[int] = field(default_factory=list)
    processors: dict[str, list[float]] = field(default_factory=dict)

    @property
    def changes_all_logits(self) -> bool:
        """Whether it matters at every position, and not below min_tokens alone."""
        return bool(self.bad_words or self.think_end or self.processors)


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, field by field as in vLLM 0.22 (vllm/sampling_params.py).

    Attributes:
      derived: set by the engine; None in what a caller makes.

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
    derived: DerivedParams | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._normalise()
        self._check_logprobs()
        self._check_lists()

    def _check_types(self) -> None:
        for names, convert in ((_INTS, as_int), (_FLOATS, as_float), (_BOOLS, as_bool)):
            for name in names:
                value = getattr(self, name)
                if (converted := convert(name, value)) is not value:
                    setattr(self, name, converted)
        for names, convert in ((_OPTIONAL_INTS, as_int), (("skip_reading_prefix_cache",), as_bool)):
            for name in names:
                if (value := getattr(self, name)) is not None:
                    setattr(self, name, convert(name, value))
        for name in _FLOATS:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r} must be finite.")
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise ValueError(f"extra_args={self.extra_args!r} must be a dict or None.")

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
        if self.thinking_token_budget is not None and self.thinking_token_budget < 0:
            raise ValueError(
                f"thinking_token_budget={self.thinking_token_budget} must not be negative; None: no limit."
            )
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n={self.n} must be 1 for greedy sampling (temperature={self.temperature}).")

    def _normalise(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else as_list("stop", self.stop)
        self.stop = [as_text("stop", text) for text in stops]
        if "" in self.stop:
            raise ValueError(f"stop={self.stop!r} must not hold an empty string.")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs detokenize=True: stop strings are found in the text.")
        self.stop_token_ids = _id_list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        if self.repetition_detection is not None:
            self.repetition_detection = RepetitionDetectionParams.of(self.repetition_detection)
        if self.seed == -1:
            self.seed = None
        if self.output_kind not in tuple(RequestOutputKind):
            raise ValueError(f"output_kind={self.output_kind!r} must be a RequestOutputKind.")
        self.output_kind = RequestOutputKind(self.output_kind)
        if self.is_greedy:
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            logger.warning(
                "temperature=%g is raised to %g: float32 overflows below.", self.temperature, MIN_TEMPERATURE
            )
            self.temperature = MIN_TEMPERATURE
        if self.top_k == -1:
            self.top_k = 0

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < -1:
                raise ValueError(f"{name}={value} must be at least 0, or -1 for the whole vocabulary.")
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is False:
            raise ValueError(
                "skip_reading_prefix_cache=False contradicts prompt_logprobs: a cached prefix has no logprobs; leave "
                "it out."
            )
        if self.logprob_token_ids is None:
            return
        ids = _id_list("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        if self.logprobs is not None and self.logprobs != len(ids):
            raise ValueError(
                f"logprobs={self.logprobs} must equal the {len(ids)} logprob_token_ids; leave logprobs out to get "
                "exactly those."
            )
        self.logprob_token_ids = ids or None

    def _check_lists(self) -> None:
        if self.logit_bias is not None:
            self.logit_bias = _checked_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _id_list("allowed_token_ids", self.allowed_token_ids, MAX_LISTED_IDS)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids=[] allows no token: leave it out to allow all.")
        self.bad_words = [as_text("bad_words", word) for word in as_list("bad_words", self.bad_words)]
        if "" in self.bad_words:
            raise ValueError(f"bad_words={self.bad_words!r} must not hold an empty string.")

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """Build from values where None stands for the default, as the API server has them.

        Keys of logit_bias may be strings of digits, as JSON has them.
        """
        optional = {"seed", "max_tokens", "logprobs", "prompt_logprobs", "skip_reading_prefix_cache"}
        known = {f.name: f for f in fields(cls) if f.init}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise TypeError(f"SamplingParams has no field {unknown[0]!r}.")
        given: dict[str, Any] = {n: value for n, value in values.items() if value is not None or n in optional}
        bias = given.get("logit_bias")
        if isinstance(bias, Mapping):
            given["logit_bias"] = {_int_key(key): value for key, value in bias.items()}
        return cls(**given)

    def checked(self) -> Self:
        """A copy whose fields are those of a new one: whoever has set a field since learns here if it is wrong."""
        params = copy.copy(self)
        params.derived = None
        params.__post_init__()
        return params

    def clone(self) -> Self:
        """A copy that shares nothing that can change."""
        return copy.deepcopy(self)

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, random, or random with a seed of its own."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def num_sample_logprobs(self) -> int | None:
        """Entries beside the sampled token at each output position: a count, -1 for all, None for no logprobs."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_TEMPERATURE


def _checked_bias(bias: Any) -> dict[int, float]:
    """Token -> bias, clamped to [-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS] as in vLLM's from_optional."""
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias={bias!r} must map token ids to numbers.")
    if len(bias) > MAX_LISTED_IDS:
        raise ValueError(f"logit_bias holds {len(bias)} ids; at most {MAX_LISTED_IDS} are allowed.")
    checked = {}
    for key, value in bias.items():
        token_id = as_int("logit_bias key", key)
        number = as_float(f"logit_bias[{token_id}]", value)
        if math.isnan(number):
            raise ValueError(f"logit_bias[{token_id}]={value!r} must be a number.")
        checked[token_id] = min(max(number, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)
    return checked


def _int_key(key: Any) -> Any:
    try:
        return int(key) if isinstance(key, str) else key
    except ValueError:  # refused by its name later
        return key


def _id_list(name: str, value: Any, limit: int) -> list[int]:
    ids = as_int_list(name, value)
    if len(ids) > limit:
        raise ValueError(f"{name} holds {len(ids)} ids; at most {limit} are allowed.")
    return ids
