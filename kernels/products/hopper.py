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
from jaxtyping import Array, Float

from wkvm_jax.kernels.pallas import Ref, add_product, kernel, load, one_by_one, swizzled, write
from wkvm_jax.kernels.products import xla
from wkvm_jax.kernels.products.operands import ACTIVATIONS, Activation, Product

ROW_MULTIPLE = 8
MAX_ROWS = 64
"""More rows do not fit beside a deep enough pipeline, and XLA's products are good there."""
TILE = 64
"""Columns of a block, and weight rows of one step."""
NUM_MULTIPROCESSORS = 132
MAX_STEPS_AHEAD = 8
"""Tiles in flight: 64 KiB a block, more than memory's latency times a multiprocessor's share of its speed."""

ROWS = plgpu.Layout.TILED(
    fragmented_array.Tiling(((4, TILE), (32,), (1,))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)
"""Results in registers: a row a warp, neighbours in neighbouring lanes."""


def serves(jobs: Sequence[Product]) -> bool:
    """Whether the kernel can take these products."""
    rows = _num_rows(jobs[0])
    fitting = all(job.weight.dtype == jnp.bfloat16 and _tile_width(job) for job in jobs)
    return fitting and rows <= MAX_ROWS and rows % ROW_MULTIPLE == 0


def _num_rows(job: Product) -> int:
    return job.x.shape[0] * job.x.shape[1]


def _tile_width(job: Product) -> int:
    """Columns of a shared-memory tile: 64, or 32 where the weight's width asks for it, or 0 for neither."""
    return next((width for width in (64, 32) if job.weight.shape[1] % width == 0), 0)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """One product's share of the grid."""

    first_block: int
    num_column_blocks: int
    num_parts: int
    steps: int
    tile_width: int
    activation: Activation

    @property
    def end_block(self) -> int:
        return self.first_block + self.num_column_blocks * self.num_parts


def _plan(jobs: Sequence[Product], in_parts: bool) -> list[_Plan]:
    columns = [-(-job.weight.shape[1] // TILE) for job in jobs]
    plans: list[_Plan] = []
    for job, num_column_blocks in zip(jobs, columns, strict=True):
        steps = -(-job.weight.shape[0] // TILE)
        num_parts = 1
        while (
            in_parts and sum(columns) * num_parts * 2 <= NUM_MULTIPROCESSORS and steps % (num_parts * 2) == 0
        ):
            num_parts *= 2
        first = plans[-1].end_block if plans else 0
        plan = _Plan(
            first, num_column_blocks, num_parts, steps // num_parts, _tile_width(job), job.activation
        )
        plans.append(plan)
    return plans


def products(jobs: Sequence[Product], *, in_parts: bool, interpreted: bool) -> list[Array]:
    """As `api.products` says."""
    xs, weights = [job.x for job in jobs], [job.weight for job in jobs]
    kinds = tuple((job.activation, job.result_dtype) for job in jobs)
    results: list[Array] = _jitted(xs, weights, kinds, in_parts, interpreted)
    return results


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _products(
    xs: list[Array],
    weights: list[Array],
    kinds: tuple[tuple[Activation, jnp.dtype], ...],
    in_parts: bool,
    interpreted: bool,
) -> list[Array]:
    jobs = [
        Product(x, weight, activation, dtype)
        for x, weight, (activation, dtype) in zip(xs, weights, kinds, strict=True)
    ]
    plans, rows = _plan(jobs, in_parts), _num_rows(jobs[0])
    out_types = [
        jax.ShapeDtypeStruct(
            (plan.num_parts, rows, plan.num_column_blocks * TILE),
            jnp.float32 if in_parts else job.result_dtype,
        )
        for plan, job in zip(plans, jobs, strict=True)
    ]
    run = kernel(
        partial(_one_block, plans=plans),
        out_types,
        {"block": plans[-1].end_block},
        interpreted=interpreted,
        scratch=[((TILE, rows), jnp.float32)],
    )
    outs = one_by_one(run)([job.x.reshape(rows, -1).astype(jnp.bfloat16) for job in jobs], weights)
    lead = jobs[0].x.shape[:2]
    shaped = [out.reshape(out.shape[0], *lead, out.shape[-1]) for out in outs]
    return shaped if in_parts else [out[0] for out in shaped]


def _one_block(xs: list[Ref], weights: list[Ref], *results: Ref, plans: Sequence[_Plan]) -> None:
    """The kernel: one block's columns of the product that the block belongs to."""
    *outs, turned = results
    block = jax.lax.axis_index("block")
    for x, weight, out, plan in zip(xs, weights, outs, plans, strict=True):
        is_here = (plan.first_block <= block) & (block < plan.end_block)
        pl.when(is_here)(partial(_columns, x, weight, out, turned, plan, block - plan.first_block))


def _columns(x: Ref, weight: Ref, out: Ref, turned: Ref, plan: _Plan, index: Array) -> None:
    """64 columns of one product, or of one part of it."""
    part, column = index // plan.num_column_blocks, index % plan.num_column_blocks
    rows, first = turned.shape[1], part * plan.steps
    block_spec = partial(plgpu.BlockSpec, transforms=swizzled(plan.tile_width), delay_release=1)

    def summed(sums: Ref) -> Array:
        def step(_: tuple[Array, ...], weight_tile: Ref, x_tile: Ref) -> None:
            add_product(sums, weight_tile.T, x_tile.T)
            plgpu.wgmma_wait(1)

        plgpu.emit_pipeline(
            step,
            grid=(plan.steps,),
            in_specs=[
                block_spec((TILE, TILE), lambda k: (first + k, column)),
                block_spec((rows, TILE), lambda k: (0, first + k)),
            ],
            max_concurrent_steps=min(MAX_STEPS_AHEAD, max(2, plan.steps)),
        )(weight, x)
        return sums[...]

    # The sums lie in registers as [column, row]; through shared memory they turn to rows.
    turned[...] = pl.run_scoped(summed, plgpu.WGMMAAccumulatorRef((TILE, rows), jnp.float32))
    plgpu.commit_smem()
    result = ACTIVATIONS[plan.activation](load(turned.T, ROWS))

    def written(staged: Ref) -> None:
        staged[...] = result.astype(out.dtype)
        write(staged, out.at[part, :, pl.ds(column * TILE, TILE)])

    pl.run_scoped(written, plgpu.SMEM((rows, TILE), out.dtype))


def _by_xla(
    xs: list[Array], weights: list[Array], kinds: tuple[tuple[Activation, jnp.dtype], ...], in_parts: bool
) -> list[Float[Array, "b t o"]]:
    return [
        xla.product(Product(x, weight, activation, jnp.float32 if in_parts else dtype))
        for x, weight, (activation, dtype) in zip(xs, weights, kinds, strict=True)
    ]


def _forward(
    xs: list[Array], weights: list[Array], kinds: tuple[tuple[Activation, jnp.dtype], ...], in_parts: bool,
    interpreted: bool,
) -> tuple[list[Array], tuple[list[Array], list[Array]]]:  # fmt: skip
    return _products(xs, weights, kinds, in_parts, interpreted), (xs, weights)


def _backward(
    kinds: tuple[tuple[Activation, jnp.dtype], ...], in_parts: bool, interpreted: bool,
    operands: tuple[list[Array], list[Array]], cotangents: list[Array],
) -> tuple[list[Array], list[Array]]:  # fmt: skip
    xs, weights = operands
    out, pull_back = jax.vjp(lambda xs, weights: _by_xla(xs, weights, kinds, in_parts), xs, weights)
    # Every part has the same cotangent, that of the sum; columns over the weight's width have none.
    whole = [c[0] if in_parts else c for c in cotangents]
    fitting = [c[..., : o.shape[-1]].astype(o.dtype) for c, o in zip(whole, out, strict=True)]
    gradients: tuple[list[Array], list[Array]] = pull_back(fitting)
    return gradients


_products.defvjp(_forward, _backward)
_jitted = jax.jit(_products, static_argnums=(2, 3, 4))  # so that a model's equal layers are lowered once
