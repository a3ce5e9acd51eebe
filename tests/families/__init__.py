"""The families that the contract suite runs over, each with a small config and random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
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
    """Fresh weights with noise: matrices that start at zero would hide most of the model."""
    fresh, noisy = jax.random.split(key)
    leaves, tree = jax.tree.flatten(rwkv7.init_params(config, fresh))

    def one(leaf: Array, key: PRNGKeyArray) -> Array:
        size = leaf.shape[0] ** -0.5 if leaf.ndim == 2 and leaf.shape[0] != config.vocab_size else 0.3
        return leaf + size * jax.random.normal(key, leaf.shape)

    return jax.tree.unflatten(tree, map(one, leaves, jax.random.split(noisy, len(leaves))))


FAMILIES_UNDER_TEST: tuple[FamilyUnderTest, ...] = (
    FamilyUnderTest("toy", toy.TOY, toy.Config(), partial(toy.make_params, toy.Config())),
    FamilyUnderTest("rwkv7", RWKV7, RWKV7_CONFIG, partial(rwkv7_params, RWKV7_CONFIG)),
)
