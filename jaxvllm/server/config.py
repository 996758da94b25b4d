"""ServerConfig: what the command line says about the server; the engine has arguments of its own."""

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

DEFAULT_MAX_REQUEST_BYTES = 16 << 20
MAX_CHOICES = 2048  # prompts times n of one request


@dataclass(frozen=True)
class ServerConfig:
    """Everything the application is told.

    Attributes:
      served_model_names: names that requests may use; the first is the one in answers.
      api_keys: any of them opens the door; none: no door.
      max_request_bytes: of a request's body.
      chat_template: Jinja text in the place of the model's own.
      trust_request_chat_template: take templates from requests, too.
      default_chat_template_kwargs: variables of the template, under those of the request.
      response_role: of answers.
      tool_call_parser: name of the parser for tool_choice "auto"; None: no such choice.
      exclude_tools_when_tool_choice_none: the template does not see tools that may not be called.
      enable_prompt_tokens_details: usage tells the cached tokens.
      enable_force_include_usage: every stream ends with usage.
      return_tokens_as_token_ids: log-probabilities name tokens "token_id:17".
      enable_request_id_headers: answers carry X-Request-Id.
      allowed_origins, allowed_methods, allowed_headers, allow_credentials: CORS.
      root_path: where a proxy mounts the server.
      middleware: import paths of ASGI middleware.
    """

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response_role: str = "assistant"
    tool_call_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    enable_request_id_headers: bool = False
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    middleware: tuple[str, ...] = ()


class Keys:
    """Checks keys in a time that does not depend on how much of a key is right, nor on which one is."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def accept(self, authorization: bytes) -> bool:
        """Whether a header "Bearer KEY" holds one of the keys."""
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        is_known = False
        for known in self._digests:
            is_known |= secrets.compare_digest(known, digest)
        return is_known and scheme.lower() == b"bearer"
