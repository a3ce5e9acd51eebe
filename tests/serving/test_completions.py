from __future__ import annotations

import collections
import time

import pytest

from tests.serving.fake_engine import FAILING_PROMPT, SCRIPT, FakeEngine
from tests.serving.live import LiveServer, error_of, events_of, serving, wait_until
from wkvm_jax.errors import RequestError
from wkvm_jax.serving import engine_loop

CALLS: tuple[dict[str, object], ...] = (
    {"prompt": "hi"},
    {"prompt": "hi", "max_tokens": 0},
    {"prompt": "hi", "max_tokens": 1, "logprobs": 0},
    {"prompt": "hi", "max_tokens": 200, "logprobs": 3},
    {"prompt": "hé🌊", "echo": True, "max_tokens": 9},
    {"prompt": "hé🌊", "echo": True, "logprobs": 2, "max_tokens": 9},
    {"prompt": "hé🌊", "echo": True, "logprobs": 1, "max_tokens": 0},
    {"prompt": [104, 105, 226], "echo": True, "logprobs": 1, "n": 2},
    {"prompt": "hi", "n": 5, "max_tokens": 40},
    {"prompt": ["a", "b", "c"], "n": 3, "logprobs": 1, "max_tokens": 25},
    {"prompt": [[1], [2, 3]], "max_tokens": 25},
    {"prompt": "hi", "stop": ["nothing", "Ünder"], "max_tokens": 200, "logprobs": 1},
    {"prompt": "hi", "stop_token_ids": [10], "max_tokens": 200},
)


def join_events(events: list[dict[str, object]]) -> dict[int, dict[str, object]]:
    """The choices that a stream's pieces join to."""
    choices: dict[int, dict[str, object]] = {}
    for event in events:
        for piece in event["choices"]:
            if piece["index"] not in choices:
                choices[piece["index"]] = piece
                continue
            choice = choices[piece["index"]]
            assert choice["finish_reason"] is None, "a piece after the last one"
            choice["text"] += piece["text"]
            choice["token_ids"] += piece["token_ids"]
            choice["finish_reason"] = piece["finish_reason"]
            for name, values in (piece["logprobs"] or {}).items():
                choice["logprobs"][name] += values
    return choices


@pytest.mark.parametrize("call", CALLS)
def test_stream_joins_to_the_blocking_answer(shared_live: LiveServer, call: dict[str, object]) -> None:
    call = {"seed": 11, **call}
    blocking = shared_live.complete(**call).json()
    events = shared_live.stream(**call, stream_options={"include_usage": True})
    joined = join_events(events)
    assert [joined[index] for index in sorted(joined)] == blocking["choices"]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == blocking["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert all(event["object"] == "text_completion" and event["model"] == "fake" for event in events)


def test_answer_has_openais_shape(shared_live: LiveServer) -> None:
    answer = shared_live.complete(prompt="hi", max_tokens=3, model="fake").json()
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["id"].startswith("cmpl-") and abs(answer["created"] - time.time()) < 60
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "token_ids"}
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 3
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_without_include_usage_no_chunk_has_usage(shared_live: LiveServer) -> None:
    assert all("usage" not in event for event in shared_live.stream(prompt="hi"))


def test_choices_of_several_prompts_are_numbered_in_order(shared_live: LiveServer) -> None:
    alone = [shared_live.complete(prompt=p, n=2, seed=3).json()["choices"] for p in ("a", "b")]
    together = shared_live.complete(prompt=["a", "b"], n=2, seed=3).json()
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in together["choices"]]
    assert texts == [choice["text"] for choices in alone for choice in choices]
    assert together["usage"]["prompt_tokens"] == 2, "a prompt counts once, not once a choice"


def test_seed_repeats_and_its_absence_does_not(shared_live: LiveServer) -> None:
    def texts(**fields: object) -> list[str]:
        answer = shared_live.complete(prompt=["a"] * 8, max_tokens=30, **fields).json()
        return [choice["text"] for choice in answer["choices"]]

    assert texts(seed=4) == texts(seed=4) and len(set(texts(seed=4))) == 1
    assert len(set(texts())) > 1
    assert len(set(texts(temperature=0))) == 1


def test_echo_and_logprobs_cover_prompt_and_output(shared_live: LiveServer) -> None:
    answer = shared_live.complete(prompt="hé", echo=True, logprobs=1, max_tokens=2, stop_token_ids=[]).json()
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("hé")
    assert logprobs["tokens"][:3] == ["h", "bytes:\\xc3", "bytes:\\xa9"] and len(logprobs["tokens"]) == 5
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][:4] == [0, 1, 1, 2]
    for token, logprob, top in list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )[1:]:
        assert top[token] == logprob and 1 <= len(top) <= 2
    assert len(choice["token_ids"]) == 2


def test_scoring_a_text_generates_nothing(shared_live: LiveServer) -> None:
    answer = shared_live.complete(prompt="score me", echo=True, logprobs=1, max_tokens=0).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "score me" and choice["token_ids"] == []
    assert len(choice["logprobs"]["token_logprobs"]) == 8
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_without_logprobs_streams_the_prompt_first(live: LiveServer, engine: FakeEngine) -> None:
    engine.step_s = 0.01
    events = live.stream(prompt="hi ", echo=True, max_tokens=6)
    assert events[0]["choices"][0]["text"].startswith("hi ")
    assert len(events) > 1 and all(event["choices"][0]["logprobs"] is None for event in events)


def test_stop_string_cuts_the_text(shared_live: LiveServer) -> None:
    text = SCRIPT.decode() * 4
    answer = shared_live.complete(prompt="hi", stop="calm;", max_tokens=200).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and "calm;" not in choice["text"]
    assert bytes(choice["token_ids"]).endswith(b"calm;")
    assert choice["text"] in text or choice["text"].startswith("\ufffd")


def test_state_is_named_in_the_answer(live: LiveServer) -> None:
    first = live.complete(prompt="four", save_as="s", max_tokens=3).json()
    assert first["state"] == {"handle": "s@1", "num_tokens": 7, "durable": False}
    second = live.complete(prompt="ab", state="s@1", max_tokens=1).json()
    assert "state" not in second
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    assert second["usage"]["prompt_tokens"] == 9, "cached tokens are a part of the prompt's"
    events = live.stream(prompt="four", save_as="t", max_tokens=3)
    assert [event["choices"][0]["finish_reason"] for event in events if "state" in event] == ["length"]
    assert events[-1]["state"]["handle"] == "t@1"
    missing = live.complete(prompt="a", state="nobody")
    assert missing.status_code == 404 and error_of(missing)["param"] == "state"


def test_model_without_tokenizer_takes_and_gives_ids() -> None:
    with serving(FakeEngine(tokenizer=False)) as server:
        refused = server.complete(prompt="text")
        assert refused.status_code == 400 and error_of(refused)["param"] == "prompt"
        call = {"prompt": [1, 2], "logprobs": 1, "echo": True, "max_tokens": 4}
        (choice,) = server.complete(**call).json()["choices"]
        assert choice["text"] == "" and len(choice["token_ids"]) == 4
        assert choice["logprobs"]["tokens"][:2] == ["token_id:1", "token_id:2"]
        assert choice["logprobs"]["text_offset"] == [0] * 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [0, 256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [1 << 70]]}, "prompt"),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"max_tokens": 32_769}, "max_tokens"),
        ({"n": 33}, "n"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stop": ["x"] * 1025}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ],
)
def test_limits_name_their_field(shared_live: LiveServer, fields: dict[str, object], param: str) -> None:
    response = shared_live.complete(**{"prompt": "a", **fields})
    assert response.status_code == 400 and error_of(response)["param"] == param


@pytest.mark.parametrize(
    "fields", [{"top_p": 0}, {"temperature": 0}, {"stop": ["x"] * 1024}, {"prompt": "a"}]
)
def test_extremes_that_are_allowed(shared_live: LiveServer, fields: dict[str, object]) -> None:
    assert shared_live.complete(**{"prompt": "a", **fields}).status_code == 200


def test_wrong_model_is_404(shared_live: LiveServer) -> None:
    response = shared_live.complete(prompt="a", model="gpt-4")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found" and error_of(response)["param"] == "model"


def test_failed_choice_fails_the_call_and_cancels_the_rest(live: LiveServer, engine: FakeEngine) -> None:
    engine.step_s = 0.002
    response = live.complete(prompt=["a", FAILING_PROMPT, "b"], max_tokens=5000)
    assert response.status_code == 500
    assert "not finite" in error_of(response)["message"] and error_of(response)["code"] == "generation_failed"
    wait_until(lambda: engine.num_cancelled == 2 and engine.slots().free == 64)
    assert live.complete(prompt="a").status_code == 200


def test_failed_choice_ends_a_stream_with_an_error_event(live: LiveServer, engine: FakeEngine) -> None:
    engine.step_s = 0.002
    events = live.stream(prompt=["a", FAILING_PROMPT], max_tokens=5000)
    assert "not finite" in events[-1]["error"]["message"]
    assert all("error" not in event for event in events[:-1])
    pieces = collections.Counter(choice["index"] for event in events[:-1] for choice in event["choices"])
    assert set(pieces) == {0, 1}
    wait_until(lambda: engine.num_cancelled == 1 and engine.slots().free == 64)


def test_refused_prompt_cancels_those_before_it(live: LiveServer, engine: FakeEngine) -> None:
    engine.gate.clear()
    for stream in (False, True):
        response = live.complete(prompt=["a", "b", "c" * 5000], stream=stream)
        assert response.status_code == 400 and error_of(response)["param"] == "prompt"
    wait_until(lambda: engine.num_cancelled == 4 and engine.slots().free == 64)
    assert live.num_open == 0


def test_more_choices_than_rows_wait_their_turn() -> None:
    with serving(FakeEngine(max_rows=2)) as server:
        answer = server.complete(prompt=["a", "b", "c", "d", "e"], seed=1).json()
        assert [len(choice["token_ids"]) for choice in answer["choices"]] == [16] * 5


def test_unread_stream_is_cancelled(
    live: LiveServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "MAX_UNREAD_TOKENS", 200)
    with live.connect(prompt="a", n=16, logprobs=20, stream=True, max_tokens=30_000) as connection:
        wait_until(lambda: engine.num_cancelled == 16, timeout_s=20)
        content = bytearray()
        while not content.endswith(b"0\r\n\r\n"):
            content += connection.recv(1 << 20)
    assert b'"code":"stream_not_read"' in content and b"data: [DONE]" in content
    wait_until(lambda: live.num_open == 0)


def test_slow_submission_of_one_does_not_hold_up_others(live: LiveServer, engine: FakeEngine) -> None:
    engine.submit_s = 1.0
    with live.connect(prompt="slow"):
        started_s = time.monotonic()
        assert live.client.get("/health").status_code == 200
        assert time.monotonic() - started_s < 0.5
    wait_until(lambda: engine.num_submitted == 1 and live.num_open == 0)


def test_error_of_the_engine_is_raised_where_it_belongs(live: LiveServer, engine: FakeEngine) -> None:
    engine.submit_error = RequestError("max_tokens", "too many for this engine")
    response = live.complete(prompt="a", stream=True)
    assert response.status_code == 400 and error_of(response)["param"] == "max_tokens"
    engine.submit_error = None
    assert events_of(live.complete(prompt="a", stream=True))
