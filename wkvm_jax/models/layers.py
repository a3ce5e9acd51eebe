"""Pieces that several families share. Elementwise work is float32; products take the weights' dtype."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def product(x: Float[Array, "*rows i"], weight: Float[Array, "i o"]) -> Float32[Array, "*rows o"]:
    """`x @ weight` with operands in the weight's dtype and a float32 result.

    Full float32 weights get full float32 products on every platform (no TF32).
    """
    return jnp.matmul(x.astype(weight.dtype), weight, precision="highest", preferred_element_type=jnp.float32)


def layer_norm(
    x: Float32[Array, "*rows d"], params: Mapping[str, Array], eps: float
) -> Float32[Array, "*rows d"]:
    """LayerNorm over the last axis; `params` holds "scale" and, for norms that have one, "bias"."""
    return _scaled(_normalised(x, eps), params)


def group_norm(
    x: Float32[Array, "*rows h v"], params: Mapping[str, Array], eps: float
) -> Float32[Array, "*rows hv"]:
    """GroupNorm with one group a head, heads joined in the result."""
    x = _normalised(x, eps)
    return _scaled(x.reshape(*x.shape[:-2], -1), params)


def _normalised(x: Array, eps: float) -> Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)


def _scaled(x: Array, params: Mapping[str, Array]) -> Array:
    x = x * params["scale"].astype(jnp.float32)
    return x + params["bias"].astype(jnp.float32) if "bias" in params else x


def previous_tokens(x: Float32[Array, "b t d"], before: Float32[Array, "b d"]) -> Float32[Array, "b t d"]:
    """Each token's predecessor: `before` for the first token of a row."""
    return jnp.concatenate([before[:, None], x[:, :-1]], axis=1)


def last_counted(
    x: Float32[Array, "b t d"], before: Float32[Array, "b d"], lengths: Array
) -> Float32[Array, "b d"]:
    """Each row's value at its last counted token; `before` where none counts."""
    if x.shape[1] == 1:
        return jnp.where(lengths[:, None] > 0, x[:, 0], before)
    last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(lengths[:, None] > 0, last, before)
