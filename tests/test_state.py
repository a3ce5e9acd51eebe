"""Specifications, states and the batches that address them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wkvm_jax.state import (
    Batch,
    LeafSpec,
    State,
    StateSpec,
    advance_num_tokens,
    copy_pages,
    copy_slots,
    identity_batch,
    read_layer,
    read_rows,
    write_layer,
    write_rows,
)

MATRIX = LeafSpec((2, 3, 4), jnp.float32, ("layer", "key", "value"), "recurrent")
SHIFT = LeafSpec((2, 5), jnp.bfloat16, ("layer", "width"), "window", initial=-1.5)
RING = LeafSpec((2, 6, 5), jnp.float32, ("layer", "entry", "width"), "window", rewritten=False)
PAGES = LeafSpec((2, 4, 5), jnp.float32, ("layer", "token", "width"), "paged")
LATENT = LeafSpec((1, 4, 7), jnp.float16, ("layer", "token", "rank"), "paged")
SPEC = StateSpec({"matrix": MATRIX, "shift": SHIFT, "ring": RING, "pages": PAGES, "latent": LATENT})


def batch_of(read: list[int], write: list[int], lengths: list[int]) -> Batch:
    rows = len(read)
    return Batch(
        tokens=jnp.zeros((rows, 3), jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        read_slots=jnp.asarray(read, jnp.int32),
        write_slots=jnp.asarray(write, jnp.int32),
        page_table=jnp.zeros((rows, 0), jnp.int32),
    )


def numbered(num_slots: int = 6, num_pages: int = 5) -> State:
    """A state in which each slot and page holds its own number."""
    state = SPEC.allocate(num_slots, num_pages)

    def number(leaf: jax.Array) -> jax.Array:
        index = jnp.arange(leaf.shape[0], dtype=leaf.dtype)
        return jnp.broadcast_to(index.reshape(-1, *[1] * (leaf.ndim - 1)), leaf.shape)

    return jax.tree.map(number, state)


def firsts(leaf: jax.Array) -> list[float]:
    """The number in each slot, which must be the same all over it."""
    flat = np.asarray(leaf, np.float32).reshape(leaf.shape[0], -1)
    assert (flat == flat[:, :1]).all()
    return flat[:, 0].tolist()


def test_axes_name_the_shape() -> None:
    with pytest.raises(ValueError, match="axes"):
        LeafSpec((2, 3), jnp.float32, ("layer",), "recurrent")


@pytest.mark.parametrize("axes", [("layer", "width", "token"), ("token", "layer", "width")])
def test_a_page_is_tokens_of_layers(axes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="token"):
        LeafSpec((2, 4, 5), jnp.float32, axes, "paged")
    with pytest.raises(ValueError, match="token"):
        LeafSpec((4,), jnp.float32, ("token",), "paged")


def test_pools_agree_on_the_page() -> None:
    other = LeafSpec((1, 8, 7), jnp.float32, ("layer", "token", "rank"), "paged")
    with pytest.raises(ValueError, match=r"\[4, 8\]"):
        StateSpec({"pages": PAGES, "other": other})


def test_sizes() -> None:
    assert MATRIX.num_bytes == 2 * 3 * 4 * 4 and SHIFT.num_bytes == 2 * 5 * 2
    assert SPEC.slot_bytes == MATRIX.num_bytes + SHIFT.num_bytes + RING.num_bytes + 4
    assert SPEC.page_bytes == 2 * 4 * 5 * 4 + 4 * 7 * 2
    assert SPEC.page_size == 4
    assert [SPEC.pages_for(count) for count in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert set(SPEC.slot_leaves) == {"matrix", "shift", "ring"} and set(SPEC.paged) == {"pages", "latent"}


def test_without_pages_there_are_none() -> None:
    spec = StateSpec({"matrix": MATRIX})
    assert (spec.page_size, spec.page_bytes, spec.pages_for(1000)) == (0, 0, 0)
    assert spec.allocate(2, 7).num_pages == 0


def test_two_slots_take_turns_only_if_all_is_rewritten() -> None:
    assert StateSpec({"matrix": MATRIX, "shift": SHIFT}).alternates
    assert not StateSpec({"matrix": MATRIX, "ring": RING}).alternates
    assert not StateSpec({"matrix": MATRIX, "pages": PAGES}).alternates


def test_allocate_fills_in_the_initial_values() -> None:
    state = SPEC.allocate(3, 2)
    assert (state.num_slots, state.num_pages) == (3, 2)
    for name, leaf in SPEC.leaves.items():
        held = state.leaves[name] if leaf.kind != "paged" else state.pools[name]
        assert held.shape == (2 if leaf.kind == "paged" else 3, *leaf.shape)
        assert held.dtype == leaf.dtype and firsts(held) == [leaf.initial] * held.shape[0]
    assert state.num_tokens.tolist() == [0, 0, 0] and state.num_tokens.dtype == jnp.int32


def test_states_are_pytrees() -> None:
    state = numbered()
    doubled = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + leaf, state))(state)
    assert isinstance(doubled, State) and doubled.num_tokens.tolist() == [0, 2, 4, 6, 8, 10]
    assert len(jax.tree.leaves(state)) == len(SPEC.leaves) + 1
    with pytest.raises(AttributeError):
        state.num_tokens = jnp.zeros(6, jnp.int32)


@pytest.mark.parametrize("index", [0, 3, 5, -1])
def test_one_row_is_a_batch_of_one(index: int) -> None:
    state = numbered(num_pages=12)
    one = state.row(index)
    assert one.num_slots == 1 and one.num_tokens.tolist() == [index % 6]
    assert all(firsts(leaf) == [index % 6] for leaf in one.leaves.values())
    pages = state.num_pages // 6
    own = [pages * (index % 6) + page for page in range(pages)]
    assert all(firsts(pool) == own for pool in one.pools.values())


def test_a_row_that_is_not_there_is_an_error() -> None:
    with pytest.raises(IndexError):
        numbered().row(6)


def test_identity_batch() -> None:
    batch = identity_batch(jnp.zeros((3, 7), jnp.int32), SPEC.allocate(3, 6))
    assert batch.read_slots.tolist() == batch.write_slots.tolist() == [0, 1, 2]
    assert batch.lengths.tolist() == [7, 7, 7]
    assert batch.page_table.tolist() == [[0, 1], [2, 3], [4, 5]]
    batch = identity_batch(
        jnp.zeros((3, 7), jnp.int32), SPEC.allocate(3, 6), jnp.asarray([1, 0, 7], jnp.int32)
    )
    assert batch.lengths.tolist() == [1, 0, 7]
    flat = StateSpec({"matrix": MATRIX})
    assert identity_batch(jnp.zeros((2, 1), jnp.int32), flat.allocate(2)).page_table.shape == (2, 0)


def test_identity_batch_wants_a_row_for_each_state() -> None:
    with pytest.raises(ValueError, match="4 rows and the state 3"):
        identity_batch(jnp.zeros((4, 2), jnp.int32), SPEC.allocate(3, 6))


def test_rows_go_out_and_in() -> None:
    state, batch = numbered(), batch_of([4, 0, 2], [5, 1, 2], [3, 3, 3])
    rows = read_rows(state.leaves["matrix"], batch)
    assert firsts(rows) == [4, 0, 2]
    assert firsts(write_rows(state.leaves["matrix"], batch, rows + 10)) == [0, 10, 12, 3, 4, 14]
    assert write_rows(state.leaves["shift"], batch, jnp.zeros((3, 2, 5))).dtype == jnp.bfloat16


def test_layers_go_out_and_in() -> None:
    state, batch = numbered(), batch_of([4, 0, 2], [5, 1, 2], [3, 3, 3])
    leaf = state.leaves["matrix"]
    rows = read_layer(leaf, batch, 1)
    assert rows.shape == (3, 3, 4) and firsts(rows) == [4, 0, 2]
    written = write_layer(leaf, batch, 1, rows + 10)
    assert firsts(written[:, 1]) == [0, 10, 12, 3, 4, 14] and firsts(written[:, 0]) == [0, 1, 2, 3, 4, 5]


def test_counts_grow_by_lengths() -> None:
    state, batch = numbered(), batch_of([4, 0, 2], [5, 1, 2], [3, 0, 1])
    assert advance_num_tokens(state, batch).tolist() == [0, 0, 3, 3, 4, 7]


def test_copy_slots_moves_what_is_written_in_parts() -> None:
    """Leaves that a step rewrites whole, counts and pools stay; sources are read before anything changes."""
    copies = jnp.asarray([[2, 4], [4, 5], [1, 1]], jnp.int32)
    state = numbered()
    after = copy_slots(state, SPEC, copies)
    assert firsts(after.leaves["ring"]) == [0, 1, 2, 3, 2, 4]
    for name in ("matrix", "shift"):
        assert firsts(after.leaves[name]) == [0, 1, 2, 3, 4, 5]
    assert after.num_tokens.tolist() == state.num_tokens.tolist()
    assert firsts(after.pools["pages"]) == [0, 1, 2, 3, 4]


def test_copy_pages_moves_every_pool() -> None:
    after = copy_pages(numbered(), jnp.asarray([[1, 3], [3, 4], [0, 0]], jnp.int32))
    assert firsts(after.pools["pages"]) == firsts(after.pools["latent"]) == [0, 1, 2, 1, 3]
    assert firsts(after.leaves["ring"]) == [0, 1, 2, 3, 4, 5]
