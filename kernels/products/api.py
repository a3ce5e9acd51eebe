"""Products of a few rows with several weights: one signature for all platforms."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from wkvm_jax.kernels.dispatch import Kernels, for_hopper, interpreted
from wkvm_jax.kernels.products import hopper, xla
from wkvm_jax.kernels.products.operands import Product
from wkvm_jax.kernels.products.tiles import ROW_MULTIPLE


def products(jobs: Sequence[Product], *, kernels: Kernels, in_parts: bool = False) -> list[Array]:
    """The results of several independent products.

    On Hopper, products with bfloat16 weights go through one launch, if their rows are a multiple of
    `ROW_MULTIPLE`; everything else is XLA's, a product at a time.

    Args:
        jobs: the products; all have the same number of rows.
        kernels: what computes them.
        in_parts: results are float32 parts `[part, b, t, o]` whose sum over the first axis is the product,
            for a consumer that reads them all at once. Such jobs have no activation.

    Returns:
        One array a job, `[b, t, o]`, or with `in_parts` one `[part, b, t, o]`. `o` may be rounded up to a
        multiple of 64 if the weight's is none; what is over is of no meaning.

    Gradients flow through rows and weights, on every platform as those of the XLA path.
    """
    if in_parts and any(job.activation != "none" for job in jobs):
        raise ValueError("a product in parts has no activation")
    if for_hopper(kernels) and hopper.serves(jobs):
        return hopper.products(jobs, in_parts=in_parts, interpreted=interpreted(kernels))
    if not in_parts:
        return [xla.product(job) for job in jobs]
    return [_one_part(job) for job in jobs]


def _one_part(job: Product) -> Float[Array, "1 b t o"]:
    return xla.product(Product(job.x, job.weight, dtype=jnp.float32))[None]


def padded_rows(num_rows: int, num_tokens: int, kernels: Kernels) -> int:
    """Rows that a step's activations should have, so that no product needs to pad them."""
    if num_tokens > 1 or not for_hopper(kernels):
        return num_rows
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE
