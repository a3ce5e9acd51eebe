"""The RWKV World vocabulary: byte strings, of which the longest that fits is always taken."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from wkvm_jax.errors import TokenizerError
from wkvm_jax.tokenizers.base import REPLACEMENT, utf8, vocabulary_digest
from wkvm_jax.tokenizers.detokenize import ByteDetokenizer

WORLD_FILE = "rwkv_vocab_v20230424.txt"
WORLD_VOCAB_SIZE = 65_536
_END_OF_TEXT = 0
_LINE = re.compile(r"(\d+) (.+) (\d+)\r?", re.ASCII)
_FIRST_LINE = re.compile(rb"\d+ b?(['\"]).*\1 \d+\r?\n")
# A literal that is its own content: no backslash, no quote of its kind, nothing that Python refuses.
_PLAIN_LITERAL = re.compile(r"'[^'\\\0\r\n]*'" r'|"[^"\\\0\r\n]*"')
_SNIFFED_BYTES = 2_048


class WorldTokenizer:
    """Greedy longest match over bytes; the tokens' ids start at 1.

    Id 0 ends a text and has none itself, so it decodes to nothing. An id that the vocabulary lacks
    decodes to U+FFFD.
    """

    name = "world"
    eos_ids = (_END_OF_TEXT,)

    def __init__(self, tokens: Mapping[int, bytes]) -> None:
        missing = set(range(256)) - {token[0] for token in tokens.values() if len(token) == 1}
        if missing:
            raise ValueError(f"lacks the single byte 0x{min(missing):02x}, so not every text would encode")
        self._root = _trie(tokens)
        self._bytes = {_END_OF_TEXT: b"", **tokens}
        self.vocab_size = max(tokens) + 1

    @classmethod
    def from_file(cls, path: Path) -> WorldTokenizer:
        """The vocabulary in `path`; `TokenizerError` names the line that is wrong."""
        return cls._checked(path, read_vocabulary(path))

    @classmethod
    def from_package(cls, vocab_size: int = WORLD_VOCAB_SIZE) -> WorldTokenizer:
        """The vocabulary that the `rwkv` package brings, without the ids from `vocab_size` on."""
        path = find_in_package()
        if path is None:
            raise TokenizerError(
                WORLD_FILE,
                "the RWKV World vocabulary is not installed: run pip install 'wkvm_jax[world]', "
                "or put the file into the model's directory",
            )
        tokens = read_vocabulary(path)
        return cls._checked(path, {i: token for i, token in tokens.items() if i < vocab_size})

    @classmethod
    def _checked(cls, path: Path, tokens: Mapping[int, bytes]) -> WorldTokenizer:
        try:
            return cls(tokens)
        except ValueError as fault:
            raise TokenizerError(path, str(fault)) from fault

    @functools.cached_property
    def digest(self) -> str:
        """A short fingerprint of the vocabulary."""
        return vocabulary_digest(self._bytes.items())

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; every text has some, since every single byte is a token."""
        data = utf8(text)
        num_bytes = len(data)
        ids = []
        start = 0
        while start < num_bytes:
            node = self._root
            position = start
            while position < num_bytes:
                child = node.children.get(data[position])
                if child is None:
                    break
                node = child
                position += 1
                if node.token_id:
                    longest, end = node.token_id, position
            # The first byte alone is a token, so `longest` and `end` are this round's.
            ids.append(longest)
            start = end
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        token_bytes = self._bytes.get
        return b"".join([token_bytes(i, REPLACEMENT) for i in ids]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes, which need not be whole characters."""
        return self._bytes.get(token_id, REPLACEMENT)

    def detokenizer(self) -> ByteDetokenizer:
        """A fresh incremental `decode`."""
        return ByteDetokenizer(self.token_bytes)


class _Node:
    """A place in the trie: the bytes that may follow, and the token that ends here (0: none)."""

    __slots__ = ("children", "token_id")

    def __init__(self) -> None:
        self.children: dict[int, _Node] = {}
        self.token_id = 0


def _trie(tokens: Mapping[int, bytes]) -> _Node:
    root = _Node()
    for token_id, token in tokens.items():
        node = root
        for byte in token:
            child = node.children.get(byte)
            if child is None:
                child = node.children[byte] = _Node()
            node = child
        node.token_id = token_id
    return root


def find_in_directory(directory: Path) -> Path | None:
    """The one file of `directory` that holds a World vocabulary, told by its first line."""
    found = [path for path in sorted(directory.iterdir()) if path.is_file() and _looks_like_world(path)]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise TokenizerError(directory, f"holds several World vocabularies, keep one: {names}")
    return found[0] if found else None


def find_in_package() -> Path | None:
    """The vocabulary file of the `rwkv` package, found without importing it: that would import torch."""
    spec = importlib.util.find_spec("rwkv")
    folders = spec.submodule_search_locations if spec is not None else None
    paths = [Path(folder) / WORLD_FILE for folder in folders or ()]
    return next((path for path in paths if path.is_file()), None)


def read_vocabulary(path: Path) -> dict[int, bytes]:
    """The tokens in `path` by id, from lines of `id repr num_bytes`."""
    try:
        lines = path.read_bytes().decode().split("\n")
    except UnicodeDecodeError as fault:
        raise TokenizerError(path, f"is not UTF-8: {fault}") from fault
    if lines[-1] == "":
        lines.pop()
    tokens: dict[int, bytes] = {}
    ids: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        try:
            token_id, token = parse_line(line)
            if token_id in tokens:
                raise ValueError(f"id {token_id} stands on an earlier line too")
            if token in ids:
                raise ValueError(f"the same token has id {ids[token]} too")
        except ValueError as fault:
            raise TokenizerError(path, f"line {number}: {fault}") from fault
        tokens[token_id] = token
        ids[token] = token_id
    return tokens


def parse_line(line: str) -> tuple[int, bytes]:
    """The id and the bytes of one line; `ValueError` says what is wrong with it."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"expected `id repr num_bytes`, got {line[:80]!r}")
    token_id, token, num_bytes = int(match[1]), parse_literal(match[2]), int(match[3])
    if token_id == _END_OF_TEXT:
        raise ValueError("id 0 is the end of text and cannot be a token")
    if len(token) != num_bytes:
        raise ValueError(f"the token has {len(token)} bytes, the line says {num_bytes}")
    if not token:
        raise ValueError("the token is empty")
    return token_id, token


def parse_literal(source: str) -> bytes:
    """The bytes of a Python literal of `str` or `bytes`, the former in UTF-8."""
    # Nearly every line takes this way; `literal_eval` would take four times as long over the file.
    if _PLAIN_LITERAL.fullmatch(source):
        return utf8(source[1:-1])
    try:
        value = ast.literal_eval(source)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as fault:
        raise ValueError(f"{source[:80]!r} is not a literal: {fault}") from fault
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, bytes):
        return value
    raise ValueError(f"{source[:80]!r} is neither str nor bytes")


def _looks_like_world(path: Path) -> bool:
    with path.open("rb") as file:
        return _FIRST_LINE.match(file.read(_SNIFFED_BYTES)) is not None
