"""What a request's sampling parameters need of the model and of the engine: checked, and made into token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxvllm.config import EngineConfig
from jaxvllm.model_info import ModelInfo
from jaxvllm.tokenizer import Tokenizer
from scheduler.sampling_params import MAX_LISTED_IDS, MAX_THINK_IDS, DerivedParams, SamplingParams

if TYPE_CHECKING:
    from jaxvllm.sampling import LogitsProcessor


@dataclass(frozen=True)
class SamplingFeatures:
    """What of sampling an engine was started with.

    Attributes:
      max_logprobs: the most logprobs a position; -1: all.
      processors: custom logits processors.
      thinking: strings that open and close the model's thinking.
    """

    max_logprobs: int = 20
    processors: "tuple[LogitsProcessor, ...]" = ()
    thinking: tuple[str, str] | None = None

    @classmethod
    def of_config(cls, config: EngineConfig) -> "SamplingFeatures":
        """Of an engine; imports its logits processors, and JAX with them, only if it has some."""
        processors: tuple[LogitsProcessor, ...] = ()
        if config.logits_processors:
            from jaxvllm.sampling import load_logits_processors

            processors = load_logits_processors(config.logits_processors)
        return cls(config.max_logprobs, processors, config.thinking)


class SamplingChecker:
    """Checks sampling parameters against the model and the engine, and derives what the core needs of them.

    Raises: ValueError at construction if a thinking string has no tokens or too many.
    """

    def __init__(self, model: ModelInfo, tokenizer: Tokenizer | None, features: SamplingFeatures) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._features = features
        self._processors = {processor.name: processor for processor in features.processors}
        self._thinking = self._encode_thinking()

    def check(self, params: SamplingParams) -> None:
        """Raises: ValueError for what this model or engine cannot do; names field, value, limit and remedy."""
        vocab_size = self._model.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            check_token_ids(getattr(params, name) or (), name, vocab_size)
        for token_id in params.logit_bias or ():
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"logit_bias has the key {token_id}, which is outside the vocabulary: ids must be in "
                    f"[0, {vocab_size - 1}]."
                )
        self._check_first_tokens(params)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_num_logprobs(name, getattr(params, name), params)
        if params.bad_words and self._tokenizer is None:
            raise ValueError(f"bad_words={params.bad_words!r} needs a tokenizer (skip_tokenizer_init=True).")
        if params.thinking_token_budget is not None and self._thinking is None:
            raise ValueError(
                f"thinking_token_budget={params.thinking_token_budget} needs an engine that knows the model's thinking "
                "strings: start it with reasoning_config={'reasoning_start_str': ..., 'reasoning_end_str': ...}."
            )
        if params.thinking_token_budget is not None and params.structured_outputs is not None:
            raise ValueError(
                "thinking_token_budget cannot be combined with structured_outputs, whose grammar begins with the first "
                "token: leave one of them out."
            )
        for name in params.extra_args or ():
            if name not in self._processors:
                raise ValueError(
                    f"extra_args has the key {name!r}, which is no custom logits processor of this engine: it has "
                    f"{sorted(self._processors)} (argument logits_processors)."
                )

    def _check_first_tokens(self, params: SamplingParams) -> None:
        """Below min_tokens no end may come: something else has to be allowed."""
        if not (params.min_tokens and params.allowed_token_ids):
            return
        ends = {self._model.eos_token_id, *self._model.extra_eos_token_ids, *(params.stop_token_ids or ())}
        if ends.issuperset(params.allowed_token_ids):
            raise ValueError(
                f"allowed_token_ids={params.allowed_token_ids} are all ends of the text, of which min_tokens="
                f"{params.min_tokens} allows none at first: allow another id, or leave one of the two out."
            )

    def _check_num_logprobs(self, name: str, value: int | None, params: SamplingParams) -> None:
        limit = self._features.max_logprobs
        if value is None or limit < 0 or (name == "logprobs" and params.logprob_token_ids):
            return
        if value > limit or (value < 0 and self._model.vocab_size > limit):
            raise ValueError(
                f"{name}={value} must be at most max_logprobs={limit}: lower it, or start the engine with a larger "
                "max_logprobs (-1: no limit)."
            )

    def derive(self, params: SamplingParams) -> DerivedParams | None:
        """Token ids of text fields, ends that are ignored, parameters of custom processors; None if there is nothing.

        Raises: ValueError as check does.
        """
        derived = DerivedParams()
        if params.ignore_eos and params.min_tokens:
            derived.ignored_ends = list(self._model.extra_eos_token_ids)
        if params.bad_words:
            derived.bad_words = self._encode_bad_words(params.bad_words)
        if params.thinking_token_budget is not None and self._thinking is not None:
            derived.think_start, derived.think_end = self._thinking
        for name, value in (params.extra_args or {}).items():
            derived.processors[name] = self._processors[name].params_of(value)
        return derived if derived != DerivedParams() else None

    def _encode_bad_words(self, words: list[str]) -> list[list[int]]:
        """Each word as it stands at the start of a text and, where that is another first token, behind a space."""
        assert self._tokenizer is not None, "checked"
        spellings = []
        for word in words:
            plain = self._tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self._tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if not plain:
                raise ValueError(f"bad_words holds {word!r}, which has no tokens: leave it out.")
            spellings.append(plain)
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                spellings.append(spaced)
        num_ids = sum(map(len, spellings))
        if num_ids > MAX_LISTED_IDS:
            raise ValueError(f"bad_words make {num_ids} tokens; at most {MAX_LISTED_IDS} are allowed.")
        return spellings

    def _encode_thinking(self) -> tuple[list[int], list[int]] | None:
        if self._features.thinking is None:
            return None
        if self._tokenizer is None:
            raise ValueError("reasoning_config needs a tokenizer: set skip_tokenizer_init=False.")
        start, end = (self._tokenizer.encode(text, add_special_tokens=False) for text in self._features.thinking)
        for text, ids in zip(self._features.thinking, (start, end), strict=True):
            if not 1 <= len(ids) <= MAX_THINK_IDS:
                raise ValueError(f"reasoning_config: {text!r} has {len(ids)} tokens; 1 to {MAX_THINK_IDS} are allowed.")
        return start, end


def check_token_ids(ids: Sequence[int], name: str, vocab_size: int) -> None:
    """Raises: ValueError naming the first id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise ValueError(f"{name}[{index}]={bad} is outside the vocabulary: ids must be in [0, {vocab_size - 1}].")
