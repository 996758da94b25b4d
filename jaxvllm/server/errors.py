"""Errors as OpenAI's API shows them: {"error": {"message", "type", "param", "code"}}."""

import re
from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response

from jaxvllm.errors import EngineDeadError

MAX_MESSAGE_CHARS = 1000
MAX_VALUE_CHARS = 100
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_BRANCH = re.compile(r"constrained-str|(list|literal)\[.*\]|NamedToolChoice")
_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_FIRST_WORD = re.compile(r"(?:sampling parameter |the )?([a-z][a-z_]*)\b")


class ApiError(Exception):
    """An answer with an HTTP status and, if the caller's request is to blame, the field that is.

    Attributes:
      headers: of the HTTP response.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        message = self.message
        if len(message) > MAX_MESSAGE_CHARS:  # it quotes the caller, who may have sent megabytes
            message = message[:MAX_MESSAGE_CHARS] + "..."
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> Response:
        """The HTTP response."""
        return Response(msgspec.json.encode(self.body()), self.status, self.headers, "application/json")


def to_api_error(
    error: Exception, fields: Container[str] = (), other_names: Mapping[str, str] = _NO_NAMES
) -> ApiError | None:
    """What a caller is told of an error; None for one that is no answer but a defect.

    Args:
      fields: of the request; a message that begins with one of them is about it.
      other_names: fields that the engine knows under the key's name.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _from_validation(error, fields)
    if isinstance(error, EngineDeadError):
        return ApiError(str(error).split("\n", 1)[0], status=503)
    if isinstance(error, ValueError | NotImplementedError):
        return refusal(" ".join([str(error), *getattr(error, "__notes__", ())]), fields, other_names)
    return None


def refusal(message: str, fields: Container[str], other_names: Mapping[str, str]) -> ApiError:
    """What a caller is told of the engine's reason to refuse a request; arguments as of to_api_error."""
    first = _FIRST_WORD.match(message)
    if first and first[1] in other_names:
        message = other_names[first[1]] + message[first.end() :]
    return ApiError(message, param=_first_word(message, fields))


def _first_word(message: str, fields: Container[str]) -> str | None:
    """The field that a message of this project begins with."""
    found = _FIRST_WORD.match(message)
    name = found.group(1) if found else ""
    name = {"prompt_token_ids": "prompt"}.get(name, name)
    return name if name in fields else None


def _from_validation(error: ValidationError, fields: Container[str]) -> ApiError:
    """The first field's error; of a field that may be of several types, that of the type which fits furthest."""
    errors = error.errors(include_url=False, include_context=False)
    errors = [e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    is_union = any(map(_branches, errors))
    first = max(errors, key=_fit) if is_union else errors[0]
    where = [str(part) for part in first["loc"] if part not in _branches(first)]
    message = first["msg"].removeprefix("Value error, ")
    if is_union and _fit(first) == (2, False):  # none of the types fits
        message = " or ".join([message, *(e["msg"].removeprefix("Input should be ") for e in errors if e is not first)])
    if not where:  # of several fields together
        return ApiError(f"{message}.", param=_first_word(message, fields))
    if first["type"] == "missing":
        return ApiError(f"{'.'.join(where)} is missing.", param=where[0])
    value = repr(first["input"])
    shown = value if len(value) <= MAX_VALUE_CHARS else value[:MAX_VALUE_CHARS] + "..."
    return ApiError(f"{'.'.join(where)}={shown}: {message}.", param=where[0])


def _branches(error: ErrorDetails) -> list[int | str]:
    """Where pydantic names the type that it tried, behind the field: stop.list[constrained-str]."""
    return [part for part in error["loc"][1:2] if isinstance(part, str) and _BRANCH.fullmatch(part)]


def _fit(error: ErrorDetails) -> tuple[int, bool]:
    """Larger for a type whose parts were looked at, and for one that the value is of."""
    return len(error["loc"]), not error["type"].endswith("_type")
