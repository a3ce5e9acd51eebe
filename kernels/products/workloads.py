"""Groups of products of RWKV-7's layers, and operands for them: one list for tests and measurements."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from wkvm_jax.kernels.products.operands import Activation, Product


@dataclasses.dataclass(frozen=True)
class Group:
    """Products of one launch.

    Attributes:
        name: where in a layer.
        rows: rows of each product.
        shapes: a weight's height and width and the activation after it, for each product.
        in_parts: whether the results may come as parts.
    """

    name: str
    rows: int
    shapes: tuple[tuple[int, int, Activation], ...]
    in_parts: bool = False

    @property
    def weight_bytes(self) -> int:
        return sum(2 * height * width for height, width, _ in self.shapes)


def _layer(rows: int, width: int, inner: int, ranks: tuple[int, int, int, int]) -> tuple[Group, ...]:
    decay, iclr, value, gate = ranks
    square: tuple[int, int, Activation] = (width, width, "none")
    downs: tuple[tuple[int, int, Activation], ...] = (
        (width, decay, "tanh"), (width, iclr, "none"), (width, gate, "sigmoid"), (width, value, "none"),
    )  # fmt: skip
    ups: tuple[tuple[int, int, Activation], ...] = tuple((rank, width, "none") for rank in ranks)
    return (
        Group("r, k, v and low-rank downs", rows, (square, square, square, *downs)),
        Group("low-rank ups", rows, ups),
        Group("output", rows, (square,), in_parts=True),
        Group("channel mix key", rows, ((width, inner, "square_relu"),)),
        Group("channel mix value", rows, ((inner, width, "none"),), in_parts=True),
    )


TINY = _layer(8, 128, 256, (32, 32, 32, 64))
PUBLISHED = tuple(
    group for rows in (8, 32, 128, 256, 1024) for group in _layer(rows, 2048, 8192, (96, 96, 64, 256))
)
"""The 1.5B model's layers; one row is padded to eight."""


def make_weights(group: Group, seed: int = 0) -> list[Array]:
    """One bfloat16 weight a product, scaled so that results are of order 1."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(group.shapes))
    return [
        (jax.random.normal(key, (height, width)) / height**0.5).astype(jnp.bfloat16)
        for key, (height, width, _) in zip(keys, group.shapes, strict=True)
    ]


def make_jobs(group: Group, weights: list[Array], seed: int = 1) -> list[Product]:
    """The group's products, each with rows of its own as in a layer."""
    keys = jax.random.split(jax.random.key(seed), len(group.shapes))
    return [
        Product(jax.random.normal(key, (group.rows, 1, height)).astype(jnp.bfloat16), weight, activation)
        for key, weight, (height, _, activation) in zip(keys, weights, group.shapes, strict=True)
    ]
