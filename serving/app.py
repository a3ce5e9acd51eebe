"""The FastAPI application, and the one place where errors become HTTP.

| error | status | type | code |
| --- | --- | --- | --- |
| a field is wrong, or the body is no JSON object | 400 | invalid_request_error | |
| no such model, state, request, path | 404 | invalid_request_error | model_not_found, state_not_found, ... |
| wrong method | 405 | invalid_request_error | |
| the body came too slowly | 408 | invalid_request_error | body_timeout |
| a version is no longer the newest; a state is pinned | 409 | invalid_request_error | version_conflict, ... |
| the body is too long | 413 | invalid_request_error | too_large |
| a state does not fit the model | 422 | invalid_request_error | state_mismatch |
| no room now | 429, with Retry-After | rate_limit_error | overloaded |
| the request failed in the engine | 500 | server_error | generation_failed |
| anything unforeseen, told by the log alone | 500 | server_error | |
| the engine or the server is ending | 503, with Retry-After | server_error | unavailable |
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wkvm_jax.errors import (
    EngineClosedError,
    NoFreeSlotError,
    RequestError,
    StateMismatchError,
    StatePinnedError,
    StepFailedError,
    UnknownHandleError,
    UnknownRequestError,
    VersionConflictError,
    WkvmError,
)
from wkvm_jax.serving.body import read_body
from wkvm_jax.serving.completions import Completions
from wkvm_jax.serving.engine_loop import EngineLoop, UnreadStreamError
from wkvm_jax.serving.health import health
from wkvm_jax.serving.interface import ServedEngine
from wkvm_jax.serving.openapi import COMPLETION_ANSWER, body_of, describe, error_answers
from wkvm_jax.serving.protocol import (
    BodyError,
    BodyTimeoutError,
    BodyTooLargeError,
    Completion,
    ErrorBody,
    ErrorResponse,
    Health,
    ModelCard,
    ModelList,
    ModelNotFoundError,
    query_error,
)
from wkvm_jax.serving.states import states_router

DEFAULT_MAX_TOKENS_LIMIT = 32_768
DEFAULT_MAX_BODY_BYTES = 8 << 20
"""Enough for a million token ids."""

_INVALID = "invalid_request_error"
_INTERNAL_MESSAGE = "internal error; the server's log says more"
_CLIENT_GONE = 499
"""Nobody reads this answer; the number is the one that proxies log for it."""

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Fault:
    """How a kind of error looks in HTTP."""

    status: int
    kind: str = _INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})


_AGAIN_SOON = MappingProxyType({"retry-after": "1"})
_CLOSE = MappingProxyType({"connection": "close"})
_FAULTS: Mapping[type[Exception], _Fault] = {
    BodyError: _Fault(400),
    BodyTimeoutError: _Fault(408, code="body_timeout", headers=_CLOSE),
    BodyTooLargeError: _Fault(413, code="too_large", headers=_CLOSE),
    ModelNotFoundError: _Fault(404, param="model", code="model_not_found"),
    UnknownHandleError: _Fault(404, param="state", code="state_not_found"),
    UnknownRequestError: _Fault(404, code="request_not_found"),
    VersionConflictError: _Fault(409, param="if_version", code="version_conflict"),
    StatePinnedError: _Fault(409, param="state", code="state_pinned"),
    StateMismatchError: _Fault(422, param="state", code="state_mismatch"),
    NoFreeSlotError: _Fault(429, "rate_limit_error", code="overloaded", headers=_AGAIN_SOON),
    UnreadStreamError: _Fault(408, code="stream_not_read"),
    StepFailedError: _Fault(500, "server_error", code="generation_failed"),
    EngineClosedError: _Fault(503, "server_error", code="unavailable", headers=_AGAIN_SOON),
}


def _fault_of(error: Exception) -> tuple[_Fault, str]:
    """How an error looks, and what it says. The unforeseen is logged, and says nothing of itself."""
    if isinstance(error, RequestError):
        return _Fault(400, param=error.param), str(error)
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        code = "not_found" if error.status_code == HTTPStatus.NOT_FOUND else None
        return _Fault(error.status_code, code=code, headers=headers), str(error.detail)
    for kind, fault in _FAULTS.items():
        if isinstance(error, kind):
            return fault, str(error)
    _logger.error("unforeseen error in a request", exc_info=error)
    return _Fault(500, "server_error"), _INTERNAL_MESSAGE


def error_object(error: Exception) -> ErrorResponse:
    """OpenAI's error object for an error."""
    fault, message = _fault_of(error)
    return ErrorResponse(
        error=ErrorBody(message=message, type=fault.kind, param=fault.param, code=fault.code)
    )


def error_answer(error: Exception) -> Response:
    """The whole HTTP answer for an error."""
    fault, message = _fault_of(error)
    body = ErrorResponse(
        error=ErrorBody(message=message, type=fault.kind, param=fault.param, code=fault.code)
    )
    return JSONResponse(body.model_dump(), fault.status, dict(fault.headers))


class ErrorBoundary:
    """Answers every error that leaves the application, so that the server goes on after it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def noting_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except ClientDisconnect:
            if not has_started:
                await Response(status_code=_CLIENT_GONE)(scope, receive, send)
        except Exception as error:
            if has_started:
                # Half an answer cannot be taken back; the server closes the connection on this.
                raise
            await error_answer(error)(scope, receive, send)


async def _answer_error(_: Request, error: Exception) -> Response:
    return error_answer(query_error(error) if isinstance(error, RequestValidationError) else error)


def create_app(
    engine: ServedEngine,
    *,
    max_tokens_limit: int = DEFAULT_MAX_TOKENS_LIMIT,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    served_name: str | None = None,
) -> FastAPI:
    """The application that serves one engine.

    Any content type is taken for JSON, as `curl -d` needs.

    Args:
        engine: runs the requests. Whoever made it closes it; `run.serve` does.
        max_tokens_limit: larger `max_tokens` are refused.
        max_body_bytes: longer bodies are refused.
        served_name: the model's name in requests and answers; by default the engine's.
    """
    name = engine.model.name if served_name is None else served_name
    engine_loop = EngineLoop()
    completions = Completions(
        engine, engine_loop, served_name=name, max_tokens_limit=max_tokens_limit, describe=error_object
    )
    card = ModelCard(id=name, created=int(time.time()))
    app = FastAPI(
        title="wkvm",
        version="1",
        description="Recurrent-state language models behind OpenAI's API.",
        redoc_url=None,
    )
    app.state.engine = engine
    app.state.engine_loop = engine_loop
    app.add_middleware(ErrorBoundary)
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(WkvmError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_error)

    @app.post(
        "/v1/completions",
        summary="Continue prompts",
        response_model=Completion,
        responses={200: COMPLETION_ANSWER, **error_answers(400, 404, 408, 413, 429, 500, 503)},
        openapi_extra=body_of("CompletionRequest"),
    )
    async def create_completion(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        return await completions.respond(body, request.receive)

    @app.get("/v1/models", summary="List the model")
    async def list_models() -> ModelList:
        return ModelList(data=[card])

    @app.get("/v1/models/{model:path}", summary="Describe the model", responses=error_answers(404))
    async def get_model(model: str) -> ModelCard:
        if model != card.id:
            raise ModelNotFoundError(f"The model {model!r} does not exist; this server has {card.id!r}")
        return card

    @app.get("/health", summary="Whether the engine lives, and its slots", responses=error_answers(503))
    async def get_health() -> Health:
        return health(engine)

    app.include_router(states_router(engine, engine_loop, max_body_bytes))
    describe(app)
    return app
