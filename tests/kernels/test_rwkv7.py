"""The RWKV-7 recurrence, chunked and one token at a time, against a scan in float32 and one in float64."""

from __future__ import annotations

import dataclasses
from functools import cache

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from wkvm_jax.kernels.rwkv7.reference import recurrence_reference
from wkvm_jax.kernels.rwkv7.xla import recurrence
from wkvm_jax.state import Batch

LENGTHS = [1, 2, 15, 16, 17, 33, 63, 64, 65, 130]
"""Around one token, and around one and several chunks."""
STRONGEST_DECAY = -float(np.exp(-0.5))
"""The model's decay has no smaller logarithm."""
HEADS, KEY, VALUE = 2, 16, 24
ROUNDING = 1e-6
"""Allowed of the largest value. A float32 holds 6e-8, and a value here is a sum of some tens of products."""
LAYERS, LAYER, NUM_SLOTS = 2, 1, 9
READ, WRITE = (7, 2, 5), (3, 2, 8)
"""Slots of three rows; the second continues in place."""
NAMES = ("r", "log_w", "k", "v", "a", "b")


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of three rows: each `[row, token, head, channel]`, and states `[row, head, key, value]`."""

    inputs: dict[str, np.ndarray]
    state: np.ndarray
    lengths: np.ndarray

    @property
    def width(self) -> int:
        return self.inputs["r"].shape[1]


def make_case(width: int, seed: int = 0, lengths: tuple[int, ...] | None = None) -> Case:
    """Inputs as the model makes them: keys of removal have unit length, decays the model's range."""
    rng = np.random.default_rng(seed)
    rows = len(READ)

    def normal(channels: int) -> np.ndarray:
        return rng.standard_normal((rows, width, HEADS, channels)).astype(np.float32)

    kappa = _unit(normal(KEY))
    iclr = 1 / (1 + np.exp(-2 * normal(KEY)))
    inputs = {
        "r": normal(KEY),
        "log_w": STRONGEST_DECAY / (1 + np.exp(-3 * normal(KEY))),
        "k": normal(KEY),
        "v": normal(VALUE),
        "a": -kappa,
        "b": kappa * iclr,
    }
    state = rng.standard_normal((rows, HEADS, KEY, VALUE)).astype(np.float32)
    counts = np.full(rows, width) if lengths is None else np.asarray(lengths)
    inputs = {name: inputs[name].astype(np.float32) for name in NAMES}
    return Case(inputs, state, counts.astype(np.int32))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def scan_float64(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence as written in the paper, token by token; outputs past a row's length are 0."""
    y = np.zeros((*case.inputs["v"].shape,))
    states = case.state.astype(np.float64)
    for row, length in enumerate(case.lengths):
        for head in range(HEADS):
            state = states[row, head]
            for t in range(length):
                r, log_w, k, v, a, b = (case.inputs[name][row, t, head].astype(np.float64) for name in NAMES)
                state = (np.diag(np.exp(log_w)) + np.outer(b, a)) @ state + np.outer(k, v)
                y[row, t, head] = state.T @ r
            states[row, head] = state
    return y, states


@jax.jit
def run(inputs: dict[str, Array], state: Array, lengths: Array) -> tuple[Array, Array]:
    """The kernel's output and final states; everything else in the arena is NaN before and after."""
    width = inputs["r"].shape[1]
    arena = jnp.full((NUM_SLOTS, LAYERS, *state.shape[1:]), jnp.nan).at[jnp.asarray(READ), LAYER].set(state)
    batch = Batch(
        tokens=jnp.zeros((len(READ), width), jnp.int32),
        lengths=lengths,
        read_slots=jnp.asarray(READ, jnp.int32),
        write_slots=jnp.asarray(WRITE, jnp.int32),
        page_table=jnp.zeros((len(READ), 0), jnp.int32),
    )
    y, after = recurrence(arena, LAYER, batch, tuple(inputs[name] for name in NAMES))
    return y, after


@jax.jit
def run_reference(inputs: dict[str, Array], state: Array) -> tuple[Array, Array]:
    return recurrence_reference(*(inputs[name] for name in NAMES), state)


def check(case: Case, tolerance: float = ROUNDING) -> None:
    """Output and final state against float64, within a part of the largest value; the arena otherwise."""
    y, arena = map(np.asarray, run(case.inputs, case.state, case.lengths))
    expected_y, expected = scan_float64(case)
    counted = np.arange(case.width) < case.lengths[:, None]
    scale = max(1.0, np.abs(expected_y).max(), np.abs(expected).max())
    np.testing.assert_allclose(y[counted], expected_y[counted], rtol=0, atol=tolerance * scale)
    np.testing.assert_allclose(arena[WRITE, LAYER], expected, rtol=0, atol=tolerance * scale)
    untouched = np.full(arena.shape[:2], True)
    untouched[WRITE, LAYER] = untouched[READ, LAYER] = False
    assert np.isnan(arena[untouched]).all()
    left = [row for row in range(len(READ)) if READ[row] not in WRITE]
    np.testing.assert_array_equal(arena[np.asarray(READ)[left], LAYER], case.state[left])


@pytest.mark.parametrize("width", LENGTHS)
def test_equals_float64(width: int) -> None:
    check(make_case(width))


@pytest.mark.parametrize("width", [1, 17, 65])
def test_equals_the_reference(width: int) -> None:
    case = make_case(width, seed=1)
    y, arena = map(np.asarray, run(case.inputs, case.state, case.lengths))
    expected_y, expected = map(np.asarray, run_reference(case.inputs, case.state))
    np.testing.assert_allclose(y, expected_y, rtol=0, atol=ROUNDING * np.abs(expected_y).max())
    np.testing.assert_allclose(arena[WRITE, LAYER], expected, rtol=0, atol=ROUNDING * np.abs(expected).max())


def test_the_reference_equals_float64() -> None:
    case = make_case(33)
    expected_y, expected = scan_float64(case)
    y, state = map(np.asarray, run_reference(case.inputs, case.state))
    np.testing.assert_allclose(y, expected_y, rtol=0, atol=ROUNDING * np.abs(expected_y).max())
    np.testing.assert_allclose(state, expected, rtol=0, atol=ROUNDING * np.abs(expected).max())


@pytest.mark.parametrize("lengths", [(0, 1, 17), (16, 33, 32), (33, 0, 5)])
def test_ragged_lengths(lengths: tuple[int, ...]) -> None:
    """What stands past a row's length does not matter, be it large."""
    case = make_case(33, lengths=lengths)
    padding = np.arange(case.width) >= case.lengths[:, None]
    for name in NAMES:
        case.inputs[name][padding] = np.nan
    check(case)


@pytest.mark.parametrize("width", [1, 33])
def test_rows_of_no_length_keep_their_bits(width: int) -> None:
    case = make_case(width, lengths=(0, 0, 0))
    _, arena = run(case.inputs, case.state, case.lengths)
    np.testing.assert_array_equal(np.asarray(arena)[WRITE, LAYER], case.state)


@pytest.mark.parametrize("decay", ["strongest", "none", "mixed"])
def test_extreme_decays(decay: str) -> None:
    """The strongest decay's inverse grows to 1.7e4 in a chunk, and no digit may be lost to it."""
    case = make_case(65)
    log_w = case.inputs["log_w"]
    log_w[...] = {"strongest": STRONGEST_DECAY, "none": 0.0, "mixed": 0.0}[decay]
    if decay == "mixed":
        log_w[..., ::2] = STRONGEST_DECAY
        log_w[:, ::3] = 0.0
    check(case)


@pytest.mark.parametrize("iclr", [1.0, 0.5])
@pytest.mark.parametrize("spread", [0.0, 1e-3])
def test_keys_that_repeat(iclr: float, spread: float) -> None:
    """Equal keys fill the triangle that a chunk inverts: where a sum of its powers would lose everything."""
    case = make_case(65)
    rng = np.random.default_rng(5)
    one = rng.standard_normal((1, 1, HEADS, KEY)) + spread * rng.standard_normal(case.inputs["a"].shape)
    kappa = _unit(np.broadcast_to(one, case.inputs["a"].shape)).astype(np.float32)
    case.inputs["log_w"][...] = 0.0
    case.inputs["a"][...], case.inputs["b"][...] = -kappa, kappa * iclr
    check(case)


def test_text_of_one_token_repeated() -> None:
    """All inputs the same at each token, as in a text of one letter; the state settles and stays."""
    case = make_case(130)
    for name in NAMES:
        case.inputs[name][:] = case.inputs[name][:, :1]
    check(case)


@cache
def _gradients(of_reference: bool) -> jax.stages.Wrapped:
    def loss(inputs: dict[str, Array], state: Array, lengths: Array) -> Array:
        if of_reference:
            counted = (jnp.arange(inputs["r"].shape[1]) < lengths[:, None])[:, :, None, None]
            still = {"log_w": 0.0, "k": 0.0, "a": 0.0}
            masked = {name: jnp.where(counted, x, still.get(name, x)) for name, x in inputs.items()}
            y, final = run_reference(masked, state)
        else:
            y, arena = run(inputs, state, lengths)
            final = arena[jnp.asarray(WRITE), LAYER]
        counted = (jnp.arange(y.shape[1]) < lengths[:, None])[:, :, None, None]
        weights = jnp.cos(jnp.arange(y.shape[1] * VALUE).reshape(1, -1, 1, VALUE))
        return jnp.sum(jnp.where(counted, y, 0.0) * weights) + jnp.sum(jnp.sin(final))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


@pytest.mark.parametrize(
    "width,lengths", [(1, (1, 1, 1)), (1, (1, 0, 1)), (33, (33, 16, 0)), (33, (33, 33, 33))]
)
def test_gradients_equal_the_references(width: int, lengths: tuple[int, ...]) -> None:
    """For each input and for the initial state. It passes through each product
    twice and adds up over tokens, hence ten times the tolerance of values."""
    case = make_case(width, lengths=lengths)
    got, got_state = _gradients(False)(case.inputs, case.state, case.lengths)
    wanted, wanted_state = _gradients(True)(case.inputs, case.state, case.lengths)
    for name, one, other in [*((n, got[n], wanted[n]) for n in NAMES), ("state", got_state, wanted_state)]:
        one, other = np.asarray(one), np.asarray(other)
        assert np.isfinite(one).all(), name
        np.testing.assert_allclose(
            one, other, rtol=0, atol=10 * ROUNDING * max(1, np.abs(other).max()), err_msg=name
        )


@hypothesis.given(
    width=st.sampled_from([1, 3, 16, 19]),
    seed=st.integers(0, 1 << 16),
    fractions=st.tuples(*[st.floats(0, 1)] * 3),
    state_scale=st.sampled_from([0.0, 1.0, 100.0]),
    value_scale=st.sampled_from([0.0, 1e-3, 30.0]),
    sharpness=st.sampled_from([0.1, 1.0, 100.0]),
)
@hypothesis.settings(max_examples=60)
def test_any_inputs_equal_float64(
    width: int,
    seed: int,
    fractions: tuple[float, ...],
    state_scale: float,
    value_scale: float,
    sharpness: float,
) -> None:
    """Decays at the ends of their range (large sharpness), states and values of any size, any lengths."""
    case = make_case(width, seed, tuple(round(fraction * width) for fraction in fractions))
    rng = np.random.default_rng(seed)
    case.inputs["log_w"][...] = STRONGEST_DECAY / (
        1 + np.exp(-sharpness * rng.standard_normal(case.inputs["r"].shape))
    )
    case.inputs["v"][...] *= value_scale
    case.state[...] *= state_scale
    check(case, tolerance=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 16, 65, 130])
def test_equals_float64_on_a_gpu(width: int) -> None:
    """In full float32 there too, not in TF32, which would cost three digits."""
    check(make_case(width))
