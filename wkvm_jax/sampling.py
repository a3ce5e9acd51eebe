"""Sampling on the device: a pure function of logits, a lane's parameters, its position and its history.

A lane is a running request's row in a small table beside the arena. The table keeps what a step needs to
choose and judge a token without the host: the token to consume next, limits, stop ids, the random key, and
counts of the tokens seen. Randomness is counter-based: the token after position `p` of a conversation is
drawn with `fold_in(key, p)`, so a resumed conversation continues its stream and a fork may share it.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

PADDING_LANE = 0
"""Always done; padded rows use it."""
NUM_RESERVED_LANES = 1
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 300
RANK_BITS = 2
"""Bits of a rank that one pass over the vocabulary finds."""
MAX_TOP_LOGPROBS = 20

IN_PROMPT = np.uint32(1 << 31)
"""Bit of a history word that says the token stands in the prompt; the bits below count it in the output."""


class LaneParams(flax.struct.PyTreeNode):
    """What a request asked for, one entry a lane.

    Attributes:
        remaining: tokens the lane may still sample.
        min_remaining: tokens it must still sample before stop ids count.
        key: raw threefry key of the request's seed and choice.
        temperature: 0 takes the most likely token.
        top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
        repetition: 1 is off (CTRL, arXiv 1909.05858). presence, frequency: 0 is off (OpenAI's).
        stop_ids: filled up with -1.
        bias_ids, bias_values: logit bias, filled up with -1 and 0.
        wants_logprobs: whether the request asked for log-probabilities.
    """

    remaining: Int32[Array, " n"]
    min_remaining: Int32[Array, " n"]
    key: UInt32[Array, "n 2"]
    temperature: Float32[Array, " n"]
    top_k: Int32[Array, " n"]
    top_p: Float32[Array, " n"]
    min_p: Float32[Array, " n"]
    repetition: Float32[Array, " n"]
    presence: Float32[Array, " n"]
    frequency: Float32[Array, " n"]
    stop_ids: Int32[Array, "n stops"]
    bias_ids: Int32[Array, "n biases"]
    bias_values: Float32[Array, "n biases"]
    wants_logprobs: Bool[Array, " n"]


class Lanes(flax.struct.PyTreeNode):
    """The table of running requests.

    Attributes:
        token: the token that the lane's next step consumes.
        done: nothing more is sampled; the lane's writes go to the trash slot.
        params: see `LaneParams`.
        history: a word for each token id: `IN_PROMPT` and a count.
    """

    token: Int32[Array, " n"]
    done: Bool[Array, " n"]
    params: LaneParams
    history: UInt32[Array, "n vocab"]


class Sampled(flax.struct.PyTreeNode):
    """One step's outcome, one entry a row.

    Attributes:
        token: the token sampled; of no meaning where `live` is false.
        live: whether the row was still running.
        stopped: the token is one of the row's stop ids.
        exhausted: it was the last token that the row may sample.
        invalid: the row's logits hold NaN or infinity; the row is done.
        logprob: of the token under the model's own distribution (before penalties and temperature).
        top_ids, top_logprobs: the most likely tokens; zeros unless a row of the step asked.
    """

    token: Int32[Array, " b"]
    live: Bool[Array, " b"]
    stopped: Bool[Array, " b"]
    exhausted: Bool[Array, " b"]
    invalid: Bool[Array, " b"]
    logprob: Float32[Array, " b"]
    top_ids: Int32[Array, "b top"]
    top_logprobs: Float32[Array, "b top"]


def idle_fields(num_lanes: int) -> dict[str, np.ndarray]:
    """The fields of `LaneParams` for lanes that nobody uses: greedy, nothing remaining."""

    def full(value: int, dtype: type, width: int | None = None) -> np.ndarray:
        return np.full((num_lanes,) if width is None else (num_lanes, width), value, dtype)

    return {
        "remaining": full(0, np.int32),
        "min_remaining": full(0, np.int32),
        "key": full(0, np.uint32, 2),
        "temperature": full(0, np.float32),
        "top_k": full(0, np.int32),
        "top_p": full(1, np.float32),
        "min_p": full(0, np.float32),
        "repetition": full(1, np.float32),
        "presence": full(0, np.float32),
        "frequency": full(0, np.float32),
        "stop_ids": full(-1, np.int32, MAX_STOP_IDS),
        "bias_ids": full(-1, np.int32, MAX_LOGIT_BIAS),
        "bias_values": full(0, np.float32, MAX_LOGIT_BIAS),
        "wants_logprobs": full(False, bool),
    }


def allocate_lanes(num_lanes: int, vocab_size: int) -> Lanes:
    """An empty table; every lane is done."""
    return Lanes(
        token=jnp.zeros((num_lanes,), jnp.int32),
        done=jnp.ones((num_lanes,), bool),
        params=LaneParams(**{name: jnp.array(field) for name, field in idle_fields(num_lanes).items()}),
        history=jnp.zeros((num_lanes, vocab_size), jnp.uint32),
    )


def seed_key(seed: UInt32[Array, "n 2"], choice: Int32[Array, " n"]) -> UInt32[Array, "n 2"]:
    """Raw keys: choice `i` of a request uses `fold_in(seed, i)`."""

    def one(words: Array, index: Array) -> Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, index))

    return jax.vmap(one)(seed, choice)


_Chosen = tuple[Array, Array, Array, Array]
"""Each row's token, its log-probability, and the likeliest tokens with theirs."""


def sample(
    logits: Float32[Array, "b vocab"],
    lanes: Lanes,
    lane_ids: Int32[Array, " b"],
    positions: Int32[Array, " b"],
    *,
    only_likeliest: bool = False,
) -> tuple[Sampled, Lanes]:
    """Chooses each row's next token and updates its lane.

    Args:
        logits: of the model, one row a lane.
        lanes: the table.
        lane_ids: each row's lane; rows that pad the rectangle name `PADDING_LANE`.
        positions: tokens that each row's conversation has consumed.
        only_likeliest: every row takes the most likely token, with nothing else to say of it: the host may
            know that, and a GPU is spared the choice, which costs it some 60 us.
    """
    params = jax.tree.map(lambda leaf: leaf[lane_ids], lanes.params)
    live = ~lanes.done[lane_ids]
    invalid = live & ~jnp.all(jnp.isfinite(logits), axis=-1)
    random = params.temperature > 0
    shaped = _adjusted(params) | (random & _filtered(params))

    def drawn(with_shape: bool, with_logprobs: bool) -> _Chosen:
        adjusted = _adjust(logits, params, lanes.history, lane_ids) if with_shape else logits
        token = jnp.where(random, _draw(adjusted, params, positions, with_shape), _likeliest(adjusted))
        return (token, *(top_log_probs(logits, token) if with_logprobs else _no_log_probs(logits)))

    # One choice for the whole step, and nothing in it that has a GPU's host wait: the step stays one graph.
    branches: list[Callable[[], _Chosen]] = [
        lambda: (_likeliest(logits), *_no_log_probs(logits)),
        lambda: drawn(with_shape=False, with_logprobs=False),
        lambda: drawn(with_shape=True, with_logprobs=False),
        lambda: drawn(with_shape=True, with_logprobs=True),
    ]
    needs = jnp.stack([random, shaped, params.wants_logprobs])
    branch = jnp.max(jnp.where(live & needs, jnp.arange(1, 4)[:, None], 0))
    chosen = branches[0]() if only_likeliest else jax.lax.switch(branch, branches)
    token, logprob, top_ids, top_logprobs = chosen
    stopped = live & jnp.any(token[:, None] == params.stop_ids, axis=-1) & (params.min_remaining <= 0)
    exhausted = live & (params.remaining <= 1)
    sampled = Sampled(token, live, stopped, exhausted, invalid, logprob, top_ids, top_logprobs)
    return sampled, _advanced(lanes, lane_ids, sampled)


def _advanced(lanes: Lanes, lane_ids: Array, sampled: Sampled) -> Lanes:
    """The table after the step. Lanes that were done keep every field, so duplicates of the padding
    lane write equal values."""
    live = sampled.live
    done = ~live | sampled.stopped | sampled.exhausted | sampled.invalid
    spent = live.astype(jnp.int32)
    return lanes.replace(
        token=lanes.token.at[lane_ids].set(jnp.where(live, sampled.token, lanes.token[lane_ids])),
        done=lanes.done.at[lane_ids].set(done),
        params=lanes.params.replace(
            remaining=lanes.params.remaining.at[lane_ids].add(-spent),
            min_remaining=lanes.params.min_remaining.at[lane_ids].add(-spent),
        ),
        history=lanes.history.at[lane_ids, sampled.token].add(spent.astype(jnp.uint32)),
    )


def _likeliest(logits: Float32[Array, "b vocab"]) -> Int32[Array, " b"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _penalised(params: LaneParams) -> Bool[Array, " b"]:
    return (params.repetition != 1) | (params.presence != 0) | (params.frequency != 0)


def _adjusted(params: LaneParams) -> Bool[Array, " b"]:
    """Whose logits `_adjust` changes."""
    biased = jnp.any(params.bias_ids >= 0, axis=-1)
    return _penalised(params) | biased | (params.min_remaining > 0)


def _filtered(params: LaneParams) -> Bool[Array, " b"]:
    return (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)


def _adjust(logits: Array, params: LaneParams, history: Array, lane_ids: Array) -> Array:
    """Logits after penalties, bias, and the ban of stop ids that `min_tokens` asks for.

    Rows that asked for none of a part keep their bits.
    """
    rows, vocab = jnp.arange(logits.shape[0])[:, None], logits.shape[1]
    words = history[lane_ids]
    count = (words & ~IN_PROMPT).astype(jnp.float32)
    repetition = params.repetition[:, None]
    seen = jnp.where(logits > 0, logits / repetition, logits * repetition)
    result = jnp.where(words > 0, seen, logits)
    result = result - params.frequency[:, None] * count - params.presence[:, None] * (count > 0)
    logits = jnp.where(_penalised(params)[:, None], result, logits)

    biased = jnp.where(params.bias_ids < 0, vocab, params.bias_ids)
    logits = logits.at[rows, biased].add(params.bias_values, mode="drop")
    banned = (params.stop_ids >= 0) & (params.min_remaining > 0)[:, None]
    banned_ids = jnp.where(banned, params.stop_ids, vocab)
    return logits.at[rows, banned_ids].set(-jnp.inf, mode="drop")


def _draw(
    logits: Float32[Array, "b vocab"], params: LaneParams, positions: Array, with_filters: bool
) -> Int32[Array, " b"]:
    """Gumbel-max draws at each row's temperature, from what passes its filters."""
    scaled = logits / jnp.maximum(params.temperature, 1e-6)[:, None]

    def noise(words: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (scaled.shape[1],), jnp.float32)

    noisy = scaled + jax.vmap(noise)(params.key, positions)
    if with_filters:
        lowest = jnp.where(_filtered(params), _lowest_kept(scaled, params), 0)
        kept = (_ranks(scaled) >= lowest[:, None]) | (scaled >= jnp.max(scaled, axis=-1, keepdims=True))
        noisy = jnp.where(kept, noisy, -jnp.inf)
    return _likeliest(noisy)


def _lowest_kept(scaled: Float32[Array, "b vocab"], params: LaneParams) -> UInt32[Array, " b"]:
    """The rank from which tokens pass top-k, top-p (arXiv 1904.09751) and min-p (arXiv 2407.01082).

    Ties share a fate. The most likely token may be below it, and passes all the same: `top_p=0` is greedy.
    """
    vocab = scaled.shape[1]
    ranks, probs = _ranks(scaled), jax.nn.softmax(scaled, axis=-1)
    best = jnp.max(scaled, axis=-1, keepdims=True)
    relative = best + jnp.log(params.min_p)[:, None]
    by_count = _highest_with(ranks, jnp.ones_like(scaled), jnp.minimum(params.top_k, vocab))
    by_mass = _highest_with(ranks, probs, params.top_p)
    lowest = _ranks(relative)[:, 0]
    lowest = jnp.where(params.top_k > 0, jnp.maximum(lowest, by_count), lowest)
    return jnp.where(params.top_p < 1, jnp.maximum(lowest, by_mass), lowest)


def _ranks(x: Float32[Array, ...]) -> UInt32[Array, ...]:
    """Integers in the order of the numbers; both zeros have one rank."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _highest_with(
    ranks: UInt32[Array, "b vocab"], weights: Float32[Array, "b vocab"], wanted: Array
) -> UInt32[Array, " b"]:
    """Each row's highest rank such that the tokens from there on weigh as much as wanted.

    Found digit by digit from the top: a sort of the vocabulary takes a GPU longer, and its host has to wait.
    """
    found = jnp.zeros(ranks.shape[:1], jnp.uint32)
    for shift in range(32 - RANK_BITS, -1, -RANK_BITS):
        digits = jnp.arange(1, 1 << RANK_BITS, dtype=jnp.uint32) << shift
        tried = found[:, None] | digits
        above = ranks[:, None, :] >= tried[:, :, None]
        weight = jnp.sum(jnp.where(above, weights[:, None, :], 0.0), axis=-1)
        enough = jnp.sum(weight >= wanted[:, None], axis=-1).astype(jnp.uint32)
        found = found | (enough << shift)
    return found


def _no_log_probs(logits: Array) -> tuple[Array, Array, Array]:
    rows, vocab = logits.shape
    shape = (rows, min(MAX_TOP_LOGPROBS, vocab))
    return jnp.zeros((rows,), jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def top_log_probs(
    logits: Float32[Array, "b vocab"], token: Int32[Array, " b"]
) -> tuple[Float32[Array, " b"], Int32[Array, "b top"], Float32[Array, "b top"]]:
    """Log-probability of each row's token, and the row's most likely tokens with theirs."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    ids = _top_ids(log_probs, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    values = jnp.take_along_axis(log_probs, ids, axis=-1)
    chosen = jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
    return chosen, ids, values


def _top_ids(x: Float32[Array, "b vocab"], count: int) -> Int32[Array, "b top"]:
    """Where the largest numbers of each row are, the first of equals first."""

    def at_once(x: Array) -> Array:
        return jax.lax.top_k(x, count)[1].astype(jnp.int32)

    def one_by_one(x: Array) -> Array:
        ranks, ids = _ranks(x), []
        rows = jnp.arange(x.shape[0])
        for _ in range(count):
            ids.append(jnp.argmax(ranks, axis=-1).astype(jnp.int32))
            ranks = ranks.at[rows, ids[-1]].set(0)
        return jnp.stack(ids, axis=-1)

    # A GPU sorts for top_k, and has its host wait for that.
    result: Array = jax.lax.platform_dependent(x, cpu=at_once, default=one_by_one)
    return result
