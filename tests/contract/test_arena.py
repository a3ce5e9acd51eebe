"""In an arena a step touches the slots and pages that it was given, and reads nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract.harness import Harness, assert_near, assert_same_bits, on_host, scattered_slots
from wkvm_jax.state import INITIAL_SLOT, TRASH_SLOT, State

ROWS = 3
BUCKET = 4
WIDTHS = [1, 16]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "to other slots"])
def test_scattered_slots_give_what_a_batch_gives(harness: Harness, width: int, in_place: bool) -> None:
    states, tokens = harness.warm(ROWS), harness.tokens(ROWS, width)
    lengths = [width, 1, max(1, width - 2)]
    slots, pages = scattered_slots(2 * ROWS), harness.page_lists(ROWS)
    read, write = slots[:ROWS], slots[:ROWS] if in_place else slots[ROWS:]
    arena = harness.arena(states, read, pages)
    logits, after = harness.step(harness.batch(tokens, read, write, pages, BUCKET, lengths), arena)
    expected, expected_states = harness.model(tokens, states, jnp.asarray(lengths, jnp.int32))
    logits, expected = np.asarray(logits), np.asarray(expected)
    for row, length in enumerate(lengths):
        assert_near(logits[row, :length], expected[row, :length])
        taken = harness.taken(after, write[row], pages[row])
        assert_near(taken, harness.row(expected_states, row))
    _assert_untouched(after, arena, written=write, pages=[page for some in pages for page in some])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_new_request_starts_from_slot_0(harness: Harness, width: int) -> None:
    """Whatever its own slot and pages held before."""
    tokens, pages = harness.tokens(1, width), harness.page_lists(1)
    used = harness.warm(1)
    arena = harness.arena(used, [5], pages)
    poisoned = {name: np.full_like(pool, np.nan) for name, pool in arena.pools.items()}
    arena = arena.replace(pools=poisoned)
    logits, after = harness.step(harness.batch(tokens, [INITIAL_SLOT], [7], pages, BUCKET), arena)
    expected, state = harness.run_alone(tokens[0], harness.fresh(1))
    assert_near(np.asarray(logits)[0], np.asarray(expected))
    taken = harness.taken(after, 7, pages[0])
    assert_near(taken.replace(pools={}), on_host(state).replace(pools={}))
    _assert_untouched(after, arena, written=[7], pages=pages[0])


@pytest.mark.parametrize("width", WIDTHS)
def test_padding_writes_to_the_trash_alone(harness: Harness, width: int) -> None:
    pages = harness.page_lists(ROWS)
    arena = harness.arena(harness.warm(ROWS), [4, 9, 6], pages)
    nothing = harness.batch(jnp.zeros((0, width), jnp.int32), [], [], [], BUCKET)
    _, after = harness.step(nothing, arena)
    _assert_untouched(after, arena, written=[], pages=[])


def test_a_finished_row_writes_to_the_trash_alone(harness: Harness) -> None:
    """A row that is done still names its own slot and pages; its length is 0 and it writes to the trash."""
    pages = harness.page_lists(1)
    arena = harness.arena(harness.warm(1), [4], pages)
    batch = harness.batch(harness.tokens(1, 1), [4], [TRASH_SLOT], pages, BUCKET, [0])
    _, after = harness.step(batch, arena)
    _assert_untouched(after, arena, written=[], pages=[])


def test_trash_is_not_read(harness: Harness) -> None:
    pages = harness.page_lists(1)
    arena = harness.arena(harness.warm(1), [4], pages)
    batch = harness.batch(harness.tokens(1, 1), [4], [4], pages, BUCKET)
    _, poisoned = harness.step(batch, arena)
    clean = jax.tree.map(np.copy, arena)
    for leaf, trash in [(leaf, TRASH_SLOT) for leaf in clean.leaves.values()] + [
        (p, 0) for p in clean.pools.values()
    ]:
        leaf[trash] = 0
    _, cleaned = harness.step(batch, clean)
    assert_same_bits(harness.taken(poisoned, 4, pages[0]), harness.taken(cleaned, 4, pages[0]))


def _assert_untouched(after: State, before: State, *, written: list[int], pages: list[int]) -> None:
    """Slots and pages that the step was not given hold the bits they held; the trash may hold anything."""
    slots = np.setdiff1d(np.arange(before.num_slots), [TRASH_SLOT, *written])
    assert INITIAL_SLOT in slots
    after = on_host(after)
    for name, leaf in before.leaves.items():
        assert_same_bits(after.leaves[name][slots], leaf[slots], name)
    assert_same_bits(after.num_tokens[slots], before.num_tokens[slots], "num_tokens")
    others = np.setdiff1d(np.arange(before.num_pages), [0, *pages])
    for name, pool in before.pools.items():
        assert_same_bits(after.pools[name][others], pool[others], name)
