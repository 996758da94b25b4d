"""InputProcessor: what the caller gives becomes an EngineCoreRequest, or an error before anything is scheduled."""

import contextlib
import copy
import random
import secrets
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxvllm.core_messages import EngineCoreInfo, EngineCoreRequest
from jaxvllm.model_info import ModelInfo
from jaxvllm.output_processor import CallerRequest
from jaxvllm.outputs import RequestMetrics
from jaxvllm.sampling_checks import SamplingChecker, SamplingFeatures, check_token_ids
from jaxvllm.tokenizer import Tokenizer
from scheduler.field_checks import as_float, as_int, as_text
from scheduler.sampling_params import MAX_STOP_TOKEN_IDS, DerivedParams, SamplingParams
from scheduler.structured_outputs import StructuredOutputsParams

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
# What vLLM's prompts may hold beside: refused by name unless it is None.
NOT_BUILT_PROMPT_KEYS = (
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
    "prompt_embeds",
    "encoder_prompt",
    "decoder_prompt",
)
# Fields of SamplingParams that are not applied: a request that sets one is refused by name.
NOT_APPLIED = {"routed_experts_prompt_start": "no mixture-of-experts model is served"}
_SEED_BITS = 63

Prompt = str | Sequence[int] | Mapping[str, Any]


@contextlib.contextmanager
def naming_prompt(index: int, num_prompts: int) -> Iterator[None]:
    """Around the processing of one of several prompts: an error gets a note that says which of them is to blame."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if num_prompts > 1:
            error.add_note(f"This is about prompt {index} of {num_prompts}, counted from 0.")
        raise


@dataclass(slots=True)
class ProcessedRequest:
    """A request ready to be added: the caller's side, and what the core gets (one a completion)."""

    caller: CallerRequest
    children: list[EngineCoreRequest]


@dataclass(slots=True)
class _ParsedPrompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


class InputProcessor:
    """Tokenises and validates.

    Args:
      seed: of the seeds drawn for requests that bring none; None: the operating system's entropy.
      features: what of sampling the engine was started with.
    """

    def __init__(
        self,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        info: EngineCoreInfo,
        seed: int | None,
        features: SamplingFeatures | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._info = info
        self._seeds = random.Random(seed)
        self._checker = SamplingChecker(model, tokenizer, features or SamplingFeatures())

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> ProcessedRequest:
        """Make a request complete.

        Raises:
          ValueError: a value that can never be served; names it, the limit and the remedy.
          NotImplementedError: a sampling parameter that is not applied yet.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params={params!r} must be a SamplingParams.")
        # Checked anew, for fields may have been set since, and copied: those set from now on are for other requests.
        params = params.checked()
        parsed = self._parse(prompt)
        self._check_prompt(parsed.token_ids)
        self._check_params(params, len(parsed.token_ids))
        arrival_time = time.time() if arrival_time is None else as_float("arrival_time", arrival_time)
        caller = CallerRequest(request_id, parsed.text, parsed.token_ids, params, RequestMetrics(arrival_time))
        int32_ids = array("i", parsed.token_ids)
        derived = self._checker.derive(params)
        children = [
            EngineCoreRequest(
                request_id=self._internal_id(request_id, index, params.n),
                prompt_token_ids=int32_ids,
                sampling_params=self._complete(params, index, len(parsed.token_ids), derived),
                eos_token_id=self._model.eos_token_id,
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=parsed.cache_salt,
            )
            for index in range(params.n)
        ]
        return ProcessedRequest(caller, children)

    def _parse(self, prompt: Prompt) -> _ParsedPrompt:
        if isinstance(prompt, str):
            return _ParsedPrompt(prompt, self.tokenize(prompt))
        if isinstance(prompt, Mapping):
            return self._parse_dict(prompt)
        return _ParsedPrompt(None, self._token_ids(prompt))

    def _parse_dict(self, prompt: Mapping[str, Any]) -> _ParsedPrompt:
        for key in NOT_BUILT_PROMPT_KEYS:
            if prompt.get(key) is not None:
                raise NotImplementedError(f"a prompt with {key} is not supported: prompts are text or token ids.")
        unknown = sorted(str(key) for key in prompt if key not in (*PROMPT_KEYS, *NOT_BUILT_PROMPT_KEYS))
        if unknown:
            raise ValueError(f"prompt has the unknown keys {unknown}: allowed are {list(PROMPT_KEYS)}.")
        text, ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
        if salt is not None:
            salt = as_text("cache_salt", salt)
            if not salt:
                raise ValueError(f"cache_salt={salt!r} must be a non-empty string; leave it out to share the cache.")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"prompt['prompt']={text!r} must be a string.")
        if ids is not None:
            return _ParsedPrompt(text, self._token_ids(ids), salt)
        if text is None:
            raise ValueError("a prompt given as a dict needs 'prompt' (text) or 'prompt_token_ids'.")
        return _ParsedPrompt(text, self.tokenize(text), salt)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids.

        Raises: ValueError without a tokenizer, or for a text that is certain to be longer than max_model_len.
        """
        if self._tokenizer is None:
            raise ValueError(
                "the engine has no tokenizer (skip_tokenizer_init=True): give prompt_token_ids instead of text."
            )
        longest = self._tokenizer.max_chars_per_token
        limit = self._info.max_model_len - 1
        if longest is not None and len(text) > limit * longest:  # seconds of work that would end in the same answer
            raise ValueError(
                f"the prompt has {len(text)} characters, at least {-(-len(text) // longest)} tokens; with at least 1 "
                f"output token at most {limit} fit max_model_len={limit + 1}: shorten it, or raise max_model_len."
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _token_ids(self, ids: Any) -> list[int]:
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise ValueError(f"a prompt must be text, a list of token ids or a dict, got {type(ids).__name__}.")
        ids = list(ids)
        if set(map(type, ids)) <= {int}:
            return ids
        return [as_int(f"prompt_token_ids[{i}]", token_id) for i, token_id in enumerate(ids)]

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise ValueError("the prompt is empty (0 tokens): give at least one token.")
        self._check_ids(ids, "prompt_token_ids")
        limit = self._info.max_model_len - 1
        if len(ids) > limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; with at least 1 output token at most {limit} fit "
                f"max_model_len={self._info.max_model_len}: shorten it, or raise max_model_len."
            )

    def _check_ids(self, ids: list[int], name: str) -> None:
        check_token_ids(ids, name, self._model.vocab_size)

    def _check_params(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        for name, reason in NOT_APPLIED.items():
            if (value := getattr(params, name)) is not None:
                raise NotImplementedError(
                    f"sampling parameter {name}={value!r} is not supported ({reason}): leave it out."
                )
        self._checker.check(params)
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer: use stop_token_ids instead.")
        if params.structured_outputs is not None:
            self._check_structured_outputs(params.structured_outputs)
        room = self._info.max_model_len - num_prompt_tokens
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens={params.min_tokens} can never be reached: behind a prompt of {num_prompt_tokens} tokens "
                f"max_model_len={self._info.max_model_len} leaves {room}. Lower it, or shorten the prompt."
            )

    def _check_structured_outputs(self, params: StructuredOutputsParams) -> None:
        if self._tokenizer is None:
            raise ValueError(
                "structured_outputs cannot be followed without a tokenizer: set skip_tokenizer_init=False."
            )
        if self._model.eos_token_id is None:
            raise ValueError(
                "structured_outputs cannot be followed without a token that ends the text: the model's files name none."
            )
        from jaxvllm.structured_output.grammar import check, special_texts  # late: few requests need llguidance

        check(params, special_texts(self._tokenizer.backend))

    def _complete(
        self, params: SamplingParams, index: int, num_prompt_tokens: int, derived: DerivedParams | None
    ) -> SamplingParams:
        """The parameters of one completion, with nothing left open."""
        own_ids = dict.fromkeys(params.stop_token_ids or [])
        all_ids = own_ids | dict.fromkeys(self._model.extra_eos_token_ids)
        if len(all_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids and the model's {len(self._model.extra_eos_token_ids)} end-of-turn ids make "
                f"{len(all_ids)}; at most {MAX_STOP_TOKEN_IDS} are allowed."
            )
        stop_ids = own_ids if params.ignore_eos else all_ids
        seed = self._seeds.getrandbits(_SEED_BITS) if params.seed is None else (params.seed + index) % 2**64
        max_tokens, max_model_len = params.max_tokens, self._info.max_model_len
        # What no text can reach is cut to what a message can hold.
        max_tokens = max_model_len - num_prompt_tokens if max_tokens is None else min(max_tokens, max_model_len)
        complete = copy.copy(params)
        if params.thinking_token_budget is not None:
            complete.thinking_token_budget = min(params.thinking_token_budget, max_model_len)
        complete.extra_args = None  # of any type; `derived` has what the core needs of them
        if params.top_k >= self._model.vocab_size:
            complete.top_k = 0  # off: it would choose among all, and need not fit the plan's int32
        if params.structured_outputs is not None:
            complete.structured_outputs = params.structured_outputs.with_json_text()
        complete.n, complete.seed, complete.max_tokens, complete.stop_token_ids = 1, seed, max_tokens, list(stop_ids)
        if complete.logprobs is not None:
            complete.logprobs = min(complete.logprobs, self._model.vocab_size)
        if complete.prompt_logprobs is not None:  # once a request: the first completion brings them
            complete.prompt_logprobs = min(complete.prompt_logprobs, self._model.vocab_size) if index == 0 else None
        complete.derived = derived
        return complete

    def _internal_id(self, request_id: str, index: int, n: int) -> str:
        base = f"{request_id}-{secrets.token_hex(4)}"
        return base if n == 1 else f"{index}_{base}"
