"""What a checkpoint is, content decides; what is wrong with it, the error says."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from wkvm_jax.errors import CheckpointError
from wkvm_jax.weights.checkpoint import read_checkpoint

from . import safetensors_writer, torch_writer

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(4, dtype=np.float16)
SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"


def fault_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    return str(caught.value)


def write_index(directory: Path, weight_map: Mapping[str, object], name: str = SAFETENSORS_INDEX) -> None:
    (directory / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A directory of two safetensors shards with an index."""
    safetensors_writer.save_arrays(tmp_path / "one.safetensors", {"a": A})
    safetensors_writer.save_arrays(tmp_path / "two.safetensors", {"b": B})
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


@pytest.mark.parametrize("name", ["model.pth", "model.safetensors", "config.yaml", "weights"])
def test_a_file_is_what_it_holds(tmp_path: Path, name: str) -> None:
    for writer in (torch_writer, safetensors_writer):
        path = writer.save_arrays(tmp_path / name, {"a": A, "b": B})
        checkpoint = read_checkpoint(str(path))
        assert (checkpoint.path, checkpoint.directory, checkpoint.config) == (path, tmp_path, None)
        assert checkpoint.shapes == {"a": (2, 3), "b": (4,)}
        np.testing.assert_array_equal(checkpoint.tensors["a"], A)
        np.testing.assert_array_equal(checkpoint.tensors["b"], B)


def test_a_directory_of_either_kind(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# model")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "empty.txt").touch()
    torch_writer.save_arrays(tmp_path / "odd name", {"a": A})
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.path, checkpoint.directory) == (tmp_path, tmp_path)
    assert list(checkpoint.tensors) == ["a"]
    safetensors_writer.save_arrays(tmp_path / "other", {"b": B})
    assert list(read_checkpoint(tmp_path).tensors) == ["b"]
    safetensors_writer.save_arrays(tmp_path / "more.safetensors", {"c": B})
    assert set(read_checkpoint(tmp_path).tensors) == {"b", "c"}


def test_a_checkpoint_cannot_be_changed_and_prints_no_tensors(sharded: Path) -> None:
    checkpoint = read_checkpoint(sharded)
    assert "array" not in repr(checkpoint)
    with pytest.raises(dataclasses.FrozenInstanceError):
        checkpoint.path = Path()  # type: ignore[misc]
    with pytest.raises(TypeError):
        checkpoint.tensors["a"] = A  # type: ignore[index]


def test_hidden_files_are_left_alone(tmp_path: Path) -> None:
    safetensors_writer.save_arrays(tmp_path / "model.safetensors", {"a": A})
    (tmp_path / "._model.safetensors").write_bytes(bytes(100))
    (tmp_path / ".model.safetensors.index.json").write_text("{")
    assert list(read_checkpoint(tmp_path).tensors) == ["a"]


def test_links_are_followed(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Download caches hold the files under their hashes, and links by the files' names."""
    cache = tmp_path_factory.mktemp("cache")
    for path in sharded.iterdir():
        (cache / path.name).symlink_to(path)
    assert set(read_checkpoint(cache).tensors) == {"a", "b"}


def test_an_index_decides(sharded: Path) -> None:
    # Neither a file that it does not list nor a second copy of a tensor counts.
    safetensors_writer.save_arrays(sharded / "consolidated.safetensors", {"a": A, "b": B, "c": B})
    safetensors_writer.save_arrays(sharded / "two.safetensors", {"b": B, "a": -A})
    (sharded / "left.safetensors").touch()
    checkpoint = read_checkpoint(sharded)
    assert set(checkpoint.tensors) == {"a", "b"}
    np.testing.assert_array_equal(checkpoint.tensors["a"], A)


def test_an_index_of_torch_files(tmp_path: Path) -> None:
    torch_writer.save_arrays(tmp_path / "one.bin", {"a": A})
    torch_writer.save_arrays(tmp_path / "two.bin", {"b": B})
    write_index(tmp_path, {"a": "one.bin", "b": "two.bin"}, TORCH_INDEX)
    assert read_checkpoint(tmp_path).shapes == {"a": (2, 3), "b": (4,)}
    # Beside safetensors of the same model it does not count.
    safetensors_writer.save_arrays(tmp_path / "model.safetensors", {"c": A})
    assert list(read_checkpoint(tmp_path).tensors) == ["c"]


def test_of_two_indexes_safetensors_go_first(sharded: Path) -> None:
    torch_writer.save_arrays(sharded / "one.bin", {"old": A})
    write_index(sharded, {"old": "one.bin"}, TORCH_INDEX)
    assert set(read_checkpoint(sharded).tensors) == {"a", "b"}
    (sharded / "one.bin").unlink()
    assert set(read_checkpoint(sharded).tensors) == {"a", "b"}
    write_index(sharded, {"a": "one.safetensors"}, "model.fp16.safetensors.index.json")
    assert "2 indexes that could be meant" in fault_of(sharded)


def test_an_index_lists_what_is_missing(sharded: Path) -> None:
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "three.safetensors", "d": "four"}
    write_index(sharded, weight_map)
    message = fault_of(sharded)
    assert SAFETENSORS_INDEX in message
    for part in ("'three.safetensors' is missing", "'four' is missing", "'one.safetensors' lacks 'b'"):
        assert part in message
    (sharded / "four").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "'four' is a git-lfs pointer" in fault_of(sharded)


@pytest.mark.parametrize(
    "shard", ["../up.safetensors", "/absolute", "in/side", "..", ".", "", "a\\b", "a\0b"]
)
def test_an_index_stays_in_its_directory(sharded: Path, shard: str) -> None:
    safetensors_writer.save_arrays(sharded.parent / "up.safetensors", {"a": A})
    write_index(sharded, {"a": shard})
    assert "only files in the same directory are read" in fault_of(sharded)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "should hold a JSON object and holds a list"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "values are not file names"),
        ("", "is empty"),
    ],
)
def test_a_broken_index_is_named(sharded: Path, content: str, fault: str) -> None:
    (sharded / SAFETENSORS_INDEX).write_text(content)
    message = fault_of(sharded)
    assert fault in message
    assert SAFETENSORS_INDEX in message


def test_tensors_twice_are_an_error(sharded: Path) -> None:
    (sharded / SAFETENSORS_INDEX).unlink()
    safetensors_writer.save_arrays(sharded / "two.safetensors", {"b": B, "a": A})
    assert "'a' in 'one.safetensors' and in 'two.safetensors'" in fault_of(sharded)


def test_a_shard_that_did_not_arrive_is_named(sharded: Path) -> None:
    (sharded / SAFETENSORS_INDEX).unlink()
    (sharded / "two.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    message = fault_of(sharded)
    assert "two.safetensors: is a git-lfs pointer" in message
    assert "git lfs pull" in message


def test_several_torch_files_are_an_error(tmp_path: Path) -> None:
    for name in ("rwkv-10.pth", "rwkv-20.pth"):
        torch_writer.save_arrays(tmp_path / name, {"a": A})
    message = fault_of(tmp_path)
    assert "2 torch files; name one" in message
    assert "rwkv-20.pth" in message


def test_config_is_read_as_written(tmp_path: Path) -> None:
    path = safetensors_writer.save_arrays(tmp_path / "model.safetensors", {"a": A})
    config = '{"model_type": "tiny", "time_step_limit": [0.0, Infinity], "low": -Infinity, "odd": NaN}'
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + config.encode())
    for named in (path, tmp_path):
        read = read_checkpoint(named).config
        assert read is not None
        assert read["model_type"] == "tiny"
        assert read["time_step_limit"] == [0.0, math.inf]
        assert read["low"] == -math.inf
        assert isinstance(read["odd"], float) and math.isnan(read["odd"])


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"{'a': 1}", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 200_000, "is not valid JSON"),
        (b'"text"', "should hold a JSON object and holds a str"),
        (b"null", "should hold a JSON object and holds a NoneType"),
        (b"", "is empty"),
        (b"<html>404</html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
    ],
)
def test_a_broken_config_is_named(sharded: Path, content: bytes, fault: str) -> None:
    (sharded / "config.json").write_bytes(content)
    message = fault_of(sharded)
    assert fault in message
    assert "config.json" in message


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is empty (0 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "git lfs pull"),
        (b"<!doctype html><html>Not found</html>", "is a web page"),
        (b"just some text\n", "is a text file"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "torch >= 1.6"),
        (b"GGUF\x03\x00\x00\x00", "is a GGUF file"),
        (bytes(64), "is neither a torch zip file (.pth, .bin) nor a safetensors file"),
        (b"PK\x03\x04" + bytes(60), "cut short"),
        (b"\x40\x00\x00\x00\x00\x00\x00\x00{", "cut short"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    assert fault in fault_of(path)
    message = fault_of(tmp_path)
    assert fault in message
    assert "model.bin" in message


def test_places_without_weights(tmp_path: Path) -> None:
    assert "is an empty directory" in fault_of(tmp_path)
    (tmp_path / "README.md").write_text("# model")
    assert "holds no safetensors and no torch file, only:\n  'README.md'" in fault_of(tmp_path)
    assert "does not exist" in fault_of(tmp_path / "missing")
    assert "does not exist" in fault_of(Path("some-hub/some-model"))
    assert "does not exist" in fault_of(tmp_path / "nul\0")
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in fault_of(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "loop")
