"""Sampling against numpy: what is chosen, how often, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wkvm_jax.sampling import (
    IN_PROMPT,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    MAX_TOP_LOGPROBS,
    PADDING_LANE,
    Lanes,
    Sampled,
    allocate_lanes,
    sample,
    seed_key,
    top_log_probs,
)

VOCAB = 24
NUM_LANES = 33
FILLED_UP = {
    "stop_ids": (MAX_STOP_IDS, -1),
    "bias_ids": (MAX_LOGIT_BIAS, -1),
    "bias_values": (MAX_LOGIT_BIAS, 0.0),
}
run = jax.jit(sample)


def keys(seeds: Sequence[int]) -> np.ndarray:
    words = np.asarray([[0, seed] for seed in seeds], np.uint32)
    return np.asarray(seed_key(jnp.asarray(words), jnp.zeros(len(seeds), jnp.int32)))


def make_lanes(ids: Sequence[int], history: np.ndarray | None = None, **params: object) -> Lanes:
    """A table in which some lanes run: 100 tokens to go, greedy unless `params` say otherwise.

    A parameter is one value for all, or one for each of `ids`.
    """
    lanes = jax.tree.map(np.array, allocate_lanes(NUM_LANES, VOCAB))
    at = np.asarray(ids)
    lanes.done[at] = False
    for name, value in ({"remaining": 100, "key": keys(range(len(ids)))} | params).items():
        if name in FILLED_UP:
            size, filler = FILLED_UP[name]
            value = np.asarray([[*row, *[filler] * (size - len(row))] for row in value])
        lanes.params.__dict__[name][at] = value
    if history is not None:
        lanes.history[at] = history
    return jax.tree.map(jnp.asarray, lanes)


def random_logits(rows: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((rows, VOCAB))).astype(np.float32)


def draw(
    logits: np.ndarray, lanes: Lanes, ids: Sequence[int], positions: Sequence[int] | int = 0
) -> tuple[Sampled, Lanes]:
    """One step, with results as numpy arrays."""
    at = jnp.asarray(np.broadcast_to(positions, len(ids)), jnp.int32)
    return jax.tree.map(np.asarray, run(jnp.asarray(logits), lanes, jnp.asarray(ids, jnp.int32), at))


def draws(logits: np.ndarray, count: int, **params: object) -> np.ndarray:
    """How often each token comes from one row of logits, over `count` positions of a few seeds."""
    ids = list(range(1, NUM_LANES))
    lanes = make_lanes(ids, **params)
    seen = np.zeros(VOCAB)
    for position in range(-(-count // len(ids))):
        sampled, _ = draw(np.tile(logits, (len(ids), 1)), lanes, ids, position)
        seen += np.bincount(sampled.token, minlength=VOCAB)
    return seen


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def assert_distributed(seen: np.ndarray, probs: np.ndarray) -> None:
    """Pearson's statistic, below its mean plus five deviations; seeds are fixed, so this passes or fails
    for good. Tokens of no probability never come."""
    expected = probs * seen.sum()
    assert seen[probs == 0].sum() == 0
    common = expected >= 5
    statistic = ((seen - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * max(freedom, 1))


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = random_logits(3)
    logits[1, [4, 9]] = 50.0
    sampled, _ = draw(logits, make_lanes([5, 2, 7]), [5, 2, 7])
    assert sampled.token.tolist() == [logits[0].argmax(), 4, logits[2].argmax()]
    assert sampled.live.all() and not (sampled.stopped | sampled.exhausted | sampled.invalid).any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_temperatures(temperature: float) -> None:
    logits = random_logits(1)[0]
    seen = draws(logits, 4000, temperature=temperature)
    assert_distributed(seen, softmax(logits / temperature))


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(1)[0]
    for temperature in (1e-6, 1e-30, 1e-45):
        assert draws(logits, 64, temperature=temperature)[logits.argmax()] == 64


def kept_by_numpy(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Which tokens pass: the `top_k` likeliest, the shortest head of the ranking that holds `top_p`, and
    those at least `min_p` times as likely as the first; each counted on the whole distribution."""
    probs = softmax(logits / temperature)
    order = np.argsort(-probs, kind="stable")
    ranked = probs[order]
    kept = np.ones(VOCAB, bool)
    if top_k > 0:
        kept &= probs >= ranked[min(top_k, VOCAB) - 1]
    if top_p < 1:
        count = int(np.searchsorted(np.cumsum(ranked), top_p)) + 1
        kept &= probs >= ranked[min(count, VOCAB) - 1]
    kept &= probs >= min_p * ranked[0]
    kept[order[0]] = True
    return kept


@hypothesis.given(
    seed=st.integers(0, 1 << 16),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB, 1000]),
    top_p=st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
@hypothesis.settings(max_examples=80)
def test_filters_keep_what_numpy_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """32 draws at a temperature at which all that is kept comes about equally often."""
    logits = random_logits(1, seed)[0]
    probs = np.sort(softmax(logits / temperature))[::-1]
    hypothesis.assume(np.abs(np.cumsum(probs) - top_p).min() > 1e-4)
    kept = kept_by_numpy(logits, temperature, top_k, top_p, min_p)
    seen = draws(logits, 32, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert seen[~kept].sum() == 0
    likeliest = np.flatnonzero(kept)
    if likeliest.size == 1:
        assert seen[likeliest[0]] == seen.sum()


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.95, "min_p": 0.02},
        {"top_k": 3, "temperature": 2.0},
    ],
    ids=str,
)
def test_what_is_kept_is_drawn_in_proportion(params: dict[str, float]) -> None:
    logits = random_logits(1)[0]
    everything = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    kept = kept_by_numpy(logits, **everything)
    assert 1 < kept.sum() < VOCAB
    probs = np.where(kept, softmax(logits / everything["temperature"]), 0)
    assert_distributed(draws(logits, 3000, **everything), probs / probs.sum())


def test_ties_share_a_fate() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[3, 8, 11]] = 2.0
    seen = draws(logits, 600, temperature=1.0, top_k=1)
    assert set(np.flatnonzero(seen)) == {3, 8, 11} and seen[[3, 8, 11]].min() > 130


def test_penalties_are_those_of_numpy() -> None:
    """Seen through the choice: each token in turn is lifted until it just wins or just loses."""
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 4, VOCAB)
    prompt = rng.random(VOCAB) < 0.4
    history = (counts + np.where(prompt, int(IN_PROMPT), 0)).astype(np.uint32)
    logits = random_logits(1, scale=3.0)[0]
    repetition, presence, frequency = 1.4, 0.6, 0.25
    wanted = np.where(
        (counts > 0) | prompt, np.where(logits > 0, logits / repetition, logits * repetition), logits
    )
    wanted = wanted - frequency * counts - presence * (counts > 0)
    params = {"repetition": repetition, "presence": presence, "frequency": frequency}
    assert wanted.argmax() != logits.argmax()
    ids = list(range(1, VOCAB + 1))
    for margin, wins in ((0.01, True), (-0.01, False)):
        lift = wanted.max() - wanted + margin
        biases = {"bias_ids": [[token] for token in range(VOCAB)], "bias_values": [[value] for value in lift]}
        lanes = make_lanes(ids, history, **params, **biases)
        sampled, _ = draw(np.tile(logits, (VOCAB, 1)), lanes, ids)
        chosen = sampled.token == np.arange(VOCAB)
        chosen[wanted.argmax()] = wins
        assert chosen.all() if wins else not chosen.any()


@pytest.mark.parametrize("name, value", [("repetition", 1.3), ("presence", 0.5), ("frequency", -0.5)])
def test_penalties_count_what_was_said(name: str, value: float) -> None:
    """Repetition counts the prompt too; presence and frequency, as OpenAI's, the output alone."""
    logits = np.full((3, VOCAB), -5.0, np.float32)
    logits[:, 7], logits[:, 8] = 2.0, 1.9
    history = np.zeros((3, VOCAB), np.uint32)
    history[0, 7], history[1, 7] = IN_PROMPT, 1
    wanted = {"repetition": [8, 8, 7], "presence": [7, 8, 7], "frequency": [7, 7, 7]}[name]
    sampled, _ = draw(logits, make_lanes([1, 2, 3], history, **{name: value}), [1, 2, 3])
    assert sampled.token.tolist() == wanted


def test_history_grows_with_the_output() -> None:
    lanes = make_lanes([4, 6], np.full((2, VOCAB), IN_PROMPT, np.uint32))
    logits = random_logits(2)
    for _ in range(3):
        sampled, lanes = draw(logits, lanes, [4, 6])
        lanes = jax.tree.map(jnp.asarray, lanes)
    expected = np.full((2, VOCAB), IN_PROMPT, np.uint32)
    expected[[0, 1], sampled.token] += 3
    np.testing.assert_array_equal(np.asarray(lanes.history)[[4, 6]], expected)
    assert np.asarray(lanes.history)[[1, 2, 3, 5]].sum() == 0
    assert lanes.params.remaining[jnp.asarray([4, 6])].tolist() == [97, 97]
    assert lanes.token[jnp.asarray([4, 6])].tolist() == sampled.token.tolist()


def test_biases_move_their_row_alone() -> None:
    logits = random_logits(3)
    logits[:, [5, 9]] = 0.0
    biases = {"bias_ids": [[5, 9], [], [9]], "bias_values": [[99.0, 100.0], [], [-100.0]]}
    sampled, _ = draw(logits, make_lanes([1, 2, 3], **biases), [1, 2, 3])
    assert sampled.token[0] == 9 and sampled.token[1] == logits[1].argmax()
    logits[2, 9] = -np.inf
    assert sampled.token[2] == logits[2].argmax()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_wait_for_min_tokens(temperature: float) -> None:
    """Until then they do not come at all; the first that comes afterwards stops the lane."""
    logits = random_logits(1)[0]
    logits[[3, 5]] = 30.0
    lanes = make_lanes([2], stop_ids=[[3, 5]], min_remaining=2, temperature=temperature)
    said = []
    for position in range(4):
        sampled, lanes = draw(logits[None], lanes, [2], position)
        lanes = jax.tree.map(jnp.asarray, lanes)
        said.append((int(sampled.token[0]), bool(sampled.live[0]), bool(sampled.stopped[0])))
    assert [token in (3, 5) for token, _, _ in said[:3]] == [False, False, True]
    assert [(live, stopped) for _, live, stopped in said] == [(True, False)] * 2 + [
        (True, True),
        (False, False),
    ]
    assert bool(lanes.done[2])


def test_the_last_token_exhausts_a_lane() -> None:
    lanes = make_lanes([2], remaining=2)
    for position, exhausted in enumerate([False, True]):
        sampled, lanes = draw(random_logits(1), lanes, [2], position)
        lanes = jax.tree.map(jnp.asarray, lanes)
        assert sampled.exhausted.tolist() == [exhausted] and sampled.live.all()
    assert draw(random_logits(1), lanes, [2])[0].live.tolist() == [False]


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_ends_alone(fault: float) -> None:
    """Its neighbours' tokens, log-probabilities and lanes keep their bits."""
    ids = [4, 1, 7, 2]
    params = {
        "temperature": [0.0, 1.0, 1.0, 0.7],
        "top_p": [1.0, 0.9, 1.0, 0.5],
        "presence": [0.0, 0.5, 0.0, 0.0],
        "wants_logprobs": True,
    }
    logits, lanes = random_logits(4), make_lanes(ids, **params)
    broken = logits.copy()
    broken[2, 5] = fault
    clean, clean_lanes = draw(logits, lanes, ids)
    sampled, after = draw(broken, lanes, ids)
    assert sampled.invalid.tolist() == [False, False, True, False] and bool(after.done[7])
    rows, others = [0, 1, 3], [lane for lane in range(NUM_LANES) if lane != 7]
    for one, other in zip(jax.tree.leaves(sampled), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(one[rows], other[rows])
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(clean_lanes), strict=True):
        np.testing.assert_array_equal(one[others], other[others])


def test_done_lanes_and_padding_keep_every_field() -> None:
    lanes = make_lanes([3, 5], temperature=1.0)
    lanes = lanes.replace(done=lanes.done.at[5].set(True), token=lanes.token.at[5].set(17))
    ids = [3, 5, *[PADDING_LANE] * 6]
    logits = random_logits(len(ids))
    logits[4:] = np.nan
    sampled, after = draw(logits, lanes, ids)
    assert sampled.live.tolist() == [True] + [False] * 7
    assert not (sampled.stopped | sampled.exhausted | sampled.invalid)[1:].any()
    others = [lane for lane in range(NUM_LANES) if lane != 3]
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(lanes), strict=True):
        np.testing.assert_array_equal(one[others], np.asarray(other)[others])
    assert not after.done[3]


def test_log_probabilities_are_the_model_s_own() -> None:
    """Before temperature, penalties and bias; the likeliest tokens in order."""
    logits = random_logits(2)
    params = {"temperature": 3.0, "bias_ids": [[2], [2]], "bias_values": [[50.0], [50.0]]}
    lanes = make_lanes([1, 2], wants_logprobs=[True, False], **params)
    sampled, _ = draw(logits, lanes, [1, 2])
    assert sampled.token.tolist() == [2, 2]
    for row in range(2):
        wanted = np.log(softmax(logits[row]))
        order = np.argsort(-wanted, kind="stable")[:MAX_TOP_LOGPROBS]
        np.testing.assert_allclose(sampled.logprob[row], wanted[2], rtol=1e-5)
        assert sampled.top_ids[row].tolist() == order.tolist()
        np.testing.assert_allclose(sampled.top_logprobs[row], wanted[order], rtol=1e-5)


def test_log_probabilities_nobody_asked_for_are_zeros() -> None:
    sampled, _ = draw(random_logits(2), make_lanes([1, 2]), [1, 2])
    assert not sampled.logprob.any() and not sampled.top_ids.any() and not sampled.top_logprobs.any()


def test_a_small_vocabulary_has_fewer_likeliest_tokens() -> None:
    chosen, ids, values = top_log_probs(jnp.zeros((1, 3)), jnp.asarray([1], jnp.int32))
    assert ids.shape == values.shape == (1, 3)
    np.testing.assert_allclose(chosen, np.log(1 / 3), rtol=1e-6)


def test_a_draw_depends_on_seed_choice_and_position_alone() -> None:
    """Not on row, lane, neighbours or the number of rows."""
    logits = np.tile(random_logits(1, scale=0.5), (32, 1))
    params = {"temperature": 1.0, "top_p": 0.95, "key": keys([7])[0]}
    alone = [
        int(draw(logits[:1], make_lanes([1], **params), [1], position)[0].token[0]) for position in range(32)
    ]
    assert len(set(alone)) > 8
    ids = list(range(1, 33))
    together = draw(logits, make_lanes(ids, **params), ids, range(32))[0].token.tolist()
    assert together == alone
    order = np.random.default_rng(0).permutation(32)
    for rows in (order, order[:16], order[:4], order[:1]):
        lanes_of_rows = [ids[::-1][row] for row in rows]
        mixed = make_lanes(ids, **(params | {"temperature": 1.0}))
        token = draw(logits[: len(rows)], mixed, lanes_of_rows, rows)[0].token
        assert token.tolist() == [alone[row] for row in rows]


def test_seeds_and_choices_have_streams_of_their_own() -> None:
    words = jnp.asarray([[0, 1], [0, 1], [0, 2], [1, 1]], jnp.uint32)
    streams = np.asarray(seed_key(words, jnp.asarray([0, 1, 0, 0], jnp.int32)))
    assert len({tuple(stream) for stream in streams}) == 4
    ids, logits = [1, 2, 3, 4], np.zeros((4, VOCAB), np.float32)
    lanes = make_lanes(ids, temperature=1.0, key=streams)
    said = np.stack([draw(logits, lanes, ids, position)[0].token for position in range(200)])
    for one in range(4):
        for other in range(one):
            assert (said[:, one] == said[:, other]).mean() < 3 / VOCAB
    again = seed_key(words[:1], jnp.zeros(1, jnp.int32))
    np.testing.assert_array_equal(again[0], streams[0])


def test_positions_far_along() -> None:
    """A conversation of a billion tokens still draws anew."""
    logits = np.zeros((32, VOCAB), np.float32)
    ids = list(range(1, 33))
    lanes = make_lanes(ids, temperature=1.0, key=keys([7])[0])
    said = draw(logits, lanes, ids, range(1 << 30, (1 << 30) + 32))[0].token
    assert len(set(said.tolist())) > 8


def test_neighbours_wishes_leave_a_row_s_bits_alone() -> None:
    """Penalties, bias, filters or a ban anywhere in the step run other code, with the same outcome here."""
    logits = random_logits(2)
    plain = make_lanes([1, 2], temperature=1.0, wants_logprobs=True)
    wishes = [
        {"repetition": [1.0, 2.0]},
        {"bias_ids": [[], [3]], "bias_values": [[], [5.0]]},
        {"top_k": [0, 3]},
        {"min_p": [0.0, 0.3]},
        {"stop_ids": [[], [4]], "min_remaining": [0, 9]},
        {"temperature": [1.0, 0.0]},
    ]
    for position in range(8):
        wanted, _ = draw(logits, plain, [1, 2], position)
        for wish in wishes:
            lanes = make_lanes([1, 2], **({"temperature": 1.0, "wants_logprobs": True} | wish))
            sampled, _ = draw(logits, lanes, [1, 2], position)
            for one, other in zip(jax.tree.leaves(sampled), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_array_equal(one[0], other[0], err_msg=str(wish))
