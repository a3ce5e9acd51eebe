"""How the Hopper kernels cut products into tiles, and what they know of the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array

from wkvm_jax.kernels.pallas import Ref

ROW_MULTIPLE = 8
"""Rows come in multiples of this, as bulk copies of swizzled tiles want them."""
TILE = 64
"""Weights' heights count in tiles of so many rows, and results' widths in tiles of so many columns."""
NUM_MULTIPROCESSORS = 132
SHARED_BYTES = 200 * 1024
"""Shared memory for tiles, of the 227 KiB that a block may have."""


def swizzle_width(num_columns: int) -> int:
    """Columns that a swizzle spans: 64, or 32 where the weight's width asks for it, or 0 for neither."""
    return next((width for width in (64, 32) if num_columns % width == 0), 0)


def cut(size: int, tile: int) -> int:
    """How many tiles cover so much."""
    return -(-size // tile)


class Share(Protocol):
    """One product's share of a grid of blocks."""

    @property
    def first_block(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...


def by_block[S: Share](
    one_block: Callable[[Ref, Ref, Array, Ref, S, Array], None], plans: Sequence[S]
) -> Callable[..., None]:
    """A kernel that lets each block do its part of the product that it belongs to.

    Args:
        one_block: called with a product's rows, its weight's stack, the place in the stack, the result, the
            plan, and the block's number among those of the plan.
        plans: one a product, in the order of their blocks.

    Returns:
        A function of all products' rows, stacks, places, and results.
    """

    def body(xs: list[Ref], stacks: list[Ref], where: Ref, *outs: Ref) -> None:
        block = jax.lax.axis_index("block")
        for number, plan in enumerate(plans):
            own = partial(
                one_block, xs[number], stacks[number], where[number], outs[number], plan,
                block - plan.first_block,
            )  # fmt: skip
            end = plan.first_block + plan.num_blocks
            pl.when((plan.first_block <= block) & (block < end))(own)

    return body
