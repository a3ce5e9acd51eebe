"""Which tokenizer a model's directory gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from wkvm_jax.errors import TokenizerError
from wkvm_jax.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    WorldTokenizer,
    load_tokenizer,
    tokenizer_named,
    world,
)


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the rwkv package."""
    monkeypatch.setattr(world, "find_in_package", lambda: None)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, world_file: Path) -> None:
    """As on a machine where the rwkv package holds the small vocabulary."""
    monkeypatch.setattr(world, "find_in_package", lambda: world_file)


def add_tokenizer_json(directory: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.save(str(directory / "tokenizer.json"))


def add_world(directory: Path, world_file: Path) -> None:
    (directory / "some_vocabulary").write_bytes(world_file.read_bytes())


def add_mark(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))


def name_of(tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.name


@pytest.mark.usefixtures("package")
def test_the_order_in_which_they_are_looked_for(tmp_path: Path, world_file: Path) -> None:
    config = {"tokenizer": "bytes"}
    names = [name_of(load_tokenizer(tmp_path, config, 65_536))]
    add_mark(tmp_path)
    names.append(name_of(load_tokenizer(tmp_path, {}, 65_536)))
    add_world(tmp_path, world_file)
    names.append(name_of(load_tokenizer(tmp_path, config, 65_536)))
    add_tokenizer_json(tmp_path)
    names.append(name_of(load_tokenizer(tmp_path, config, 65_536)))
    assert names == ["bytes", "bytes", "world", "huggingface"]


def test_the_mark_of_a_byte_tokenizer_in_the_config_file(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, None, 256) is None
    (tmp_path / "config.json").write_text('{"tokenizer": "bytes"}')
    assert isinstance(load_tokenizer(tmp_path, None, 256), ByteTokenizer)
    assert load_tokenizer(tmp_path, {}, 256) is None


@pytest.mark.usefixtures("package")
def test_world_sizes_take_the_package(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(tmp_path, {}, 65_536), WorldTokenizer)
    assert isinstance(load_tokenizer(tmp_path, {}, 65_529), WorldTokenizer)
    assert load_tokenizer(tmp_path, {}, 50_304) is None


@pytest.mark.usefixtures("no_package")
def test_without_any_tokenizer_there_is_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, {}, 65_536) is None
    assert load_tokenizer(tmp_path, None, 65_536) is None


def test_a_tokenizer_larger_than_the_model_names_both_numbers(
    tmp_path: Path, world_file: Path, world_tokens: dict[int, bytes]
) -> None:
    with pytest.raises(
        TokenizerError, match="bytes tokenizer has 256 ids, more than the model's vocab_size 255"
    ):
        load_tokenizer(tmp_path, {"tokenizer": "bytes"}, 255)
    add_world(tmp_path, world_file)
    num_ids = len(world_tokens) + 1
    with pytest.raises(TokenizerError, match=rf"has {num_ids} ids, more than the model's vocab_size 256"):
        load_tokenizer(tmp_path, {}, 256)
    add_tokenizer_json(tmp_path)
    with pytest.raises(TokenizerError, match="has 2 ids, more than the model's vocab_size 1"):
        load_tokenizer(tmp_path, {}, 1)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="is not a directory"):
        load_tokenizer(tmp_path / "missing", {}, 256)


@pytest.mark.usefixtures("package")
def test_named() -> None:
    assert tokenizer_named("bytes").name == "bytes"
    assert tokenizer_named("world").name == "world"
    with pytest.raises(ValueError, match="name='words' must be 'bytes' or 'world'"):
        tokenizer_named("words")


def test_the_library_is_imported_only_for_its_own_files(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from wkvm_jax.tokenizers import load_tokenizer; "
        f"load_tokenizer(pathlib.Path({str(tmp_path)!r}), {{'tokenizer': 'bytes'}}, 256); "
        "sys.exit('tokenizers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
