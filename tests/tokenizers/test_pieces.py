"""Every decoder that is taken to pieces says what the library's own decoder says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, pre_tokenizers

from wkvm_jax.tokenizers.pieces import PieceDetokenizer, Pieces, compile_decoder

LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]

IN_PIECES = {
    "none": None,
    "byte_level": decoders.ByteLevel(),
    "byte_level_sequence": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 2, 0)]),
    "llama": decoders.Sequence(LLAMA),
    "gemma": decoders.Sequence(LLAMA[:3]),
    "strip_twice": decoders.Sequence([*LLAMA, decoders.Strip(" ", 2, 0)]),
    "nested": decoders.Sequence([decoders.Sequence(LLAMA[:2]), decoders.Sequence(LLAMA[2:])]),
    "fallback_alone": decoders.ByteFallback(),
    "fuse_alone": decoders.Fuse(),
    "metaspace_always": decoders.Metaspace(),
    "metaspace_never": decoders.Metaspace(prepend_scheme="never"),
    "metaspace_first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace_fallback": decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]),
    "wordpiece": decoders.WordPiece(),
    "wordpiece_raw": decoders.WordPiece(prefix="▁", cleanup=False),
    "strip_tokens": decoders.Sequence([decoders.Strip(" ", 2, 0), decoders.Replace("b", "")]),
    "replace_pattern": decoders.Sequence([decoders.Replace(Regex("[ab]+"), "✓"), decoders.WordPiece()]),
    "empty_sequence": decoders.Sequence([]),
}

NOT_IN_PIECES = {
    "bpe": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
    "metaspace_after_fallback": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "replace_after_fuse": decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
    "strip_both_ends": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    "strip_letters": decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 1, 0)]),
    "strip_after_fallback": decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
    "fallback_then_byte_level": decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()]),
}

TOKENS = st.sampled_from(
    [
        *("", "▁", "▁▁", "▁a", "a", "ab▁b", " ", "  b", "a b", "##a", "a##", "Ġ", "Ċa", "漢", "é", "😀"),
        *("n't", " '", ".", "'s", "do not", "</w>", "a</w>", "<pad>", "|", "\0", "\ufffd"),
        *("<0x", "<0xZZ>", "<\uff5cend▁of\uff5c>"),
    ]
)
# Whole characters spelled in byte tokens: runs with wrong bytes the library decodes by another rule.
SPELLED = st.characters(exclude_categories=["Cs"]).map(lambda c: [f"<0x{byte:02X}>" for byte in c.encode()])


def decode(pieces: Pieces, tokens: Sequence[str], cut: int) -> str:
    detokenizer = PieceDetokenizer(
        lambda i: pieces.first(tokens[i]), lambda i: pieces.later(tokens[i]), pieces.num_stripped
    )
    begun = detokenizer.add(range(min(cut, len(tokens))))
    return begun + detokenizer.add(range(cut, len(tokens))) + detokenizer.finish()


@pytest.mark.parametrize("name", IN_PIECES)
@given(units=st.lists(TOKENS.map(lambda token: [token]) | SPELLED, max_size=8), cut=st.integers(0, 9))
def test_pieces_join_to_what_the_library_decodes(name: str, units: list[list[str]], cut: int) -> None:
    decoder = IN_PIECES[name]
    tokens = [token for unit in units for token in unit]
    pieces = compile_decoder(decoder)
    assert pieces is not None
    expected = " ".join(tokens) if decoder is None else decoder.decode(tokens)
    assert decode(pieces, tokens, cut) == expected


@pytest.mark.parametrize("name", NOT_IN_PIECES)
def test_other_decoders_are_left_whole(name: str) -> None:
    assert compile_decoder(NOT_IN_PIECES[name]) is None


@given(characters=st.lists(st.sampled_from(sorted(pre_tokenizers.ByteLevel.alphabet()))))
def test_byte_level_covers_the_alphabet(characters: list[str]) -> None:
    pieces = compile_decoder(decoders.ByteLevel())
    assert pieces is not None
    token = "".join(characters)
    assert len(pieces.later(token)) == len(characters)
    assert pieces.later(token).decode("utf-8", "replace") == decoders.ByteLevel().decode([token])


def test_all_bytes_have_a_byte_level_character() -> None:
    pieces = compile_decoder(decoders.ByteLevel())
    assert pieces is not None
    assert {pieces.later(character) for character in pre_tokenizers.ByteLevel.alphabet()} == {
        bytes([byte]) for byte in range(256)
    }


def test_wrong_bytes_in_a_run_leave_the_right_ones_alone() -> None:
    pieces = compile_decoder(decoders.Sequence(LLAMA))
    assert pieces is not None
    tokens = ["<0xC3>", "<0xA9>", "<0xff>", "a", "<0xF0>", "<0x9F>"]
    assert decode(pieces, tokens, 1) == "é\ufffda\ufffd"


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(["▁", "▁", "a"], " a"), (["▁a", "▁b"], "a b"), (["", "▁▁a"], " a"), (["a", "▁b"], "a b"), ([], "")],
)
def test_one_leading_space_is_stripped_wherever_the_cut(tokens: list[str], text: str) -> None:
    pieces = compile_decoder(decoders.Sequence(LLAMA))
    assert pieces is not None
    assert [decode(pieces, tokens, cut) for cut in range(len(tokens) + 1)] == [text] * (len(tokens) + 1)
