"""Parameters with their layers stacked compute what they do apart, and are the same model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wkvm_jax import Engine
from wkvm_jax.kernels.dispatch import Kernels
from wkvm_jax.models import rwkv7
from wkvm_jax.models.model import Model
from wkvm_jax.models.registry import RWKV7
from wkvm_jax.models.stacking import apart, stacked
from wkvm_jax.types import Params

CONFIG = rwkv7.Config(
    vocab_size=64, hidden_size=256, num_layers=2, head_dim=64, intermediate_size=256, value_dim=256,
    decay_rank=32, iclr_rank=32, value_rank=32, gate_rank=64,
)  # fmt: skip
INTERPRETED: Kernels = "hopper_interpreted"


def make_params(seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.1 * rng.standard_normal(leaf.shape), jnp.bfloat16),
        rwkv7.param_spec(CONFIG),
    )


@pytest.mark.parametrize("kernels", ["xla", INTERPRETED])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_stacked_model_computes_the_same(kernels: Kernels, num_tokens: int) -> None:
    model = Model(RWKV7, CONFIG, make_params(), kernels=kernels)
    tokens = jnp.arange(2 * num_tokens, dtype=jnp.int32).reshape(2, num_tokens)
    wanted = model(tokens, model.init_state(2))
    got = dataclasses.replace(model, params=stacked(model.params))(tokens, model.init_state(2))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_stacking_is_undone_and_done_once() -> None:
    params = make_params()
    both = stacked(params)
    assert len(jax.tree.leaves(both)) < len(jax.tree.leaves(params)) / 1.5
    assert stacked(both) is both and apart(params) is params
    jax.tree.map(np.testing.assert_array_equal, apart(both), params)
    model = Model(RWKV7, CONFIG, params)
    assert dataclasses.replace(model, params=both).fingerprint == model.fingerprint


def test_freed_layers_are_gone() -> None:
    params = make_params()
    kept = jax.tree.map(np.asarray, params)
    both = stacked(params, free=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params["blocks"]))
    jax.tree.map(np.testing.assert_array_equal, apart(both), kept)


def test_an_engine_takes_new_weights_in_either_form() -> None:
    model = Model(RWKV7, CONFIG, make_params(), kernels=INTERPRETED)
    other = make_params(1)
    with Engine(dataclasses.replace(model, params=other), num_slots=4) as engine:
        (wanted,) = engine.generate([[1, 2]], max_tokens=2)
        fingerprint = engine.model.fingerprint
    for params in (other, stacked(other)):
        with Engine(model, num_slots=4) as engine:
            engine.set_params(params)
            (got,) = engine.generate([[1, 2]], max_tokens=2)
            assert got.token_ids == wanted.token_ids
            assert engine.model.fingerprint == fingerprint
