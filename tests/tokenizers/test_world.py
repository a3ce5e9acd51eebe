"""The RWKV World tokenizer, on a small vocabulary and, where it is installed, on the real one."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wkvm_jax.errors import TokenizerError
from wkvm_jax.tokenizers import world
from wkvm_jax.tokenizers.base import Tokenizer
from wkvm_jax.tokenizers.world import WorldTokenizer

Stream = Callable[[Tokenizer, Sequence[int], Sequence[int]], str]

needs_package = pytest.mark.skipif(
    world.find_in_package() is None, reason="the rwkv package is not installed"
)
TEXTS = st.text() | st.text(alphabet="abcd 漢字😀\n'\"\\")


@pytest.fixture(scope="module")
def tokenizer(world_file: Path) -> WorldTokenizer:
    return WorldTokenizer.from_file(world_file)


@pytest.fixture(scope="module")
def real() -> WorldTokenizer:
    return WorldTokenizer.from_package()


def longest_first(tokens: dict[int, bytes], data: bytes) -> list[int]:
    """The same rule said the slow way."""
    ids = []
    by_length = sorted(tokens.items(), key=lambda entry: -len(entry[1]))
    while data:
        token_id, token = next(entry for entry in by_length if data.startswith(entry[1]))
        ids.append(token_id)
        data = data[len(token) :]
    return ids


@given(text=TEXTS)
def test_encoding_takes_the_longest_token(
    tokenizer: WorldTokenizer, world_tokens: dict[int, bytes], text: str
) -> None:
    assert tokenizer.encode(text) == longest_first(world_tokens, text.encode())


@given(text=TEXTS)
def test_round_trip(tokenizer: WorldTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_awkward_texts_survive(tokenizer: WorldTokenizer, awkward_text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(awkward_text)) == awkward_text


@given(ids=st.lists(st.integers(-2, 300)), cuts=st.lists(st.integers(0, 99)))
def test_streaming_equals_decoding(
    tokenizer: WorldTokenizer, stream: Stream, ids: list[int], cuts: list[int]
) -> None:
    assert stream(tokenizer, ids, cuts) == tokenizer.decode(ids)


def test_what_it_says_of_itself(tokenizer: WorldTokenizer, world_tokens: dict[int, bytes]) -> None:
    assert (tokenizer.name, tokenizer.eos_ids) == ("world", (0,))
    assert tokenizer.vocab_size == len(world_tokens) + 1
    assert tokenizer.digest == WorldTokenizer(dict(reversed(world_tokens.items()))).digest


def test_a_prefix_of_a_longer_token_falls_back(
    tokenizer: WorldTokenizer, world_tokens: dict[int, bytes]
) -> None:
    ids = {token: token_id for token_id, token in world_tokens.items()}
    assert tokenizer.encode("abcab") == [ids[b"ab"], ids[b"c"], ids[b"ab"]]
    assert tokenizer.encode("abcd") == [ids[b"abcd"]]


def test_end_of_text_is_silent_and_unknown_ids_are_replacement_characters(tokenizer: WorldTokenizer) -> None:
    assert tokenizer.decode([98, 0, 99]) == "ab"
    assert tokenizer.decode([98, 65_535, -1, 99]) == "a\ufffd\ufffdb"
    assert tokenizer.token_bytes(0) == b""
    assert tokenizer.token_bytes(65_535).decode() == "\ufffd"


def test_a_lone_surrogate_is_refused(tokenizer: WorldTokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("257 'ab'", "expected `id repr num_bytes`"),
        ("x 'ab' 2", "expected `id repr num_bytes`"),
        ("", "expected `id repr num_bytes`"),
        ("257 'ab' 3", "the token has 2 bytes, the line says 3"),
        ("257 'é' 1", "the token has 2 bytes, the line says 1"),
        ("257 'ab 2", "is not a literal"),
        ("257 ' 1", "is not a literal"),
        ("257 'a'b' 3", "is not a literal"),
        ("257 ab 2", "is not a literal"),
        ("257 print() 2", "is not a literal"),
        ("257 17 2", "is neither str nor bytes"),
        ("257 ['ab'] 2", "is neither str nor bytes"),
        ("257 '\\ud800' 3", "lone surrogate"),
        ("257 '' 0", "the token is empty"),
        ("0 'ab' 2", "id 0 is the end of text"),
        ("5 'ab' 2", "id 5 stands on an earlier line too"),
        ("257 'a' 1", "the same token has id 98 too"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "broken.txt"
    lines = [f"{byte + 1} {bytes([byte])!r} 1" for byte in range(256)]
    path.write_text("\n".join([*lines, line, "300 'end' 3"]) + "\n", encoding="utf-8")
    with pytest.raises(TokenizerError) as caught:
        WorldTokenizer.from_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: line 257: ")
    assert fault in message


def test_a_vocabulary_without_some_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("1 'a' 1\n2 'ab' 2\n")
    with pytest.raises(TokenizerError, match="lacks the single byte 0x00"):
        WorldTokenizer.from_file(path)


def test_a_vocabulary_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"1 '\xe9' 1\n")
    with pytest.raises(TokenizerError, match="is not UTF-8"):
        WorldTokenizer.from_file(path)


@given(
    source=st.text(alphabet=st.characters(exclude_categories=["Cs"])) | st.text(alphabet="ab'\"\\\0\r\n\f ")
)
def test_the_short_cut_reads_literals_as_python_does(source: str) -> None:
    literal = f"'{source}'"
    try:
        expected = ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        with pytest.raises(ValueError, match="is not a literal"):
            world.parse_literal(literal)
    else:
        assert world.parse_literal(literal) == expected.encode()


def test_found_by_content_under_any_name(tmp_path: Path, world_file: Path) -> None:
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)) * 16)
    (tmp_path / "subfolder").mkdir()
    (tmp_path / "empty").write_bytes(b"")
    assert world.find_in_directory(tmp_path) is None
    (tmp_path / "some.vocabulary").write_bytes(world_file.read_bytes())
    assert world.find_in_directory(tmp_path) == tmp_path / "some.vocabulary"
    (tmp_path / "another.txt").write_bytes(world_file.read_bytes())
    with pytest.raises(TokenizerError, match=r"several World vocabularies.*another\.txt, some\.vocabulary"):
        world.find_in_directory(tmp_path)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "find_in_package", lambda: None)
    with pytest.raises(TokenizerError, match=r"pip install 'wkvm_jax\[world\]'"):
        WorldTokenizer.from_package()


def test_the_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_file: Path
) -> None:
    package = tmp_path / "rwkv"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert world.find_in_package() is None
    (package / world.WORLD_FILE).write_bytes(world_file.read_bytes())
    assert world.find_in_package() == package / world.WORLD_FILE
    assert "rwkv" not in sys.modules
    whole = WorldTokenizer.from_package()
    shorter = WorldTokenizer.from_package(whole.vocab_size - 1)
    assert shorter.vocab_size == whole.vocab_size - 1
    assert shorter.decode(shorter.encode("back\\slash")) == "back\\slash"


@needs_package
def test_real_vocabulary_is_what_literal_eval_reads() -> None:
    path = world.find_in_package()
    assert path is not None
    expected = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        token_id, rest = line.split(" ", 1)
        literal, num_bytes = rest.rsplit(" ", 1)
        value = ast.literal_eval(literal)
        expected[int(token_id)] = value.encode() if isinstance(value, str) else value
        assert len(expected[int(token_id)]) == int(num_bytes)
    assert world.read_vocabulary(path) == expected
    assert list(expected) == list(range(1, 65_530))


@needs_package
def test_real_vocabulary_gives_its_known_ids(real: WorldTokenizer) -> None:
    assert real.vocab_size == 65_530
    assert real.encode("\n\n") == [261]
    assert real.encode(" memorable") == [60_000]
    assert real.encode("-" * 80 + "#" * 80) == [65_528, 65_527]
    assert real.decode(real.encode("The Eiffel tower")) == "The Eiffel tower"


@needs_package
@given(text=st.text(min_size=1), cuts=st.lists(st.integers(0, 99)))
def test_real_vocabulary_round_trip(real: WorldTokenizer, stream: Stream, text: str, cuts: list[int]) -> None:
    ids = real.encode(text)
    assert real.decode(ids) == text
    assert stream(real, ids, cuts) == text
