"""What goes into a group of products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wkvm_jax.kernels.stacked import Weight

Activation = Literal["none", "tanh", "sigmoid", "square_relu"]

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "square_relu": lambda x: jnp.square(jnp.maximum(x, 0.0)),
}
"""What may follow a product, in float32."""


@dataclasses.dataclass(frozen=True)
class Product:
    """`activation(x @ weight)`.

    Attributes:
        x: rows; taken in the weight's dtype. It may be wider than `weight` is high: what is over meets no
            weight.
        weight: `[in, out]`, by itself or in a stack.
        activation: applied to the float32 sums.
        dtype: of the result; None is the weight's.
        sparse_rows: x has many zeros, and of its rows only the first so many count; None promises nothing.
            Rows of the weight that meet only zeros may be skipped.
    """

    x: Float[Array, "b t i"]
    weight: Weight
    activation: Activation = "none"
    dtype: DTypeLike | None = None
    sparse_rows: int | None = None

    @property
    def num_rows(self) -> int:
        return self.x.shape[0] * self.x.shape[1]

    @property
    def result_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.weight.dtype if self.dtype is None else self.dtype)


Launch = Callable[[list[Array], list[Array], Array], list[Array]]
"""A kernel for products of some shapes. It takes rows as bfloat16, `[rows, in]`, stacks of weights, and the
weights' places in them, and returns one `[part, rows, out]` a product."""
