"""A checkpoint is told by its tensors, and what does not fit is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.models.rwkv7_tensors import (
    Tensors,
    fla_config,
    random_tensors,
    small_config,
    to_fla,
    write_fla,
)
from tests.weights import safetensors_writer
from wkvm_jax.errors import CheckpointError
from wkvm_jax.models.family import Shapes
from wkvm_jax.models.loading import load
from wkvm_jax.models.rwkv7 import param_spec
from wkvm_jax.models.rwkv7_checkpoint import layout
from wkvm_jax.weights import Source

CONFIG = small_config()


def shapes_of(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}


BLINKDL = shapes_of(random_tensors(CONFIG))
FLA = shapes_of(to_fla(random_tensors(CONFIG)))
PACKED = shapes_of(to_fla(random_tensors(CONFIG), packed=True))


@pytest.mark.parametrize(
    "shapes, content",
    [
        (BLINKDL, None),
        (BLINKDL, {"model_type": "something"}),
        (FLA, fla_config(CONFIG)),
        (PACKED, fla_config(CONFIG)),
    ],
    ids=["blinkdl", "blinkdl beside some config.json", "fla", "packed fla"],
)
def test_sizes_and_table(shapes: Shapes, content: Mapping[str, object] | None) -> None:
    """The config is that of the tensors, and the table uses each of them to fill the specification."""
    found = layout(shapes, content)
    assert found is not None and found.config == CONFIG
    spec, table = param_spec(CONFIG), found.table
    assert jax.tree.structure(table) == jax.tree.structure(spec)
    used: list[str] = []
    for source, wanted in zip(jax.tree.leaves(table), jax.tree.leaves(spec), strict=True):
        assert isinstance(source, Source)
        built = source.build(*(np.zeros(shape) for shape in source.shapes))
        assert built.shape == wanted.shape, source.names
        used += source.names
    assert sorted(used) == sorted(shapes)


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"],
        ["model.layers.0.attn.q_proj.weight", "model.layers.0.attn.A_log"],
        ["emb.weight", "head.weight"],
        ["blocks.0.att.receptance.weight"],
        [],
    ],
)
def test_other_models_are_left_to_others(names: list[str]) -> None:
    assert layout(dict.fromkeys(names, (4, 4)), {"model_type": "rwkv7"}) is None


@pytest.mark.parametrize("name", ["time_decay", "time_mix_k", "time_maa_x", "time_faaaa"])
def test_older_generations_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="older generation"):
        layout({"emb.weight": (40, 32), f"blocks.0.att.{name}": (32,)}, None)


@pytest.mark.parametrize("present", [True, False])
def test_value_residual_of_layer_0_may_be_there(present: bool) -> None:
    extra = {"blocks.0.att.v0": (1, 1, 32), "blocks.0.att.v1": (32, 5), "blocks.0.att.v2": (5, 32)}
    found = layout(BLINKDL | (extra if present else {}), None)
    assert found is not None and found.config == CONFIG
    assert all(found.ignored(name) for name in extra)
    assert not any(found.ignored(name) for name in BLINKDL)


def test_one_layer() -> None:
    """It has no value residual, so its rank is of no meaning."""
    config = small_config(num_layers=1)
    tensors = random_tensors(config)
    for found in (
        layout(shapes_of(tensors), None),
        layout(shapes_of(to_fla(tensors)), fla_config(config, v_low_rank_dim=None)),
    ):
        assert found is not None and found.config == small_config(num_layers=1, value_rank=1)


@pytest.mark.parametrize(
    "missing, told",
    [
        ("emb.weight", "emb.weight"),
        ("blocks.0.att.r_k", "att.r_k"),
        ("blocks.0.ffn.key.weight", "ffn.key.weight"),
        ("blocks.1.att.v1", "att.v1"),
        ("blocks.0.att.g1", "att.g1"),
    ],
)
def test_sizes_that_cannot_be_told(missing: str, told: str) -> None:
    gone = (missing, missing.replace("blocks.0", "blocks.1"), missing.replace("emb", "head"))
    with pytest.raises(ValueError, match=told.replace(".", r"\.")):
        layout({name: shape for name, shape in BLINKDL.items() if name not in gone}, None)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("blocks.0.att.r_k", (2, 0)),
        ("blocks.0.att.r_k", (2, 7)),
        ("blocks.0.att.r_k", ()),
        ("emb.weight", ()),
        ("emb.weight", (40,)),
        ("emb.weight", (0, 32)),
    ],
)
def test_senseless_shapes_are_an_error_of_the_file(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG) | {name: np.zeros(shape, np.float32)}
    path = safetensors_writer.save_arrays(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(path)


def test_all_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    del tensors["blocks.1.att.k_k"], tensors["ln_out.bias"]
    tensors["blocks.0.att.w2"] = np.zeros((3, 32), np.float32)
    tensors["blocks.1.extra"] = np.zeros((2, 2), np.float32)
    tensors["blocks.1.ffn.x_k"] = np.zeros((1, 1, 32), np.int32)
    path = safetensors_writer.save_arrays(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    lines = [
        "missing: 'blocks.1.att.k_k'",
        "missing: 'ln_out.bias'",
        "wrong shape: 'blocks.0.att.w2' has (3, 32), expected (4, 32)",
        "wrong type: 'blocks.1.ffn.x_k' is int32",
        "unexpected: 'blocks.1.extra' with shape (2, 2)",
    ]
    assert [line for line in lines if line not in message] == []
    assert "2 missing, 1 of a wrong shape, 1 of a wrong type, 1 unexpected" in message


@pytest.mark.parametrize(
    "changes, faults",
    [
        ({"attn": {"layers": [1], "num_heads": 2}}, ["attn"]),
        ({"hidden_act": "silu"}, ["hidden_act"]),
        ({"norm_first": False}, ["norm_first"]),
        ({"num_heads": 3}, ["num_heads"]),
        ({"head_dim": 12, "num_heads": None}, ["head_dim"]),
        ({"value_dim": [32, 64]}, ["value_dim"]),
        ({"value_dim": "wide"}, ["value_dim"]),
        ({"value_dim": [[32], [32]]}, ["value_dim"]),
        ({"num_hidden_layers": None}, ["num_hidden_layers"]),
        ({"num_hidden_layers": -2}, ["num_hidden_layers"]),
        ({"hidden_size": "32"}, ["hidden_size"]),
        ({"vocab_size": 40.5}, ["vocab_size"]),
        ({"gate_low_rank_dim": True}, ["gate_low_rank_dim"]),
        ({"norm_eps": "small"}, ["norm_eps"]),
        (
            {"hidden_act": "gelu", "attn": {"layers": [0]}, "norm_first": None},
            ["hidden_act", "attn", "norm_first"],
        ),
    ],
)
def test_unsupported_fields_are_named(changes: dict[str, object], faults: list[str]) -> None:
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        layout(FLA, fla_config(CONFIG) | changes)
    assert [fault for fault in faults if fault not in str(caught.value)] == []


def test_a_directory_without_config_json_says_so(tmp_path: Path) -> None:
    tensors = to_fla(random_tensors(CONFIG))
    path = safetensors_writer.save_arrays(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"config\.json: num_hidden_layers"):
        load(path)


@pytest.mark.parametrize("how", ["null", "absent"])
def test_sizes_left_open_come_from_the_tensors(how: str) -> None:
    """fla writes null for ranks that it chose itself, and older versions wrote fewer fields."""
    open_fields = [
        "decay_low_rank_dim",
        "a_low_rank_dim",
        "v_low_rank_dim",
        "gate_low_rank_dim",
        "intermediate_size",
        "head_dim",
        "num_heads",
        "value_dim",
        "vocab_size",
        "hidden_size",
    ]
    content = fla_config(CONFIG)
    for field in open_fields:
        content[field] = None
        if how == "absent":
            del content[field]
    found = layout(FLA, content)
    assert found is not None and found.config == CONFIG


def test_defaults_are_those_of_fla() -> None:
    """What a config.json does not say is as `RWKV7Config` has it: keys normalised by the fused norm."""
    content = fla_config(CONFIG)
    for field in (
        "fuse_norm",
        "norm_bias",
        "norm_eps",
        "tie_word_embeddings",
        "hidden_act",
        "norm_first",
        "attn",
    ):
        del content[field]
    found = layout(FLA, content)
    assert found is not None and found.config == small_config(fused_norm=True)


def test_ranks_that_contradict_the_tensors(tmp_path: Path) -> None:
    path = write_fla(tmp_path, to_fla(random_tensors(CONFIG)), fla_config(CONFIG, decay_low_rank_dim=64))
    with pytest.raises(CheckpointError, match=r"w_lora\.lora\.0\.weight' has \(4, 32\), expected \(64, 32\)"):
        load(path)


def test_tied_heads_bring_no_head(tmp_path: Path) -> None:
    config = small_config(tied_head=True)
    tensors = to_fla(random_tensors(config))
    model = load(write_fla(tmp_path, tensors, fla_config(config)))
    assert model.config.tied_head and "head" not in model.params


def test_norms_without_bias(tmp_path: Path) -> None:
    """fla's `norm_bias` is for LayerNorms; its group norm has a bias all the same."""
    config = small_config(norm_bias=False)
    tensors: Tensors = to_fla(random_tensors(config))
    assert "model.layers.0.attn.g_norm.bias" in tensors and "model.norm.bias" not in tensors
    model = load(write_fla(tmp_path, tensors, fla_config(config)))
    assert not model.config.norm_bias
