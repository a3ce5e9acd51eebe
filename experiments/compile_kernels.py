"""Compiles the kernels for GPUs of several architectures, without a GPU, and says what they take of one.

    pip install 'jax[cuda13]'
    python3 -m experiments.compile_kernels
    python3 -m experiments.compile_kernels --arch 8.0 8.9 --json

Needs JAX's CUDA plugin and its `ptxas`, and no device: JAX compiles for a described one. The shapes are those
of a step of the 1.5B model, and of its prompts. Registers, with 65,536 in a multiprocessor, decide how many
blocks run there at once; spilled registers cost time. What compiles here has still to run somewhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from wkvm_jax.kernels.dispatch import Kernels
from wkvm_jax.kernels.products import Product, products
from wkvm_jax.kernels.products import workloads as product_workloads
from wkvm_jax.kernels.rwkv7 import Projections, Variant, time_mix, workloads
from wkvm_jax.kernels.stacked import Weights
from wkvm_jax.kernels.token_shift import TokenShift
from wkvm_jax.state import Batch

ROWS = (8, 256)
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "described"
"""
"""Of all this only the compute capability matters to the kernels; the rest is about an H200's."""

Step = Callable[..., object]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What one kernel takes: registers a thread, and bytes of registers spilled to memory and back."""

    kernel: str
    architecture: str
    registers: int
    spilled_bytes: int


def steps(kernels: Kernels) -> Iterator[tuple[Step, tuple[object, ...]]]:
    """Functions of one kernel or two, and the shapes of their operands."""
    for workload in [workloads.Decode(ROWS[-1], 32, 24), *_prompts(kernels)]:
        arena = jax.ShapeDtypeStruct(workload.arena_shape, jnp.float32)
        yield _mix(kernels), (arena, *jax.eval_shape(partial(_mix_operands, workload)))
    for rows in ROWS:
        yield _shift(kernels), _shift_operands(rows)
    if kernels == "hopper":
        for group in product_workloads.PUBLISHED:
            if group.rows in ROWS:
                yield _products(group), _product_operands(group)


def _prompts(kernels: Kernels) -> list[workloads.Prefill]:
    return [workloads.Prefill(8, 2048, 32, 2)] if kernels == "hopper" else []


def _mix(kernels: Kernels) -> Step:
    def mix(arena: Array, batch: Batch, projections: Projections, params: Weights, ln_x: Weights) -> object:
        variant = Variant(1e-5, False)
        return time_mix(arena, 1, batch, projections, params, ln_x, variant=variant, kernels=kernels)

    return mix


def _mix_operands(workload: workloads.Decode | workloads.Prefill) -> tuple[object, ...]:
    made = workloads.make_operands(workload)
    return made.batch, made.projections, made.params, made.ln_x


def _shift(kernels: Kernels) -> Step:
    def shift(
        x: Array, parts: Array, leaf: Array, batch: Batch, norm: dict[str, Array], mixes: Array
    ) -> object:
        places = TokenShift(leaf, batch, kernels)
        return places.mix(x, parts, 0, 0, norm, mixes, eps=1e-5, dtype=jnp.bfloat16), places.finish()

    return shift


def _shift_operands(rows: int) -> tuple[object, ...]:
    def shape(*sizes: int, dtype: type = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    index = shape(rows, dtype=jnp.int32)
    batch = Batch(shape(rows, 1, dtype=jnp.int32), index, index, index, shape(rows, 0, dtype=jnp.int32))
    norm = {name: shape(2048) for name in ("scale", "bias")}
    x, parts, leaf = shape(rows, 1, 2048), shape(4, rows, 1, 2048), shape(rows + 2, 24, 2, 2048)
    return x, parts, leaf, batch, norm, shape(6, 2048)


def _products(group: product_workloads.Group) -> Step:
    def run(xs: list[Array], weights: list[Array]) -> object:
        kinds = [activation for _, _, activation in group.shapes]
        jobs = [Product(*job) for job in zip(xs, weights, kinds, strict=True)]
        return products(jobs, kernels="hopper", in_parts=group.in_parts)

    return run


def _product_operands(group: product_workloads.Group) -> tuple[object, ...]:
    xs = [jax.ShapeDtypeStruct((group.rows, 1, height), jnp.bfloat16) for height, _, _ in group.shapes]
    return xs, [jax.ShapeDtypeStruct(shape[:2], jnp.bfloat16) for shape in group.shapes]


def compile_all(major: int, minor: int) -> None:
    """Compiles everything for one architecture; the compiler's report goes to the standard output."""
    from jax.experimental import topologies
    from jax.experimental.mosaic.gpu import utils

    # Mosaic asks the default device, of which there is none.
    utils._infer_arch = lambda: (major, minor)  # type: ignore[attr-defined]
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="described", topology="1x1x1",
        target_config=TARGET.format(major=major, minor=minor),
    )  # fmt: skip
    place = jax.sharding.SingleDeviceSharding(described.devices[0])
    for step, operands in steps("hopper" if major == 9 else "ampere"):
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), operands)
        jax.jit(step).lower(*placed).compile()


def reported(text: str) -> list[Compiled]:
    """The kernels that a report of `ptxas -v` names, each once for equal figures."""
    found: dict[Compiled, None] = {}
    name = architecture = ""
    spilled = 0
    for line in text.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for '(\w+)'", line):
            name, architecture = entry.groups()
        elif spills := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = sum(map(int, spills.groups()))
        elif used := re.search(r"Used (\d+) registers", line):
            found[Compiled(name, architecture, int(used[1]), spilled)] = None
    return list(found)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch", nargs="+", default=["8.0", "8.6", "8.9", "9.0"], metavar="X.Y",
        help="compute capabilities (default: 8.0 8.6 8.9 9.0)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON lines in place of a table")
    parser.add_argument("--report", metavar="X.Y", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.report is not None:
        compile_all(*map(int, options.report.split(".")))
        return 0
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        parser.error("JAX's CUDA plugin is missing: pip install 'jax[cuda13]'")
    if not options.json:
        print(f"{'kernel':20} {'architecture':>12} {'registers':>10} {'spilled bytes':>14}")
    for arch in options.arch:
        # A process each: the compiler writes to the standard output, past Python.
        run = subprocess.run(
            [sys.executable, "-m", "experiments.compile_kernels", "--report", arch],
            env=os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if run.returncode:
            print(run.stdout[-2000:], file=sys.stderr)
            return 1
        for kernel in reported(run.stdout):
            if options.json:
                print(json.dumps(dataclasses.asdict(kernel)))
            else:
                print(
                    f"{kernel.kernel:20} {kernel.architecture:>12} {kernel.registers:>10} "
                    f"{kernel.spilled_bytes:>14}"
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
