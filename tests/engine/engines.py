"""Small models, engines that tests share, and the plain loop that engines are held against."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tests.families import rwkv7_params
from tests.families.toy import toy_model
from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.engine import Engine
from wkvm_jax.engine.request import Output, Request, SamplingParams
from wkvm_jax.models import rwkv7
from wkvm_jax.models.model import Model
from wkvm_jax.models.registry import RWKV7
from wkvm_jax.state import State
from wkvm_jax.store.memory import MemoryRecords
from wkvm_jax.tokenizers.byte_level import ByteTokenizer

MAX_LENGTH = 256
"""Tokens that a test's conversation may reach in a paged family."""
CONFIG = EngineConfig(
    num_slots=24,
    max_rows=8,
    prefill_chunks=(4, 16),
    tokens_per_slot=MAX_LENGTH,
    max_prompt_tokens=5000,
    max_tokens_limit=4000,
)
DETERMINISTIC = EngineConfig(num_slots=40, max_rows=32, deterministic=True, tokens_per_slot=MAX_LENGTH)
ROUNDING = 1e-4
"""How far apart two logits or log-probabilities may lie that were computed in different shapes; they are of
order 1, and float32 carries 6e-8 of that, through some hundred sums."""
LETTERS = {ord(letter): 40.0 for letter in "abcdefghijklmnopqrstuvwxyz"}
"""A logit bias that makes random weights write letters."""

_RWKV7_CONFIG = rwkv7.Config(
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    head_dim=16,
    intermediate_size=96,
    value_dim=64,
    decay_rank=8,
    iclr_rank=8,
    value_rank=8,
    gate_rank=16,
)


@functools.cache
def model_named(name: str) -> Model:
    """A model with random weights: "toy" has leaves of each kind, "rwkv7" none that is paged."""
    if name == "toy":
        return toy_model()
    params = rwkv7_params(_RWKV7_CONFIG, jax.random.key(7))
    return Model(RWKV7, _RWKV7_CONFIG, params, ByteTokenizer(), name=name)


def start(
    model: Model, config: EngineConfig = CONFIG, mesh: jax.sharding.Mesh | None = None, **changes: object
) -> Engine:
    """A fresh engine, to be closed by whoever asked for it."""
    return Engine(model, dataclasses.replace(config, **changes), MemoryRecords(), mesh)


@contextlib.contextmanager
def running(model: Model, config: EngineConfig = CONFIG, **changes: object) -> Iterator[Engine]:
    """A fresh engine for one test; nothing may be left in it at the end."""
    with start(model, config, **changes) as engine:
        yield engine
        assert_empty(engine)


def assert_empty(engine: Engine) -> None:
    """Once nothing runs and no state is kept, every slot, page and row is free."""
    for record in list(engine.states.list()):
        engine.states.pin(record.handle, False)
        engine.states.delete(record.handle)
    # A prefix whose choices were cancelled ends with the next turn.
    wait_until(lambda: engine.scheduler.idle, 5)
    with engine.lock:
        assert not engine._live
        for pool in (*engine.pools, engine._lanes):
            assert pool.num_free == pool.num_usable
    assert engine.slots().free == engine.slots().total


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    ids = np.random.default_rng(seed).integers(1, 256, length)
    return [int(token_id) for token_id in ids]


class Plain:
    """A model that is called for one token after the other, as a user's loop would."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._after: dict[tuple[int, ...], tuple[np.ndarray, State]] = {}

    def after(self, tokens: Sequence[int]) -> tuple[np.ndarray, State]:
        """The last token's logits and the state after all tokens."""
        key = tuple(tokens)
        known = next((at for at in range(len(key), 0, -1) if key[:at] in self._after), 0)
        logits, state = self._after[key[:known]] if known else (np.empty(0), self.fresh())
        for at in range(known, len(key)):
            result, state = self.model(jnp.array([key[at : at + 1]], jnp.int32), state)
            logits = np.asarray(result[0, -1])
            self._after[key[: at + 1]] = logits, state
        if len(self._after) > 2000:
            self._after.clear()
        return logits, state

    def fresh(self) -> State:
        return self.model.init_state(1, max_length=MAX_LENGTH)

    def logits(self, tokens: Sequence[int], start: int) -> np.ndarray:
        """Logits from which the tokens from `start` on were chosen."""
        return np.stack([self.after(tokens[:at])[0] for at in range(start, len(tokens))])

    def log_probs(self, tokens: Sequence[int], start: int) -> np.ndarray:
        return np.asarray(jax.nn.log_softmax(self.logits(tokens, start)))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely tokens after a prompt."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.after(tokens)[0].argmax()))
        return tokens[len(prompt) :]

    def assert_greedy(self, prompt: Sequence[int], output_ids: Sequence[int]) -> None:
        """Every token is the most likely one, or tied with it within rounding."""
        if not output_ids:
            return
        logits = self.logits([*prompt, *output_ids], len(prompt))
        chosen = logits[np.arange(len(output_ids)), list(output_ids)]
        np.testing.assert_array_less(logits.max(axis=-1) - chosen, ROUNDING)

    def assert_state(self, state: State, tokens: Sequence[int]) -> None:
        """The state has consumed exactly these tokens."""
        expected = self.after(tokens)[1] if tokens else self.fresh()
        assert state.num_tokens.tolist() == [len(tokens)]
        for name, leaf in expected.leaves.items():
            assert_near(state.leaves[name], leaf)
        for name, pool in expected.pools.items():
            flat, want = _by_token(state.pools[name]), _by_token(pool)
            assert_near(flat[: len(tokens)], want[: len(tokens)])


def _by_token(pool: Array) -> np.ndarray:
    """A row's pages as `[token, layer, ...]`."""
    by_token = np.moveaxis(np.asarray(pool), 2, 1)
    return by_token.reshape(-1, *by_token.shape[2:])


def assert_near(actual: Array, expected: Array) -> None:
    limit = ROUNDING * max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)


@functools.cache
def plain_named(name: str) -> Plain:
    return Plain(model_named(name))


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Waits for something that another thread brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


def prefilling(engine: Engine, request: Request) -> bool:
    """Whether a request has read some of its prompt, and not all."""
    with engine.lock:
        sequence = engine.sequence_of(request)
        return sequence is not None and 0 < sequence.num_computed < sequence.num_prompt - 1


def outputs(requests: Sequence[Request], timeout_s: float = 60.0) -> list[Output]:
    """What became of requests, none of which may take for ever."""
    return [request.result(timeout_s) for request in requests]


def greedy_params(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)
