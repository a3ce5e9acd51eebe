"""Once an engine is warm, nothing compiles, whatever is asked of it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest

from tests.engine.engines import (
    CONFIG,
    LETTERS,
    Plain,
    greedy_params,
    model_named,
    outputs,
    prompt_of,
    start,
    wait_until,
)
from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.engine import Engine
from wkvm_jax.models.model import Model

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """What the process compiles from here on; nothing that it compiled for single operations is left."""
    jax.clear_caches()
    events: list[str] = []

    def listen(event: str, duration_s: float, **fields: object) -> None:
        if event == COMPILED:
            events.append(str(fields.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_compilations_are_counted(compilations: list[str]) -> None:
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7))
    assert compilations


def mixed_traffic(engine: Engine, model: Model, plain: Plain) -> None:
    every_penalty = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    fields: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "seed": 3},
        every_penalty,
        {"logprobs": 5, "prompt_logprobs": True},
        {"logit_bias": LETTERS, "stop": ["qu", "x"], "min_tokens": 3},
        {"stop_token_ids": [9, 10], "min_tokens": 2},
        {"save_as": "kept", "stop": "\0never"},
    ]
    requests = [
        engine.submit(prompt_of(length, length), **{"max_tokens": 9, "ignore_eos": True, **one})
        for one in fields
        for length in (1, 2, 5, 17, 40, 77)
    ]
    requests += engine.submit_choices(prompt_of(21), 5, params=greedy_params(4, **every_penalty, logprobs=2))
    snapshot_of = engine.submit(prompt_of(5), max_tokens=200, ignore_eos=True)
    wait_until(lambda: snapshot_of.num_tokens > 5)
    engine.states.snapshot(snapshot_of, "photo")
    engine.states.fork("photo", "child", n=6)
    requests += [engine.submit(prompt_of(3), state="child", max_tokens=4) for _ in range(6)]
    requests += engine.submit_choices([], 3, state="photo", params=greedy_params(3))
    cancelled = engine.submit(prompt_of(100), max_tokens=100)
    cancelled.cancel()
    outputs([*requests, snapshot_of])
    for length in (1, 5, 12, 33):
        engine.states.create("read", prompt_of(length))
        engine.states.put("written", engine.states.load("read"))
        engine.states.load("written", max_length=100)
        outputs([engine.submit([1, 2], state="written", max_tokens=3)])
    engine.set_params(model.params)
    outputs([engine.submit("again", max_tokens=2)])


def test_a_warm_engine_compiles_nothing(
    engine: Engine, model: Model, plain: Plain, compilations: list[str]
) -> None:
    mixed_traffic(engine, model, plain)
    assert compilations == []


def test_an_engine_is_warm_at_once(model: Model, plain: Plain, compilations: list[str]) -> None:
    """Nor does anything that a first engine compiled help a second one."""
    steps: list[tuple[int, int]] = []
    with start(model) as engine:
        engine.warm_up(lambda done, total: steps.append((done, total)))
        assert [done for done, _ in steps] == list(range(1, steps[-1][1] + 1))
        compilations.clear()
        mixed_traffic(engine, model, plain)
        assert compilations == []


def test_only_the_shapes_that_are_needed() -> None:
    """Without warming up, a request compiles a step a chunk's width and one to sample, and small ones."""
    with start(model_named("rwkv7"), CONFIG) as engine:
        engine.compile([(1, 1), (1, 4)])
        compiled = dict(engine.device._compiled)
        engine.generate([prompt_of(5)], max_tokens=4)
        assert dict(engine.device._compiled) == compiled


def test_the_number_of_shapes_is_limited() -> None:
    for config in (CONFIG, EngineConfig(max_rows=1024), EngineConfig(deterministic=True, max_rows=1024)):
        assert len(config.decode_buckets) + len(config.prefill_buckets) <= 24
