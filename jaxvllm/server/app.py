"""The ASGI application: routes, errors, middleware."""

import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from jaxvllm.prometheus import CONTENT_TYPE, render
from jaxvllm.server.body import read_body
from jaxvllm.server.chat import create_chat_completion
from jaxvllm.server.completions import create_completion
from jaxvllm.server.config import Keys
from jaxvllm.server.errors import ApiError, to_api_error
from jaxvllm.server.middleware import KeyCheck, LoadCount, RequestIdHeader
from jaxvllm.server.openapi import describe
from jaxvllm.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from jaxvllm.server.responses import ModelCard, ModelList, ModelPermission, encode
from jaxvllm.server.serving import Serving
from jaxvllm.server.streaming import ClientGoneError, while_connected
from jaxvllm.server.tokens import detokenize, tokenize

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody reads it
Handle = Callable[[Serving, Any, Request], Awaitable[Response]]


def make_app(serving: Serving) -> FastAPI:
    """The application over an engine. Serves the routes below and nothing else: no documentation pages."""
    config = serving.config
    app = FastAPI(
        title="jaxvllm", version=version("jaxvllm"), openapi_url=None, docs_url=None, redoc_url=None,
        root_path=config.root_path,
    )  # fmt: skip
    _add_generation_routes(app, serving)
    _add_state_routes(app, serving)
    _add_error_handlers(app)
    _add_middleware(app, serving)
    return app


def _add_generation_routes(app: FastAPI, serving: Serving) -> None:
    async def tokenize_route(serving: Serving, request: TokenizeRequest, http: Request) -> Response:
        return await tokenize(serving, request)

    async def detokenize_route(serving: Serving, request: DetokenizeRequest, http: Request) -> Response:
        return await detokenize(serving, request)

    routes: list[tuple[str, type[BaseModel], Handle]] = [
        ("/v1/completions", CompletionRequest, create_completion),
        ("/v1/chat/completions", ChatCompletionRequest, create_chat_completion),
        ("/tokenize", TokenizeRequest, tokenize_route),
        ("/detokenize", DetokenizeRequest, detokenize_route),
    ]
    for path, model, handle in routes:
        app.post(path, openapi_extra=describe(model))(_route(serving, model, handle))


def _route(serving: Serving, model: type[BaseModel], handle: Handle) -> Callable[[Request], Awaitable[Response]]:
    async def run(request: Request) -> Response:
        other_names = {}
        try:
            body = await read_body(request, model, serving.config.max_request_bytes)
            if isinstance(body, GenerationRequest):
                other_names = body.other_names()
            return await while_connected(request.receive, handle(serving, body, request))  # type: ignore[arg-type]
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            known = to_api_error(error, model.model_fields, other_names)
            if known is None:
                raise
            return known.response()

    run.__name__ = handle.__name__
    return run


def _add_state_routes(app: FastAPI, serving: Serving) -> None:
    async def health() -> Response:
        dead = serving.engine.dead_error
        if dead is not None:
            raise ApiError(str(dead).split("\n", 1)[0], status=503)
        return Response()

    async def list_models() -> Response:
        return _json(_models(serving))

    async def show_version() -> Response:
        return _json({"version": version("jaxvllm")})

    async def load() -> Response:
        return _json({"server_load": serving.load.num_requests})

    async def metrics() -> Response:
        text = render(await serving.engine.get_metrics(), model_name=serving.config.served_model_names[0])
        return Response(text, media_type=CONTENT_TYPE)

    app.get("/health")(health)
    app.get("/ping", operation_id="ping")(health)
    app.post("/ping", operation_id="post_ping")(health)
    app.get("/v1/models")(list_models)
    app.get("/version")(show_version)
    app.get("/load")(load)
    app.get("/metrics")(metrics)


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


def _models(serving: Serving) -> ModelList:
    return ModelList(
        [
            ModelCard(
                name,
                serving.created,
                serving.engine.model.path,
                serving.engine.max_model_len,
                [ModelPermission(f"modelperm-{name}", serving.created)],
            )
            for name in serving.config.served_model_names
        ]
    )


def _add_error_handlers(app: FastAPI) -> None:
    async def on_api_error(request: Request, error: Any) -> Response:
        return error.response()

    async def on_http_error(request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}."
        return ApiError(message, status=error.status_code, headers=error.headers).response()

    async def on_defect(request: Request, error: Exception) -> Response:
        return ApiError("the server failed; its log says more.", status=500).response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_defect)


def _add_middleware(app: FastAPI, serving: Serving) -> None:
    """Innermost first."""
    config = serving.config
    app.add_middleware(LoadCount, load=serving.load)
    for path in config.middleware:
        found = find_middleware(path)
        if inspect.isclass(found):
            app.add_middleware(found)  # pyright: ignore[reportArgumentType]  # ASGI, or its own error says otherwise
        else:
            app.add_middleware(BaseHTTPMiddleware, dispatch=found)
    if config.api_keys:
        app.add_middleware(KeyCheck, keys=Keys(config.api_keys))
    if config.enable_request_id_headers:
        app.add_middleware(RequestIdHeader)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
    )


def find_middleware(path: str) -> Any:
    """The middleware of an import path: an ASGI class, or an async function as Starlette's dispatch is one.

    Raises: ImportError, ValueError: there is none.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
    except ImportError as error:
        raise ImportError(f"middleware={path!r} cannot be imported: {error}.") from error
    if not inspect.isclass(found) and not inspect.iscoroutinefunction(found):
        raise ValueError(f"middleware={path!r} must be the import path of a class or of an async function.")
    return found
