"""The contract of a model family: everything that the rest of the project may know of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from jax import Array

from wkvm_jax.state import State, StateSpec
from wkvm_jax.types import Params

Shapes = Mapping[str, tuple[int, ...]]
"""A checkpoint's tensors: name to shape."""


class FamilyConfig(Protocol):
    """What every family's `Config` has; configs are frozen dataclasses, hashable and comparable."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one checkpoint maps to a family's parameters.

    Attributes:
        config: the family's `Config`, found from config.json or from the tensors' shapes.
        table: `param_spec(config)` with a `weights.Source` at each leaf.
        ignored: says of a tensor's name that it may be present though nothing needs it.
    """

    config: FamilyConfig
    table: Mapping[str, object]
    ignored: Callable[[str], bool]


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: as configs spell it, e.g. "rwkv7".
        param_spec: the parameter tree of a config, as `jax.ShapeDtypeStruct`s.
        state_spec: one conversation's state, without a batch axis.
        forward: `(params, batch, state, *, config, kernels) -> (hidden [b, t, d], state)`, pure.
        head: `(params, hidden, *, config) -> float32 logits` of the positions given.
        partition: a `PartitionSpec` over `state.MODEL_AXIS` for each parameter of a config; None for a family
            that cannot be split. Where it can, `forward` and `head` also take `model_axis`: the name of the
            mesh axis, where they run on one device's share.
        kernel_misfit: why a config cannot run on the Pallas kernels, None if it can.
        layout: the mapping for a checkpoint of this family, None for any other. Raises `ValueError`
            with the fields named for one that is of this family and not supported.
    """

    name: str
    param_spec: Callable[..., Params]
    state_spec: Callable[..., StateSpec]
    forward: Callable[..., tuple[Array, State]]
    head: Callable[..., Array]
    layout: Callable[[Shapes, Mapping[str, object] | None], Layout | None]
    partition: Callable[..., object] | None = None
    kernel_misfit: Callable[..., str | None] = lambda config: "this family has no kernels yet"
