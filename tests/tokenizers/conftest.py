"""Texts, splits and a small World vocabulary for the tokenizer tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from wkvm_jax.tokenizers.base import Tokenizer

AWKWARD_TEXTS = (
    "",
    "\0",
    "plain words, and  two spaces ",
    " leading space",
    "é ü ß ﬁ ✓",
    "漢字かな交じり文、한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "\u200b\u2028\ufeff\ufffd",
    "\U0010ffff\ue000",
)

WORLD_TOKENS = (
    *(bytes([byte]) for byte in range(256)),
    b"ab",
    b"abcd",
    b"bc",
    b"\n\n",
    b"  ",
    b" the",
    "漢".encode(),
    "漢字".encode(),
    b"\xe6\xbc",
    b"\x9f\x98\x80",
    b"it's",
    b'a "b"',
    b"back\\slash",
)


@pytest.fixture(params=AWKWARD_TEXTS)
def awkward_text(request: pytest.FixtureRequest) -> str:
    """A text that has tripped some tokenizer or other."""
    text: str = request.param
    return text


@pytest.fixture(scope="session")
def world_tokens() -> dict[int, bytes]:
    """A World vocabulary of all single bytes and a few longer tokens, from id 1."""
    return dict(enumerate(WORLD_TOKENS, start=1))


@pytest.fixture(scope="session")
def world_file(tmp_path_factory: pytest.TempPathFactory, world_tokens: dict[int, bytes]) -> Path:
    """The small vocabulary written as RWKV writes its own."""
    path = tmp_path_factory.mktemp("world") / "vocabulary.txt"
    path.write_text("".join(map(world_line, world_tokens.items())), newline="")
    return path


def world_line(entry: tuple[int, bytes]) -> str:
    """A vocabulary line: tokens of whole characters as `str`, others as `bytes`."""
    token_id, token = entry
    try:
        literal = repr(token.decode())
    except UnicodeDecodeError:
        literal = repr(token)
    return f"{token_id} {literal} {len(token)}\r\n"


@pytest.fixture(scope="session")
def stream() -> Callable[[Tokenizer, Sequence[int], Sequence[int]], str]:
    """Decodes in pieces that end at `cuts`, going on with a copy at every cut."""

    def decode_in_pieces(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int]) -> str:
        detokenizer = tokenizer.detokenizer()
        pieces = []
        bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
        for start, end in itertools.pairwise(bounds):
            branch = detokenizer.copy()
            pieces.append(detokenizer.add(ids[start:end]))
            # What becomes of the original after the fork must not reach the copy.
            detokenizer.finish()
            assert branch.add(ids[start:end]) == pieces[-1]
            detokenizer = branch
        return "".join(pieces) + detokenizer.finish()

    return decode_in_pieces
