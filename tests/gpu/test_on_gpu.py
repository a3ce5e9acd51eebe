"""The XLA path on a GPU: fixtures, engine and determinism. `python -m pytest -m gpu` runs it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wkvm_jax
from wkvm_jax import EngineConfig
from wkvm_jax.models.model import Model

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parent.parent / "golden" / "rwkv7-pth" / "l2d128"
CLOSE = 1e-3
"""Float32 weights on a GPU, whose products and reductions are ordered differently from the reference's."""


@pytest.fixture(scope="module")
def model() -> Model:
    return wkvm_jax.load(GOLDEN / "model.pth", dtype=jnp.float32)


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "expected.npz") as arrays:
        return dict(arrays)


def prompts() -> list[np.ndarray]:
    return [row[row >= 0] for row in np.load(GOLDEN / "tokens.npy")]


def test_logits_match_the_reference(model: Model, expected: dict[str, np.ndarray]) -> None:
    assert jax.default_backend() == "gpu"
    for index, prompt in enumerate(prompts()):
        logits, _ = model(prompt[None], model.init_state(1))
        np.testing.assert_allclose(np.asarray(logits[0]), expected[f"logits_{index}"], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_engine_continues_as_the_reference(
    model: Model, expected: dict[str, np.ndarray], deterministic: bool
) -> None:
    config = EngineConfig(num_slots=16, max_rows=8, prefill_chunks=(16, 64), deterministic=deterministic)
    with wkvm_jax.Engine(model, config=config) as engine:
        outputs = engine.generate([prompt.tolist() for prompt in prompts()], max_tokens=32, ignore_eos=True)
        for index, output in enumerate(outputs):
            assert list(output.token_ids) == expected[f"greedy_{index}"].tolist()


def test_company_changes_nothing_in_deterministic_mode(model: Model) -> None:
    config = EngineConfig(num_slots=32, max_rows=32, deterministic=True)
    prompt = prompts()[2].tolist()
    with wkvm_jax.Engine(model, config=config) as engine:
        (alone,) = engine.generate([prompt], max_tokens=24, logprobs=5, ignore_eos=True)
        others = [prompt[:length] for length in range(3, 34)]
        crowd = engine.generate([*others, prompt], max_tokens=24, logprobs=5, ignore_eos=True)
        assert crowd[-1].token_ids == alone.token_ids
        assert crowd[-1].logprobs == alone.logprobs
