"""`wkvm bench`: tokens a second, with what they cost in memory."""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import time

import jax
import numpy as np

from wkvm_jax.api import Engine
from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.engine import Engine as RunningEngine
from wkvm_jax.engine.request import SamplingParams
from wkvm_jax.engine.step import Device, NewLanes, Sizes, StepRows
from wkvm_jax.kernels.products import sparse_rows
from wkvm_jax.models.model import Model
from wkvm_jax.models.sizes import random_model
from wkvm_jax.sampling import NUM_RESERVED_LANES, PADDING_LANE, LaneParams, idle_fields
from wkvm_jax.serving.chosen import load_chosen
from wkvm_jax.state import INITIAL_SLOT, NUM_RESERVED_SLOTS, TRASH_SLOT
from wkvm_jax.types import from_host


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """One batch size's medians.

    Attributes:
        dense_step_tokens_per_s: the bare step's, with weights that leave no row of the channel mix to skip;
            None where none would be skipped.
    """

    rows: int
    step_tokens_per_s: float
    dense_step_tokens_per_s: float | None
    engine_tokens_per_s: float
    engine_share: float
    step_ms: float
    floor_ms: float
    times_floor: float


def bench_decode(arguments: argparse.Namespace) -> int:
    """Bare step and engine take turns, round by round, so that a noisy machine treats them alike."""
    model = chosen_model(arguments)
    bytes_per_s = copy_bytes_per_s()
    results = [
        decode_speed(model, rows, arguments.steps, arguments.rounds, bytes_per_s) for rows in arguments.rows
    ]
    if arguments.size is not None and model.kernels == "hopper":
        few = [result for result in results if result.rows <= sparse_rows.MAX_ROWS]
        without_zeros = chosen_model(arguments, ffn_zeros=0.5) if few else model
        for result in few:
            step_s = bare_step_s(without_zeros, result.rows, arguments.steps, arguments.rounds)
            at = results.index(result)
            results[at] = dataclasses.replace(result, dense_step_tokens_per_s=result.rows / step_s)
    memory = _memory(model, max(arguments.rows))
    if arguments.json:
        for result in results:
            print(json.dumps(dataclasses.asdict(result) | memory | platform(model, arguments.rounds)))
        return 0
    print(describe(model, arguments.rounds))
    print(
        f"{'rows':>5} {'step tok/s':>12} {'engine tok/s':>13} {'engine/step':>12} {'step ms':>9} "
        f"{'floor ms':>9} {'x floor':>8} {'dense tok/s':>12}"
    )
    for r in results:
        dense = "" if r.dense_step_tokens_per_s is None else f"{r.dense_step_tokens_per_s:,.0f}"
        print(
            f"{r.rows:>5} {r.step_tokens_per_s:>12,.0f} {r.engine_tokens_per_s:>13,.0f} "
            f"{r.engine_share:>11.0%} {r.step_ms:>9.2f} {r.floor_ms:>9.2f} {r.times_floor:>8.2f} {dense:>12}"
        )
    if arguments.size is not None:
        print(
            f"weights: random, with {arguments.ffn_zeros:.0%} of the channel mix's squared relus zero, as in "
            f"trained models; up to {sparse_rows.MAX_ROWS} rows the kernels for Hopper skip what meets only "
            "zeros, and 'dense' is the step where they find nothing to skip"
        )
    print(
        f"memory: weights {memory['weights_mib']:.1f} MiB, a state {memory['state_mib']:.3f} MiB, "
        f"arena {memory['arena_mib']:.1f} MiB, process at its peak {memory['peak_process_mib']:.0f} MiB"
    )
    print(
        f"floor: weights read once, states read and written, at the {bytes_per_s / 1e9:,.0f} GB/s of a copy"
    )
    return 0


def chosen_model(arguments: argparse.Namespace, ffn_zeros: float | None = None) -> Model:
    """The model that the command line names, or one of the size that it names."""
    if arguments.size is not None:
        return random_model(
            arguments.size,
            arguments.dtype or "bfloat16",
            kernels=arguments.kernels,
            state_dtype=arguments.state_dtype,
            ffn_zeros=arguments.ffn_zeros if ffn_zeros is None else ffn_zeros,
        )
    return load_chosen(arguments)


def copy_bytes_per_s() -> float:
    """Bytes read and written a second in an array much larger than any cache, in place; the best of five."""
    num_bytes = 2**28 if jax.default_backend() == "cpu" else 2**31
    # In place, since a fresh array's pages would first have to be found.
    add_one = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    array = jax.block_until_ready(add_one(jax.numpy.zeros(num_bytes // 4, jax.numpy.float32)))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        array = jax.block_until_ready(add_one(array))
        seconds.append(time.perf_counter() - started)
    return 2 * num_bytes / min(seconds)


def decode_speed(model: Model, rows: int, steps: int, rounds: int, bytes_per_s: float) -> DecodeResult:
    """Tokens a second of `rows` greedy rows, bare and through the engine; medians over rounds."""
    max_rows = 1 << (rows - 1).bit_length()
    bare = BareStep(model, rows, max_rows)
    bare_s, engine_s = [], []
    with Engine(model, config=EngineConfig(num_slots=2 * max_rows, max_rows=max_rows)) as engine:
        _engine_seconds(engine, rows, 4)
        bare.seconds(4)
        for _ in range(rounds):
            bare_s.append(bare.seconds(steps))
            engine_s.append(_engine_seconds(engine, rows, steps))
    step_rate = rows * steps / statistics.median(bare_s)
    engine_rate = rows * steps / statistics.median(engine_s)
    step_s = statistics.median(bare_s) / steps
    floor_s = (model.weight_bytes_a_step + 2 * rows * model.state_spec.slot_bytes) / bytes_per_s
    return DecodeResult(
        rows=rows,
        step_tokens_per_s=step_rate,
        dense_step_tokens_per_s=None,
        engine_tokens_per_s=engine_rate,
        engine_share=engine_rate / step_rate,
        step_ms=1e3 * step_s,
        floor_ms=1e3 * floor_s,
        times_floor=step_s / floor_s,
    )


def bare_step_s(model: Model, rows: int, steps: int, rounds: int) -> float:
    """Seconds of one bare step, a median over rounds."""
    bare = BareStep(model, rows, 1 << (rows - 1).bit_length())
    bare.seconds(4)
    return statistics.median(bare.seconds(steps) for _ in range(rounds)) / steps


class BareStep:
    """The jitted step alone: the same program as the engine's, dispatched in a plain loop."""

    def __init__(self, model: Model, rows: int, bucket: int) -> None:
        self._device = Device(model, Sizes(rows + NUM_RESERVED_SLOTS, 0, rows + NUM_RESERVED_LANES, 0))
        index = np.arange(bucket, dtype=np.int32)
        own = index < rows
        slots = np.where(own, index + NUM_RESERVED_SLOTS, INITIAL_SLOT)
        lanes = np.where(own, index + NUM_RESERVED_LANES, PADDING_LANE)
        table = np.stack([lanes, slots, np.where(own, slots, TRASH_SLOT)], axis=1)
        self._rows = StepRows(jax.device_put(table.astype(np.int32)))
        self._bucket = bucket
        self._num_rows = rows

    def seconds(self, steps: int) -> float:
        """Seconds for `steps` steps, all results on the host at the end."""
        self._device.set_lanes([self._lane(row, steps + 1) for row in range(self._num_rows)])
        jax.block_until_ready(self._device.lanes)
        started = time.perf_counter()
        for _ in range(steps):
            sampled = self._device.run_step(self._rows, (self._bucket, 1), only_likeliest=True)
        np.asarray(sampled.token)
        return time.perf_counter() - started

    def _lane(self, row: int, remaining: int) -> NewLanes:
        fields = idle_fields(1)
        fields["remaining"][0] = remaining
        zero = np.zeros(1, np.int32)
        return NewLanes(
            lane_ids=from_host(zero + row + NUM_RESERVED_LANES),
            token=from_host(zero + 1),
            seed=from_host(np.zeros((1, 2), np.uint32)),
            choice=from_host(zero),
            params=LaneParams(**{name: from_host(field) for name, field in fields.items()}),
        )


def _engine_seconds(engine: RunningEngine, rows: int, steps: int) -> float:
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    started = time.perf_counter()
    engine.generate([[1]] * rows, params=params)
    return time.perf_counter() - started


def _memory(model: Model, rows: int) -> dict[str, float]:
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    state = model.state_spec.slot_bytes
    slots = 2 * (1 << (rows - 1).bit_length()) + NUM_RESERVED_SLOTS
    return {
        "weights_mib": weights / 2**20,
        "state_mib": state / 2**20,
        "arena_mib": slots * state / 2**20,
        "peak_process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def platform(model: Model, rounds: int) -> dict[str, str | int]:
    """What a figure needs beside it to be repeated."""
    device = jax.devices()[0]
    return {
        "model": model.name,
        "kernels": model.kernels,
        "device": device.device_kind,
        "jax": jax.__version__,
        "rounds": rounds,
    }


def describe(model: Model, rounds: int) -> str:
    """The same in a sentence."""
    values = platform(model, rounds)
    dtype = jax.tree.leaves(model.params)[0].dtype
    return (
        f"{values['model']}, {dtype} weights, {model.kernels} kernels, greedy, on {values['device']}, "
        f"JAX {values['jax']}; "
        f"medians of {rounds} rounds"
    )
