"""A state may be copied out and in, and forked, and goes on as if nothing had happened."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.contract.harness import Harness, assert_near, assert_same_bits, on_host
from wkvm_jax.engine.step import read_page, read_slot, write_page, write_slot
from wkvm_jax.state import State, copy_pages

BUCKET = 4
WIDTH = 16


def test_slots_go_out_and_in(harness: Harness) -> None:
    pages = harness.page_lists(2)
    arena = harness.arena(harness.warm(1), [9], pages[:1])
    snapshot = on_host(jax.jit(read_slot)(arena, jnp.int32(9)))
    moved = jax.jit(write_slot)(arena, jnp.int32(4), jax.tree.map(jnp.asarray, snapshot))
    for old, new in zip(pages[0], pages[1], strict=True):
        page = jax.tree.map(np.asarray, read_page(moved, jnp.int32(old)))
        moved = write_page(moved, jnp.int32(new), jax.tree.map(jnp.asarray, page))
    assert_same_bits(harness.taken(moved, 4, pages[1]), harness.taken(arena, 9, pages[0]))
    assert_same_bits(harness.taken(moved, 9, pages[0]), harness.taken(arena, 9, pages[0]))
    tokens = harness.tokens(1, WIDTH)
    stayed, _ = harness.step(harness.batch(tokens, [9], [9], pages[:1], BUCKET), arena)
    went, _ = harness.step(harness.batch(tokens, [4], [4], pages[1:], BUCKET), moved)
    assert_same_bits(stayed[0], went[0])


def test_a_snapshot_is_a_batch_of_one(harness: Harness) -> None:
    """What leaves the arena runs in research code as it is."""
    pages = harness.page_lists(1)
    arena = harness.arena(harness.warm(1), [9], pages)
    snapshot = read_slot(jax.tree.map(jnp.asarray, arena), jnp.int32(9))
    assert_same_bits(snapshot, harness.warm(1).replace(pools={}))


def test_children_of_a_fork_go_their_own_ways(harness: Harness) -> None:
    """Two rows continue one slot with different tokens; the parent keeps its bits."""
    parent, children = 5, [8, 3]
    harness_pages = harness.page_lists(1)
    arena = harness.arena(harness.warm(1), [parent], harness_pages)
    pages, arena = _share(harness, arena, harness_pages[0], len(children))
    tokens = harness.tokens(len(children), WIDTH)
    batch = harness.batch(tokens, [parent] * len(children), children, pages, BUCKET)
    logits, after = harness.step(batch, arena)
    assert_same_bits(harness.taken(after, parent, harness_pages[0]), harness.warm(1))
    for row, child in enumerate(children):
        expected, state = harness.run_alone(tokens[row], harness.warm(1))
        assert_near(np.asarray(logits)[row], np.asarray(expected))
        assert_near(_filled_part(harness, after, child, pages[row]), _filled_part(harness, state, 0, None))


def test_a_child_in_place_of_its_parent(harness: Harness) -> None:
    """The parent goes on in another slot while a second reader of its old one still starts from there."""
    pages = harness.page_lists(1)
    arena = harness.arena(harness.warm(1), [5], pages)
    shared, arena = _share(harness, arena, pages[0], 1)
    tokens = harness.tokens(2, 1)
    _, after = harness.step(harness.batch(tokens[:1], [5], [8], shared, BUCKET), arena)
    logits, _ = harness.step(harness.batch(tokens[1:], [5], [5], pages, BUCKET), after)
    expected, _ = harness.step(harness.batch(tokens[1:], [5], [5], pages, BUCKET), arena)
    assert_same_bits(logits[0], expected[0])


def _share(harness: Harness, arena: State, pages: list[int], children: int) -> tuple[list[list[int]], State]:
    """Page lists of children that share the parent's full pages and own a copy of its last one."""
    if not pages:
        return [[]] * children, arena
    full = int(harness.warm(1).num_tokens[0]) // harness.spec.page_size
    free = [page for page in range(1, harness.num_pages) if page not in pages]
    each = len(pages) - full
    own = [free[child * each : (child + 1) * each] for child in range(children)]
    copies = jnp.asarray([[pages[full], some[0]] for some in own], jnp.int32)
    return [pages[:full] + some for some in own], copy_pages(jax.tree.map(jnp.asarray, arena), copies)


def _filled_part(harness: Harness, arena: State, slot: int, pages: list[int] | None) -> State:
    """A conversation without the pages that it has not reached, which may hold anything."""
    if pages is None:
        pages = list(range(harness.pages_per_row))
    state = harness.taken(arena, slot, pages)
    count = int(state.num_tokens[0])
    pools = {
        name: np.swapaxes(pool, 1, 2).reshape(-1, *np.delete(pool.shape, [0, 2]))[:count]
        for name, pool in state.pools.items()
    }
    return state.replace(pools=pools)
