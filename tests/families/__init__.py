"""The families that the contract suite runs over, each with a small config and random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from tests.families import toy
from wkvm_jax.models import rwkv7
from wkvm_jax.models.family import Family, FamilyConfig
from wkvm_jax.models.model import Model
from wkvm_jax.models.registry import RWKV7
from wkvm_jax.types import Params


@dataclasses.dataclass(frozen=True)
class FamilyUnderTest:
    """A family with what a test needs to run it."""

    name: str
    family: Family
    config: FamilyConfig
    make_params: Callable[[PRNGKeyArray], Params]

    def model(self, seed: int = 0) -> Model:
        return Model(self.family, self.config, self.make_params(jax.random.key(seed)), name=self.name)


RWKV7_CONFIG = rwkv7.Config(
    vocab_size=96,
    hidden_size=64,
    num_layers=2,
    head_dim=16,
    intermediate_size=96,
    value_dim=128,
    decay_rank=8,
    iclr_rank=8,
    value_rank=8,
    gate_rank=16,
)
"""Heads' keys and values differ in width, so that a mix-up shows."""


def rwkv7_params(config: rwkv7.Config, key: PRNGKeyArray) -> Params:
    """Random weights in which every part of the model matters; fresh ones to train from hide most of it."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    paths, tree = jax.tree_util.tree_flatten_with_path(rwkv7.param_spec(config))
    return jax.tree.unflatten(
        tree, [_random(jax.tree_util.keystr(path[-1:], simple=True), leaf.shape, rng) for path, leaf in paths]
    )


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    middle, spread = {"scale": (1, 0.3), "k_k": (0.8, 0.1), "k_a": (1, 0.1)}.get(name, (0, 0.3))
    if name.startswith("x_"):
        middle, spread = 0.5, 0.3
    elif len(shape) == 2 and name != "r_k":
        spread = 0.5 if name == "embedding" else shape[0] ** -0.5
    return jnp.asarray(middle + spread * rng.standard_normal(shape), jnp.float32)


FAMILIES_UNDER_TEST: tuple[FamilyUnderTest, ...] = (
    FamilyUnderTest("toy", toy.TOY, toy.Config(), partial(toy.make_params, toy.Config())),
    FamilyUnderTest("rwkv7", RWKV7, RWKV7_CONFIG, partial(rwkv7_params, RWKV7_CONFIG)),
)
