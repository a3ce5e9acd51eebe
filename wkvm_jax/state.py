"""States, arenas and the batches that address them.

A model family declares its state once, as a `StateSpec`. One `State` pytree then serves both uses: a
research batch, whose slots are its rows, and the engine's arena, whose slots rows borrow by id. Slot
leaves carry a leading slot axis; paged leaves are pools of pages that a row's page table names. A state
is immutable: functions take one and return another, and `jax.tree.map` sees every leaf of every family.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int32, Shaped

LeafKind = Literal["recurrent", "window", "paged"]

DATA_AXIS, MODEL_AXIS = "data", "model"
"""Names of a mesh's axes: slots and rows are spread over the first, heads over the second."""

INITIAL_SLOT = 0
"""Holds the initial value; read by new and by padded rows, never written."""
TRASH_SLOT = 1
"""Takes the writes of padded and finished rows; nobody reads it."""
NUM_RESERVED_SLOTS = 2
FILLER_PAGE = 0
"""Fills up page tables; no row's tokens live there."""
NUM_RESERVED_PAGES = 1


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One leaf of a state: what one slot (or, for a paged leaf, one page) holds.

    Attributes:
        shape: of one slot or one page, without the slot or page axis.
        dtype: element type, e.g. `jnp.float32`.
        axes: a name for each axis of `shape`; a paged leaf's second axis is "token".
        kind: "recurrent" (matrix states), "window" (token shifts, convolution tails, rings) or "paged".
        initial: the value that fills a fresh slot.
        rewritten: whether a forward writes the whole leaf at `write_slot`, whatever it read. A leaf of
            which only some entries are written (a ring) says False; `copy_slots` serves rows that move slots.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    axes: tuple[str, ...]
    kind: LeafKind
    initial: float = 0.0
    rewritten: bool = True

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{self.axes=} must name each axis of {self.shape=}")
        if self.kind == "paged" and (len(self.axes) < 2 or self.axes[1] != "token"):
            raise ValueError(f"a paged leaf is [layer, token, ...]; got {self.axes=}")

    @property
    def partition(self) -> tuple[str | None, ...]:
        """The mesh axis that each axis of `shape` is spread over: heads over `MODEL_AXIS`."""
        return tuple(MODEL_AXIS if axis == "head" else None for axis in self.axes)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """All leaves of one family's state, by name, without a batch axis."""

    leaves: Mapping[str, LeafSpec]

    def __post_init__(self) -> None:
        sizes = {leaf.shape[1] for leaf in self.paged.values()}
        if len(sizes) > 1:
            raise ValueError(f"paged leaves must agree on tokens a page; got {sorted(sizes)}")

    @property
    def slot_leaves(self) -> dict[str, LeafSpec]:
        return {name: leaf for name, leaf in self.leaves.items() if leaf.kind != "paged"}

    @property
    def paged(self) -> dict[str, LeafSpec]:
        return {name: leaf for name, leaf in self.leaves.items() if leaf.kind == "paged"}

    @property
    def page_size(self) -> int:
        """Tokens a page holds; 0 when no leaf is paged."""
        return next((leaf.shape[1] for leaf in self.paged.values()), 0)

    @property
    def alternates(self) -> bool:
        """Whether two slots can take turns: every leaf is rewritten whole by each forward."""
        return not self.paged and all(leaf.rewritten for leaf in self.leaves.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, its token count included."""
        return sum(leaf.num_bytes for leaf in self.slot_leaves.values()) + 4

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all pools."""
        return sum(leaf.num_bytes for leaf in self.paged.values())

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.page_size) if self.paged else 0

    def allocate(self, num_slots: int, num_pages: int = 0) -> State:
        """A `State` whose every slot holds the initial value and has consumed no token."""
        return State(
            leaves={name: _filled(leaf, num_slots) for name, leaf in self.slot_leaves.items()},
            pools={name: _filled(leaf, num_pages) for name, leaf in self.paged.items()},
            num_tokens=jnp.zeros((num_slots,), jnp.int32),
        )


def _filled(leaf: LeafSpec, count: int) -> Array:
    return jnp.full((count, *leaf.shape), leaf.initial, leaf.dtype)


class State(flax.struct.PyTreeNode):
    """A batch of states, or the engine's arena.

    Attributes:
        leaves: slot leaves, `[s, ...]`, slot-major so that one session is contiguous in each.
        pools: paged leaves, `[page, layer, token, ...]`.
        num_tokens: how many tokens each slot's state has consumed.
    """

    leaves: dict[str, Shaped[Array, "s ..."]]
    pools: dict[str, Shaped[Array, "page ..."]]
    num_tokens: Int32[Array, " s"]

    @property
    def num_slots(self) -> int:
        return self.num_tokens.shape[0]

    @property
    def num_pages(self) -> int:
        return next((pool.shape[0] for pool in self.pools.values()), 0)

    def row(self, index: int) -> State:
        """One row of a research batch, as a batch of one with its own pages.

        Raises:
            IndexError: there is no such row.
        """
        index = range(self.num_slots)[index]
        pages = self.num_pages // self.num_slots
        return self.replace(
            leaves={name: leaf[index : index + 1] for name, leaf in self.leaves.items()},
            pools={name: pool[index * pages : (index + 1) * pages] for name, pool in self.pools.items()},
            num_tokens=self.num_tokens[index : index + 1],
        )


class Batch(flax.struct.PyTreeNode):
    """One rectangle of rows x tokens and where its rows read and write.

    Apart from `TRASH_SLOT`, no slot that is written is another row's read or write slot.

    Attributes:
        tokens: ids, padded on the right.
        lengths: how many of a row's tokens count; a row of length 0 leaves its state as it was.
        read_slots: the slot each row continues from.
        write_slots: the slot that receives the row's new state.
        page_table: pages of each row in order, filled up with page 0 (zero wide without paged leaves).
    """

    tokens: Int32[Array, "b t"]
    lengths: Int32[Array, " b"]
    read_slots: Int32[Array, " b"]
    write_slots: Int32[Array, " b"]
    page_table: Int32[Array, "b p"]


def identity_batch(
    tokens: Int32[Array, "b t"], state: State, lengths: Int32[Array, " b"] | None = None
) -> Batch:
    """The batch of a research call: row i reads and writes slot i, its pages contiguous."""
    rows, width = tokens.shape
    if rows != state.num_slots:
        raise ValueError(f"tokens has {rows} rows and the state {state.num_slots}; they must agree")
    slots = jnp.arange(rows, dtype=jnp.int32)
    pages_per_row = state.num_pages // rows if rows else 0
    return Batch(
        tokens=tokens.astype(jnp.int32),
        lengths=jnp.full((rows,), width, jnp.int32) if lengths is None else lengths.astype(jnp.int32),
        read_slots=slots,
        write_slots=slots,
        page_table=jnp.arange(rows * pages_per_row, dtype=jnp.int32).reshape(rows, pages_per_row),
    )


def read_rows(leaf: Shaped[Array, "s ..."], batch: Batch) -> Shaped[Array, "b ..."]:
    """The rows' values of a slot leaf.

    The barrier makes XLA finish this copy before the arena is written. Without it the read is fused into
    later users, and the arena itself is copied at each step.
    """
    return jax.lax.optimization_barrier(leaf[batch.read_slots])


def write_rows(
    leaf: Shaped[Array, "s ..."], batch: Batch, rows: Shaped[Array, "b ..."]
) -> Shaped[Array, "s ..."]:
    """The leaf with the rows' values at their write slots; in place when the leaf is donated."""
    return leaf.at[batch.write_slots].set(rows.astype(leaf.dtype))


def read_layer(
    leaf: Shaped[Array, "s l ..."], batch: Batch, layer: int | Int32[Array, ""]
) -> Shaped[Array, "b ..."]:
    """The rows' values of one layer of a slot leaf."""
    return jax.lax.optimization_barrier(leaf[batch.read_slots, layer])


def write_layer(
    leaf: Shaped[Array, "s l ..."], batch: Batch, layer: int | Int32[Array, ""], rows: Shaped[Array, "b ..."]
) -> Shaped[Array, "s l ..."]:
    """The leaf with the rows' values of one layer at their write slots."""
    return leaf.at[batch.write_slots, layer].set(rows.astype(leaf.dtype))


def copy_slots(state: State, spec: StateSpec, copies: Int32[Array, "c 2"]) -> State:
    """The state after copying leaves that are written entry by entry, (source, destination) slots.

    A row that moves slots needs this before its step, which reads and writes such leaves at its write
    slot; leaves that each step rewrites whole need no copy. Trash to trash is a filler.
    """
    leaves = {
        name: leaf if spec.leaves[name].rewritten else _copied(leaf, copies)
        for name, leaf in state.leaves.items()
    }
    return state.replace(leaves=leaves)


def copy_pages(state: State, copies: Int32[Array, "c 2"]) -> State:
    """The state after copying whole pages, (source, destination); page 0 to page 0 is a filler."""
    return state.replace(pools={name: _copied(pool, copies) for name, pool in state.pools.items()})


def _copied(leaf: Shaped[Array, "s ..."], copies: Int32[Array, "c 2"]) -> Shaped[Array, "s ..."]:
    return leaf.at[copies[:, 1]].set(jax.lax.optimization_barrier(leaf[copies[:, 0]]))


def advance_num_tokens(state: State, batch: Batch) -> Int32[Array, " s"]:
    """`num_tokens` after the batch: each row's count, grown by its length, at its write slot."""
    return write_rows(state.num_tokens, batch, read_rows(state.num_tokens, batch) + batch.lengths)
