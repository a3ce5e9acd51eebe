"""RWKV-7 against a second implementation in numpy, at many sizes; what training and tuning need of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from tests.families import RWKV7_CONFIG, rwkv7_params
from tests.models import rwkv7_numpy
from tests.models.rwkv7_tensors import Tensors, fla_config, random_tensors, small_config, to_fla, write_fla
from tests.weights import torch_writer
from wkvm_jax.kernels.dispatch import Kernels
from wkvm_jax.models import rwkv7
from wkvm_jax.models.loading import load
from wkvm_jax.models.model import Model
from wkvm_jax.models.registry import RWKV7
from wkvm_jax.state import Batch, State

WIDTH = 20
"""Tokens of a rectangle: one chunk of the recurrence and a part of another."""
CLOSE = 5e-5
"""Two float32 forwards, where logits have a spread of about 1."""

KERNEL_CONFIG = rwkv7.Config(
    vocab_size=64, hidden_size=256, num_layers=2, head_dim=64, intermediate_size=512, value_dim=256,
    decay_rank=64, iclr_rank=96, value_rank=32, gate_rank=128,
)  # fmt: skip
"""A model that the Pallas kernels take."""
CONFIGS = {
    "small": small_config(),
    "one layer": small_config(num_layers=1),
    "one head": small_config(head_dim=32),
    "heads of 64": small_config(hidden_size=128, value_dim=128, head_dim=64, intermediate_size=96),
    "wide values": small_config(value_dim=96, num_layers=3),
    "norms without bias": small_config(norm_bias=False),
    "fused norm": small_config(fused_norm=True),
    "tied head": small_config(tied_head=True),
}
_FLA_ALONE = {"wide values", "norms without bias", "fused norm", "tied head"}
"""What BlinkDL's names cannot say."""


@cache
def checkpoint(name: str) -> tuple[Tensors, Model]:
    """Random tensors, and the model that a checkpoint of them is loaded as."""
    config = CONFIGS[name]
    tensors = random_tensors(config)
    with TemporaryDirectory() as directory:
        path = Path(directory)
        if name in _FLA_ALONE:
            model = load(write_fla(path, to_fla(tensors), fla_config(config)))
        else:
            model = load(torch_writer.save_arrays(path / "model.pth", tensors))
    assert dataclasses.replace(model.config, value_rank=config.value_rank) == config
    return tensors, model


@pytest.mark.parametrize("name", CONFIGS)
@hypothesis.given(
    lengths=st.tuples(*[st.integers(0, WIDTH)] * 3), seed=st.integers(0, 1 << 16), more=st.integers(1, 3)
)
@hypothesis.settings(max_examples=4)
def test_equals_numpy(name: str, lengths: tuple[int, ...], seed: int, more: int) -> None:
    """Ragged rows of one pass, then a few single tokens: logits and states."""
    tensors, model = checkpoint(name)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, model.config.vocab_size, (len(lengths), WIDTH + more))
    logits, state = model(
        jnp.asarray(tokens[:, :WIDTH], jnp.int32), model.init_state(3), jnp.asarray(lengths, jnp.int32)
    )
    logits = np.asarray(logits)
    singles = []
    for step in range(more):
        single, state = model(jnp.asarray(tokens[:, WIDTH + step, None], jnp.int32), state)
        singles.append(np.asarray(single))
    for row, length in enumerate(lengths):
        ids = [*tokens[row, :length], *tokens[row, WIDTH:]]
        got = np.concatenate([logits[row, :length], *(single[row] for single in singles)])
        check(tensors, model, ids, got, state.row(row))


def test_a_vocabulary_of_65536() -> None:
    """The size of the published models' vocabulary; ids from all of it, the last one included."""
    config = small_config(vocab_size=65_536)
    tensors = random_tensors(config)
    with TemporaryDirectory() as directory:
        model = load(torch_writer.save_arrays(Path(directory) / "model.pth", tensors))
    assert model.config == config
    ids = np.random.default_rng(0).integers(0, 65_536, WIDTH)
    ids[[3, 7]] = 65_535, 0
    logits, state = model(jnp.asarray(ids, jnp.int32)[None], model.init_state(1))
    check(tensors, model, ids, np.asarray(logits[0]), state)
    state, pieces = model.init_state(1), []
    for token in ids:
        logits, state = model(jnp.full((1, 1), token, jnp.int32), state)
        pieces.append(np.asarray(logits[0]))
    check(tensors, model, ids, np.concatenate(pieces), state)


def check(tensors: Tensors, model: Model, ids: Sequence[int], logits: np.ndarray, state: State) -> None:
    """Logits and state within ten times the distance that numpy's own float32 has to its float64.

    That distance is larger where a head's output is nearly zero before it is normalised, as at some first
    tokens: no float32 forward can do better there.
    """
    wanted, end = rwkv7_numpy.run(tensors, model.config, ids)
    rounded, rounded_end = rwkv7_numpy.run(tensors, model.config, ids, np.float32)
    shift = state.leaves["shift"][0]
    compared = [
        ("logits", logits, wanted, rounded),
        ("wkv", state.leaves["wkv"][0].swapaxes(-1, -2), end.wkv, rounded_end.wkv),
        ("time mix", shift[:, 0], end.att_x, rounded_end.att_x),
        ("channel mix", shift[:, 1], end.ffn_x, rounded_end.ffn_x),
    ]
    for name, got, exact, in_float32 in compared:
        distance = max(np.abs(in_float32 - exact).max(), 1e-6 * np.abs(exact).max())
        np.testing.assert_allclose(got, exact, rtol=0, atol=10 * distance, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_other_kernels_run_under_vmap_and_grad(dtype: jnp.dtype) -> None:
    """Two states side by side, and a gradient for each: as on XLA."""
    config = dataclasses.replace(KERNEL_CONFIG, num_layers=1)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), rwkv7_params(config, jax.random.key(2)))
    tokens = jnp.asarray([[[3]], [[5]]], jnp.int32)

    def losses(kernels: Kernels) -> tuple[Array, State]:
        model = Model(RWKV7, config, params, kernels=kernels)
        states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), model.init_state(1))
        states = states.replace(leaves=jax.tree.map(lambda leaf: leaf + 0.1, states.leaves))

        def loss(leaves: dict[str, Array], num_tokens: Array, tokens: Array) -> Array:
            logits, after = model.apply(params, tokens, State(leaves, {}, num_tokens))
            return jnp.sum(jnp.sin(logits)) + jnp.sum(jnp.sin(after.leaves["wkv"]))

        each = jax.jit(jax.vmap(jax.value_and_grad(loss)))
        return each(states.leaves, states.num_tokens, tokens)

    close = 0.1 if dtype == jnp.bfloat16 else 1e-3
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=close, atol=close),
        losses("hopper_interpreted"),
        losses("xla"),
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_other_kernels_make_the_same_model(dtype: jnp.dtype) -> None:
    """One token for each of three rows: one moves to another slot, one stays, one has no token to consume."""
    config = KERNEL_CONFIG
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), rwkv7_params(config, jax.random.key(2)))
    state = rwkv7.state_spec(config).allocate(7)
    keys = jax.random.split(jax.random.key(3))
    leaves = {
        name: jax.random.normal(key, leaf.shape)
        for key, (name, leaf) in zip(keys, state.leaves.items(), strict=True)
    }
    batch = Batch(
        tokens=jnp.asarray([[3], [5], [7]], jnp.int32),
        lengths=jnp.asarray([1, 1, 0], jnp.int32),
        read_slots=jnp.asarray([2, 4, 3], jnp.int32),
        write_slots=jnp.asarray([5, 4, 6], jnp.int32),
        page_table=jnp.zeros((3, 0), jnp.int32),
    )

    def run(kernels: Kernels) -> tuple[Array, State]:
        forward = partial(rwkv7.forward, config=config, kernels=kernels)
        return jax.jit(forward)(params, batch, state.replace(leaves=leaves))

    hidden, after = run("xla")
    other, other_after = run("hopper_interpreted")
    close = 0.05 if dtype == jnp.bfloat16 else 2e-5
    np.testing.assert_allclose(other[:2], hidden[:2], rtol=0, atol=close)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=close), other_after, after)


@pytest.mark.parametrize(("state_dtype", "close"), [("float16", 5e-3), ("bfloat16", 5e-2)])
def test_16_bit_states(state_dtype: str, close: float) -> None:
    """Half the bytes a state, and logits nearby: in one pass over a chunk, and token by token."""
    _, exact = checkpoint("small")
    config = dataclasses.replace(exact.config, state_dtype=state_dtype)
    model = dataclasses.replace(exact, config=config)
    assert model.fingerprint != exact.fingerprint
    assert model.init_state(1).leaves["wkv"].dtype == state_dtype
    assert model.state_spec.leaves["wkv"].num_bytes * 2 == exact.state_spec.leaves["wkv"].num_bytes
    tokens = jnp.arange(2 * WIDTH, dtype=jnp.int32).reshape(2, WIDTH) % config.vocab_size
    wanted, _ = exact(tokens, exact.init_state(2))
    state, pieces = model.init_state(2), []
    for first, end in [(0, 12), *((at, at + 1) for at in range(12, WIDTH))]:
        logits, state = model(tokens[:, first:end], state)
        pieces.append(logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), wanted, rtol=0, atol=close)
    with pytest.raises(ValueError, match="state_dtype='int8' must be one of float32, float16, bfloat16"):
        dataclasses.replace(config, state_dtype="int8")


def test_keys_of_no_length_do_no_harm() -> None:
    """A removal key of zeros stays zeros, and so does its gradient's infinity."""
    _, model = checkpoint("small")
    flat, tree = jax.tree_util.tree_flatten_with_path(model.params)
    params = jax.tree_util.tree_unflatten(
        tree, [jnp.zeros_like(leaf) if "k_k" in jax.tree_util.keystr(path) else leaf for path, leaf in flat]
    )
    tokens = jnp.arange(5, dtype=jnp.int32)[None]
    loss = jax.jit(
        jax.value_and_grad(lambda params: model.apply(params, tokens, model.init_state(1))[0].sum())
    )
    value, gradient = loss(params)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in [value, *jax.tree.leaves(gradient)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fresh_weights_fit_the_specification(dtype: jnp.dtype) -> None:
    for config in (small_config(), small_config(tied_head=True, norm_bias=False, num_layers=1)):
        params = rwkv7.init_params(config, jax.random.key(0), dtype)
        spec = rwkv7.param_spec(config)
        assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(lambda leaf: leaf.shape, spec)
        assert all(leaf.dtype == dtype and bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))


def test_fresh_weights_know_nothing() -> None:
    """They spread their guess evenly: the loss is that of the vocabulary's size, be it large."""
    config = small_config(vocab_size=1024)
    model = Model(RWKV7, config, rwkv7.init_params(config, jax.random.key(0)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 1024, (2, 50)), jnp.int32)
    loss = -float(model.score(tokens).mean())
    assert abs(loss - np.log(1024)) < 0.3


def test_fresh_blocks_are_the_identity() -> None:
    config = small_config()
    params = rwkv7.init_params(config, jax.random.key(0))
    model = Model(RWKV7, config, params)
    tokens = jnp.asarray([[3, 1, 4, 1, 5]], jnp.int32)
    hidden, _ = model.hidden(tokens, model.init_state(1))
    x = params["embedding"][tokens]
    for _ in ("ln0", "ln_out"):
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + config.norm_eps)
    np.testing.assert_allclose(hidden, x, rtol=0, atol=1e-4)


def test_a_state_is_tuned_to_a_text() -> None:
    """Gradient descent (RMSProp with momentum) on the initial state alone halves the loss of a tiny text."""
    config = RWKV7_CONFIG
    model = Model(RWKV7, config, rwkv7_params(config, jax.random.key(1)))
    text = jnp.asarray(np.random.default_rng(2).integers(0, config.vocab_size, (1, 12)), jnp.int32)
    fresh = model.init_state(1)

    def loss(wkv: Array) -> Array:
        logits, _ = model.apply(model.params, text[:, :-1], fresh.replace(leaves=fresh.leaves | {"wkv": wkv}))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], axis=-1)
        return -picked.mean()

    @jax.jit
    def step(wkv: Array, mean: Array, square: Array) -> tuple[Array, Array, Array, Array]:
        value, gradient = jax.value_and_grad(loss)(wkv)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.9 * square + 0.1 * gradient**2
        return wkv - mean / (jnp.sqrt(square) + 1e-8), mean, square, value

    wkv = fresh.leaves["wkv"]
    mean = square = jnp.zeros_like(wkv)
    losses = []
    while len(losses) < 150 and (not losses or losses[-1] >= losses[0] / 2):
        wkv, mean, square, value = step(wkv, mean, square)
        losses.append(float(value))
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("changes, fault", [({"head_dim": 12}, "head_dim"), ({"value_dim": 33}, "num_heads")])
def test_sizes_that_do_not_divide(changes: dict[str, int], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        small_config(**changes)
