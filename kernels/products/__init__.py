"""Products of a few rows with several weights, in one launch."""

from wkvm_jax.kernels.products.api import padded_rows, products
from wkvm_jax.kernels.products.operands import Product

__all__ = ["Product", "padded_rows", "products"]
