"""Kernels at published shapes, translated for a GPU where there is none: what Mosaic refuses shows here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from wkvm_jax.kernels.products import Product, products
from wkvm_jax.kernels.products import workloads as product_workloads
from wkvm_jax.models import rwkv7
from wkvm_jax.models.sizes import SIZES
from wkvm_jax.models.stacking import stacked
from wkvm_jax.state import Batch, State
from wkvm_jax.types import Params


def lower(function: object, *arguments: object) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


FEW_AND_MANY = [group for group in product_workloads.PUBLISHED if group.rows in (8, 256, 1024)]


@pytest.mark.parametrize("group", FEW_AND_MANY, ids=lambda g: f"{g.rows} {g.name}")
def test_groups_of_products(group: product_workloads.Group) -> None:
    xs = [jax.ShapeDtypeStruct((group.rows, 1, height), jnp.bfloat16) for height, _, _ in group.shapes]
    weights = [jax.ShapeDtypeStruct(shape[:2], jnp.bfloat16) for shape in group.shapes]

    def run(xs: list[jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
        kinds = [activation for _, _, activation in group.shapes]
        jobs = [Product(*job) for job in zip(xs, weights, kinds, strict=True)]
        return products(jobs, kernels="hopper", in_parts=group.in_parts)

    assert lower(run, xs, weights).count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("size", "state_dtype", "rows"),
    [("0.1b", "float32", 1), ("0.4b", "float32", 200), ("1.5b", "float16", 32), ("2.9b", "float32", 200),
     ("7.2b", "float32", 1)],
)  # fmt: skip
def test_a_step(size: str, state_dtype: str, rows: int) -> None:
    """Two layers of each published size: one call of each kernel, lowered once for both."""
    config = rwkv7.Config(**{**vars(SIZES[size]), "num_layers": 2, "state_dtype": state_dtype})

    def step(params: Params, batch: Batch, state: State) -> tuple[jax.Array, State]:
        return rwkv7.forward(params, batch, state, config=config, kernels="hopper")

    def operands() -> tuple[Params, Batch, State]:
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.bfloat16), rwkv7.param_spec(config))
        zero = jnp.zeros((rows,), jnp.int32)
        batch = Batch(zero[:, None], zero, zero, zero, jnp.zeros((rows, 0), jnp.int32))
        return stacked(params), batch, rwkv7.state_spec(config).allocate(rows + 2)

    text = lower(step, *jax.eval_shape(operands))
    # The first layer has no value residual, and no parts to add.
    assert 8 <= text.count("custom_call @mosaic_gpu") <= 12
