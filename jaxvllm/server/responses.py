"""What the server answers: OpenAI's objects with vLLM's extra fields, encoded by msgspec."""

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

PromptLogprobs = list[dict[int, dict[str, Any]] | None]


class PromptTokensDetails(Struct):
    """Of the prompt's tokens, those that were found in the prefix cache."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of a whole request: the prompts once, the completions of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogprobs(Struct):
    """Parallel lists, an entry a token."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionChoice(Struct):
    """One completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct):
    """The answer of /v1/completions, and a piece of it in a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"
    system_fingerprint: str | None = None


class FunctionCall(Struct):
    """The function that is called; arguments is the text of a JSON object."""

    name: str
    arguments: str


class ChatToolCall(Struct):
    """One call of a tool."""

    id: str
    function: FunctionCall
    type: str = "function"


class ChatMessage(Struct):
    """The model's message."""

    role: str
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class TokenLogprob(Struct):
    """One token of those that might have come."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChosenLogprob(Struct):
    """The token that came, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TokenLogprob] = []


class ChatLogprobs(Struct):
    """An entry a token of the message."""

    content: list[ChosenLogprob]
    refusal: None = None


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    """The answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct):
    """More of a call: its name once, its arguments in pieces."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """More of call number index; id and type come with the name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class ChatDelta(Struct):
    """What is new of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """A piece of /v1/chat/completions in a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelPermission(Struct):
    """What vLLM says of every model."""

    id: str
    created: int
    object: str = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Struct):
    """One name of the served model; root is the model itself."""

    id: str
    created: int
    root: str
    max_model_len: int
    permission: list[ModelPermission]
    object: str = "model"
    owned_by: str = "jaxvllm"
    parent: str | None = None


class ModelList(Struct):
    """The answer of /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class Tokens(Struct):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


encode = msgspec.json.Encoder().encode
