"""What clients send: OpenAI's requests with vLLM's extra fields.

None means "not given": then the model's generation_config.json and the defaults of SamplingParams hold.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_TOOLS = 128
MAX_NAME_CHARS = 256


def _whole(value: Any) -> Any:
    """A float without a fraction as an integer: some languages write 16.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_prompt(value: Any) -> Any:
    """Text, ids, or a list of one of these; looked at once, as a prompt may have a million ids."""
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    is_ids = kinds == {int} or (kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value))
    if isinstance(value, str) or is_ids or kinds == {str}:
        return value
    if value == []:
        raise ValueError("the list of prompts is empty: give at least one")
    raise ValueError("must be text, a list of integer token ids, or a list of one of these, not mixed")


_Int = Annotated[int, BeforeValidator(_whole)]
_Ids = list[_Int]
_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
_ShortText = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
_Texts = Annotated[list[_ShortText], Field(max_length=MAX_STOP_STRINGS)]
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
    ]
}
_MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_call_id": {"type": "string"},
    },
}
Prompt = Annotated[Any, BeforeValidator(_check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
Message = Annotated[dict[str, Any], WithJsonSchema(_MESSAGE_SCHEMA)]
_JsonObject = dict[str, Any]


class _Fields(BaseModel):
    """Fields of exactly the JSON types that are written: no "5" for 5, no true for 1."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Fields):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(_Fields):
    """response_format of type json_schema: the schema and its name."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    name: str | None = None
    description: str | None = None
    json_schema: _JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """How the answer is formed; further keys belong to type structural_tag."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with type json_schema, and only with it")
        if self.type != "structural_tag" and self.model_extra:
            raise ValueError(f"{next(iter(self.model_extra))} is no field of type {self.type}")
        return self


class GenerationRequest(_Fields):
    """What completions and chats have in common: SamplingParams' fields, and what surrounds them."""

    model: _Name | None = None
    n: _Int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: _Int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: _ShortText | _Texts | None = None
    stop_token_ids: _Ids | None = None
    bad_words: _Texts | None = None
    allowed_token_ids: _Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: _Int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: _Int | None = None
    logprob_token_ids: _Ids | None = None
    truncate_prompt_tokens: _Int | None = Field(None, ge=-1)
    response_format: ResponseFormat | None = None
    structured_outputs: _JsonObject | None = None
    repetition_detection: _JsonObject | None = None
    thinking_token_budget: _Int | None = None
    vllm_xargs: _JsonObject | None = None
    priority: _Int = Field(0, ge=-(2**63), le=2**63 - 1)
    request_id: _Name | None = None
    cache_salt: _Name | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    # Fields of OpenAI and vLLM that are not built, with the values that ask for nothing.
    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            "use_beam_search": (False,),
            "length_penalty": (1.0, 1),
            "kv_transfer_params": (),
            "ec_transfer_params": (),
            "logits_processors": ([],),
            "guided_json": (),
            "guided_regex": (),
            "guided_choice": (),
            "guided_grammar": (),
            "guided_decoding_backend": (),
            "guided_whitespace_pattern": (),
            "truncation_side": ("left",),
            "watermarking": (False,),
            "stream_interval": (1,),
            "routed_experts_prompt_start": (0,),
        }
    )
    # Fields of OpenAI that change nothing about the answer.
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"user", "safety_identifier", "session_id", "metadata", "service_tier", "prompt_cache_key", "store"}
    )

    def other_names(self) -> dict[str, str]:
        """Fields of SamplingParams that this request gives under another name, and that name."""
        names = {"extra_args": "vllm_xargs"}
        if self.response_format is not None and not self.structured_outputs:
            names["structured_outputs"] = "response_format"
        return names

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: _Int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: _Int | None = None
    add_special_tokens: bool = True

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            **GenerationRequest.NOT_SUPPORTED,
            "suffix": ("",),
            "best_of": (1,),
            "prompt_embeds": (),
            "return_token_offsets": (False,),
            "return_mm_kwargs": (True,),
        }
    )

    @model_validator(mode="after")
    def _check_logprobs(self) -> "CompletionRequest":
        if self.logprob_token_ids and self.logprobs not in (0, len(self.logprob_token_ids)):
            raise ValueError(f"logprob_token_ids needs logprobs=0, or their number, {len(self.logprob_token_ids)}")
        return self


class FunctionDefinition(_Fields):
    """A function that the model may call; parameters is its JSON schema."""

    name: _Name
    description: str | None = None
    parameters: _JsonObject | None = None
    strict: bool | None = None


class Tool(_Fields):
    """A tool of a chat."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(_Fields):
    """The function of a NamedToolChoice."""

    name: _Name


class NamedToolChoice(_Fields):
    """tool_choice that names the function to call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class RenderRequest(_Fields):
    """What makes a conversation into a prompt."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: _JsonObject | None = None

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {"mm_processor_kwargs": ({},), "media_io_kwargs": ({},)}
    )

    @model_validator(mode="after")
    def _check_final_message(self) -> "RenderRequest":
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message=true needs add_generation_prompt=false")
        return self


class ChatCompletionRequest(GenerationRequest, RenderRequest):
    """POST /v1/chat/completions."""

    max_completion_tokens: _Int | None = Field(None, ge=1)
    max_tokens: _Int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: _Int | None = Field(None, ge=-1)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    echo: bool = False
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            **GenerationRequest.NOT_SUPPORTED,
            **RenderRequest.NOT_SUPPORTED,
            "include_reasoning": (True,),
            "modalities": (["text"],),
            "functions": (),
            "function_call": (),
            "audio": (),
            "prediction": (),
            "web_search_options": (),
        }
    )

    def other_names(self) -> dict[str, str]:
        """As of any request; a choice of tools is held to by structured output, too."""
        names = super().other_names() | {"logprobs": "top_logprobs"}
        if self.tool_choice not in (None, "none", "auto"):
            names["structured_outputs"] = "tools"
        return names

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.logprob_token_ids and not self.logprobs:
            raise ValueError("logprob_token_ids needs logprobs=true")
        if self.logprob_token_ids and self.top_logprobs not in (None, 0, len(self.logprob_token_ids)):
            raise ValueError(
                f"top_logprobs={self.top_logprobs} must be the number of logprob_token_ids, "
                f"{len(self.logprob_token_ids)}, or left out"
            )
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatCompletionRequest":
        names = [tool.function.name for tool in self.tools or ()]
        if self.tool_choice not in (None, "none") and not names:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is none of tools")
        if len(set(names)) < len(names):
            raise ValueError("tools must have names of their own")
        return self


class TokenizeRequest(RenderRequest):
    """POST /tokenize: a prompt, or a conversation."""

    model: _Name | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)  # pyright: ignore[reportIncompatibleVariableOverride]
    add_special_tokens: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(_Fields):
    """POST /detokenize."""

    model: _Name | None = None
    tokens: _Ids
