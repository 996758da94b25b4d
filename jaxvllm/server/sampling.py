"""A request's fields as SamplingParams."""

import json
from collections.abc import Mapping
from typing import Any

from jaxvllm.model_info import ModelInfo
from jaxvllm.server.errors import ApiError
from jaxvllm.server.protocol import GenerationRequest
from scheduler.sampling_params import RequestOutputKind, SamplingParams

MAX_CHOICE_TEXTS = 4096  # compiling 100,000 takes half a minute
# Fields that mean the same under the same name.
_SAME_NAMES = (
    "n",
    "logit_bias",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
    "logprob_token_ids",
    "repetition_detection",
    "thinking_token_budget",
)
_FORMATS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def sampling_params(
    request: GenerationRequest,
    model: ModelInfo,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured_outputs: Mapping[str, Any] | None = None,
    **changes: Any,
) -> SamplingParams:
    """What a request asks for, over the model's own defaults and within its limit.

    Args:
      max_tokens: None: fill the context, or up to the model's default.
      structured_outputs: what the request's tools demand; None: what the request itself says.
      changes: fields in the place of the request's.

    Raises: ValueError, ApiError: a value out of range, or two formats at once.
    """
    values: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAMES}
    values["extra_args"] = request.vllm_xargs
    values["structured_outputs"] = structured_outputs or _format(request)
    values["logprobs"] = None if request.logprob_token_ids else logprobs
    if request.thinking_token_budget == -1:  # vLLM's word for no limit
        values["thinking_token_budget"] = None
    values |= changes
    given = {name: value for name, value in values.items() if value is not None}
    defaults, limit = model.default_sampling, model.max_output_tokens
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens")
    elif limit is not None:
        max_tokens = min(max_tokens, limit)
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams.from_optional(**{**defaults, **given, "max_tokens": max_tokens, "output_kind": kind})


def _format(request: GenerationRequest) -> dict[str, Any] | None:
    """structured_outputs, with what response_format adds to it."""
    wanted = dict(request.structured_outputs or {})
    choice = wanted.get("choice")
    if isinstance(choice, list) and len(choice) > MAX_CHOICE_TEXTS:
        raise ApiError(
            f"structured_outputs: choice has {len(choice)} texts; at most {MAX_CHOICE_TEXTS} are allowed.",
            param="structured_outputs",
        )
    form = request.response_format
    if form is None or form.type == "text":
        return wanted or None
    if any(wanted.get(name) is not None for name in _FORMATS):
        raise ApiError("response_format and structured_outputs exclude each other.", param="response_format")
    if form.type == "json_object":
        wanted["json_object"] = True
    elif form.json_schema is not None:
        wanted["json"] = form.json_schema.json_schema
    else:
        wanted["structural_tag"] = json.dumps(form.model_dump(exclude_none=True))
    return wanted
