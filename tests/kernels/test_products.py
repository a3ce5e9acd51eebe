"""Groups of products as one kernel, interpreted, against XLA's products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from wkvm_jax.kernels.dispatch import Kernels
from wkvm_jax.kernels.products import Product, hopper, padded_rows, products, sparse_rows
from wkvm_jax.kernels.products.operands import ACTIVATIONS, Activation

INTERPRETED: Kernels = "hopper_interpreted"


def make(
    inner: int,
    out: int,
    activation: Activation = "none",
    *,
    rows: int = 8,
    seed: int = 0,
    x: Array | None = None,
) -> Product:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((inner, out)) / inner**0.5
    if x is None:
        x = jnp.asarray(rng.standard_normal((rows, 1, inner)), jnp.bfloat16)
    return Product(x, jnp.asarray(weight, jnp.bfloat16), activation)


def check(got: Array, wanted: Array) -> None:
    """Equal but for the order of sums and the last bit of 16."""
    got, wanted = (np.asarray(x, np.float32) for x in (got[..., : wanted.shape[-1]], wanted))
    np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("rows", [8, 24, 64, 136, 256, 264])
def test_a_group_of_unequal_products(rows: int) -> None:
    jobs = [
        make(256, 128, rows=rows),
        make(192, 96, "tanh", rows=rows, seed=1),
        make(320, 64, "sigmoid", rows=rows, seed=2),
        make(64, 192, "square_relu", rows=rows, seed=3),
    ]
    for got, job, wanted in zip(
        products(jobs, kernels=INTERPRETED), jobs, products(jobs, kernels="xla"), strict=True
    ):
        assert got.dtype == jnp.bfloat16 and got.shape[-1] == -(-job.weight.shape[1] // 64) * 64
        check(got, wanted)


def test_a_result_wider_than_its_weight_feeds_the_next_product() -> None:
    down = make(128, 96)
    (inner,) = products([down], kernels=INTERPRETED)
    assert inner.shape == (8, 1, 128)
    up = make(96, 128, seed=1, x=inner)
    exact = make(96, 128, seed=1, x=inner[..., :96])
    check(products([up], kernels=INTERPRETED)[0], products([exact], kernels="xla")[0])
    check(products([up], kernels="xla")[0], products([exact], kernels="xla")[0])


def test_parts_sum_to_the_product() -> None:
    jobs = [make(512, 128)]
    (parts,), (whole,) = (products(jobs, kernels=k, in_parts=True) for k in (INTERPRETED, "xla"))
    assert parts.shape == (8, 8, 1, 128) and whole.shape == (1, 8, 1, 128)
    assert parts.dtype == whole.dtype == jnp.float32
    np.testing.assert_allclose(parts.sum(0), whole[0], rtol=1e-5, atol=1e-5)


def test_parts_have_no_activation() -> None:
    with pytest.raises(ValueError, match="no activation"):
        products([make(64, 64, "tanh")], kernels="xla", in_parts=True)


@pytest.mark.parametrize("job", [make(64, 64, rows=72), make(64, 64, rows=3), make(64, 40)])
def test_what_does_not_fit_is_left_to_xla(job: Product) -> None:
    (got,), (wanted,) = (products([job], kernels=k) for k in (INTERPRETED, "xla"))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def test_float32_weights_are_left_to_xla() -> None:
    job = Product(jnp.ones((8, 1, 64)), jnp.ones((64, 64)))
    assert not hopper.serves([job])
    assert products([job], kernels=INTERPRETED)[0].dtype == jnp.float32


@pytest.mark.parametrize(
    ("counted", "zeros"), [(1, 0.87), (3, 0.9), (4, 0.3), (2, 1.0), (1, 0.0)], ids=lambda x: str(x)
)
def test_rows_of_a_weight_that_meet_only_zeros_are_skipped(counted: int, zeros: float) -> None:
    """Their values do not matter, be they NaN, and neither do rows that do not count."""
    rng = np.random.default_rng(0)
    x = np.square(rng.standard_normal((8, 1, 1024))) * (rng.random((8, 1, 1024)) >= zeros)
    x[counted:] = np.nan
    weight = rng.standard_normal((1024, 128)) / 32
    used = (x[:counted, 0] != 0).any(axis=0)
    assert (zeros > 0) == bool((~used).any())
    job = Product(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), sparse_rows=counted)
    assert sparse_rows.serves([job])
    (parts,), (whole,) = (products([job], kernels=k, in_parts=True) for k in (INTERPRETED, "xla"))
    np.testing.assert_allclose(parts.sum(0)[:counted], whole[0, :counted], rtol=1e-5, atol=1e-5)
    if zeros > 0.5:
        poisoned = jnp.asarray(np.where(used[:, None], weight, np.nan), jnp.bfloat16)
        poisoned_job = Product(job.x, poisoned, sparse_rows=counted)
        (same,) = products([poisoned_job], kernels=INTERPRETED, in_parts=True)
        np.testing.assert_array_equal(same[:, :counted], parts[:, :counted])


@pytest.mark.parametrize("in_parts", [True, False])
def test_gradients_are_those_of_xla(in_parts: bool) -> None:
    activations: list[Activation] = ["none", "none"] if in_parts else ["tanh", "square_relu"]
    made = [make(256, 128, seed=4), make(128, 96, seed=5)]
    xs, weights = [job.x for job in made], [job.weight for job in made]

    def loss(xs: list[Array], weights: list[Array], kernels: Kernels) -> Array:
        jobs = [Product(*job) for job in zip(xs, weights, activations, strict=True)]
        outs = products(jobs, kernels=kernels, in_parts=in_parts)
        whole = [out.sum(0) if in_parts else out for out in outs]
        return sum(
            jnp.sum(jnp.sin(out[..., : weight.shape[1]].astype(jnp.float32)))
            for out, weight in zip(whole, weights, strict=True)
        )

    got, wanted = (jax.grad(loss, argnums=(0, 1))(xs, weights, kernels) for kernels in (INTERPRETED, "xla"))
    jax.tree.map(check, got, wanted)


def test_a_step_pads_its_rows_where_products_want_it() -> None:
    assert padded_rows(3, 1, "hopper") == 8 and padded_rows(9, 1, "hopper") == 16
    assert padded_rows(3, 1, "xla") == padded_rows(3, 1, "ampere") == padded_rows(3, 64, "hopper") == 3


def test_activations() -> None:
    x = jnp.asarray([-2.0, 0.0, 3.0])
    np.testing.assert_allclose(ACTIVATIONS["square_relu"](x), [0.0, 0.0, 9.0])
    np.testing.assert_allclose(ACTIVATIONS["sigmoid"](x), 1 / (1 + np.exp(-np.asarray(x))), rtol=1e-6)
