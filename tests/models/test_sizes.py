"""Random weights in the shapes of published models."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wkvm_jax.models import rwkv7, sizes

PUBLISHED_MILLIONS = {"0.1b": 191.0, "0.4b": 450.7, "1.5b": 1527.4, "2.9b": 2947.7, "7.2b": 7199.0}
"""Parameters of the World checkpoints on Hugging Face."""


@pytest.mark.parametrize("size", sizes.SIZES)
def test_sizes_are_those_of_the_published_models(size: str) -> None:
    leaves = jax.tree.leaves(rwkv7.param_spec(sizes.SIZES[size]))
    count = sum(math.prod(leaf.shape) for leaf in leaves) / 1e6
    assert count == pytest.approx(PUBLISHED_MILLIONS[size], rel=2e-3)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dataclasses.replace(
        sizes.SIZES["0.1b"],
        vocab_size=96,
        hidden_size=128,
        value_dim=128,
        num_layers=2,
        intermediate_size=256,
    )
    monkeypatch.setattr(sizes, "SIZES", sizes.SIZES | {"tiny": tiny})


def test_a_random_model_runs() -> None:
    model, same = sizes.random_model("tiny"), sizes.random_model("tiny")
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(model.params))
    jax.tree.map(np.testing.assert_array_equal, model.params, same.params)
    logits, _ = model(jnp.asarray([[1, 2, 3]], jnp.int32), model.init_state(1))
    assert bool(jnp.isfinite(logits).all()) and float(jnp.std(logits)) > 0.1


def test_an_unknown_size_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"size='3b' must be one of 0\.1b, 0\.4b"):
        sizes.random_model("3b")


@pytest.mark.parametrize("share", [0.5, 0.87])
def test_so_many_squared_relus_are_zero(share: float) -> None:
    model = sizes.random_model("tiny", jnp.float32, kernels="xla", ffn_zeros=share)
    state, tokens = model.init_state(16), jnp.arange(16 * 7).reshape(16, 7) % 96
    before = model(tokens[:, :-1], state)[1].leaves["shift"][-16:, :, 1]
    after = model(tokens, state)[1].leaves["shift"][-16:, :, 1]
    for layer, block in enumerate(model.params["blocks"]):
        own, previous, weights = after[:, layer], before[:, layer], block["channel_mix"]
        inner = (own + (previous - own) * weights["x_k"]) @ weights["key"]
        assert float(jnp.mean(inner <= 0)) == pytest.approx(share, abs=0.06)


def test_an_impossible_share_of_zeros_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ffn_zeros=1\.0 must be in"):
        sizes.random_model("tiny", ffn_zeros=1.0)
