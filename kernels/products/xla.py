"""Products one by one, as XLA computes them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from wkvm_jax.kernels.products.operands import ACTIVATIONS, Product
from wkvm_jax.kernels.stacked import by_itself


def product(job: Product) -> Float[Array, "b t o"]:
    """One product. Float32 weights get full float32 products on every platform (no TF32)."""
    x = job.x[..., : job.weight.shape[0]].astype(job.weight.dtype)
    # Without an activation the sum is rounded once, by the product itself.
    accumulated = job.result_dtype if job.activation == "none" else jnp.float32
    out = jnp.matmul(x, by_itself(job.weight), precision="highest", preferred_element_type=accumulated)
    return ACTIVATIONS[job.activation](out).astype(job.result_dtype)
