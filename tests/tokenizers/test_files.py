"""Reading the JSON files beside a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from wkvm_jax.errors import TokenizerError
from wkvm_jax.tokenizers.files import read_json_object


def test_reads_an_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"é": [1, null]}', encoding="utf-8")
    assert read_json_object(path) == {"é": [1, None]}


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert read_json_object(tmp_path / "config.json") == {}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is not valid JSON"),
        (b"{]", "is not valid JSON"),
        (b'{"\xff": 1}', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", "must hold a JSON object, not list"),
        (b"null", "must hold a JSON object, not NoneType"),
    ],
)
def test_anything_else_is_named(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        read_json_object(path)
    assert str(caught.value).startswith(f"{path}: {fault}")
