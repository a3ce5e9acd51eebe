"""A group of products of many rows as one Pallas Mosaic GPU kernel for Hopper.

A block computes one tile of one product's result: a warpgroup fetches tiles of rows and weights several steps
ahead, and two others, with 64 rows each, keep the tensor cores busy. Neighbouring blocks take the same
columns of a weight, which so comes from memory about once. Products of one group share a launch, so that
together they fill the last wave of blocks better than each its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from wkvm_jax.kernels.pallas import Ref, add_product, kernel, send, swizzled
from wkvm_jax.kernels.products.operands import ACTIVATIONS, Activation, Launch, Product
from wkvm_jax.kernels.products.tiles import (
    NUM_MULTIPROCESSORS,
    SHARED_BYTES,
    TILE,
    by_block,
    cut,
    swizzle_width,
)

NUM_WORKERS = 2
"""Warpgroups that multiply."""
HEIGHT, WIDTHS = NUM_WORKERS * TILE, (256, 128, 64)
"""Rows of a result's tile, and the columns that it may have."""
TILE_COST = 1024
"""What a tile's start and end take, in columns times steps; measured on an H200."""
FETCHER_REGISTERS = 40
STAGED_BYTES = 128
"""Bytes of a row of results that pass shared memory together, as many as a swizzle spans."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """One product's share of the grid."""

    first_block: int
    num_row_blocks: int
    num_column_blocks: int
    num_parts: int
    width: int
    steps: int
    steps_ahead: int
    swizzle: int
    activation: Activation

    @property
    def num_blocks(self) -> int:
        return self.num_row_blocks * self.num_column_blocks * self.num_parts


def _plan(jobs: Sequence[Product], in_parts: bool) -> list[_Plan]:
    """Tiles as wide as fills the multiprocessors' waves best, and with that in as few parts as may be."""

    def cost(plans: list[_Plan]) -> tuple[int, int]:
        waves = cut(sum(plan.num_blocks for plan in plans), NUM_MULTIPROCESSORS)
        return waves * (TILE_COST + max(plan.width * plan.steps for plan in plans)), plans[0].num_parts

    return min((_plan_of_width(jobs, in_parts, width) for width in WIDTHS[:2]), key=cost)


def _plan_of_width(jobs: Sequence[Product], in_parts: bool, widest: int) -> list[_Plan]:
    num_row_blocks = cut(jobs[0].num_rows, HEIGHT)
    widths = [
        next(width for width in WIDTHS if width <= min(widest, TILE * cut(job.weight.shape[1], TILE)))
        for job in jobs
    ]
    columns = [cut(job.weight.shape[1], width) for job, width in zip(jobs, widths, strict=True)]
    plans: list[_Plan] = []
    for job, width, num_column_blocks in zip(jobs, widths, columns, strict=True):
        steps, num_parts = cut(job.weight.shape[0], TILE), 1
        whole = num_row_blocks * sum(columns)
        while in_parts and whole * num_parts * 2 <= NUM_MULTIPROCESSORS and steps % (num_parts * 2) == 0:
            num_parts *= 2
        plan = _Plan(
            first_block=plans[-1].first_block + plans[-1].num_blocks if plans else 0,
            num_row_blocks=num_row_blocks,
            num_column_blocks=num_column_blocks,
            num_parts=num_parts,
            width=width,
            steps=steps // num_parts,
            steps_ahead=SHARED_BYTES // (2 * TILE * (HEIGHT + width)),
            swizzle=swizzle_width(job.weight.shape[1]),
            activation=job.activation,
        )
        plans.append(plan)
    return plans


def launch(jobs: Sequence[Product], *, in_parts: bool, interpreted: bool) -> Launch:
    """The kernel for products of these shapes."""
    plans, rows = _plan(jobs, in_parts), jobs[0].num_rows
    out_types = [
        jax.ShapeDtypeStruct((plan.num_parts, rows, TILE * cut(job.weight.shape[1], TILE)), job.result_dtype)
        for plan, job in zip(plans, jobs, strict=True)
    ]
    grid = {"block": sum(plan.num_blocks for plan in plans)}
    body = by_block(_tile, plans)
    return kernel("many_products", body, out_types, grid, warpgroups=NUM_WORKERS + 1, interpreted=interpreted)


def _tile(x: Ref, stack: Ref, place: Array, out: Ref, plan: _Plan, index: Array) -> None:
    """One tile of one product, or of one part of it."""
    worker = jax.lax.axis_index("warpgroup")
    row, above = index % plan.num_row_blocks, index // plan.num_row_blocks
    column, part = above % plan.num_column_blocks, above // plan.num_column_blocks
    first = part * plan.steps
    own_rows = pl.ds(worker * TILE, TILE)
    chunk = STAGED_BYTES // out.dtype.itemsize
    # The tensor cores want both operands swizzled alike.
    tiles = partial(plgpu.BlockSpec, transforms=swizzled(plan.swizzle), delay_release=1)

    def multiply(_: tuple[Array, ...], x_tile: Ref, weight_tile: Ref, sums: Ref) -> Ref:
        add_product(sums, x_tile.at[own_rows], weight_tile)
        plgpu.wgmma_wait(1)
        return sums

    def work(run: Callable[[Ref], None], staged: Ref) -> None:
        def with_sums(sums: Ref) -> None:
            run(sums)
            result = ACTIVATIONS[plan.activation](sums[...]).astype(out.dtype)
            target = out.at[part, pl.ds(row * HEIGHT + worker * TILE, TILE)]
            for number, start in enumerate(range(0, plan.width, chunk)):
                place, columns = staged.at[worker, number % 2], pl.ds(column * plan.width + start, chunk)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                place[...] = result[:, start : start + chunk]
                send(place, target.at[:, columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(with_sums, plgpu.WGMMAAccumulatorRef((TILE, plan.width), jnp.float32))

    def pipeline(work: Callable[..., None]) -> plgpu.WarpSpecializedPipeline:
        return plgpu.emit_pipeline_warp_specialized(
            multiply,  # type: ignore[arg-type]  # JAX's type forgets what passes from step to step
            grid=(plan.steps,),
            in_specs=[
                tiles((HEIGHT, TILE), lambda k: (row, first + k)),
                tiles((None, TILE, plan.width), lambda k: (place, first + k, column)),
            ],
            max_concurrent_steps=plan.steps_ahead,
            memory_registers=FETCHER_REGISTERS,
            wg_axis="warpgroup",
            num_compute_wgs=NUM_WORKERS,
            compute_context=work,
        )

    def with_memory(steps: object, staged: Ref) -> None:
        pipeline(partial(work, staged=staged))(x, stack, allocations=steps)

    staged = plgpu.SMEM(
        (NUM_WORKERS, 2, TILE, chunk), out.dtype, transforms=swizzled(chunk, out.dtype.itemsize)
    )
    steps = pipeline(lambda *_: None).get_allocations(x, stack)
    pl.run_scoped(with_memory, steps, staged, collective_axes="warpgroup")
