"""A group of products of few rows as one Pallas Mosaic GPU kernel for Hopper.

With few rows a product is a reading of its weight. A block takes 64 columns of one weight, or those of a part
of its rows, and streams them through shared memory by bulk copies, several tiles ahead, into tensor-core
products that have the weight's columns as their 64 rows and the few rows as their columns. Products of one
group share a launch: blocks of the small weights run beside those of the large ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from wkvm_jax.kernels.pallas import Ref, add_product, kernel, load, swizzled, write
from wkvm_jax.kernels.products.operands import ACTIVATIONS, Activation, Launch, Product
from wkvm_jax.kernels.products.tiles import (
    NUM_MULTIPROCESSORS,
    SHARED_BYTES,
    TILE,
    by_block,
    cut,
    swizzle_width,
)

MAX_ROWS = 256
"""As wide as one tensor-core product gets."""
STEP_HEIGHTS = (256, 128, 64)
"""Weight rows of one step: as many as may be, since each step has its own waits."""
LEAST_STEPS_AHEAD, MAX_STEPS_AHEAD = 4, 8

ROWS = plgpu.Layout.TILED(
    fragmented_array.Tiling(((4, TILE), (32,), (1,))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)
"""Results in registers: a row a warp, neighbours in neighbouring lanes."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One product's share of the grid."""

    first_block: int
    num_column_blocks: int
    num_parts: int
    height: int
    steps: int
    steps_ahead: int
    swizzle: int
    activation: Activation

    @property
    def num_blocks(self) -> int:
        return self.num_column_blocks * self.num_parts


def plan(jobs: Sequence[Product], in_parts: bool) -> list[Plan]:
    """Each product's share of the grid, cut into parts as long as there are idle multiprocessors."""
    num_column_blocks = sum(cut(job.weight.shape[1], TILE) for job in jobs)
    plans: list[Plan] = []
    for job in jobs:
        tiles, num_parts = cut(job.weight.shape[0], TILE), 1
        while (
            in_parts
            and num_column_blocks * num_parts * 2 <= NUM_MULTIPROCESSORS
            and tiles % (num_parts * 2) == 0
        ):
            num_parts *= 2
        plans.append(of_parts(job, num_parts, plans[-1].first_block + plans[-1].num_blocks if plans else 0))
    return plans


def of_parts(job: Product, num_parts: int, first_block: int = 0) -> Plan:
    """One product's share of the grid."""
    share = TILE * cut(job.weight.shape[0], TILE) // num_parts
    bytes_a_height = 2 * (job.num_rows + TILE)
    fitting = SHARED_BYTES // (LEAST_STEPS_AHEAD * bytes_a_height)
    height = next(height for height in STEP_HEIGHTS if share % height == 0 and height <= fitting)
    return Plan(
        first_block=first_block,
        num_column_blocks=cut(job.weight.shape[1], TILE),
        num_parts=num_parts,
        height=height,
        steps=share // height,
        steps_ahead=min(MAX_STEPS_AHEAD, SHARED_BYTES // (height * bytes_a_height), max(2, share // height)),
        swizzle=swizzle_width(job.weight.shape[1]),
        activation=job.activation,
    )


def launch(jobs: Sequence[Product], *, in_parts: bool, interpreted: bool) -> Launch:
    """The kernel for products of these shapes."""
    plans, rows = plan(jobs, in_parts), jobs[0].num_rows
    out_types = [
        jax.ShapeDtypeStruct((plan.num_parts, rows, plan.num_column_blocks * TILE), job.result_dtype)
        for plan, job in zip(plans, jobs, strict=True)
    ]
    grid = {"block": sum(plan.num_blocks for plan in plans)}
    return kernel("products", by_block(columns, plans), out_types, grid, interpreted=interpreted)


def columns(x: Ref, stack: Ref, place: Array, out: Ref, plan: Plan, index: Array) -> None:
    """64 columns of one product, or of one part of it."""
    part, column = index // plan.num_column_blocks, index % plan.num_column_blocks
    rows, first = x.shape[0], part * plan.steps
    tiles = partial(plgpu.BlockSpec, transforms=swizzled(plan.swizzle), delay_release=1)

    def summed(sums: Ref) -> Array:
        def step(_: tuple[Array, ...], weight_tile: Ref, x_tile: Ref) -> None:
            add_product(sums, weight_tile.T, x_tile.T)
            plgpu.wgmma_wait(1)

        plgpu.emit_pipeline(
            step,
            grid=(plan.steps,),
            in_specs=[
                tiles((None, plan.height, TILE), lambda k: (place, first + k, column)),
                tiles((rows, plan.height), lambda k: (0, first + k)),
            ],
            max_concurrent_steps=plan.steps_ahead,
        )(stack, x)
        return sums[...]

    sums = pl.run_scoped(summed, plgpu.WGMMAAccumulatorRef((TILE, rows), jnp.float32))

    result = ACTIVATIONS[plan.activation](sums).astype(out.dtype)
    target = out.at[part, :, pl.ds(column * TILE, TILE)]

    # In registers lie columns of rows; through shared memory they turn to rows of columns.
    def turned_as_written(staged: Ref) -> None:
        staged.T[...] = result
        write(staged, target)

    def turned_as_read(staged: Ref) -> None:
        staged[...] = result
        plgpu.commit_smem()
        target[...] = load(staged.T, ROWS)

    if out.dtype == jnp.bfloat16:
        pl.run_scoped(turned_as_written, plgpu.SMEM((rows, TILE), out.dtype))
    else:
        pl.run_scoped(turned_as_read, plgpu.SMEM((TILE, rows), out.dtype))
