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
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from wkvm_jax.kernels.pallas import Ref, add_product, kernel, load, one_by_one, swizzled, write
from wkvm_jax.kernels.products import xla
from wkvm_jax.kernels.products.operands import ACTIVATIONS, Activation, Product
from wkvm_jax.kernels.stacked import OfLayer, in_stack, places

ROW_MULTIPLE = 8
MAX_ROWS = 256
"""As wide as one tensor-core product gets; beyond, XLA's products are good."""
TILE = 64
"""Columns of a block. Heights and widths of weights count in such tiles too."""
STEP_HEIGHTS = (256, 128, 64)
"""Weight rows of one step: as many as may be, since each step has its own waits."""
LEAST_STEPS_AHEAD, MAX_STEPS_AHEAD = 4, 8
NUM_MULTIPROCESSORS = 132
SHARED_BYTES = 200 * 1024
"""Shared memory for tiles, of the 227 KiB that a block may have."""

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
    height: int
    steps: int
    steps_ahead: int
    tile_width: int
    activation: Activation

    @property
    def end_block(self) -> int:
        return self.first_block + self.num_column_blocks * self.num_parts


def _plan(jobs: Sequence[Product], in_parts: bool) -> list[_Plan]:
    columns = [-(-job.weight.shape[1] // TILE) for job in jobs]
    plans: list[_Plan] = []
    for job, num_column_blocks in zip(jobs, columns, strict=True):
        tiles = -(-job.weight.shape[0] // TILE)
        num_parts = 1
        while (
            in_parts and sum(columns) * num_parts * 2 <= NUM_MULTIPROCESSORS and tiles % (num_parts * 2) == 0
        ):
            num_parts *= 2
        share = TILE * tiles // num_parts
        bytes_a_height = 2 * (_num_rows(job) + TILE)
        fitting = SHARED_BYTES // (LEAST_STEPS_AHEAD * bytes_a_height)
        height = next(height for height in STEP_HEIGHTS if share % height == 0 and height <= fitting)
        ahead = min(MAX_STEPS_AHEAD, SHARED_BYTES // (height * bytes_a_height), max(2, share // height))
        plan = _Plan(
            first_block=plans[-1].end_block if plans else 0,
            num_column_blocks=num_column_blocks,
            num_parts=num_parts,
            height=height,
            steps=share // height,
            steps_ahead=ahead,
            tile_width=_tile_width(job),
            activation=job.activation,
        )
        plans.append(plan)
    return plans


def products(jobs: Sequence[Product], *, in_parts: bool, interpreted: bool) -> list[Array]:
    """As `api.products` says."""
    weights = [in_stack(job.weight) for job in jobs]
    xs, stacks = [job.x for job in jobs], [weight.stack for weight in weights]
    kinds = tuple((job.activation, job.result_dtype) for job in jobs)
    results: list[Array] = _jitted(xs, stacks, places(weights), kinds, in_parts, interpreted)
    return results


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _products(
    xs: list[Array],
    stacks: list[Array],
    where: Array,
    kinds: tuple[tuple[Activation, jnp.dtype], ...],
    in_parts: bool,
    interpreted: bool,
) -> list[Array]:
    jobs = [
        Product(x, OfLayer(stack, 0), activation, dtype)
        for x, stack, (activation, dtype) in zip(xs, stacks, kinds, strict=True)
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
        "products",
        partial(_one_block, plans=plans),
        out_types,
        {"block": plans[-1].end_block},
        interpreted=interpreted,
    )
    outs = one_by_one(run)([_rows_of_tiles(job.x, rows) for job in jobs], stacks, where)
    lead = jobs[0].x.shape[:2]
    shaped = [out.reshape(out.shape[0], *lead, out.shape[-1]) for out in outs]
    return shaped if in_parts else [out[0] for out in shaped]


def _rows_of_tiles(x: Float[Array, "b t i"], rows: int) -> Float[Array, "rows j"]:
    """The rows as bfloat16, as wide as whole tiles are: what is added meets no weight."""
    x = x.reshape(rows, -1).astype(jnp.bfloat16)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE)))


def _one_block(xs: list[Ref], stacks: list[Ref], where: Ref, *outs: Ref, plans: Sequence[_Plan]) -> None:
    """The kernel: one block's columns of the product that the block belongs to."""
    block = jax.lax.axis_index("block")
    for number, plan in enumerate(plans):
        is_here = (plan.first_block <= block) & (block < plan.end_block)
        operands = (xs[number], stacks[number], where[number], outs[number])
        pl.when(is_here)(partial(_columns, *operands, plan, block - plan.first_block))


def _columns(x: Ref, stack: Ref, place: Array, out: Ref, plan: _Plan, index: Array) -> None:
    """64 columns of one product, or of one part of it."""
    part, column = index // plan.num_column_blocks, index % plan.num_column_blocks
    rows, first = x.shape[0], part * plan.steps
    tiles = partial(plgpu.BlockSpec, transforms=swizzled(plan.tile_width), delay_release=1)

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


def _by_xla(
    xs: list[Array],
    stacks: list[Array],
    where: Array,
    kinds: tuple[tuple[Activation, jnp.dtype], ...],
    in_parts: bool,
) -> list[Float[Array, "b t o"]]:
    return [
        xla.product(Product(x, stack[place], activation, jnp.float32 if in_parts else dtype))
        for x, stack, place, (activation, dtype) in zip(xs, stacks, where, kinds, strict=True)
    ]


_Operands = tuple[list[Array], list[Array], Array]


def _forward(
    xs: list[Array], stacks: list[Array], where: Array, kinds: tuple[tuple[Activation, jnp.dtype], ...],
    in_parts: bool, interpreted: bool,
) -> tuple[list[Array], _Operands]:  # fmt: skip
    return _products(xs, stacks, where, kinds, in_parts, interpreted), (xs, stacks, where)


def _backward(
    kinds: tuple[tuple[Activation, jnp.dtype], ...], in_parts: bool, interpreted: bool,
    operands: _Operands, cotangents: list[Array],
) -> tuple[list[Array], list[Array], np.ndarray]:  # fmt: skip
    xs, stacks, where = operands
    out, pull_back = jax.vjp(lambda xs, stacks: _by_xla(xs, stacks, where, kinds, in_parts), xs, stacks)
    # Every part has the same cotangent, that of the sum; columns over the weight's width have none.
    whole = [c[0] if in_parts else c for c in cotangents]
    fitting = [c[..., : o.shape[-1]].astype(o.dtype) for c, o in zip(whole, out, strict=True)]
    of_xs, of_stacks = pull_back(fitting)
    return of_xs, of_stacks, np.zeros(where.shape, jax.dtypes.float0)


_products.defvjp(_forward, _backward)
_jitted = jax.jit(_products, static_argnums=(3, 4, 5))  # so that a model's equal layers are lowered once
