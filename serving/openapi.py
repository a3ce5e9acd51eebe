"""What `/openapi.json` and `/docs` say beyond what FastAPI finds by itself."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from wkvm_jax.serving.protocol import (
    CompletionRequest,
    ErrorResponse,
    ForkRequest,
    NewStateRequest,
    StateChange,
)

_NOT_USED = ("HTTPValidationError", "ValidationError")
"""What FastAPI would answer with to a wrong query, in place of the error object."""

_REFERENCE = "#/components/schemas/{model}"

_REQUEST_EXAMPLES = {
    "text": {
        "summary": "Continue a text",
        "value": {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0},
    },
    "choices": {
        "summary": "Three choices, repeatable",
        "value": {"prompt": "The sea", "n": 3, "seed": 7, "temperature": 0.8, "stop": ["\n"]},
    },
    "stream": {
        "summary": "Tokens as they come",
        "value": {"prompt": "The sea", "stream": True, "stream_options": {"include_usage": True}},
    },
    "score": {
        "summary": "Log-probabilities of a text",
        "value": {"prompt": [72, 101, 108, 108, 111], "max_tokens": 0, "echo": True, "logprobs": 1},
    },
}

_ANSWER_EXAMPLE = {
    "id": "cmpl-5f0c1a2b-1",
    "object": "text_completion",
    "created": 1767225600,
    "model": "demo",
    "choices": [
        {
            "index": 0,
            "text": " there",
            "logprobs": None,
            "finish_reason": "length",
            "token_ids": [32, 116, 104],
        }
    ],
    "usage": {
        "prompt_tokens": 16,
        "completion_tokens": 3,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
}

_EVENTS_EXAMPLE = (
    'data: {"id":"cmpl-5f0c1a2b-1","object":"text_completion","created":1767225600,"model":"demo","choices":'
    '[{"index":0,"text":" there","logprobs":null,"finish_reason":"length","token_ids":[32,116,104]}]}\n\n'
    "data: [DONE]\n\n"
)

_ERROR_EXAMPLES = {
    400: ("temperature: input should be a valid number", "invalid_request_error", "temperature", None),
    404: (
        "The model 'x' does not exist; this server has 'demo'",
        "invalid_request_error",
        "model",
        "model_not_found",
    ),
    408: ("the body did not arrive within 60 s", "invalid_request_error", None, "body_timeout"),
    409: ("facts@1 is pinned; unpin it before deleting it", "invalid_request_error", "state", "state_pinned"),
    413: (
        "the body is longer than this server's limit of 8388608 bytes",
        "invalid_request_error",
        None,
        "too_large",
    ),
    429: ("65536 requests are waiting already; try again later", "rate_limit_error", None, "overloaded"),
    500: ("internal error; the server's log says more", "server_error", None, None),
    503: ("the engine is closed", "server_error", None, "unavailable"),
}

_EXAMPLES: Mapping[str, Mapping[str, object]] = {
    "CompletionRequest": _REQUEST_EXAMPLES,
    "NewStateRequest": {
        "text": {"value": {"name": "facts", "prompt": "User: Mira's locker code is 4821.\nBot: Noted.\n"}},
        "ids": {"value": {"name": "facts", "prompt_ids": [72, 101, 108, 108, 111]}},
    },
    "StateChange": {"pin": {"value": {"tags": ["nightly"], "pinned": True}}},
    "ForkRequest": {"many": {"value": {"name": "branch", "n": 64}}},
}


def body_of(model: str) -> dict[str, object]:
    """Describes the body of a call, which the server parses itself."""
    schema = {"$ref": _REFERENCE.format(model=model)}
    content = {"application/json": {"schema": schema, "examples": _EXAMPLES[model]}}
    return {"requestBody": {"required": True, "content": content}}


COMPLETION_ANSWER = {
    "description": "The completion, or with `stream` server-sent events whose pieces join to it.",
    "content": {
        "application/json": {"example": _ANSWER_EXAMPLE},
        "text/event-stream": {"schema": {"type": "string"}, "example": _EVENTS_EXAMPLE},
    },
}


def error_answers(*statuses: int) -> dict[int | str, dict[str, object]]:
    """FastAPI's description of the errors that a call can answer with."""
    return {status: {"model": ErrorResponse, **_error_content(status)} for status in statuses}


def _error_content(status: int) -> dict[str, object]:
    message, kind, param, code = _ERROR_EXAMPLES[status]
    example = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return {"content": {"application/json": {"example": example}}}


def describe(app: FastAPI) -> None:
    """Adds the request bodies, which the server parses itself, to the app's schema."""

    def build() -> dict[str, object]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            for kind in (CompletionRequest, NewStateRequest, StateChange, ForkRequest):
                body = kind.model_json_schema(ref_template=_REFERENCE)
                parts: Mapping[str, object] = body.pop("$defs", {})
                schema["components"]["schemas"].update({**parts, kind.__name__: body})
            schema["components"]["schemas"] = {
                name: part for name, part in schema["components"]["schemas"].items() if name not in _NOT_USED
            }
            for call in (call for path in schema["paths"].values() for call in path.values()):
                call["responses"].pop("422", None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]
