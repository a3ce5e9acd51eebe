"""From a path to a model: what is found there, in which type, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.models.rwkv7_tensors import fla_config, random_tensors, small_config, to_fla, write_fla
from tests.weights import safetensors_writer, torch_writer
from wkvm_jax.errors import CheckpointError, TokenizerError
from wkvm_jax.models.loading import load
from wkvm_jax.tokenizers import ByteTokenizer

CONFIG = small_config(num_layers=1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A checkpoint of one file."""
    return torch_writer.save_arrays(tmp_path / "model.pth", random_tensors(CONFIG))


def test_foreign_checkpoints_are_refused_with_what_is_known(tmp_path: Path) -> None:
    tensors = {"transformer.h.0.attn.c_attn.weight": np.zeros((2, 2), np.float32)}
    safetensors_writer.save_arrays(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert all(part in message for part in (str(tmp_path), "gpt2", "c_attn", "rwkv7"))


def test_older_models_are_refused_with_the_path(tmp_path: Path) -> None:
    path = torch_writer.save_arrays(
        tmp_path / "rwkv-6.pth", {"blocks.0.att.time_decay": np.zeros(4, np.float32)}
    )
    with pytest.raises(CheckpointError, match=r"rwkv-6\.pth.*older generation"):
        load(path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        load(tmp_path / "missing")


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("asked", [None, "float32", "bfloat16", jnp.bfloat16, np.float32])
def test_types_of_weights(stored: type, asked: object, tmp_path: Path) -> None:
    """Without a wish they are float32 on a CPU, where 16-bit products are slow; the values are the file's."""
    tensors = {name: tensor.astype(stored) for name, tensor in random_tensors(CONFIG).items()}
    path = safetensors_writer.save_arrays(tmp_path / "model.safetensors", tensors)
    model = load(path, dtype=asked)
    wanted = np.dtype(jnp.float32 if asked is None else asked)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {wanted}
    np.testing.assert_array_equal(model.params["embedding"], tensors["emb.weight"].astype(wanted))
    logits, state = model(jnp.zeros((1, 3), jnp.int32), model.init_state(1))
    assert logits.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in state.leaves.values())


@pytest.mark.parametrize("dtype", ["float16", "int8", np.float64])
def test_other_types_are_refused(file: Path, dtype: object) -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        load(file, dtype=dtype)


def test_a_given_tokenizer_goes_first(file: Path) -> None:
    """It is taken as it is, whatever lies beside the weights."""
    (file.parent / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))
    with pytest.raises(TokenizerError):
        load(file)
    mine = ByteTokenizer()
    assert load(file, tokenizer=mine).tokenizer is mine


def test_tokenizers_beside_the_weights_are_found(tmp_path: Path) -> None:
    config = small_config(num_layers=1, vocab_size=256)
    content = fla_config(config) | {"tokenizer": "bytes"}
    model = load(write_fla(tmp_path, to_fla(random_tensors(config)), content))
    assert isinstance(model.tokenizer, ByteTokenizer)


def test_without_a_tokenizer_there_is_none(file: Path) -> None:
    assert load(file).tokenizer is None


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("model.pth", "model"),
        ("RWKV-x070-1.5B.pth", "RWKV-x070-1.5B"),
        ("rwkv7-1.5B-world", "rwkv7-1.5B-world"),
    ],
)
def test_names(name: str, wanted: str, tmp_path: Path) -> None:
    """A file's name without its ending; a directory's name whole, though it has a dot."""
    path = tmp_path / name
    if name.endswith(".pth"):
        torch_writer.save_arrays(path, random_tensors(CONFIG))
    else:
        write_fla(path, to_fla(random_tensors(CONFIG)), fla_config(CONFIG))
    assert load(path).name == wanted
    assert load(str(path)).name == wanted


def test_progress_reaches_the_end(file: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(file, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    total = sum(tensor.nbytes for tensor in random_tensors(CONFIG).values())
    assert seen[-1] == (total, total) and {total for _, total in seen} == {total}
