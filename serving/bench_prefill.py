"""`wkvm bench prefill`: tokens a second of reading prompts, beside what the products alone would allow."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from wkvm_jax.api import Engine
from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.engine import Engine as RunningEngine
from wkvm_jax.engine.step import Device, PromptRows, Sizes
from wkvm_jax.models.model import Model
from wkvm_jax.models.stacking import LAYERS
from wkvm_jax.sampling import NUM_RESERVED_LANES
from wkvm_jax.serving.bench import chosen_model, describe, platform
from wkvm_jax.state import NUM_RESERVED_SLOTS, Batch


@dataclasses.dataclass(frozen=True)
class PrefillResult:
    """One shape's medians."""

    rows: int
    length: int
    step_tokens_per_s: float
    engine_tokens_per_s: float
    step_ms: float
    floor_ms: float
    times_floor: float


def bench_prefill(arguments: argparse.Namespace) -> int:
    """Bare step and engine, for each number of rows and each length."""
    model = chosen_model(arguments)
    flop_per_s = product_flop_per_s(jax.tree.leaves(model.params)[0].dtype)
    if not arguments.json:
        print(describe(model, arguments.rounds))
        print(
            f"{'rows':>5} {'length':>8} {'step tok/s':>12} {'engine tok/s':>13} {'step ms':>9} "
            f"{'floor ms':>9} {'x floor':>8}"
        )
    for rows in arguments.rows:
        for length in arguments.lengths:
            r = prefill_speed(model, rows, length, arguments.rounds, flop_per_s)
            if arguments.json:
                print(json.dumps(dataclasses.asdict(r) | platform(model, arguments.rounds)), flush=True)
                continue
            print(
                f"{r.rows:>5} {r.length:>8} {r.step_tokens_per_s:>12,.0f} {r.engine_tokens_per_s:>13,.0f} "
                f"{r.step_ms:>9.2f} {r.floor_ms:>9.2f} {r.times_floor:>8.2f}", flush=True,
            )  # fmt: skip
    if not arguments.json:
        print(
            f"floor: the layers' products alone, at the {flop_per_s / 1e12:,.1f} TFLOP/s of a large product"
        )
    return 0


def prefill_speed(model: Model, rows: int, length: int, rounds: int, flop_per_s: float) -> PrefillResult:
    """Tokens a second of `rows` prompts of one length: as one bare rectangle, and through the engine."""
    bare = BarePrompt(model, rows, length)
    bare.seconds()
    step_s = statistics.median(bare.seconds() for _ in range(rounds))
    max_rows = 1 << (rows - 1).bit_length()
    with Engine(model, config=EngineConfig(num_slots=2 * max_rows + 2, max_rows=max_rows)) as engine:
        _engine_seconds(engine, rows, length)
        engine_s = statistics.median(_engine_seconds(engine, rows, length) for _ in range(rounds))
    tokens = rows * length
    floor_s = 2 * sum(leaf.size for leaf in jax.tree.leaves(model.params[LAYERS])) * tokens / flop_per_s
    return PrefillResult(
        rows=rows,
        length=length,
        step_tokens_per_s=tokens / step_s,
        engine_tokens_per_s=tokens / engine_s,
        step_ms=1e3 * step_s,
        floor_ms=1e3 * floor_s,
        times_floor=step_s / floor_s,
    )


class BarePrompt:
    """The jitted prompt step alone: the engine's program, for a rectangle full of tokens."""

    def __init__(self, model: Model, rows: int, length: int) -> None:
        self._device = Device(model, Sizes(rows + NUM_RESERVED_SLOTS, 0, NUM_RESERVED_LANES, 0))
        self._shape = (rows, length)
        slots = np.arange(rows, dtype=np.int32) + NUM_RESERVED_SLOTS
        tokens = _random_tokens(model.config.vocab_size, rows, length)
        batch = Batch(
            tokens=jnp.asarray(tokens),
            lengths=jnp.full((rows,), length, jnp.int32),
            read_slots=jnp.asarray(slots),
            write_slots=jnp.asarray(slots),
            page_table=jnp.zeros((rows, 0), jnp.int32),
        )
        self._rows = PromptRows(batch, batch.tokens, jnp.asarray(False))

    def seconds(self) -> float:
        """Seconds until the states are there."""
        jax.block_until_ready(self._device.arena)
        started = time.perf_counter()
        self._device.run_prompt(self._rows, self._shape)
        jax.block_until_ready(self._device.arena)
        return time.perf_counter() - started


def product_flop_per_s(dtype: jnp.dtype) -> float:
    """Multiplications and additions a second of a large square product; the best of five."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    matrix = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
    product = jax.jit(lambda x: jnp.matmul(x, matrix))
    result = jax.block_until_ready(product(matrix))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        result = jax.block_until_ready(product(matrix))
        seconds.append(time.perf_counter() - started)
    assert result.shape == (size, size)
    return 2 * size**3 / min(seconds)


def _engine_seconds(engine: RunningEngine, rows: int, length: int) -> float:
    prompts = _random_tokens(engine.model.config.vocab_size, rows, length).tolist()
    started = time.perf_counter()
    requests = [engine.submit(prompt, max_tokens=0) for prompt in prompts]
    for request in requests:
        request.result()
    return time.perf_counter() - started


def _random_tokens(vocab_size: int, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, vocab_size, (rows, length)).astype(np.int32)
