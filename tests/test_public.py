"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import wkvm_jax
from wkvm_jax.errors import RequestError
from wkvm_jax.models.loading import DEMO_DIRECTORY
from wkvm_jax.models.model import Model

LATE = ("orbax", "fastapi", "uvicorn", "tokenizers", "pydantic", "optax", "torch")

PROGRAM = f"""
import sys
import wkvm_jax
assert "jax" not in sys.modules
wkvm_jax.load, wkvm_jax.Engine, wkvm_jax.SamplingParams
late = [name for name in {LATE!r} if name in sys.modules]
assert not late, late
"""


@pytest.fixture(scope="module")
def demo() -> Model:
    return wkvm_jax.load("demo")


def test_importing_brings_only_what_is_needed() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_every_public_name_is_there() -> None:
    for name in wkvm_jax.__all__:
        assert hasattr(wkvm_jax, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = wkvm_jax.nothing


def test_a_durable_store_is_refused_for_now(demo: Model) -> None:
    with pytest.raises(RequestError, match="memory only") as caught:
        wkvm_jax.Engine(demo, store="states/")
    assert caught.value.param == "store"


def test_the_model_in_the_box_is_small_and_documented() -> None:
    files = list(DEMO_DIRECTORY.iterdir())
    assert sum(file.stat().st_size for file in files) <= 16 * 2**20
    assert {"README.md", "config.json", "demo.safetensors"} <= {file.name for file in files}


def test_the_model_in_the_box_remembers(demo: Model) -> None:
    assert demo.name == "demo" and demo.tokenizer is not None and demo.tokenizer.name == "bytes"
    told = "User: Mira's locker code is 4821.\nBot: Noted.\nUser: Hello.\nBot: Hello.\n"
    config = wkvm_jax.EngineConfig(num_slots=4, max_rows=2, prefill_chunks=(64,))
    with wkvm_jax.Engine(demo, config=config) as engine:
        engine.states.create("facts", told)
        request = engine.submit("User: What is Mira's locker code?\nBot:", state="facts", stop="\n")
        assert "".join(token.text for token in request) == " 4821"
        assert request.result().num_cached_tokens == len(told) - 1
