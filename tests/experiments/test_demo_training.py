"""Training of the demo model: the engine's function, checkpoints that resume, weights that read back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.demo_model import corpus, evaluate, export, net, training
from experiments.demo_model.batches import Phase
from experiments.demo_model.net import Shape
from experiments.demo_model.training import Loop, Recipe
from wkvm_jax.models import rwkv7

SHAPE = Shape(
    num_layers=2,
    hidden_size=64,
    head_dim=32,
    intermediate_size=96,
    decay_rank=8,
    iclr_rank=6,
    value_rank=4,
    gate_rank=10,
)
RECIPE = Recipe(
    shape=SHAPE,
    phases=(Phase(until=1.0, num_rows=2, length=192, max_facts=2, max_filler_bytes=30, prose_share=0.3),),
    num_steps=6,
    warmup_steps=2,
    dtype="float32",
)


@pytest.fixture(scope="module")
def params() -> net.Params:
    """Random everywhere, so that no term of the forward is zero."""
    start = net.init_params(SHAPE, jax.random.key(0))
    leaves, tree = jax.tree.flatten(start)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


def test_training_forward_equals_the_engines(params: net.Params, tmp_path: Path) -> None:
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    export.write(rounded, SHAPE, tmp_path)
    model = export.read(tmp_path)
    text = np.random.default_rng(0).integers(0, 256, (2, 37)).astype(np.uint8)
    ours = net.logits(rounded, text, shape=SHAPE, recurrence=net.xla_recurrence, dtype=jnp.float32)
    theirs, _ = model(text.astype(np.int32), model.init_state(2))
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=2e-4)


def test_written_weights_read_back(params: net.Params, tmp_path: Path) -> None:
    export.write(params, SHAPE, tmp_path)
    model = export.read(tmp_path)
    config = model.config
    assert isinstance(config, rwkv7.Config)
    assert (config.num_layers, config.hidden_size, config.iclr_rank, config.gate_rank) == (2, 64, 6, 10)
    spec = rwkv7.param_spec(config)
    jax.tree.map(lambda want, got: np.testing.assert_array_equal(want.shape, got.shape), spec, model.params)
    assert json.loads((tmp_path / "config.json").read_text())["tokenizer"] == "bytes"
    assert model.tokenizer is not None and model.tokenizer.name == "bytes"


def test_first_layers_unused_value_mix_is_not_written(params: net.Params) -> None:
    names = export.tensors(params, SHAPE)
    assert "blocks.0.att.v0" not in names and "blocks.1.att.v0" in names
    assert names["blocks.1.att.x_r"].shape == (1, 1, 64) and names["blocks.1.att.w1"].shape == (64, 8)
    assert names["blocks.0.ffn.key.weight"].shape == (96, 64)


def test_a_stopped_run_resumes_where_it_was(texts: Path, tmp_path: Path) -> None:
    whole = Loop(texts, tmp_path / "whole", log_every=1, measure_every=0, save_every=100, num_workers=1)
    expected, done = training.train(RECIPE, whole)
    assert done == 6

    parted = dataclasses.replace(whole, folder=tmp_path / "parted", stop_after_s=0.0)
    for steps in (1, 2):
        _, done = training.train(RECIPE, parted)
        assert done == steps
    got, done = training.train(RECIPE, dataclasses.replace(parted, stop_after_s=float("inf")))
    assert done == 6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), expected, got)

    def losses(name: str) -> list[float]:
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    np.testing.assert_allclose(losses("parted"), losses("whole"), rtol=1e-5)


def test_loss_falls(texts: Path) -> None:
    from experiments.demo_model import batches, dialogues

    recipe = dataclasses.replace(RECIPE, num_steps=40, hold=0.9)
    state = training.initial_state(recipe)
    prose = dialogues.Prose(corpus.select(corpus.load_works(texts), "train"))
    step = training.make_step(recipe)
    params, opt_state, losses = state["params"], state["opt_state"], []
    for at in range(25):
        batch = batches.make_batch(0, at, recipe.phases[0], prose)
        params, opt_state, metrics = step(
            params, opt_state, jnp.int32(at), batch.text, batch.weights, batch.is_prose
        )
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-3:]) < 0.8 * losses[0]


def test_evaluation_counts_what_it_should(params: net.Params, texts: Path, tmp_path: Path, capsys) -> None:
    export.write(params, SHAPE, tmp_path)
    assert evaluate.main(
        ["--model", str(tmp_path), "--texts", str(texts), "--questions", "2", "--questions-a-case", "2",
         "--prose-bytes", "9000", "--json", str(tmp_path / "out.json")]
    ) == 0  # fmt: skip
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["8 facts, 1,000 bytes between"]["asked"] == 2
    assert results["prose, all"]["bytes"] == 16384
    assert 4 < results["prose, all"]["bits_a_byte"] < 30
    assert "| 32 facts, 4,000 bytes between |" in capsys.readouterr().out
