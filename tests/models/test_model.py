"""A model's few functions: what they take, what they give, what they refuse."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int32

from tests.families import FAMILIES_UNDER_TEST, rwkv7_params
from tests.families.toy import toy_model
from tests.models.rwkv7_tensors import small_config
from wkvm_jax.models.model import SCORE_CHUNK, Model
from wkvm_jax.models.registry import RWKV7
from wkvm_jax.tokenizers import ByteTokenizer


@cache
def small_model() -> Model:
    config = small_config(num_layers=1)
    return Model(RWKV7, config, rwkv7_params(config, jax.random.key(0)))


def random_ids(rows: int, width: int, seed: int = 0) -> Int32[Array, "b t"]:
    ids = np.random.default_rng(seed).integers(0, small_model().config.vocab_size, (rows, width))
    return jnp.asarray(ids, jnp.int32)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_has_rows(batch_size: int) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        small_model().init_state(batch_size)


def test_paged_models_need_a_length() -> None:
    with pytest.raises(ValueError, match="max_length"):
        toy_model().init_state(1)
    assert toy_model().init_state(3, max_length=9).pools["pages"].shape[0] == 3 * 3
    assert small_model().init_state(2, max_length=9).pools == {}


@pytest.mark.parametrize("max_length", [0, -1, -9])
def test_a_length_is_positive(max_length: int) -> None:
    with pytest.raises(ValueError, match="max_length"):
        toy_model().init_state(1, max_length=max_length)


def test_a_pass_needs_a_token() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        small_model()(random_ids(2, 0), small_model().init_state(2))


def test_ids_outside_the_vocabulary_are_clamped() -> None:
    model = small_model()
    last = model.config.vocab_size - 1
    logits, _ = model(jnp.asarray([[last + 1, last + 1000]], jnp.int32), model.init_state(1))
    wanted, _ = model(jnp.asarray([[last, last]], jnp.int32), model.init_state(1))
    np.testing.assert_array_equal(logits, wanted)


def test_rows_of_tokens_and_state_must_agree() -> None:
    with pytest.raises(ValueError, match="3 rows and the state 2"):
        small_model()(random_ids(3, 4), small_model().init_state(2))


@pytest.mark.parametrize("width", [2, 3, SCORE_CHUNK + 1, SCORE_CHUNK + 2, 2 * SCORE_CHUNK + 1, 600])
def test_scores_are_log_probabilities_of_the_next_token(width: int) -> None:
    """Around the number of positions whose logits exist at once, and several times it."""
    model, ids = small_model(), random_ids(2, width)
    logits, _ = model(ids[:, :-1], model.init_state(2))
    wanted = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1)[..., 0]
    scores = model.score(ids)
    assert scores.shape == (2, width - 1) and scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, wanted, rtol=0, atol=1e-5)


def test_scores_of_a_text_in_parts_are_those_of_the_whole() -> None:
    model, ids = small_model(), random_ids(2, 30)
    _, state = model(ids[:, :10], model.init_state(2))
    np.testing.assert_allclose(model.score(ids[:, 10:], state), model.score(ids)[:, 10:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [0, 1])
def test_a_score_needs_two_tokens(width: int) -> None:
    with pytest.raises(ValueError, match="two tokens"):
        small_model().score(random_ids(1, width))


@pytest.mark.parametrize("under_test", FAMILIES_UNDER_TEST, ids=lambda under_test: under_test.name)
def test_scores_of_every_family(under_test: object) -> None:
    model = under_test.model()
    ids = random_ids(2, 9)
    logits, _ = model(ids, model.init_state(2, max_length=9))
    wanted = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(model.score(ids), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.int16])
def test_ids_of_any_integer_type(dtype: jnp.dtype) -> None:
    model, ids = small_model(), random_ids(2, 5)
    wanted, _ = model(ids, model.init_state(2))
    logits, state = model(ids.astype(dtype), model.init_state(2), jnp.asarray([5, 5], dtype))
    np.testing.assert_array_equal(logits, wanted)
    assert state.num_tokens.dtype == jnp.int32


def test_hidden_is_what_the_head_reads() -> None:
    model, ids = small_model(), random_ids(2, 5)
    hidden, state = model.hidden(ids, model.init_state(2))
    logits, other = model(ids, model.init_state(2))
    assert hidden.shape == (2, 5, model.config.hidden_size)
    np.testing.assert_allclose(hidden @ model.params["head"], logits, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state.leaves["wkv"], other.leaves["wkv"], rtol=0, atol=1e-6)


def test_apply_under_every_transformation_at_once() -> None:
    """A gradient for the state, for each of several sets of weights, in one compiled function."""
    model, ids = small_model(), random_ids(2, 5)
    some = jax.tree.map(lambda leaf: jnp.stack([leaf, 1.1 * leaf]), model.params)

    def loss(params: object, wkv: Array) -> Array:
        state = model.init_state(2)
        logits, _ = model.apply(params, ids, state.replace(leaves=state.leaves | {"wkv": wkv}))
        return jax.nn.log_softmax(logits)[..., 0].sum()

    start = model.init_state(2).leaves["wkv"] + 0.1
    mapped = jax.jit(jax.vmap(jax.grad(loss, argnums=1), in_axes=(0, None)))(some, start)
    for index in range(2):
        alone = jax.jit(jax.grad(loss, argnums=1))(jax.tree.map(lambda leaf, i=index: leaf[i], some), start)
        np.testing.assert_allclose(mapped[index], alone, rtol=0, atol=1e-5 * float(jnp.abs(alone).max()))


def test_fingerprints_tell_models_apart() -> None:
    model = small_model()
    params = model.params | {"head": model.params["head"].at[0, 0].add(1e-6)}
    others = [
        model,
        Model(model.family, model.config, params),
        dataclasses.replace(model, tokenizer=ByteTokenizer()),
        toy_model(),
        toy_model(seed=1),
    ]
    assert len({other.fingerprint for other in others}) == len(others)
    assert (
        Model(model.family, model.config, jax.tree.map(jnp.copy, model.params)).fingerprint
        == model.fingerprint
    )
    assert dataclasses.replace(model, name="another name").fingerprint == model.fingerprint


def test_a_fingerprint_knows_what_the_weights_do_not_tell() -> None:
    """Equal weights under another epsilon, or with keys normalised the other way, are another model."""
    model = small_model()
    changes = ({}, {"norm_eps": 1e-3}, {"fused_norm": True})
    others = [dataclasses.replace(model.config, **change) for change in changes]
    assert len({Model(RWKV7, config, model.params).fingerprint for config in others}) == 3
