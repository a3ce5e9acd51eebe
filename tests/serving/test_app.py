from __future__ import annotations

import logging

import pytest
from starlette.exceptions import HTTPException

from tests.serving.fake_engine import FakeEngine
from tests.serving.live import LiveServer, error_of, serving, wait_until
from wkvm_jax.errors import (
    CapacityError,
    CheckpointError,
    EngineClosedError,
    NoFreeSlotError,
    RequestError,
    StateMismatchError,
    StatePinnedError,
    StepFailedError,
    UnknownHandleError,
    UnknownRequestError,
    VersionConflictError,
)
from wkvm_jax.serving.app import error_object


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (RequestError("top_p", "bad"), 400, "top_p", None),
        (CapacityError("max_tokens", "never"), 400, "max_tokens", None),
        (UnknownHandleError("no"), 404, "state", "state_not_found"),
        (UnknownRequestError("no"), 404, None, "request_not_found"),
        (VersionConflictError("old"), 409, "if_version", "version_conflict"),
        (StatePinnedError("pinned"), 409, "state", "state_pinned"),
        (StateMismatchError("other"), 422, "state", "state_mismatch"),
        (NoFreeSlotError("full"), 429, None, "overloaded"),
        (StepFailedError("step"), 500, None, "generation_failed"),
        (EngineClosedError("closed"), 503, None, "unavailable"),
    ],
)
def test_errors_of_the_engine(
    live: LiveServer, engine: FakeEngine, error: Exception, status: int, param: str | None, code: str | None
) -> None:
    engine.submit_error = error
    for stream in (False, True):
        response = live.complete(prompt="a", stream=stream)
        assert response.status_code == status
        shown = error_of(response)
        assert (shown["message"], shown["param"], shown["code"]) == (str(error), param, code)
        assert ("retry-after" in response.headers) == (status in (429, 503))
    engine.submit_error = None
    assert live.complete(prompt="a").status_code == 200


@pytest.mark.parametrize("error", [KeyError("secret"), ZeroDivisionError(), CheckpointError("secret", "x")])
def test_unforeseen_error_is_logged_and_hidden(
    live: LiveServer, engine: FakeEngine, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    engine.submit_error = error
    with caplog.at_level(logging.ERROR):
        response = live.complete(prompt="a")
    assert response.status_code == 500 and "secret" not in response.text
    assert error_of(response)["type"] == "server_error"
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]
    engine.submit_error = None
    assert live.complete(prompt="a").status_code == 200


def test_error_after_the_start_of_a_stream_is_described(live: LiveServer, engine: FakeEngine) -> None:
    engine.states.get = None  # type: ignore[assignment, method-assign]
    events = live.stream(prompt="a", save_as="s")
    assert events[-1]["error"]["message"] == error_object(KeyError()).error.message
    wait_until(lambda: live.num_open == 0)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
        ("POST", "/v1/models", 405),
    ],
)
def test_paths_and_methods_that_are_not_there(
    shared_live: LiveServer, method: str, path: str, status: int
) -> None:
    response = shared_live.client.request(method, path)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"


def test_http_exceptions_keep_their_headers() -> None:
    assert error_object(HTTPException(418, "teapot")).error.message == "teapot"


def test_models(shared_live: LiveServer) -> None:
    listed = shared_live.client.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"]) == ("fake", "model")
    assert shared_live.client.get("/v1/models/fake").json() == card


def test_served_name_and_token_limit_are_options() -> None:
    with serving(FakeEngine(), served_name="org/name", max_tokens_limit=5) as server:
        assert server.client.get("/v1/models/org/name").json()["id"] == "org/name"
        assert server.complete(prompt="a", model="org/name", max_tokens=5).json()["model"] == "org/name"
        assert server.complete(prompt="a", model="fake", max_tokens=5).status_code == 404
        response = server.complete(prompt="a")
        assert response.status_code == 400 and error_of(response)["param"] == "max_tokens"


def test_schema_describes_every_call(shared_live: LiveServer) -> None:
    schema = shared_live.client.get("/openapi.json").json()
    assert schema["openapi"].startswith("3.")
    states = {f"/v1/states{rest}" for rest in ("", "/{handle}", "/{handle}/fork", "/{handle}/lineage")}
    others = {"/v1/completions", "/v1/models", "/v1/models/{model}", "/health"}
    assert set(schema["paths"]) == states | others
    post = schema["paths"]["/v1/completions"]["post"]
    body = post["requestBody"]["content"]["application/json"]
    for example in body["examples"].values():
        response = shared_live.complete(**example["value"])
        assert response.status_code == 200, response.text
    assert {"200", "400", "404", "413", "429", "500", "503"} <= set(post["responses"])
    schemas = schema["components"]["schemas"]
    assert {"CompletionRequest", "StreamOptions", "Completion", "ErrorResponse", "Health"} <= set(schemas)
    fields = schemas["CompletionRequest"]["properties"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert {"type": "null"} in fields["temperature"]["anyOf"] and fields["temperature"]["default"] == 1.0
    assert shared_live.client.get("/docs").status_code == 200
