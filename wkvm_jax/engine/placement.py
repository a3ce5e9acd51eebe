"""Where a model's arrays lie: on one device, or with heads spread over a mesh's `model` axis."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from wkvm_jax.errors import MeshError
from wkvm_jax.models.model import Model
from wkvm_jax.state import DATA_AXIS, MODEL_AXIS, State
from wkvm_jax.types import Params

Specs = object
"""A tree of `PartitionSpec`s, or one for a whole tree."""


class Placement:
    """How one model's weights, arena and steps use a mesh.

    Weights are split by heads and by the channel mix's inner width, states by heads; everything else is on
    every device. A step runs under `shard_map`: each device computes its heads for all rows, and sums cross
    devices twice a layer (Shoeybi et al., arXiv 1909.08053).

    Args:
        model: what will run.
        mesh: None for JAX's default device. Its axes are named "model" and "data"; "data" has size 1 in this
            version.

    Raises:
        MeshError: the mesh has other axes, or the model cannot be split over it.
    """

    def __init__(self, model: Model, mesh: Mesh | None) -> None:
        self._mesh = mesh
        self._model = model
        self.model_axis: str | None = None
        if mesh is None:
            return
        sizes = dict(mesh.shape)
        unknown = set(sizes) - {DATA_AXIS, MODEL_AXIS}
        if unknown:
            raise MeshError(
                f"the mesh has axes {sorted(unknown)}; name them {DATA_AXIS!r} and {MODEL_AXIS!r}"
            )
        if sizes.get(DATA_AXIS, 1) != 1:
            raise MeshError(f"this version takes {DATA_AXIS!r} axes of size 1 only, not {sizes[DATA_AXIS]}")
        if MODEL_AXIS in sizes:
            self.model_axis = MODEL_AXIS
            self._check_divides(sizes[MODEL_AXIS])

    def _check_divides(self, num_shards: int) -> None:
        if self._model.family.partition is None:
            raise MeshError(f"{self._model.family.name} models cannot be split over {MODEL_AXIS!r} yet")
        specs = jax.tree.leaves(self.param_specs, is_leaf=lambda x: isinstance(x, P))
        weights = jax.tree_util.tree_leaves_with_path(self._model.params)
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
        return self._model.family.partition(self._model.config)

    @property
    def arena_specs(self) -> Specs:
        """A `PartitionSpec` for each leaf of the arena."""
        if self.model_axis is None:
            return P()
        spec = self._model.state_spec
        tree = jax.tree.structure(jax.eval_shape(lambda: spec.allocate(1, 1)))
        ordered = [*sorted(spec.slot_leaves.items()), *sorted(spec.paged.items())]
        return jax.tree.unflatten(tree, [*(P(None, *leaf.partition) for _, leaf in ordered), P()])

    def place_params(self, params: Params) -> Params:
        """The weights where steps want them."""
        return params if self._mesh is None else self._placed(params, self.param_specs)

    def allocated(self, allocate: Callable[[], tuple[State, object]]) -> tuple[State, object]:
        """What a function makes, an arena and something that is everywhere, in one program."""
        if self._mesh is None:
            return jax.jit(allocate)()
        shardings = self._shardings((self.arena_specs, P()))
        return jax.jit(allocate, out_shardings=shardings)()

    def spread(
        self, function: Callable[..., object], in_specs: tuple[Specs, ...], out_specs: tuple[Specs, ...]
    ) -> Callable[..., object]:
        """The function as each device runs it on its share."""
        if self._mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def abstract(self, leaf: Array) -> jax.ShapeDtypeStruct:
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
