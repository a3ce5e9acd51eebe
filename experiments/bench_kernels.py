"""Measures the kernels alone, at the shapes of the 1.5B model: time, speed, and distance from the floor.

    python3 -m experiments.bench_kernels
    python3 -m experiments.bench_kernels --kernels xla --rows 32 1024 --json

A figure is the median over rounds of one jitted chain of calls, each on weights or states that no cache still
holds, divided by the calls: the gaps between kernels are in it. The floor is the bytes that must move, at the
speed of a copy measured in the same run. `--tiny` runs tiny shapes, interpreted on a CPU, for a try.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from wkvm_jax.kernels.dispatch import Kernels, choose_kernels, interpreted
from wkvm_jax.kernels.products import Product, products
from wkvm_jax.kernels.products import workloads as product_workloads
from wkvm_jax.kernels.rwkv7 import Variant, time_mix, workloads
from wkvm_jax.kernels.stacked import OfLayer
from wkvm_jax.serving.bench import copy_bytes_per_s

CHAIN = 24
"""Calls of a chain of products, as many as a model has layers: a chain's own launch is shared by them all."""
LEAST_BYTES = 2**28
"""Weights that a chain goes through at least before it sees one again: more than a GPU's caches hold."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured shape."""

    kernel: str
    rows: int
    us: float
    tb_per_s: float
    floor_us: float
    times_floor: float


def seconds_a_call(run: Callable[[], object], num_calls: int, rounds: int) -> float:
    """Median seconds of one call in a chain; the first chain compiles."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready([run() for _ in range(4)][-1])
        taken.append((time.perf_counter() - started) / (4 * num_calls))
    return statistics.median(taken)


def layer_seconds(workload: workloads.Decode | workloads.Prefill, kernels: Kernels, rounds: int) -> float:
    """One layer's time mixing, through all layers of an arena."""
    operands = workloads.make_operands(workload)

    def through_all_layers(arena: Array, operands: workloads.Operands) -> tuple[Array, Array]:
        out = operands.projections.v
        for layer in range(workload.layers):
            projections = operands.projections.replace(v=out)
            out, arena = time_mix(
                arena, layer, operands.batch, projections, operands.params, operands.ln_x,
                variant=Variant(1e-5, False), kernels=kernels,
            )  # fmt: skip
        return out, arena

    step = jax.jit(through_all_layers, donate_argnums=0)
    state = {"arena": workloads.make_arena(workload)}

    def run() -> Array:
        out, state["arena"] = step(state["arena"], operands)
        return out

    return seconds_a_call(run, workload.layers, rounds)


def product_seconds(group: product_workloads.Group, kernels: Kernels, rounds: int) -> float:
    """One group, on several sets of weights in turn, each waiting for the one before."""
    num_calls = 2 if interpreted(kernels) else CHAIN
    num_sets = min(num_calls, -(-LEAST_BYTES // group.weight_bytes))
    stacks = [
        jnp.stack(weights)
        for weights in zip(*map(partial(product_workloads.make_weights, group), range(num_sets)), strict=True)
    ]
    first = product_workloads.make_weights(group)
    xs = [job.x for job in product_workloads.make_jobs(group, first)]
    activations = [activation for _, _, activation in group.shapes]

    def chain(xs: list[Array], stacks: list[Array]) -> Array:
        for call in range(num_calls):
            weights = [OfLayer(stack, call % num_sets) for stack in stacks]
            jobs = [Product(*job) for job in zip(xs, weights, activations, strict=True)]
            outs = products(jobs, kernels=kernels, in_parts=group.in_parts)
            number = outs[0].ravel()[0].astype(jnp.float32)
            xs = [jax.lax.optimization_barrier((x, number))[0] for x in xs]
        return number

    step = jax.jit(chain)
    return seconds_a_call(lambda: step(xs, stacks), num_calls, rounds)


def figures(arguments: argparse.Namespace, kernels: Kernels, bytes_per_s: float) -> Iterator[Figure]:
    """Everything that was asked for, as it is measured."""
    shapes = "TINY" if arguments.tiny else "PUBLISHED"
    for workload in getattr(workloads, shapes):
        if not arguments.rows or workload.rows in arguments.rows:
            seconds = layer_seconds(workload, kernels, arguments.rounds)
            yield _figure("rwkv7 time mix", workload.rows, seconds, workload.state_bytes, bytes_per_s)
    for workload in getattr(workloads, f"{shapes}_PREFILL"):
        if not arguments.rows or workload.rows in arguments.rows:
            seconds = layer_seconds(workload, kernels, arguments.rounds)
            name = f"rwkv7 time mix, {workload.tokens} tokens"
            yield _figure(name, workload.rows, seconds, workload.moved_bytes, bytes_per_s)
    for group in getattr(product_workloads, shapes):
        if not arguments.rows or group.rows in arguments.rows:
            seconds = product_seconds(group, kernels, arguments.rounds)
            yield _figure(group.name, group.rows, seconds, group.weight_bytes, bytes_per_s)


def _figure(kernel: str, rows: int, seconds: float, num_bytes: int, bytes_per_s: float) -> Figure:
    floor_s = num_bytes / bytes_per_s
    return Figure(kernel, rows, 1e6 * seconds, num_bytes / seconds / 1e12, 1e6 * floor_s, seconds / floor_s)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", default="auto", help="xla, ampere, hopper or auto (default: auto)")
    parser.add_argument("--rows", type=int, nargs="+", help="only shapes with so many rows")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; medians are printed (default: 7)")
    parser.add_argument("--json", action="store_true", help="print JSON lines in place of a table")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, interpreted on a CPU")
    options = parser.parse_args(arguments)
    kernels = choose_kernels("hopper_interpreted" if options.tiny else options.kernels)
    bytes_per_s = copy_bytes_per_s()
    device = jax.devices()[0].device_kind
    if not options.json:
        print(
            f"{kernels} kernels on {device}, JAX {jax.__version__}; a copy reads and writes "
            f"{bytes_per_s / 1e12:.2f} TB/s; medians of {options.rounds} rounds"
        )
        print(f"{'':28} {'rows':>5} {'us':>10} {'TB/s':>7} {'floor us':>9} {'x floor':>8}")
    for figure in figures(options, kernels, bytes_per_s):
        if options.json:
            run = {"kernels": kernels, "device": device, "jax": jax.__version__, "rounds": options.rounds}
            print(json.dumps(dataclasses.asdict(figure) | run), flush=True)
        else:
            print(
                f"{figure.kernel:28} {figure.rows:>5} {figure.us:>10.2f} {figure.tb_per_s:>7.3f} "
                f"{figure.floor_us:>9.2f} {figure.times_floor:>8.2f}", flush=True,
            )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
