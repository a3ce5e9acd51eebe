from __future__ import annotations

import asyncio

import openai
import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.live import LiveServer, serving


@pytest.fixture(scope="module")
def client(shared_live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared_live.url}/v1", api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "wkvm"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt=["a", "b"], n=2, max_tokens=7, logprobs=2, echo=True, seed=1, stop=["\0"]
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.completion_tokens == 28
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    for choice in answer.choices:
        assert choice.logprobs is not None and len(choice.logprobs.tokens or ()) == 8
        assert choice.finish_reason == "length"


def test_stream_equals_completion(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="hello", max_tokens=50, seed=3)
    text, usage = "", None
    for chunk in client.completions.create(
        model="fake",
        prompt="hello",
        max_tokens=50,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    ):
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].text and usage == whole.usage


def test_own_fields_go_in_and_out(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake",
        prompt="abc",
        max_tokens=4,
        extra_body={"save_as": "kept", "top_k": 5, "ignore_eos": True},
    )
    assert answer.model_extra is not None and answer.model_extra["state"]["handle"] == "kept@1"


def test_errors_become_the_clients(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="a", temperature=-1)
    assert bad.value.param == "temperature" and "temperature" in bad.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nothing", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(model="fake", prompt="fail", stream=True))


def test_32_clients_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    prompts = [f"prompt {number}" for number in range(32)]

    async def stream(asynchronous: openai.AsyncOpenAI, prompt: str) -> str:
        chunks = await asynchronous.completions.create(
            model="fake", prompt=prompt, max_tokens=60, seed=9, stream=True
        )
        return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

    async def run(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as asynchronous:
            return await asyncio.gather(*(stream(asynchronous, prompt) for prompt in prompts))

    with serving(FakeEngine(max_rows=8, step_s=0.001)) as server:
        together = asyncio.run(run(server.url))
    alone = [
        client.completions.create(model="fake", prompt=prompt, max_tokens=60, seed=9).choices[0].text
        for prompt in prompts
    ]
    assert together == alone
