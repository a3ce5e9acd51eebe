from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.fake_engine import FakeEngine
from tests.serving.live import LiveServer, error_of, serving
from wkvm_jax.errors import RequestError
from wkvm_jax.serving.protocol import (
    MAX_CHOICES,
    MAX_PROMPTS,
    BodyError,
    CompletionRequest,
    parse_completion,
)

FIELDS = tuple(CompletionRequest.model_fields)
BAD_FIELDS = (
    ("prompt", None),
    ("prompt", 3),
    ("prompt", {}),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [""]),
    ("prompt", [[]]),
    ("prompt", ["a", [1]]),
    ("prompt", ["a", 1]),
    ("prompt", [1, True]),
    ("prompt", [1.0]),
    ("prompt", [[1, "a"]]),
    ("prompt", [[1], []]),
    ("prompt", ["a"] * (MAX_PROMPTS + 1)),
    ("model", 1),
    ("max_tokens", -1),
    ("max_tokens", 1.0),
    ("max_tokens", "1"),
    ("max_tokens", True),
    ("max_tokens", 1 << 40),
    ("temperature", -0.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", [1]),
    ("top_p", 1.1),
    ("top_p", -0.1),
    ("n", 0),
    ("n", -1),
    ("n", MAX_CHOICES + 1),
    ("best_of", 2),
    ("stream", 1),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", []),
    ("stream_options", {"include_usage": 1}),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("echo", 1),
    ("stop", 1),
    ("stop", ["a", 1]),
    ("stop", {}),
    ("presence_penalty", 1e9),
    ("frequency_penalty", "0"),
    ("logit_bias", []),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": "1"}),
    ("logit_bias", {"1": True}),
    ("logit_bias", {"1": 1e5}),
    ("logit_bias", {"9" * 5000: 1}),
    ("seed", 1 << 64),
    ("seed", 0.5),
    ("user", 1),
    ("suffix", "end"),
    ("top_k", -1),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("min_tokens", -1),
    ("ignore_eos", "no"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", list(range(65))),
    ("state", "a@0"),
    ("state", "a/b"),
    ("save_as", "a@1"),
    ("save_as", ""),
    ("save_as", "a\n"),
    ("if_version", 1),
    ("durable", True),
)


def parse(**fields: object) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "a", **fields}).encode())


@pytest.mark.parametrize(("param", "value"), BAD_FIELDS)
def test_wrong_field_is_named(param: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**{param: value})
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"nonsense",
        b"[]",
        b'"text"',
        b"7",
        b"null",
        b"{",
        b"{}{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "unknown": Infinity}',
        b'{"prompt": "a", "unknown": %s}' % (b"[" * 100_000),
        b'{"a":' * 100_000,
        b'{"prompt": "a", "seed": %s}' % (b"9" * 5000),
        '{"prompt": "a"}'.encode("utf-16"),
        b"\x1f\x8b\x08\x00",
    ],
)
def test_body_that_is_no_json_object(body: bytes) -> None:
    with pytest.raises(BodyError):
        parse_completion(body)


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"1" * 4000])
def test_number_beyond_floats_is_no_temperature(number: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(b'{"prompt": "a", "temperature": %s}' % number)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_shapes(prompt: object, prompts: list[object]) -> None:
    assert parse(prompt=prompt).prompt == prompts


def test_empty_prompt_may_continue_a_state() -> None:
    assert parse(prompt="", state="a").prompt == [""]
    assert parse(prompt=[[]], state="a@3").prompt == [[]]


def test_openai_defaults() -> None:
    call = parse()
    assert (call.max_tokens, call.temperature, call.top_p, call.n) == (16, 1.0, 1.0, 1)
    assert call.seed is None and call.logprobs is None and not call.stop


def test_null_is_absent_and_unknown_is_ignored() -> None:
    nulls = {name: None for name in FIELDS if name != "prompt"}
    assert parse(**nulls, unknown={"a": [1]}) == parse()


def test_stop_and_bias_are_normalised() -> None:
    call = parse(stop="x", logit_bias={"12": -5, "007": 0.5}, best_of=1)
    assert call.stop == ["x"]
    assert call.logit_bias == {12: -5.0, 7: 0.5}


def test_one_state_has_one_name() -> None:
    assert parse(save_as="a").save_as == "a"
    for fields in ({"n": 2}, {"prompt": ["a", "b"]}):
        with pytest.raises(RequestError) as caught:
            parse(**fields, save_as="a")
        assert caught.value.param == "save_as"


def test_choices_of_all_prompts_are_limited() -> None:
    with pytest.raises(RequestError) as caught:
        parse(prompt=["a"] * (MAX_CHOICES // 2), n=3)
    assert caught.value.param == "n"


def test_long_prompt_is_quick() -> None:
    assert len(parse(prompt=[7] * 500_000).prompt[0]) == 500_000


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[LiveServer]:
    with serving(FakeEngine(), max_tokens_limit=64) as server:
        yield server


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(-1, 2)
    | st.text(max_size=12)
    | st.sampled_from(["1", "fake", "a@1", "\0", "\n"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
bodies = st.fixed_dictionaries(
    {"prompt": st.just("a") | st.text(min_size=1, max_size=5) | values},
    optional={name: values for name in (*FIELDS, "unknown") if name != "prompt"},
) | st.dictionaries(st.sampled_from(FIELDS), values, max_size=3)


def check_answer(server: LiveServer, body: bytes) -> None:
    response = server.client.post("/v1/completions", content=body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = error_of(response)
        assert error["param"] is None or error["param"] in FIELDS
    elif not response.headers["content-type"].startswith("text/event-stream"):
        assert response.json()["choices"]
    assert server.client.get("/health").json()["slots"]["free"] >= 32


@settings(max_examples=300)
@given(body=bodies)
def test_any_fields_get_an_answer(fuzzed: LiveServer, body: dict[str, object]) -> None:
    check_answer(fuzzed, json.dumps(body).encode())


@settings(max_examples=100)
@given(
    body=st.binary(max_size=60)
    | values.map(lambda value: json.dumps(value).encode())
    | st.tuples(bodies, st.integers(0, 80), st.binary(max_size=3)).map(
        lambda cut: json.dumps(cut[0]).encode()[: cut[1]] + cut[2]
    )
)
def test_any_bytes_get_an_answer(fuzzed: LiveServer, body: bytes) -> None:
    check_answer(fuzzed, body)
