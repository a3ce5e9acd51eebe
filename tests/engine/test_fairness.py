"""A long prompt does not starve those that generate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np
import pytest

import wkvm_jax
from tests.engine.engines import prompt_of, wait_until
from wkvm_jax.engine.engine import Engine
from wkvm_jax.engine.request import Request

NUM_ROWS = 8
PROMPT_LENGTH = 3000


@pytest.fixture(scope="module")
def demo_engine() -> Iterator[Engine]:
    """A model whose steps take longer than the host's part of a turn, which would blur the ratio."""
    config = wkvm_jax.EngineConfig(num_slots=32, max_rows=16, prefill_chunks=(8, 16, 64))
    with wkvm_jax.Engine(wkvm_jax.load("demo"), config=config) as engine:
        engine.warm_up()
        yield engine


class Gaps:
    """Times at which a request's tokens came."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.times_s: list[float] = []
        request.listen(self._heard)

    def _heard(self) -> None:
        tokens, _ = self.request.take()
        self.times_s += [time.perf_counter()] * len(tokens)

    def between(self, start_s: float, end_s: float) -> list[float]:
        times_s = [at for at in self.times_s if start_s <= at <= end_s]
        return np.diff(times_s).tolist()


def stretch(engine: Engine) -> tuple[float, float]:
    """The p99 gap beside a long prompt, and that without one, both over the median gap without one."""
    requests = [engine.submit("run", max_tokens=4000, ignore_eos=True) for _ in range(NUM_ROWS)]
    rows = [Gaps(request) for request in requests]
    wait_until(lambda: min(len(row.times_s) for row in rows) > 20)
    quiet_from_s = time.perf_counter()
    wait_until(lambda: min(len(row.times_s) for row in rows) > 320)
    long_from_s = time.perf_counter()
    long = engine.submit(prompt_of(PROMPT_LENGTH), max_tokens=1)
    assert long.result(60).finish_reason in ("length", "stop")
    end_s = time.perf_counter()
    assert not any(request.finished for request in requests), "they ran beside all of the prompt"
    for request in requests:
        request.cancel()
    quiet = [gap for row in rows for gap in row.between(quiet_from_s, long_from_s)]
    beside = [gap for row in rows for gap in row.between(long_from_s, end_s)]
    assert len(beside) > 100, "the prompt takes its turns beside them"
    usual_s = statistics.median(quiet)
    return float(np.quantile(beside, 0.99)) / usual_s, float(np.quantile(quiet, 0.99)) / usual_s


@pytest.mark.slow
def test_a_long_prompt_does_not_stretch_the_gaps_of_others(demo_engine: Engine) -> None:
    tries: list[tuple[float, float]] = []
    while len(tries) < 5 and min(tries, default=(9.0, 0.0))[0] > 3.0:
        tries.append(stretch(demo_engine))
    if min(beside for beside, _ in tries) > 3.0 and min(quiet for _, quiet in tries) > 1.5:
        pytest.skip(f"other processes stretch the gaps without the prompt too: {tries=}")
    assert min(beside for beside, _ in tries) <= 3.0, f"{tries=}"
