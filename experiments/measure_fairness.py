"""How a long prompt disturbs the others: gaps between their tokens, without it and while it is read.

    python3 -m experiments.measure_fairness --model demo --rows 8 --prompt-tokens 50000

Prints the others' median and 99th percentile gap in both cases, and how long the prompt took.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import wkvm_jax
from wkvm_jax import EngineConfig
from wkvm_jax.engine.engine import Engine
from wkvm_jax.engine.request import Request


class Clock:
    """Notes when each token of a request arrives."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.times: list[float] = []
        request.listen(self._note)

    def _note(self) -> None:
        tokens, _ = self.request.take()
        self.times += [time.perf_counter()] * len(tokens)

    def gaps_ms(self, start: float, end: float) -> np.ndarray:
        times = np.array([at for at in self.times if start <= at <= end])
        return np.diff(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=8, help="requests that generate meanwhile (default: 8)")
    parser.add_argument("--prompt-tokens", type=int, default=50_000, help="of the long prompt")
    parser.add_argument("--alone-s", type=float, default=5.0, help="seconds measured without it (default: 5)")
    arguments = parser.parse_args()
    model = wkvm_jax.load(arguments.model)
    with wkvm_jax.Engine(model, config=EngineConfig(num_slots=64, max_rows=32)) as engine:
        engine.warm_up()
        measure(engine, arguments.rows, arguments.prompt_tokens, arguments.alone_s)


def measure(engine: Engine, rows: int, prompt_tokens: int, alone_s: float) -> None:
    requests = [
        engine.submit([row + 1], max_tokens=1 << 20, ignore_eos=True, temperature=1.0, seed=row)
        for row in range(rows)
    ]
    clocks = [Clock(request) for request in requests]
    time.sleep(1.0)
    start = time.perf_counter()
    time.sleep(alone_s)
    middle = time.perf_counter()
    prompt = np.random.default_rng(0).integers(1, engine.model.config.vocab_size, prompt_tokens).tolist()
    engine.submit(prompt, max_tokens=1).result()
    end = time.perf_counter()
    for request in requests:
        request.cancel()
    alone = np.concatenate([clock.gaps_ms(start, middle) for clock in clocks])
    beside = np.concatenate([clock.gaps_ms(middle, end) for clock in clocks])
    print(f"{rows} rows generate; then a prompt of {prompt_tokens:,} tokens is read in {end - middle:.1f} s")
    print(f"{'':20} {'median ms':>10} {'p99 ms':>10}")
    for name, gaps in (("without it", alone), ("while it is read", beside)):
        print(f"{name:20} {np.median(gaps):>10.2f} {np.percentile(gaps, 99):>10.2f}")
    ratio = np.percentile(beside, 99) / np.median(alone)
    print(f"p99 while it is read / median without it: {ratio:.2f}")


if __name__ == "__main__":
    main()
