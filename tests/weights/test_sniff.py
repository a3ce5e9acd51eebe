"""What a file is, its bytes say."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from wkvm_jax.errors import CheckpointError
from wkvm_jax.weights.sniff import WEIGHTS, Kind, refusal, sniff

from . import safetensors_writer, torch_writer

ARRAYS = {"w": np.arange(6, dtype=np.float32)}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
# What torch before 1.6 begins with: its magic number, pickled.
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", Kind.EMPTY),
        (LFS, Kind.LFS_POINTER),
        (b"<!DOCTYPE html>\n<html>", Kind.HTML),
        (b"\xef\xbb\xbf \n<HTML><body>404</body>", Kind.HTML),
        (LEGACY, Kind.PICKLE),
        (b"\x80\x04\x95", Kind.PICKLE),
        (b"GGUF\x03\x00\x00\x00", Kind.GGUF),
        (b'{"weight_map": {}}', Kind.TEXT),
        (b"abcdefgh{", Kind.TEXT),
        ("weights: não".encode(), Kind.TEXT),
        # The first bytes that are looked at end inside a character.
        (b"a" + "é".encode() * 300, Kind.TEXT),
        (b"\x93NUMPY\x01\x00", Kind.UNKNOWN),
        (bytes(1000), Kind.UNKNOWN),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{}", Kind.SAFETENSORS),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff{}", Kind.SAFETENSORS),
        (b"PK\x03\x04 and then nothing", Kind.TORCH_ZIP),
    ],
)
def test_kinds(tmp_path: Path, content: bytes, kind: Kind) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert sniff(path) is kind


def test_weights_under_any_name(tmp_path: Path) -> None:
    path = tmp_path / "README.txt"
    assert sniff(torch_writer.save_arrays(path, ARRAYS)) is Kind.TORCH_ZIP
    assert sniff(safetensors_writer.save_arrays(path, ARRAYS)) is Kind.SAFETENSORS


def test_other_zip_files(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights/data.pkl/deeper", b"")
        archive.writestr("data.pkl", b"")
    assert sniff(path) is Kind.OTHER_ZIP


def test_every_refusal_says_what_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"\x93NUMPY")
    for kind in set(Kind) - WEIGHTS:
        message = str(refusal(path, kind))
        assert message.startswith(f"{path}: is ")
    assert r"\x93NUMPY" in str(refusal(path, Kind.UNKNOWN))


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be opened"):
        sniff(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match="is not a regular file"):
            sniff(path)
