"""Specs say what parameters and states are, before there are any."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array

from tests.contract.harness import MAX_LENGTH, Harness
from wkvm_jax.state import State, identity_batch
from wkvm_jax.types import Params


def test_params_are_as_specified(harness: Harness) -> None:
    specified = harness.model.family.param_spec(harness.model.config)
    assert jax.tree.map(_described, harness.model.params) == jax.tree.map(_described, specified)


def test_states_are_as_specified(harness: Harness) -> None:
    """At the start and after a pass alike."""
    spec, rows = harness.spec, 3
    fresh = harness.fresh(rows)
    for state in (fresh, harness.warm(rows)):
        for name, leaf in spec.slot_leaves.items():
            assert _described(state.leaves[name]) == ((rows, *leaf.shape), jnp.dtype(leaf.dtype))
        for name, leaf in spec.paged.items():
            pages = rows * spec.pages_for(MAX_LENGTH)
            assert _described(state.pools[name]) == ((pages, *leaf.shape), jnp.dtype(leaf.dtype))
        assert set(state.leaves) | set(state.pools) == set(spec.leaves)
    for name, leaf in spec.leaves.items():
        held = fresh.leaves.get(name, fresh.pools.get(name))
        assert bool((held == leaf.initial).all())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_forward_gives_what_the_contract_says(harness: Harness, dtype: jnp.dtype) -> None:
    """Shapes and types, in either weights' type, without running anything."""
    family, config = harness.model.family, harness.model.config
    rows, width = 2, 6
    tokens = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    state = jax.eval_shape(lambda: harness.fresh(rows))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), family.param_spec(config))

    def run(params: Params, tokens: Array, state: State) -> tuple[Array, State, Array]:
        hidden, after = family.forward(params, identity_batch(tokens, state), state, config=config)
        return hidden, after, family.head(params, hidden, config=config)

    hidden, after, logits = jax.eval_shape(run, params, tokens, state)
    assert hidden.shape == (rows, width, config.hidden_size)
    assert jax.tree.map(_described, after) == jax.tree.map(_described, state)
    assert _described(logits) == ((rows, width, config.vocab_size), jnp.float32)


def test_slots_hold_what_the_spec_counts(harness: Harness) -> None:
    one, two = (harness.model.init_state(rows, max_length=MAX_LENGTH) for rows in (1, 2))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(two)) - sum(
        leaf.nbytes for leaf in jax.tree.leaves(one)
    )
    assert size == harness.spec.slot_bytes + harness.pages_per_row * harness.spec.page_bytes


def _described(leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], object]:
    return leaf.shape, jnp.dtype(leaf.dtype)
