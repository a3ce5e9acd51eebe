"""Weights of all layers in one array each, so that a step has few operands.

Whoever calls a jitted step pays for each array that it gets, about 2 us on an H200's host: a model of 24
layers with 28 weights each would pay more for them than its kernels take. Kernels read one layer of a stack
where it lies; XLA slices it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32


class OfLayer(flax.struct.PyTreeNode):
    """One layer's weight within a stack.

    Attributes:
        stack: `[layer, ...]`.
        place: of the layer in the stack.
    """

    stack: Array
    place: int = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    @property
    def dtype(self) -> jnp.dtype:
        return self.stack.dtype


Weight: TypeAlias = Array | OfLayer
"""A weight by itself, or in a stack."""
Weights: TypeAlias = Mapping[str, Weight]


def by_itself(weight: Weight) -> Array:
    """The weight as an array of its own."""
    return weight.stack[weight.place] if isinstance(weight, OfLayer) else weight


def all_by_themselves(weights: Weights) -> dict[str, Array]:
    """Each of some weights as an array of its own."""
    return {name: by_itself(weight) for name, weight in weights.items()}


def in_stack(weight: Weight) -> OfLayer:
    """The weight as part of a stack, which may be one of its own."""
    return weight if isinstance(weight, OfLayer) else OfLayer(weight[None], 0)


def places(weights: Sequence[OfLayer], *others: int) -> Int32[Array, " n"]:
    """Where the weights lie in their stacks, then other numbers, as an operand.

    An operand and no constant of the kernel, so that one compiled kernel serves all layers.
    """
    return jnp.asarray(np.array([*(weight.place for weight in weights), *others], np.int32))


class LayerStack(flax.struct.PyTreeNode):
    """A model's layers, every weight in one array for all layers that have it.

    Iterated or indexed, it gives each layer's weights as nested dicts of `OfLayer`.

    Attributes:
        arrays: path of a weight within its layer, such as "time_mix.key", to `[layer, ...]`.
        layers: for each path in order, the layers that have it.
        num_layers: of the model.
    """

    arrays: dict[str, Array]
    layers: tuple[tuple[str, tuple[int, ...]], ...] = flax.struct.field(pytree_node=False)
    num_layers: int = flax.struct.field(pytree_node=False)

    def __len__(self) -> int:
        return self.num_layers

    def __iter__(self) -> Iterator[dict[str, object]]:
        return (self[layer] for layer in range(self.num_layers))

    def __getitem__(self, layer: int) -> dict[str, object]:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of {self.num_layers}")
        return _nested(
            {path: OfLayer(self.arrays[path], own.index(layer)) for path, own in self.layers if layer in own}
        )

    def apart(self) -> tuple[dict[str, object], ...]:
        """Every layer's weights as arrays of their own, on the host."""
        arrays = {path: np.asarray(array) for path, array in self.arrays.items()}
        return tuple(
            _nested({path: arrays[path][own.index(layer)] for path, own in self.layers if layer in own})
            for layer in range(self.num_layers)
        )


def stack_layers[Leaf](layers: Sequence[object], stack: Callable[[list[Leaf]], Leaf]) -> LayerStack:
    """Weights that layers have under the same path, together.

    Args:
        layers: a tree of nested mappings each, of arrays or of what stands for them.
        stack: makes one of a path's weights, in the order of the layers.
    """
    found: dict[str, dict[int, Leaf]] = {}
    for index, layer in enumerate(layers):
        for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
            found.setdefault(jax.tree_util.keystr(path, simple=True, separator="."), {})[index] = leaf
    # As it goes: `stack` may free what it has used.
    arrays: dict[str, Any] = {path: stack(list(weights.values())) for path, weights in found.items()}
    return LayerStack(arrays, tuple((path, tuple(found[path])) for path in found), len(layers))


def _nested(weights: Mapping[str, object]) -> dict[str, object]:
    result: dict[str, object] = {}
    for path, weight in weights.items():
        *groups, name = path.split(".")
        at = result
        for group in groups:
            inner = at.setdefault(group, {})
            assert isinstance(inner, dict)
            at = inner
        at[name] = weight
    return result
