"""Gradients flow through a pass, to parameters and to the state that it starts from."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tests.contract.harness import MAX_LENGTH, WARM_UP, Harness, assert_near
from wkvm_jax.state import State
from wkvm_jax.types import Params

LENGTH = 9
Floats = dict[str, Array]
GRADIENT_ROUNDING = 1e-4
"""As `harness.ROUNDING`, for the longer chains of sums of a gradient."""


def test_gradients_are_those_of_differences(harness: Harness) -> None:
    """Central differences along each leaf's own gradient, and in its steepest entry.

    A step of h has an error of h^2 and a rounding of 1e-6 / h, which meet near h = 1e-2: hence the 1% and
    the 2e-5 allowed. The smallest of the steepest entries is 1e-3.
    """
    _, gradient, arguments = _whole(harness)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))
    leaves, tree = jax.tree.flatten(arguments)
    slopes = jax.tree.leaves(gradient)
    for index, slope in enumerate(slopes):
        size = float(jnp.linalg.norm(slope.reshape(-1)))
        assert size > 0, f"no gradient reaches {jax.tree_util.keystr(_paths(arguments)[index])}"
        steepest = jnp.zeros(slope.size).at[jnp.argmax(jnp.abs(slope))].set(1.0).reshape(slope.shape)
        for direction in (slope / size, steepest):
            ends = []
            for step in (1e-2, -1e-2):
                moved = [*leaves[:index], leaves[index] + step * direction, *leaves[index + 1 :]]
                ends.append(float(_loss(harness)(*jax.tree.unflatten(tree, moved))))
            expected = float(jnp.vdot(slope, direction))
            assert abs((ends[0] - ends[1]) / 2e-2 - expected) < 1e-2 * abs(expected) + 2e-5


def test_gradients_do_not_depend_on_cuts(harness: Harness) -> None:
    """One pass, and token by token, which takes the other path through the kernels."""
    value, gradient, arguments = _whole(harness)

    @jax.jit
    def by_token(params: Params, floats: Floats) -> tuple[Array, object]:
        return jax.value_and_grad(_objective, argnums=(2, 3))(harness, True, params, floats)

    assert_near(by_token(*arguments), (value, gradient), GRADIENT_ROUNDING)


def test_padding_has_no_gradient(harness: Harness) -> None:
    """A row that counts no token passes the gradient of its state on as it is."""
    tokens, state = harness.tokens(2, 5), jax.tree.map(jnp.asarray, harness.warm(2))

    @jax.jit
    def gradient(leaves: Floats) -> Floats:
        def loss(leaves: Floats) -> Array:
            lengths = jnp.asarray([5, 0], jnp.int32)
            _, after = harness.model.apply(
                harness.model.params, tokens, state.replace(leaves=leaves), lengths
            )
            return sum(jnp.sum(leaf[1]) for leaf in after.leaves.values())

        return jax.grad(loss)(leaves)

    for leaf in gradient(state.leaves).values():
        np.testing.assert_allclose(leaf[1], 1.0, rtol=1e-6)
        np.testing.assert_array_equal(leaf[0], 0.0)


def test_vmap_over_states_equals_a_batch(harness: Harness) -> None:
    tokens, states = harness.tokens(3, 5), harness.warm(3)
    logits, after = harness.model(tokens, states)
    singles = jax.tree.map(lambda *leaves: np.stack(leaves), *(harness.row(states, row) for row in range(3)))
    apply = jax.jit(jax.vmap(harness.model.apply, in_axes=(None, 0, 0)))
    mapped, mapped_after = apply(harness.model.params, tokens[:, None], singles)
    assert_near(np.asarray(mapped)[:, 0], np.asarray(logits))
    for row in range(3):
        assert_near(jax.tree.map(lambda leaf, row=row: leaf[row], mapped_after), harness.row(after, row))


@cache
def _whole(harness: Harness) -> tuple[Array, tuple[Params, Floats], tuple[Params, Floats]]:
    """The loss of one pass, its gradients, and where they were taken."""
    arguments = (harness.model.params, _floats(jax.tree.map(jnp.asarray, harness.warm(2))))

    @jax.jit
    def whole(params: Params, floats: Floats) -> tuple[Array, object]:
        return jax.value_and_grad(_objective, argnums=(2, 3))(harness, False, params, floats)

    value, gradient = whole(*arguments)
    return value, gradient, arguments


@cache
def _loss(harness: Harness) -> jax.stages.Wrapped:
    return jax.jit(lambda params, floats: _objective(harness, False, params, floats))


def _objective(harness: Harness, by_token: bool, params: Params, floats: Floats) -> Array:
    """A smooth function of all logits and of every leaf of the final state."""
    count = jnp.full((2,), WARM_UP, jnp.int32)
    slot_leaves = {name: floats[name] for name in harness.spec.slot_leaves}
    state = State(slot_leaves, {name: floats[name] for name in harness.spec.paged}, count)
    tokens = harness.tokens(2, LENGTH)

    def one_token(state: State, token: Array) -> tuple[State, Array]:
        logits, state = harness.model.apply(params, token[:, None], state)
        return state, logits[:, 0]

    if by_token:
        state, logits = jax.lax.scan(one_token, state, tokens.T)
        logits = jnp.swapaxes(logits, 0, 1)
    else:
        logits, state = harness.model.apply(params, tokens, state)
    picked = jnp.cos(jnp.arange(LENGTH)[:, None] + jnp.arange(logits.shape[-1]))
    total = jnp.mean(jax.nn.log_softmax(logits) * picked, axis=-1).sum()
    final = [*state.leaves.values(), *state.pools.values()]
    return total + sum(jnp.mean(jnp.sin(leaf)) for leaf in final)


def _floats(state: State) -> Floats:
    assert set(state.leaves).isdisjoint(state.pools) and MAX_LENGTH >= WARM_UP + LENGTH
    return state.leaves | state.pools


def _paths(tree: object) -> list[tuple[object, ...]]:
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
