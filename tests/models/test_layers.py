"""The pieces that families share, against numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wkvm_jax.models.layers import last_counted, layer_norm, previous_tokens, product

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 5, 12)).astype(np.float32)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)])
def test_products_are_float32(dtype: jnp.dtype, tolerance: float) -> None:
    weight = RNG.standard_normal((12, 7)).astype(np.float32)
    result = product(jnp.asarray(X), jnp.asarray(weight, dtype))
    assert result.dtype == jnp.float32
    wanted = X.astype(np.float64) @ weight
    np.testing.assert_allclose(result, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


def test_half_precision_products_add_up_in_float32() -> None:
    """4,096 ones: bfloat16 could count no further than 256."""
    result = product(jnp.ones((1, 4096)), jnp.ones((4096, 1), jnp.bfloat16))
    assert result.tolist() == [[4096.0]]


@pytest.mark.parametrize("with_bias", [True, False])
def test_layer_norm(with_bias: bool) -> None:
    params = {"scale": RNG.standard_normal(12).astype(np.float32)}
    if with_bias:
        params["bias"] = RNG.standard_normal(12).astype(np.float32)
    wanted = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-3)
    wanted = wanted * params["scale"] + params.get("bias", 0)
    result = layer_norm(jnp.asarray(X), jax.tree.map(jnp.asarray, params), 1e-3)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=2e-6)


def test_a_large_mean_costs_the_norm_nothing() -> None:
    """The variance is that of what the mean leaves, not a difference of two large numbers."""
    shifted = jnp.asarray(X[0] * 2**-4 + 2**10)
    exact = np.asarray(shifted, np.float64)
    wanted = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    result = layer_norm(shifted, {"scale": jnp.ones(12)}, 1e-5)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=5e-3)


def test_previous_tokens() -> None:
    before = jnp.asarray([[-1.0], [-2.0]])
    x = jnp.asarray([[[1.0], [2.0]], [[3.0], [4.0]]])
    assert previous_tokens(x, before)[..., 0].tolist() == [[-1, 1], [-2, 3]]


@pytest.mark.parametrize("width", [1, 5])
def test_last_counted(width: int) -> None:
    x, before = jnp.asarray(X[:, :width]), -jnp.ones((2, 12))
    for lengths in ((0, width), (width, 0), (1, 1)):
        result = last_counted(x, before, jnp.asarray(lengths))
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(result[row], X[row, length - 1] if length else before[row])
