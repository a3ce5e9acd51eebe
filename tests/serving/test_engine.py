"""The server in front of the real engine, with a small hybrid model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.families.toy import toy_model
from tests.serving.live import LiveServer, error_of, serving, wait_until
from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.engine import Engine
from wkvm_jax.engine.request import SamplingParams
from wkvm_jax.store.memory import MemoryRecords


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[LiveServer, Engine]]:
    """A server of the toy model, and its engine."""
    config = EngineConfig(num_slots=16, max_rows=4, tokens_per_slot=512, prefill_chunks=(16,))
    engine = Engine(toy_model(), config, MemoryRecords())
    engine.warm_up()
    with serving(engine) as server:
        yield server, engine


def test_http_gives_what_the_engine_gives(real: tuple[LiveServer, Engine]) -> None:
    server, engine = real
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=5, logprobs=2, prompt_logprobs=True)
    outputs = [request.result() for request in engine.submit_choices("hello", 3, params=params)]
    call: dict[str, object] = {
        "prompt": "hello",
        "n": 3,
        "max_tokens": 12,
        "temperature": 0.9,
        "seed": 5,
        "logprobs": 2,
        "echo": True,
    }
    choices = server.complete(**call).json()["choices"]
    for choice, output in zip(choices, outputs, strict=True):
        assert output.text is not None and choice["text"] == "hello" + output.text
        assert choice["token_ids"] == list(output.token_ids)
        assert choice["finish_reason"] == output.finish_reason
        assert len(choice["logprobs"]["tokens"]) == 5 + len(output.token_ids)
        assert choice["logprobs"]["token_logprobs"][0] is None


def test_openai_client_streams(real: tuple[LiveServer, Engine]) -> None:
    server, _ = real
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    whole = client.completions.create(model="toy", prompt="hello", max_tokens=40, temperature=0)
    chunks = client.completions.create(model="toy", prompt="hello", max_tokens=40, temperature=0, stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text


def test_state_is_continued(real: tuple[LiveServer, Engine]) -> None:
    server, engine = real
    first = server.complete(prompt="hello", max_tokens=5, temperature=0, save_as="chat").json()
    handle = first["state"]["handle"]
    assert first["state"]["num_tokens"] == 5 + first["usage"]["completion_tokens"]
    again = [server.complete(prompt="", state=handle, max_tokens=5, temperature=0).json() for _ in range(2)]
    assert again[0]["choices"] == again[1]["choices"]
    cached = again[0]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == first["state"]["num_tokens"] - 1, "all but the pending token"
    engine.states.delete(handle)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnects_free_all_slots(real: tuple[LiveServer, Engine], stream: bool) -> None:
    server, engine = real
    free = engine.slots().free
    connections = [
        server.connect(prompt=["a", "b"], stream=stream, max_tokens=400, ignore_eos=True, n=2)
        for _ in range(5)
    ]
    wait_until(lambda: engine.slots().free < free)
    for connection in connections:
        connection.close()
    wait_until(lambda: engine.slots().free == free and server.num_open == 0, timeout_s=20)
    assert server.complete(prompt="a").status_code == 200


def test_what_only_the_engine_can_refuse(real: tuple[LiveServer, Engine]) -> None:
    server, _ = real
    response = server.complete(prompt="a", state="nobody@1")
    assert response.status_code == 404 and error_of(response)["code"] == "state_not_found"
    response = server.complete(prompt="a", max_tokens=30_000)
    assert response.status_code == 400 and error_of(response)["param"] == "max_tokens"
