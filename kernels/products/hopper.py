"""A group of products in one launch on Hopper: which of the two kernels takes it, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from wkvm_jax.kernels.pallas import one_by_one
from wkvm_jax.kernels.products import few_rows, many_rows, sparse_rows, xla
from wkvm_jax.kernels.products.operands import Activation, Launch, Product
from wkvm_jax.kernels.products.tiles import ROW_MULTIPLE, TILE, swizzle_width
from wkvm_jax.kernels.stacked import OfLayer, in_stack, places


def serves(jobs: Sequence[Product]) -> bool:
    """Whether the kernels can take these products."""
    fitting = all(job.weight.dtype == jnp.bfloat16 and swizzle_width(job.weight.shape[1]) for job in jobs)
    return fitting and jobs[0].num_rows % ROW_MULTIPLE == 0


def products(jobs: Sequence[Product], *, in_parts: bool, interpreted: bool) -> list[Array]:
    """As `api.products` says."""
    weights = [in_stack(job.weight) for job in jobs]
    xs, stacks = [job.x for job in jobs], [weight.stack for weight in weights]
    kinds = tuple((job.activation, job.result_dtype, job.sparse_rows) for job in jobs)
    results: list[Array] = _jitted(xs, stacks, places(weights), kinds, in_parts, interpreted)
    return results


Kinds = tuple[tuple[Activation, jnp.dtype, int | None], ...]
"""Activation, dtype of the result, and rows that are sparse, of each product."""


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _products(
    xs: list[Array],
    stacks: list[Array],
    where: Array,
    kinds: Kinds,
    in_parts: bool,
    interpreted: bool,
) -> list[Array]:
    jobs = [
        Product(x, OfLayer(stack, 0), activation, jnp.float32 if in_parts else dtype, sparse)
        for x, stack, (activation, dtype, sparse) in zip(xs, stacks, kinds, strict=True)
    ]
    run = _launch(jobs, in_parts, interpreted)
    outs = one_by_one(run)([_rows_of_tiles(job) for job in jobs], stacks, where)
    lead = jobs[0].x.shape[:2]
    shaped = [out.reshape(out.shape[0], *lead, out.shape[-1]) for out in outs]
    return shaped if in_parts else [out[0] for out in shaped]


def _launch(jobs: Sequence[Product], in_parts: bool, interpreted: bool) -> Launch:
    """The kernel for products of these shapes."""
    if in_parts and sparse_rows.serves(jobs):
        return sparse_rows.launch(jobs, interpreted=interpreted)
    kernel = few_rows if jobs[0].num_rows <= few_rows.MAX_ROWS else many_rows
    return kernel.launch(jobs, in_parts=in_parts, interpreted=interpreted)


def _rows_of_tiles(job: Product) -> Float[Array, "rows j"]:
    """The rows as bfloat16, as wide as whole tiles are: what is added meets no weight."""
    x = job.x.reshape(job.num_rows, -1).astype(jnp.bfloat16)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE)))


def _by_xla(
    xs: list[Array],
    stacks: list[Array],
    where: Array,
    kinds: Kinds,
    in_parts: bool,
) -> list[Float[Array, "b t o"]]:
    return [
        xla.product(Product(x, stack[place], activation, jnp.float32 if in_parts else dtype))
        for x, stack, place, (activation, dtype, _) in zip(xs, stacks, where, kinds, strict=True)
    ]


_Operands = tuple[list[Array], list[Array], Array]


def _forward(
    xs: list[Array], stacks: list[Array], where: Array, kinds: Kinds,
    in_parts: bool, interpreted: bool,
) -> tuple[list[Array], _Operands]:  # fmt: skip
    return _products(xs, stacks, where, kinds, in_parts, interpreted), (xs, stacks, where)


def _backward(
    kinds: Kinds, in_parts: bool, interpreted: bool,
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
