"""Incremental decoding equals decoding at once, however the ids are cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wkvm_jax.tokenizers.detokenize import ByteDetokenizer, Detokenizer, HoldingDetokenizer

# Short chunks of bytes that meet in the middle of characters, and whole characters cut anywhere.
CHUNKS = st.lists(st.binary(max_size=5), max_size=12)
BROKEN_CHARACTERS = st.lists(
    st.sampled_from(
        [b"\xf0\x9f\x98\x80", b"\xe2\x80\x8d", b"\xc3\xa9", b"\xed\xa0\x80", b"\xf4\x90", b"a"]
    ).flatmap(lambda character: st.integers(0, 4).map(lambda end: character[:end])),
    max_size=12,
)


def detokenizer_of(chunks: list[bytes]) -> ByteDetokenizer:
    return ByteDetokenizer(chunks.__getitem__)


@given(chunks=CHUNKS | BROKEN_CHARACTERS)
def test_pieces_join_to_the_whole_text(chunks: list[bytes]) -> None:
    detokenizer = detokenizer_of(chunks)
    pieces = [detokenizer.add([i]) for i in range(len(chunks))] + [detokenizer.finish()]
    assert "".join(pieces) == b"".join(chunks).decode("utf-8", "replace")


@given(text=st.text())
def test_no_piece_holds_half_a_character(text: str) -> None:
    chunks = [bytes([byte]) for byte in text.encode()]
    detokenizer = detokenizer_of(chunks)
    pieces = [detokenizer.add([i]) for i in range(len(chunks))]
    assert [piece for piece in pieces if piece] == list(text)
    assert detokenizer.finish() == ""


@given(chunks=CHUNKS | BROKEN_CHARACTERS, data=st.data())
def test_a_copy_goes_its_own_way(chunks: list[bytes], data: st.DataObject) -> None:
    fork = data.draw(st.integers(0, len(chunks)))
    trunk = detokenizer_of(chunks)
    begun = trunk.add(range(fork))
    branch = trunk.copy()
    trunk.finish()
    text = begun + branch.add(range(fork, len(chunks))) + branch.finish()
    assert text == b"".join(chunks).decode("utf-8", "replace")


def test_an_emoji_arrives_with_its_last_byte() -> None:
    detokenizer = detokenizer_of([b"\xf0\x9f", b"\x98", b"\x80!"])
    assert [detokenizer.add([i]) for i in range(3)] == ["", "", "😀!"]


def test_an_incomplete_end_is_one_replacement_character() -> None:
    detokenizer = detokenizer_of([b"ok\xf0\x9f\x98"])
    assert detokenizer.add([0]) == "ok"
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("make", [lambda: detokenizer_of([]), lambda: HoldingDetokenizer(str)])
def test_adding_nothing_gives_nothing(make: Callable[[], Detokenizer]) -> None:
    assert make().add([]) == ""


def test_holding_gives_everything_at_the_end_and_copies_apart() -> None:
    trunk = HoldingDetokenizer(lambda ids: "-".join(map(str, ids)))
    assert trunk.add([1, 2]) == ""
    branch = trunk.copy()
    branch.add([3])
    trunk.add([4])
    assert (trunk.finish(), branch.finish()) == ("1-2-4", "1-2-3")
