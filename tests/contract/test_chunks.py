"""A text may be cut anywhere: whole, in odd pieces or token by token, it ends in the same place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract.harness import WARM_UP, Harness, assert_near

LENGTH = 33
CUTS = {"odd chunks": (5, 11, 1, 16), "token by token": (1,) * LENGTH}


@pytest.mark.parametrize("name", CUTS)
def test_cuts_change_nothing(harness: Harness, name: str) -> None:
    tokens, start = harness.tokens(2, LENGTH), harness.warm(2)
    expected, whole = harness.model(tokens, start)
    state, pieces, first = start, [], 0
    for width in CUTS[name]:
        logits, state = harness.model(tokens[:, first : first + width], state)
        pieces.append(logits)
        first += width
    assert first == LENGTH
    assert_near(np.concatenate(pieces, axis=1), np.asarray(expected))
    assert_near(state, whole)


def test_tokens_are_counted(harness: Harness) -> None:
    tokens = harness.tokens(2, 5)
    _, state = harness.model(tokens, harness.warm(2))
    assert state.num_tokens.tolist() == [WARM_UP + 5] * 2
    _, state = harness.model(tokens, state, jnp.asarray([3, 0], jnp.int32))
    assert state.num_tokens.tolist() == [WARM_UP + 8, WARM_UP + 5]


def test_jit_equals_eager(harness: Harness) -> None:
    tokens, state = harness.tokens(2, 5), jax.tree.map(jnp.asarray, harness.warm(2))
    assert_near(harness.model(tokens, state), harness.model.apply(harness.model.params, tokens, state))


def test_calls_leave_their_arguments_alone(harness: Harness) -> None:
    state = harness.warm(2)
    before = jax.tree.map(jnp.copy, state)
    harness.model(harness.tokens(2, 5), state)
    assert_near(state, before, tolerance=0)


def test_head_of_chosen_positions_equals_all(harness: Harness) -> None:
    model = harness.model
    tokens, state = harness.tokens(2, 5), harness.warm(2)
    logits, _ = model(tokens, state)
    hidden, _ = model.hidden(tokens, state)
    chosen = model.family.head(model.params, hidden[:, jnp.asarray([0, 4])], config=model.config)
    assert_near(chosen, logits[:, jnp.asarray([0, 4])])
    one = model.family.head(model.params, hidden[1, 3], config=model.config)
    assert_near(one, logits[1, 3])
