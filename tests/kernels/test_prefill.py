"""RWKV-7's time mixing of many tokens as two kernels, interpreted, against the XLA path in float32."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from wkvm_jax.kernels.dispatch import Kernels
from wkvm_jax.kernels.rwkv7 import Projections, Variant, prefill, time_mix
from wkvm_jax.state import Batch

LAYERS, LAYER, HEADS, WIDTH, TOKENS = 2, 1, 2, 64, 130
NUM_SLOTS, READ, WRITE, LENGTHS = 9, (7, 2, 5), (3, 2, 8), (130, 64, 0)
"""Three rows: two move to another slot, one stays; one fills its chunk, one consumes nothing."""

VARIANT = Variant(1e-5, False)

Operands = tuple[Array, Projections, dict[str, Array], dict[str, Array]]


def make(first_layer: bool, tokens: int = TOKENS, decay: float = 0.0) -> Operands:
    """Operands in bfloat16 whose tokens beyond a row's length, and all slots that nobody reads, hold NaN."""
    rng = np.random.default_rng(0)
    counted = np.arange(tokens) < np.array(LENGTHS)[:, None]

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def projected() -> Array:
        x = normal(len(READ), tokens, HEADS * WIDTH)
        return jnp.where(counted[:, :, None], x, jnp.nan).astype(jnp.bfloat16)

    projections = Projections(*(projected() for _ in range(6 if first_layer else 8)))
    names = ("w0", "a0", "k_k", "k_a") if first_layer else ("w0", "a0", "k_k", "k_a", "v0")
    params = {name: normal(HEADS * WIDTH).astype(jnp.bfloat16) for name in names}
    params["w0"] = params["w0"] + decay
    params["r_k"] = normal(HEADS, WIDTH).astype(jnp.bfloat16)
    ln_x = {name: normal(HEADS * WIDTH).astype(jnp.bfloat16) for name in ("scale", "bias")}
    arena = jnp.full((NUM_SLOTS, LAYERS, HEADS, WIDTH, WIDTH), jnp.nan)
    return (
        arena.at[np.array(READ), LAYER].set(normal(len(READ), HEADS, WIDTH, WIDTH)),
        projections,
        params,
        ln_x,
    )


def batch(tokens: int = TOKENS) -> Batch:
    return Batch(
        tokens=jnp.zeros((len(READ), tokens), jnp.int32),
        lengths=jnp.minimum(jnp.asarray(LENGTHS, jnp.int32), tokens),
        read_slots=jnp.asarray(READ, jnp.int32),
        write_slots=jnp.asarray(WRITE, jnp.int32),
        page_table=jnp.zeros((len(READ), 0), jnp.int32),
    )


@partial(jax.jit, static_argnames=("kernels", "variant"))
def run(
    operands: Operands, kernels: Kernels = "hopper_interpreted", variant: Variant = VARIANT
) -> tuple[Array, Array]:
    arena, projections, params, ln_x = operands
    tokens = projections.r.shape[1]
    if kernels == "xla":
        projections = jax.tree.map(lambda x: x.astype(jnp.float32), projections)
    return time_mix(arena, LAYER, batch(tokens), projections, params, ln_x, variant=variant, kernels=kernels)


def distance(got: np.ndarray, wanted: np.ndarray) -> float:
    """Of the norms: what is reported of other implementations."""
    return float(np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize(("first_layer", "decay"), [(True, 0.0), (False, -3.0), (False, 0.0), (False, 3.0)])
def test_output_and_states_are_those_of_xla(first_layer: bool, decay: float) -> None:
    operands = make(first_layer, decay=decay)
    out, arena = map(np.asarray, run(operands))
    wanted, wanted_arena = map(np.asarray, run(operands, "xla"))
    assert out.dtype == jnp.bfloat16 and out.shape == (len(READ), TOKENS, HEADS * WIDTH)
    for row, length in enumerate(LENGTHS):
        if length:
            # Rounding the result to bfloat16 makes up 1.7e-3 of it.
            assert distance(out[row, :length].astype(np.float32), wanted[row, :length]) < 2.6e-3
            assert distance(arena[WRITE[row], LAYER], wanted_arena[WRITE[row], LAYER]) < 1.5e-3
    idle = LENGTHS.index(0)
    np.testing.assert_array_equal(arena[WRITE[idle], LAYER], np.asarray(operands[0])[READ[idle], LAYER])


def test_nothing_else_in_the_arena_changes() -> None:
    operands = make(False)
    _, arena = run(operands)
    rest = np.full((NUM_SLOTS, LAYERS), True)
    rest[np.array(WRITE), LAYER] = False
    np.testing.assert_array_equal(np.asarray(arena)[rest], np.asarray(operands[0])[rest])


def test_keys_normalised_as_flash_linear_attention_does() -> None:
    operands = make(True)
    small = operands[1].replace(k=1e-4 * operands[1].k)
    both = [run((operands[0], small, *operands[2:]), variant=Variant(1e-5, fused)) for fused in (True, False)]
    wanted, _ = run((operands[0], small, *operands[2:]), "xla", Variant(1e-5, True))
    got, other = (np.asarray(out[0], np.float32) for out, _ in both)
    assert distance(got, np.asarray(wanted)[0]) < 2.6e-3 < distance(other, np.asarray(wanted)[0])


@pytest.mark.parametrize("tokens", [33, 64])
def test_a_prompt_in_two_parts(tokens: int) -> None:
    """The second part reads the states that the first has left."""
    arena, projections, params, ln_x = jax.tree.map(jnp.nan_to_num, make(False))
    parts = [
        jax.tree.map(lambda x, p=part: x[:, p], projections) for part in (slice(tokens), slice(tokens, None))
    ]
    whole, _ = run((arena, projections, params, ln_x))
    first, half = run((arena, parts[0], params, ln_x))
    half = half.at[np.array(READ)].set(half[np.array(WRITE)])
    second, _ = run((half, parts[1], params, ln_x))
    assert first.shape[1] + second.shape[1] == TOKENS
    joined = np.concatenate([first[0], second[0]]).astype(np.float32)
    assert distance(joined, np.asarray(whole[0], np.float32)) < 2.6e-3


def test_states_of_16_bits_are_rounded_once() -> None:
    arena, *others = make(False)
    halves = arena.astype(jnp.float16)
    _, after = run((halves, *others))
    _, wanted = run((halves.astype(jnp.float32), *others))
    assert after.dtype == jnp.float16
    np.testing.assert_array_equal(after, wanted.astype(jnp.float16))


def test_gradients_are_those_of_xla() -> None:
    arena, projections, params, ln_x = jax.tree.map(jnp.nan_to_num, make(False, 64))
    counted = (np.arange(64) < np.array(LENGTHS)[:, None])[:, :, None]

    def loss(kernels: Kernels, *operands: object) -> Array:
        out, after = time_mix(operands[0], LAYER, batch(64), *operands[1:], variant=VARIANT, kernels=kernels)
        return jnp.sum(jnp.where(counted, out.astype(jnp.float32), 0)) + jnp.sum(after)

    operands = (arena, projections, params, ln_x)
    got, wanted = (
        jax.grad(partial(loss, kernels), argnums=(0, 1, 2, 3))(*operands)
        for kernels in ("hopper_interpreted", "xla")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-5), got, wanted)


def test_what_the_kernels_do_not_take_goes_to_xla() -> None:
    operands = make(False)
    in_float32 = (operands[0], jax.tree.map(lambda x: x.astype(jnp.float32), operands[1]), *operands[2:])
    assert not prefill.serves(operands[0], in_float32[1])
    few = jax.tree.map(lambda x: x[:, : prefill.LEAST_TOKENS - 1], operands[1])
    assert not prefill.serves(operands[0], few) and prefill.serves(*operands[:2])
    jax.tree.map(np.testing.assert_array_equal, run(in_float32), run(in_float32, "xla"))
