"""The token shift of one token as one kernel, interpreted, against the XLA path."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from wkvm_jax.kernels.dispatch import Kernels
from wkvm_jax.kernels.token_shift import TokenShift, mosaic_gpu
from wkvm_jax.state import Batch

WIDTH, LAYERS, PLACES, MIXES, EPS = 512, 2, 2, 6, 1e-5
NUM_SLOTS, READ, WRITE, LENGTHS = 9, (7, 2, 5), (3, 2, 8), (1, 1, 0)
"""Three rows: one moves to another slot, one stays in place, one moves without consuming its token."""

Operands = tuple[Array, Array | None, Array, dict[str, Array], Array]


def make(num_parts: int, has_bias: bool, rows: int, width: int = WIDTH) -> Operands:
    """Operands whose padding rows, and all slots that nobody reads, hold NaN."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    x = jnp.full((rows, 1, width), jnp.nan).at[: len(READ)].set(3.0 + normal(len(READ), 1, width))
    parts = normal(num_parts, rows, 1, width) if num_parts else None
    leaf = jnp.full((NUM_SLOTS, LAYERS, PLACES, width), jnp.nan)
    leaf = leaf.at[np.array(READ)].set(normal(len(READ), LAYERS, PLACES, width))
    norm = {"scale": normal(width)} | ({"bias": normal(width)} if has_bias else {})
    return x, parts, leaf, norm, normal(MIXES, width)


@partial(jax.jit, static_argnames=("kernels", "dtype"))
def run(operands: Operands, kernels: Kernels, dtype: jnp.dtype) -> tuple[Array, list[Array], Array]:
    """Every layer and place in turn, each with the residual stream of the one before."""
    x, parts, leaf, norm, mixes = operands
    batch = Batch(
        tokens=jnp.zeros((len(READ), 1), jnp.int32),
        lengths=jnp.asarray(LENGTHS, jnp.int32),
        read_slots=jnp.asarray(READ, jnp.int32),
        write_slots=jnp.asarray(WRITE, jnp.int32),
        page_table=jnp.zeros((len(READ), 0), jnp.int32),
    )
    if kernels == "xla":
        x, parts = x[: len(READ)], None if parts is None else parts[:, : len(READ)]
    shift, results = TokenShift(leaf, batch, kernels), []
    for layer in range(LAYERS):
        for place in range(PLACES):
            x, mixed = shift.mix(x, parts, layer, place, norm, mixes, eps=EPS, dtype=dtype)
            results += [one[: len(READ)] for one in mixed]
    return x[: len(READ)], results, shift.finish()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("num_parts", "has_bias"), [(0, True), (1, False), (4, True)])
def test_results_are_those_of_xla(num_parts: int, has_bias: bool, dtype: jnp.dtype) -> None:
    operands = make(num_parts, has_bias, rows=8)
    x, mixed, leaf = run(operands, "hopper_interpreted", dtype)
    wanted_x, wanted_mixed, wanted_leaf = run(operands, "xla", dtype)
    np.testing.assert_allclose(x, wanted_x, rtol=1e-6, atol=1e-5)
    one_bit = 2e-2 if dtype == jnp.bfloat16 else 1e-5
    for got, wanted in zip(mixed, wanted_mixed, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(
            got.astype(jnp.float32), wanted.astype(jnp.float32), rtol=one_bit, atol=2e-5
        )
    np.testing.assert_allclose(leaf, wanted_leaf, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(leaf[WRITE[2]], operands[2][READ[2]])


def test_widths_that_do_not_fit_are_left_to_xla() -> None:
    operands = make(1, True, rows=len(READ), width=96)
    got, wanted = (run(operands, kernels, jnp.float32) for kernels in ("hopper_interpreted", "xla"))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize(("rows", "share"), [(1, 512), (32, 512), (33, 2048)])
def test_few_rows_are_shared_out(rows: int, share: int) -> None:
    assert mosaic_gpu._share(rows, 2048) == share


def test_a_share_divides_every_width_that_fits() -> None:
    for width in range(mosaic_gpu.WIDTH_MULTIPLE, 8193, mosaic_gpu.WIDTH_MULTIPLE):
        share = mosaic_gpu._share(1, width)
        assert width % share == 0 and share % mosaic_gpu.WIDTH_MULTIPLE == 0


def test_gradients_are_those_of_xla() -> None:
    x, parts, leaf, norm, mixes = make(2, True, rows=len(READ))
    leaf = jnp.nan_to_num(leaf)

    def loss(kernels: Kernels, *operands: object) -> Array:
        x, mixed, leaf = run(operands, kernels, jnp.float32)
        return jnp.sum(jnp.sin(x)) + sum(jnp.sum(jnp.sin(one)) for one in mixed) + jnp.sum(jnp.sin(leaf))

    operands = (x, parts, leaf, norm, mixes)
    wanted = jax.grad(partial(loss, "xla"), argnums=(0, 1, 2, 3, 4))(*operands)
    got = jax.grad(partial(loss, "hopper_interpreted"), argnums=(0, 1, 2, 3, 4))(*operands)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), wanted, got)
