"""Pieces that several families share. Elementwise work is float32; products take the weights' dtype."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from wkvm_jax.kernels.token_shift.xla import last_counted, layer_norm, previous_tokens

__all__ = ["last_counted", "layer_norm", "previous_tokens", "product"]


def product(x: Float[Array, "*rows i"], weight: Float[Array, "i o"]) -> Float32[Array, "*rows o"]:
    """`x @ weight` with operands in the weight's dtype and a float32 result.

    Full float32 weights get full float32 products on every platform (no TF32).
    """
    return jnp.matmul(x.astype(weight.dtype), weight, precision="highest", preferred_element_type=jnp.float32)
