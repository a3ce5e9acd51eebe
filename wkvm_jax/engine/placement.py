"""Where a model's arrays lie: on one device, or spread over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from wkvm_jax.errors import MeshError
from wkvm_jax.models.model import Model
from wkvm_jax.models.stacking import stacked_specs
from wkvm_jax.state import DATA_AXIS, MODEL_AXIS, State
from wkvm_jax.types import Params

Tree = TypeVar("Tree")
Specs = object
"""A tree of `PartitionSpec`s, or one for a whole tree."""


class Placement:
    """How one model's weights, arena, lanes and steps use a mesh.

    Slots, lanes and rows are spread over the mesh's `data` axis: each shard has slots and lanes of its own,
    with its own reserved ones, and knows them by their index there. Heads, and with them weights and states,
    are spread over its `model` axis; sums cross devices twice a layer (Shoeybi et al., arXiv 1909.08053).
    Steps run under `shard_map`.

    Args:
        model: what will run.
        mesh: None for JAX's default device. Its axes are named "data" and "model"; either may be absent.

    Raises:
        MeshError: the mesh has other axes, or the model cannot be split over it.
    """

    def __init__(self, model: Model, mesh: Mesh | None) -> None:
        self._mesh = None if mesh is None else _without_types(mesh)
        self._model = model
        sizes = {} if mesh is None else dict(mesh.shape)
        unknown = sorted(set(sizes) - {DATA_AXIS, MODEL_AXIS})
        if unknown:
            raise MeshError(f"the mesh has axes {unknown}; name its axes {DATA_AXIS!r} and {MODEL_AXIS!r}")
        self.num_data_shards = sizes.get(DATA_AXIS, 1)
        self._data_axis = DATA_AXIS if self.num_data_shards > 1 else None
        self.model_axis = MODEL_AXIS if sizes.get(MODEL_AXIS, 1) > 1 else None
        if self.model_axis is not None:
            self._check_divides(sizes[MODEL_AXIS])

    def _check_divides(self, num_shards: int) -> None:
        family, config = self._model.family, self._model.config
        if family.partition is None:
            raise MeshError(f"{family.name} models cannot be split over {MODEL_AXIS!r} yet")
        specs = jax.tree.leaves(family.partition(config), is_leaf=lambda x: isinstance(x, P))
        weights = jax.tree_util.tree_leaves_with_path(family.param_spec(config))
        shared = [
            (jax.tree_util.keystr(path, simple=True, separator="."), leaf.shape, spec)
            for (path, leaf), spec in zip(weights, specs, strict=True)
        ]
        states = self._model.state_spec.leaves
        shared += [(f"the state's {name}", leaf.shape, leaf.partition) for name, leaf in states.items()]
        for name, shape, spec in shared:
            for size, axis in zip(shape, spec, strict=False):
                if axis == MODEL_AXIS and size % num_shards:
                    raise MeshError(
                        f"{num_shards} devices cannot share the {size} heads or channels of {name}: "
                        f"choose a number for {MODEL_AXIS!r} that divides it"
                    )

    @property
    def param_specs(self) -> Specs:
        """A `PartitionSpec` for each weight."""
        if self.model_axis is None or self._model.family.partition is None:
            return P()
        specs = self._model.family.partition(self._model.config)
        return specs if self._model.kernels == "xla" else stacked_specs(specs)

    @property
    def rows_specs(self) -> Specs:
        """The `PartitionSpec` of whatever has a row, lane or slot first."""
        return P(self._data_axis)

    @property
    def arena_specs(self) -> Specs:
        """A `PartitionSpec` for each leaf of the arena."""
        return self._state_specs(self._data_axis)

    @property
    def one_state_specs(self) -> Specs:
        """A `PartitionSpec` for each leaf of a batch of one without pools, which all data shards have."""
        return self._state_specs(None).replace(pools={})

    @property
    def page_specs(self) -> Specs:
        """A `PartitionSpec` for one page of each pool."""
        return self._state_specs(None).pools

    def _state_specs(self, first_axis: str | None) -> State:
        spec = self._model.state_spec
        tree = jax.tree.structure(jax.eval_shape(lambda: spec.allocate(1, 1)))
        ordered = [*sorted(spec.slot_leaves.items()), *sorted(spec.paged.items())]
        over_model = self.model_axis is not None
        leaves = [P(first_axis, *(leaf.partition if over_model else ())) for _, leaf in ordered]
        state: State = jax.tree.unflatten(tree, [*leaves, P(first_axis)])
        return state

    def local(self, identity: Array, share: int, filler: int) -> Array:
        """Within a spread function: an id as the shard that has it knows it, and on others a filler.

        Args:
            identity: ids over all shards.
            share: ids that each shard has.
            filler: an id that may be written by everybody.
        """
        if self._data_axis is None:
            return identity
        first = jax.lax.axis_index(self._data_axis) * share
        mine = (identity >= first) & (identity < first + share)
        return jnp.where(mine, identity - first, filler)

    def from_owner(self, tree: Tree, identity: Array, share: int) -> Tree:
        """Within a spread function: what the shard that has an id made, for all."""
        axis = self._data_axis
        if axis is None:
            return tree
        is_mine = identity // share == jax.lax.axis_index(axis)
        owned = jax.tree.map(lambda x: jax.lax.psum(jnp.where(is_mine, x, jnp.zeros_like(x)), axis), tree)
        result: Tree = owned
        return result

    def place_params(self, params: Params) -> Params:
        """The weights where and as steps want them."""
        params = self._model.laid_out(params)
        return params if self._mesh is None else self._placed(params, self.param_specs)

    def place_rows(self, table: np.ndarray) -> Array:
        """The host's numbers for a step's rows, each where its row runs."""
        if self._mesh is None:
            return jax.device_put(table)
        return jax.device_put(table, NamedSharding(self._mesh, P(self._data_axis)))

    def place_everywhere(self, tree: Tree) -> Tree:
        """Arrays from anywhere, whole on every device."""
        if self._mesh is None:
            return tree
        placed: Tree = jax.device_put(tree, NamedSharding(self._mesh, P()))
        return placed

    def taken_off(self, tree: Tree) -> Tree:
        """Arrays of a step, on JAX's default device as other arrays are."""
        if self._mesh is None:
            return tree
        taken: Tree = jax.device_put(jax.device_get(tree))
        return taken

    def allocated(self, allocate: Callable[[], tuple[State, object]]) -> tuple[State, object]:
        """What a function makes, an arena and lanes, in one program."""
        if self._mesh is None:
            return jax.jit(allocate)()
        shardings = self._shardings((self.arena_specs, self.rows_specs))
        return jax.jit(allocate, out_shardings=shardings)()

    def spread(
        self, function: Callable[..., object], in_specs: tuple[Specs, ...], out_specs: Specs
    ) -> Callable[..., object]:
        """The function as each device runs it on its share."""
        if self._mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def abstract(self, leaf: Array | np.ndarray | np.generic | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Shape, dtype and place of an argument."""
        if self._mesh is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        everywhere = NamedSharding(self._mesh, P())
        sharding = leaf.sharding if isinstance(leaf, jax.Array) else everywhere
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def _placed(self, tree: Params, specs: Specs) -> Params:
        placed: Params = jax.device_put(tree, self._shardings(specs))
        return placed

    def _shardings(self, specs: Specs) -> object:
        assert self._mesh is not None
        mesh = self._mesh
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def _without_types(mesh: Mesh) -> Mesh:
    """The same devices and names, with axes whose use JAX does not track in array types."""
    automatic = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=automatic)
