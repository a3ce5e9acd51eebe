"""What RWKV-7's kernels share around themselves: their small weights as operands, and their gradients."""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Array, Int32

from wkvm_jax.kernels.rwkv7 import xla
from wkvm_jax.kernels.rwkv7.operands import Projections, Variant
from wkvm_jax.kernels.stacked import Weights, in_stack, places
from wkvm_jax.state import Batch

Operands = tuple[Array, Batch, Array, Projections, dict[str, Array]]
"""Arena, batch, places, projections and stacks: what the kernels are called with."""


def stacks_and_places(
    params: Weights, ln_x: Weights, layer: int
) -> tuple[dict[str, Array], Int32[Array, " n"]]:
    """The small weights' stacks, and the places of their names in order; the state's layer comes last."""
    small = {name: in_stack(weight) for name, weight in sorted({**params, **ln_x}.items())}
    stacks = {name: weight.stack for name, weight in small.items()}
    return stacks, places(list(small.values()), layer)


def backward(
    variant: Variant, interpreted: bool, operands: Operands, cotangents: tuple[Array, Array]
) -> tuple[object, ...]:
    """Those of the XLA path."""
    arena, batch, where, projections, stacks = operands
    own = slice(batch.read_slots.shape[0])  # rows beyond the batch's have no meaning and no gradient

    def by_xla(arena: Array, projections: Projections, stacks: dict[str, Array]) -> tuple[Array, Array]:
        projections = jax.tree.map(lambda x: x[own], projections)
        small = {name: stacks[name][place] for name, place in zip(sorted(stacks), where, strict=False)}
        ln_x = {name: small.pop(name) for name in ("scale", "bias")}
        return xla.time_mix(arena, where[-1], batch, projections, small, ln_x, variant)

    _, pull_back = jax.vjp(by_xla, arena, projections, stacks)
    of_arena, *of_others = pull_back((cotangents[0][own], cotangents[1]))
    no_batch, nowhere = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (batch, where))
    return of_arena, no_batch, nowhere, *of_others
