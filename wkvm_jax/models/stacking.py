"""Parameters with their layers stacked, and back."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from wkvm_jax.kernels.stacked import LayerStack, stack_layers
from wkvm_jax.types import Params

LAYERS = "blocks"
"""Under which name families keep their layers."""


def stacked(params: Params, *, free: bool = False) -> Params:
    """Parameters whose layers are one `LayerStack`.

    Args:
        params: of any family; those already stacked come back as they are.
        free: give the layers' own memory back as soon as a stack has them, so that a model never lies twice
            on the device. The parameters given are of no more use then.
    """
    if isinstance(params.get(LAYERS), LayerStack) or LAYERS not in params:
        return params

    def stack(weights: list[Array]) -> Array:
        result = jnp.stack(weights)
        if free:
            result.block_until_ready()
            for weight in weights:
                weight.delete()
        return result

    return {**params, LAYERS: stack_layers(_layers(params), stack)}


def stacked_specs(specs: object) -> Params:
    """What `stacked` makes of a `PartitionSpec` for each parameter: every device has each layer's share."""

    def stack(layers: list[PartitionSpec]) -> PartitionSpec:
        return PartitionSpec(None, *layers[0])

    assert isinstance(specs, Mapping)
    return {**specs, LAYERS: stack_layers(_layers(specs), stack)}


def apart(params: Params) -> Params:
    """Parameters with every weight as an array of its own, those of a `LayerStack` on the host."""
    layers = params.get(LAYERS)
    return {**params, LAYERS: layers.apart()} if isinstance(layers, LayerStack) else params


def _layers(params: Params) -> tuple[object, ...]:
    layers = params[LAYERS]
    assert isinstance(layers, tuple | list)
    return tuple(layers)
