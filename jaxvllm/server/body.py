"""The body of a request: read up to a limit, parsed, checked for what no field may hold."""

import difflib
import math
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import Request

from jaxvllm.server.errors import ApiError

MAX_DEPTH = 64  # objects and lists within each other; schemas are walked recursively


async def read_body[M: BaseModel](request: Request, model: type[M], max_bytes: int) -> M:
    """Read a request's JSON into a model.

    Raises:
      ApiError: no JSON object, too large, nested too deep, or with a field that nobody knows.
      pydantic.ValidationError: a field is missing or has a wrong value.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(f"the content type {kind!r} is not supported: send application/json.", status=415)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError("compressed request bodies are not supported: send it as it is.", status=415)
    return parse_body(await _read(request, max_bytes), model)


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "0")
    too_large = ApiError(
        f"the request body must not exceed {max_bytes} bytes (the server's --max-request-bytes).", status=413
    )
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def parse_body[M: BaseModel](body: bytes, model: type[M]) -> M:
    """As read_body, from the bytes."""
    try:
        # Clients on Windows may begin with a byte order mark, which RFC 8259 lets a parser ignore.
        values = from_json(body.removeprefix(BOM_UTF8), allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ApiError(f"the request body is no valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ApiError(f"the request body must be a JSON object, got {type(values).__name__}.")
    refused: Mapping[str, Any] = getattr(model, "NOT_SUPPORTED", {})
    ignored = getattr(model, "WITHOUT_EFFECT", frozenset())
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if name in refused:
            _refuse(name, value, refused[name])
        elif name in model.model_fields:
            fields[name] = value
        elif name not in ignored:
            raise ApiError(_unknown(name, [*model.model_fields, *refused]), param=_shown(name))
    for name, value in fields.items():
        _check_value(name, value)
    return model.model_validate(fields)


def _refuse(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Accept a field that is not built only with a value that asks for nothing."""
    if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
        raise ApiError(f"{name}={value!r} is not supported: leave it out.", param=name)


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name[:100], known, n=1)
    return f"{_shown(name)!r} is no field of this request." + (f" Did you mean {close[0]!r}?" if close else "")


def _shown(name: str) -> str:
    return name if len(name) <= 100 else name[:100] + "..."


def _check_value(name: str, value: Any) -> None:
    """Refuse what is nested too deep and numbers that are none (1e999), level by level."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                if set(map(type, item)) - {int, str}:  # a prompt of a million ids is not walked
                    below.extend(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise ApiError(f"{name} holds a number that is not finite.", param=name)
        if not below:
            return
        level = below
    raise ApiError(f"{name} is nested deeper than {MAX_DEPTH} levels: make it flatter.", param=name)
