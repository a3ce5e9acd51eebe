"""What the contract's tests share: models, batches, arenas with poison in them, and comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from tests.families import FamilyUnderTest
from wkvm_jax.models.model import Model
from wkvm_jax.state import (
    INITIAL_SLOT,
    NUM_RESERVED_PAGES,
    NUM_RESERVED_SLOTS,
    TRASH_SLOT,
    Batch,
    State,
    StateSpec,
    copy_slots,
    identity_batch,
)
from wkvm_jax.types import Params

MAX_LENGTH = 64
"""Tokens that a test's conversation may reach."""
WARM_UP = 11
"""Tokens that a warm state has consumed: past the toy's ring, inside one of its pages."""
MAX_ROWS = 17
NUM_SLOTS = 24
"""One size of arena for all tests, so that steps compile once."""
ROUNDING = 1e-5
"""How far two float32 computations of one value may lie apart, relative to the largest value beside it. A
float32 carries 6e-8, and each result here is a chain of some hundred sums of different order."""
UNUSED_TOKENS = 1_000_003
"""The token count of slots that nobody may read."""


@dataclasses.dataclass(frozen=True, eq=False)
class Harness:
    """One family under test, with its steps compiled once for all tests."""

    under_test: FamilyUnderTest

    @cached_property
    def model(self) -> Model:
        return self.under_test.model()

    @property
    def spec(self) -> StateSpec:
        return self.model.state_spec

    @property
    def pages_per_row(self) -> int:
        return self.spec.pages_for(MAX_LENGTH)

    def tokens(self, rows: int, width: int, seed: int = 0) -> Int32[Array, "b t"]:
        """Random tokens, other ones for each seed."""
        ids = np.random.default_rng(1000 + seed).integers(0, self.model.config.vocab_size, (rows, width))
        return jnp.asarray(ids, jnp.int32)

    def fresh(self, rows: int) -> State:
        return self.model.init_state(rows, max_length=MAX_LENGTH)

    def warm(self, rows: int) -> State:
        """States of conversations that have begun, each with another text."""
        return self.first_rows(self._all_warm, rows)

    @cached_property
    def _all_warm(self) -> State:
        return on_host(self.model(self.tokens(MAX_ROWS, WARM_UP, seed=99), self.fresh(MAX_ROWS))[1])

    def step(self, batch: Batch, state: State) -> tuple[Array, State]:
        """Logits of all positions and the next state, after the copies that moving rows need."""
        return self._compiled_step(self.model.params, batch, state)

    @cached_property
    def _compiled_step(self) -> jax.stages.Wrapped:
        family, config = self.model.family, self.model.config

        def step(params: Params, batch: Batch, state: State) -> tuple[Array, State]:
            moves = batch.read_slots != batch.write_slots
            pairs = jnp.stack([batch.read_slots, batch.write_slots], axis=1)
            state = copy_slots(state, self.spec, jnp.where(moves[:, None], pairs, TRASH_SLOT))
            hidden, state = family.forward(params, batch, state, config=config)
            return family.head(params, hidden, config=config), state

        return jax.jit(step)

    @property
    def num_pages(self) -> int:
        """Of an arena's pools: one page to spare for each that is used."""
        return NUM_RESERVED_PAGES + 2 * MAX_ROWS * self.pages_per_row

    def page_lists(self, rows: int, seed: int = 5) -> list[list[int]]:
        """Pages for each row, in no order."""
        ids = np.random.default_rng(seed).permutation(np.arange(NUM_RESERVED_PAGES, self.num_pages))
        return ids[: rows * self.pages_per_row].reshape(rows, -1).tolist()

    def arena(self, states: State, slots: Sequence[int], pages: Sequence[Sequence[int]]) -> State:
        """An arena that holds row i of a research batch in slot i of `slots` and pages i of `pages`.

        All else is poison: NaN in each slot and page that is not named, and counts that lead nowhere.
        Slot 0 alone holds what it must, the initial value.
        """
        initial = self.spec.allocate(1)
        used = [INITIAL_SLOT, *slots]

        def fill(leaf: Array, first: Array, poison: float) -> np.ndarray:
            result = np.full((NUM_SLOTS, *leaf.shape[1:]), poison, leaf.dtype)
            result[used] = np.concatenate([first, leaf])
            return result

        def scatter(pool: Array) -> np.ndarray:
            result = np.full((self.num_pages, *pool.shape[1:]), np.nan, pool.dtype)
            result[np.asarray(pages).reshape(-1)] = pool
            return result

        return State(
            leaves={name: fill(leaf, initial.leaves[name], np.nan) for name, leaf in states.leaves.items()},
            pools={name: scatter(pool) for name, pool in states.pools.items()},
            num_tokens=fill(states.num_tokens, initial.num_tokens, UNUSED_TOKENS),
        )

    def batch(
        self,
        tokens: Array,
        read_slots: Sequence[int],
        write_slots: Sequence[int],
        pages: Sequence[Sequence[int]],
        rows: int,
        lengths: Sequence[int] | None = None,
    ) -> Batch:
        """A batch of `rows` rows, those past the last given one being padding."""
        given, width = tokens.shape
        pad = rows - given
        table = np.zeros((rows, self.pages_per_row), np.int32)
        if given:
            table[:given] = np.asarray(pages, np.int32).reshape(given, -1)
        lengths = [width] * given if lengths is None else lengths
        return Batch(
            tokens=np.pad(tokens, ((0, pad), (0, 0))),
            lengths=np.asarray([*lengths, *[0] * pad], np.int32),
            read_slots=np.asarray([*read_slots, *[INITIAL_SLOT] * pad], np.int32),
            write_slots=np.asarray([*write_slots, *[TRASH_SLOT] * pad], np.int32),
            page_table=table,
        )

    def taken(self, arena: State, slot: int, pages: Sequence[int]) -> State:
        """One conversation of an arena as a research batch of one."""
        pools = {name: np.asarray(pool)[np.asarray(pages, int)] for name, pool in arena.pools.items()}
        return on_host(arena).row(slot).replace(pools=pools)

    def row(self, states: State, index: int) -> State:
        """One row of a research batch."""
        each = self.pages_per_row
        states = on_host(states)
        pools = {name: pool[index * each : (index + 1) * each] for name, pool in states.pools.items()}
        return states.row(index).replace(pools=pools)

    def first_rows(self, states: State, count: int) -> State:
        """The first rows of a research batch that lies on the host."""
        some = jax.tree.map(lambda leaf: leaf[:count], states.replace(pools={}))
        pools = {name: pool[: count * self.pages_per_row] for name, pool in states.pools.items()}
        return some.replace(pools=pools)

    def run_alone(self, tokens: Array, state: State) -> tuple[Array, State]:
        """A research pass of one row: logits `[t, vocab]` and the state."""
        logits, state = self.step(identity_batch(tokens[None], state), state)
        return logits[0], state


def on_host(state: State) -> State:
    """The state in numpy arrays, which are cut and compared without compiling anything."""
    return jax.tree.map(np.asarray, state)


def scattered_slots(count: int, seed: int = 3) -> list[int]:
    """Slots in no order, none of them reserved."""
    ids = np.random.default_rng(seed).permutation(np.arange(NUM_RESERVED_SLOTS, NUM_SLOTS))
    return ids[:count].tolist()


def assert_near(actual: object, expected: object, tolerance: float = ROUNDING) -> None:
    """Every array of two trees within rounding, relative to the array's largest value; counts equal."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(expected)[0]]
    for path, one, other in zip(paths, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype and one.shape == other.shape, path
        limit = tolerance * max(1.0, float(np.abs(other).max(initial=0))) if one.dtype.kind == "f" else 0
        np.testing.assert_allclose(one, other, rtol=0, atol=limit, err_msg=path)


def assert_same_bits(actual: object, expected: object, message: str = "") -> None:
    """Every array of two trees equal bit for bit, NaN included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype and one.shape == other.shape, message
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8), err_msg=message)
