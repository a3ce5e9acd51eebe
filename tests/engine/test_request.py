from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable

import pytest

from wkvm_jax.engine.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    Output,
    Request,
    SamplingParams,
    Token,
)
from wkvm_jax.errors import RequestError, WkvmError

HUGE = 10**400


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1 << 31),
        ("max_tokens", True),
        ("max_tokens", HUGE),
        ("min_tokens", -1),
        ("min_tokens", False),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", HUGE),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", True),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("presence_penalty", -HUGE),
        ("frequency_penalty", 2000),
        ("seed", 1 << 64),
        ("seed", -(1 << 63) - 1),
        ("seed", True),
        ("logprobs", MAX_TOP_LOGPROBS + 1),
        ("logprobs", -1),
        ("logprobs", True),
        ("stop", [""]),
        ("stop", ["x" * (MAX_STOP_LENGTH + 1)]),
        ("stop", [str(index) for index in range(MAX_STOP_STRINGS + 1)]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1 << 31]),
        ("stop_token_ids", list(range(MAX_STOP_IDS + 1))),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    ],
)
def test_values_out_of_range_name_their_field(param: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param and isinstance(caught.value, ValueError)


def test_more_tokens_cannot_be_the_least_than_the_most() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=3, min_tokens=4)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("temperature", 1),
        ("top_p", 0),
        ("top_p", 1),
        ("seed", -(1 << 63)),
        ("seed", (1 << 64) - 1),
        ("repetition_penalty", 1e-3),
        ("logprobs", 0),
        ("logprobs", MAX_TOP_LOGPROBS),
        ("stop", ["x" * MAX_STOP_LENGTH] * MAX_STOP_STRINGS),
        ("stop_token_ids", range(MAX_STOP_IDS)),
        ("logit_bias", {0: -100, 5: 0.5}),
    ],
)
def test_values_at_the_ends_of_their_range(param: str, value: object) -> None:
    assert getattr(SamplingParams(**{param: value}), param) == value


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


def test_what_makes_sampling_depend_on_history() -> None:
    assert not SamplingParams(temperature=1.0, logit_bias={1: 2.0}).penalises
    for change in ({"repetition_penalty": 1.1}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.1}):
        assert SamplingParams(**change).penalises


# Requests -----------------------------------------------------------------------------------------

OUTPUT = Output((1, 2), "ab", None, None, "length", None, 3, 0)
TOKENS = (Token(1, "a"), Token(2, "b"))


@pytest.fixture
def request_() -> Request:
    return Request("r-1", lambda: None)


def soon(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(0.02), action()))
    thread.start()
    return thread


def test_tokens_come_in_order_and_end_with_the_outcome(request_: Request) -> None:
    request_._push(TOKENS[:1], None)
    thread = soon(lambda: request_._push(TOKENS[1:], OUTPUT))
    assert list(request_) == list(TOKENS)
    thread.join()
    assert request_.finished and request_.num_tokens == 2 and request_.result() is OUTPUT
    assert list(request_) == []


def test_iterating_waits(request_: Request) -> None:
    thread = soon(lambda: request_._push(TOKENS[:1], OUTPUT))
    assert next(iter(request_)) == TOKENS[0]
    thread.join()


def test_waiting_for_a_result_can_be_limited(request_: Request) -> None:
    with pytest.raises(TimeoutError, match=r"r-1 is still running"):
        request_.result(timeout_s=0.01)
    assert not request_.finished
    request_._push([], OUTPUT)
    assert request_.result(timeout_s=0) is OUTPUT


def test_taking_never_waits(request_: Request) -> None:
    assert request_.take() == ([], None)
    request_._push(TOKENS, None)
    assert request_.take() == (list(TOKENS), None)
    assert request_.take() == ([], None)
    request_._push([], OUTPUT)
    assert request_.take() == ([], OUTPUT)


def test_a_listener_hears_of_everything_once_it_listens(request_: Request) -> None:
    request_._push(TOKENS[:1], None)
    heard: list[int] = []
    request_.listen(lambda: heard.append(len(request_.take()[0])))
    assert heard == [1]
    request_._push(TOKENS[1:], None)
    request_._push([], OUTPUT)
    assert heard == [1, 1, 0]


def test_a_listener_that_fails_is_not_called_again(request_: Request) -> None:
    calls: list[int] = []

    def listen() -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise ValueError("a caller's mistake")

    request_.listen(listen)
    request_._push(TOKENS, None)
    request_._push([], OUTPUT)
    assert calls == [0, 1] and request_.take() == (list(TOKENS), OUTPUT)


def test_cancelling_asks_the_engine() -> None:
    asked: list[str] = []
    Request("r", lambda: asked.append("r")).cancel()
    assert asked == ["r"]


def test_outputs_and_tokens_are_values() -> None:
    assert dataclasses.replace(OUTPUT) == OUTPUT
    with pytest.raises(dataclasses.FrozenInstanceError):
        OUTPUT.text = "c"  # type: ignore[misc]


def test_request_errors_are_wkvm_errors_and_value_errors() -> None:
    error = RequestError("top_p", "out of range")
    assert isinstance(error, WkvmError) and isinstance(error, ValueError) and error.param == "top_p"
