"""Weights of all layers in one array each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wkvm_jax.kernels.stacked import LayerStack, OfLayer, by_itself, in_stack, places, stack_layers


def layer(index: int, *, with_extra: bool) -> dict[str, object]:
    extra = {"extra": jnp.full((3,), 10.0 + index)} if with_extra else {}
    return {"norm": {"scale": jnp.full((2,), float(index))}, "mix": {"w": jnp.eye(2) * index} | extra}


@pytest.fixture
def stack() -> LayerStack:
    """Three layers, the first without one of the weights."""
    return stack_layers([layer(index, with_extra=index > 0) for index in range(3)], jnp.stack)


def test_a_stack_gives_each_layer_its_own(stack: LayerStack) -> None:
    assert len(stack) == 3 and len(list(stack)) == 3
    assert stack.arrays["mix.w"].shape == (3, 2, 2) and stack.arrays["mix.extra"].shape == (2, 3)
    for index, weights in enumerate(stack):
        wanted = layer(index, with_extra=index > 0)
        got = jax.tree.map(by_itself, weights, is_leaf=lambda x: isinstance(x, OfLayer))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
    with pytest.raises(IndexError, match="layer 3 of 3"):
        stack[3]


def test_layers_apart_are_what_they_were(stack: LayerStack) -> None:
    for index, weights in enumerate(stack.apart()):
        jax.tree.map(np.testing.assert_array_equal, weights, layer(index, with_extra=index > 0))


def test_stacks_pass_through_jit_and_grad(stack: LayerStack) -> None:
    def total(stack: LayerStack) -> jax.Array:
        return sum(
            jnp.sum(by_itself(weights["norm"]["scale"])) * index for index, weights in enumerate(stack)
        )

    assert jax.jit(total)(stack) == 10.0
    gradient = jax.grad(total)(stack)
    np.testing.assert_array_equal(gradient.arrays["norm.scale"], [[0, 0], [1, 1], [2, 2]])
    assert not gradient.arrays["mix.w"].any()


def test_a_weight_by_itself_is_a_stack_of_one() -> None:
    alone = in_stack(jnp.arange(3.0))
    assert alone.stack.shape == (1, 3) and alone.shape == (3,)
    assert places([alone, OfLayer(jnp.zeros((4, 3)), 2)], 7).tolist() == [0, 2, 7]
