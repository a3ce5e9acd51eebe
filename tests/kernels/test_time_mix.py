"""RWKV-7's time mixing of one token as one kernel, interpreted, against the XLA path."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from wkvm_jax.kernels.dispatch import Kernels
from wkvm_jax.kernels.rwkv7 import Projections, Variant, mosaic_gpu, time_mix
from wkvm_jax.state import Batch

LAYERS, LAYER, HEADS, WIDTH = 2, 1, 2, 64
NUM_SLOTS, READ, WRITE, LENGTHS = 9, (7, 2, 5), (3, 2, 8), (1, 1, 0)
"""Three rows: one moves to another slot, one stays in place, one moves without consuming its token."""
PADDED_ROWS = 8

Operands = tuple[Array, Projections, dict[str, Array], dict[str, Array]]


def make(first_layer: bool, dtype: jnp.dtype, rows: int = PADDED_ROWS) -> Operands:
    """Operands whose padding rows, and all slots that nobody reads, hold NaN."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def projected() -> Array:
        x = jnp.full((rows, 1, HEADS * WIDTH), jnp.nan)
        return x.at[: len(READ)].set(normal(len(READ), 1, HEADS * WIDTH)).astype(dtype)

    residual = () if first_layer else (projected(), projected())
    projections = Projections(*(projected() for _ in range(6)), *residual)
    names = ("w0", "a0", "k_k", "k_a") if first_layer else ("w0", "a0", "k_k", "k_a", "v0")
    params = {name: normal(HEADS * WIDTH).astype(dtype) for name in names}
    params["r_k"] = normal(HEADS, WIDTH).astype(dtype)
    ln_x = {name: normal(HEADS * WIDTH).astype(dtype) for name in ("scale", "bias")}
    arena = jnp.full((NUM_SLOTS, LAYERS, HEADS, WIDTH, WIDTH), jnp.nan)
    read = normal(len(READ), HEADS, WIDTH, WIDTH)
    return arena.at[np.array(READ), LAYER].set(read), projections, params, ln_x


def batch() -> Batch:
    return Batch(
        tokens=jnp.zeros((len(READ), 1), jnp.int32),
        lengths=jnp.asarray(LENGTHS, jnp.int32),
        read_slots=jnp.asarray(READ, jnp.int32),
        write_slots=jnp.asarray(WRITE, jnp.int32),
        page_table=jnp.zeros((len(READ), 0), jnp.int32),
    )


@partial(jax.jit, static_argnames=("variant", "kernels"))
def run(operands: Operands, variant: Variant, kernels: Kernels) -> tuple[Array, Array]:
    arena, projections, params, ln_x = operands
    if kernels == "xla":
        projections = jax.tree.map(lambda x: x[: len(READ)], projections)
    out, arena = time_mix(arena, LAYER, batch(), projections, params, ln_x, variant=variant, kernels=kernels)
    return out[: len(READ)], arena


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("first_layer", [True, False])
@pytest.mark.parametrize("fused_norm", [True, False])
def test_output_and_arena_are_those_of_xla(fused_norm: bool, first_layer: bool, dtype: jnp.dtype) -> None:
    operands, variant = make(first_layer, dtype), Variant(1e-5, fused_norm)
    out, arena = map(np.asarray, run(operands, variant, "hopper_interpreted"))
    wanted, wanted_arena = map(np.asarray, run(operands, variant, "xla"))
    consuming = np.array(LENGTHS) > 0
    assert out.dtype == dtype
    one_bit = 2e-2 if dtype == jnp.bfloat16 else 2e-6
    np.testing.assert_allclose(
        out[consuming].astype(np.float32), wanted[consuming].astype(np.float32), rtol=one_bit, atol=1e-5
    )
    np.testing.assert_allclose(
        arena, wanted_arena, rtol=0, atol=1e-5
    )  # NaN where, and only where, XLA has it
    np.testing.assert_array_equal(arena[WRITE[2], LAYER], np.asarray(operands[0])[READ[2], LAYER])


@pytest.mark.parametrize("state_dtype", [jnp.float16, jnp.bfloat16])
def test_states_of_16_bits_are_rounded_once_a_token(state_dtype: jnp.dtype) -> None:
    arena, *others = make(False, jnp.dtype(jnp.float32))
    arena = arena.astype(state_dtype)
    out, after = run((arena, *others), Variant(1e-5, False), "hopper_interpreted")
    by_xla, after_by_xla = run((arena, *others), Variant(1e-5, False), "xla")
    wanted, wanted_after = run((arena.astype(jnp.float32), *others), Variant(1e-5, False), "xla")
    assert after.dtype == after_by_xla.dtype == state_dtype
    for got in (out, by_xla):
        np.testing.assert_allclose(got[:2], wanted[:2], rtol=0, atol=2e-5)
    for got in (after, after_by_xla):
        one_bit = float(jnp.finfo(state_dtype).eps)
        np.testing.assert_allclose(
            got.astype(jnp.float32),
            wanted_after.astype(state_dtype).astype(jnp.float32),
            rtol=one_bit,
            atol=1e-5,
        )


def test_a_state_too_large_for_float16_stays_finite() -> None:
    arena, projections, params, ln_x = make(False, jnp.dtype(jnp.float32))
    arena = jnp.where(jnp.isnan(arena), jnp.nan, 60_000.0).astype(jnp.float16)
    grown = projections.replace(k=100.0 * projections.k, v=1e5 * projections.v)
    for kernels in ("xla", "hopper_interpreted"):
        _, after = run((arena, grown, params, ln_x), Variant(1e-5, False), kernels)
        written = np.asarray(after)[np.array(WRITE), LAYER]
        assert np.isfinite(written).all() and np.abs(written).max() == 65_504


def test_without_bulk_copies_all_is_the_same() -> None:
    arena, projections, params, ln_x = make(False, jnp.dtype(jnp.bfloat16))
    operands = (arena, batch(), projections, params, ln_x, LAYER, Variant(1e-5, False))
    (out, after), (wanted, wanted_after) = (
        mosaic_gpu.time_mix(*operands, bulk=bulk, interpreted=True) for bulk in (False, True)
    )
    np.testing.assert_array_equal(np.asarray(out[:2]), np.asarray(wanted[:2]))
    np.testing.assert_array_equal(np.asarray(after), np.asarray(wanted_after))


def test_an_idle_row_hands_its_state_on_whatever_its_operands_hold() -> None:
    arena, projections, params, ln_x = make(False, jnp.dtype(jnp.float32))
    idle = LENGTHS.index(0)
    poisoned = jax.tree.map(lambda x: x.at[idle].set(jnp.nan), projections)
    _, after = run((arena, poisoned, params, ln_x), Variant(1e-5, False), "hopper_interpreted")
    np.testing.assert_array_equal(after[WRITE[idle], LAYER], arena[READ[idle], LAYER])


def test_nothing_else_in_the_arena_changes() -> None:
    operands = make(False, jnp.dtype(jnp.float32))
    _, arena = run(operands, Variant(1e-5, False), "hopper_interpreted")
    rest = np.full((NUM_SLOTS, LAYERS), True)
    rest[np.array(WRITE), LAYER] = False
    np.testing.assert_array_equal(np.asarray(arena)[rest], np.asarray(operands[0])[rest])


def test_gradients_are_those_of_xla() -> None:
    arena, projections, params, ln_x = make(False, jnp.dtype(jnp.float32), rows=len(READ))
    weight = jnp.asarray(LENGTHS, jnp.float32)[:, None, None]  # what the idle row gives has no meaning
    arena = jnp.nan_to_num(arena)

    def loss(kernels: Kernels, *operands: object) -> Array:
        out, after = run(operands, Variant(1e-5, False), kernels)
        return jnp.sum(jnp.square(out) * weight) + jnp.sum(jnp.sin(after))

    operands = (arena, projections, params, ln_x)
    wanted = jax.grad(partial(loss, "xla"), argnums=(0, 1, 2, 3))(*operands)
    got = jax.grad(partial(loss, "hopper_interpreted"), argnums=(0, 1, 2, 3))(*operands)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), wanted, got)


def test_halves_are_computed_with_in_float32() -> None:
    """Of several tokens, on the XLA path: as if operands had been float32, and rounded once at the end."""
    arena, projections, params, ln_x = make(False, jnp.dtype(jnp.bfloat16), rows=len(READ))
    longer = jax.tree.map(lambda x: jnp.repeat(x, 17, axis=1), projections)
    wider = jax.tree.map(lambda x: x.astype(jnp.float32), longer)
    out, after = run((arena, longer, params, ln_x), Variant(1e-5, False), "xla")
    wanted, wanted_after = run((arena, wider, params, ln_x), Variant(1e-5, False), "xla")
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out[:2], wanted[:2].astype(jnp.bfloat16))
    np.testing.assert_array_equal(after, wanted_after)


def test_heads_that_do_not_fit_are_refused() -> None:
    operands = make(True, jnp.dtype(jnp.float32), rows=len(READ))
    narrow = operands[0][..., :24]
    with pytest.raises(ValueError, match="num_values=24"):
        time_mix(
            narrow, LAYER, batch(), *operands[1:], variant=Variant(1e-5, False), kernels="hopper_interpreted"
        )
