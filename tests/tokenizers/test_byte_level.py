"""The byte tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wkvm_jax.tokenizers.base import Tokenizer
from wkvm_jax.tokenizers.byte_level import ByteTokenizer

Stream = Callable[[Tokenizer, Sequence[int], Sequence[int]], str]

TOKENIZER = ByteTokenizer()


@given(text=st.text())
def test_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_awkward_texts_survive(awkward_text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(awkward_text)) == awkward_text


def test_ids_are_bytes() -> None:
    assert TOKENIZER.encode("é") == [0xC3, 0xA9]
    assert TOKENIZER.encode("") == []
    assert TOKENIZER.token_bytes(0xC3) == b"\xc3"
    assert (TOKENIZER.name, TOKENIZER.vocab_size, TOKENIZER.eos_ids) == ("bytes", 256, (0,))
    assert len(TOKENIZER.digest) == 16


def test_end_of_text_decodes_to_its_character() -> None:
    assert TOKENIZER.decode([65, 0, 66]) == "A\0B"


def test_ids_outside_the_vocabulary_are_replacement_characters() -> None:
    assert TOKENIZER.decode([65, 256, -1, 66]) == "A\ufffd\ufffdB"


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        TOKENIZER.encode("a\udc80")


@given(
    ids=st.lists(st.integers(-2, 300) | st.sampled_from([0xF0, 0x9F, 0x98, 0x80])),
    cuts=st.lists(st.integers(0, 99)),
)
def test_streaming_equals_decoding(stream: Stream, ids: list[int], cuts: list[int]) -> None:
    assert stream(TOKENIZER, ids, cuts) == TOKENIZER.decode(ids)
