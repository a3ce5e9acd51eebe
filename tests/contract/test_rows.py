"""Rows of a batch do not see each other, nor the padding behind them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract.harness import Harness, assert_near, assert_same_bits, on_host, scattered_slots
from wkvm_jax.state import State

WIDTH = 16
LENGTHS = (0, 1, 5, 16)


def test_ragged_rows_equal_rows_alone(harness: Harness) -> None:
    rows = len(LENGTHS)
    tokens, state = harness.tokens(rows, WIDTH), harness.warm(rows)
    logits, after = harness.model(tokens, state, jnp.asarray(LENGTHS, jnp.int32))
    logits = np.asarray(logits)
    for index, length in enumerate(LENGTHS):
        alone = harness.row(state, index)
        if length:
            expected, alone = harness.run_alone(tokens[index, :length], alone)
            assert_near(logits[index, :length], np.asarray(expected))
        assert_near(harness.row(after, index), alone)


def test_padding_is_not_seen(harness: Harness) -> None:
    rows = len(LENGTHS)
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    state = harness.warm(rows)
    first, second = harness.tokens(rows, WIDTH), harness.tokens(rows, WIDTH, seed=1)
    counted = np.arange(WIDTH) < np.asarray(LENGTHS)[:, None]
    second = jnp.where(counted, first, second)
    logits, after = harness.model(first, state, lengths)
    other_logits, other_after = harness.model(second, state, lengths)
    assert_same_bits(after, other_after)
    assert_same_bits(np.asarray(logits)[counted], np.asarray(other_logits)[counted])


@pytest.mark.parametrize("width", [1, WIDTH])
def test_rows_of_no_length_stay_as_they_are(harness: Harness, width: int) -> None:
    state = harness.warm(4)
    _, after = harness.model(harness.tokens(4, width), state, jnp.zeros(4, jnp.int32))
    assert_same_bits(after, state)


@pytest.mark.parametrize("live", [1, 3, 17])
@pytest.mark.parametrize("width", [1, WIDTH])
def test_neighbours_and_places_do_not_matter(harness: Harness, live: int, width: int) -> None:
    """Within one bucket, a row's logits and state are equal bit for bit wherever it stands."""
    bucket = 1 << (live - 1).bit_length()
    pages = harness.page_lists(live)
    slots = scattered_slots(live)
    arena = harness.arena(harness.warm(live), slots, pages)
    tokens = harness.tokens(live, width)
    lengths = [1 + (3 * index) % width for index in range(live)]
    logits, after = _in_order(harness, (tokens, slots, pages, lengths), arena, range(live), bucket)
    order = np.random.default_rng(7).permutation(live)
    for rows in (order, order[: -(-live // 2)], order[-1:]):
        moved, moved_after = _in_order(harness, (tokens, slots, pages, lengths), arena, rows, bucket)
        for place, row in enumerate(rows):
            count = lengths[row]
            assert_same_bits(moved[place, :count], logits[row, :count], f"row {row} at {place}")
            taken = harness.taken(moved_after, slots[row], pages[row])
            assert_same_bits(taken, harness.taken(after, slots[row], pages[row]), f"row {row} at {place}")


def _in_order(
    harness: Harness,
    all_rows: tuple[jax.Array, list[int], list[list[int]], list[int]],
    arena: State,
    order: object,
    bucket: int,
) -> tuple[np.ndarray, State]:
    """One step of some rows in some order, the rest of the bucket being padding."""
    tokens, slots, pages, lengths = all_rows
    index = np.asarray(list(order))
    at = [slots[row] for row in index]
    batch = harness.batch(
        np.asarray(tokens)[index],
        at,
        at,
        [pages[row] for row in index],
        bucket,
        [lengths[row] for row in index],
    )
    logits, after = harness.step(batch, arena)
    return np.asarray(logits), on_host(after)
