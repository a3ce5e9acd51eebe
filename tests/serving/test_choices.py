from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from wkvm_jax.engine.request import Output, Token, TokenLogprob
from wkvm_jax.serving.choices import ChoiceWriter, LogprobWriter, TokenNames, joined
from wkvm_jax.serving.engine_loop import Update
from wkvm_jax.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()


def entries_of(ids: bytes) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, -1.0, ((token_id, -1.0),)) for token_id in ids]


def output_of(ids: bytes, text: str, prompt: bytes = b"") -> Output:
    return Output(
        token_ids=tuple(ids),
        text=text,
        logprobs=None,
        prompt_logprobs=(TokenLogprob(prompt[0], None), *entries_of(prompt[1:])) if prompt else None,
        finish_reason="length",
        handle=None,
        num_prompt_tokens=len(prompt),
        num_cached_tokens=0,
    )


def updates_of(ids: bytes, prompt: bytes, cuts: list[int]) -> list[Update]:
    """The tokens in pieces, each with the text that it makes certain; the rest with the outcome."""
    text = TOKENIZER.decode(ids)
    detokenizer = TOKENIZER.detokenizer()
    logprobs = entries_of(ids)
    tokens = [Token(i, detokenizer.add([i]), entry) for i, entry in zip(ids, logprobs, strict=True)]
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    updates = [Update(0, tokens[a:b], None) for a, b in itertools.pairwise(bounds)]
    return [*updates, Update(0, [], output_of(ids, text, prompt))]


def test_names_tell_bytes_apart() -> None:
    names = TokenNames(TOKENIZER)
    assert names[ord("a")] == "a"
    assert names[0xE6] == "bytes:\\xe6"
    assert len({names[token_id] for token_id in range(256)}) == 256
    assert TokenNames(None)[7] == "token_id:7"


@given(text=st.text(max_size=20), start=st.integers(0, 9))
def test_offset_is_where_the_tokens_character_begins(text: str, start: int) -> None:
    writer = LogprobWriter(TOKENIZER, TokenNames(TOKENIZER), start)
    ids = text.encode()
    expected = [start + at for at, character in enumerate(text) for _ in character.encode()]
    cut = len(ids) // 2
    written = [writer.write(entries_of(part)) for part in (ids[:cut], ids[cut:])]
    assert written[0].text_offset + written[1].text_offset == expected


@given(prompt=st.binary(min_size=1, max_size=12))
def test_prompt_offsets_end_where_the_output_begins(prompt: bytes) -> None:
    text = TOKENIZER.decode(prompt)
    writer = LogprobWriter(TOKENIZER, TokenNames(TOKENIZER), len(text))
    offsets = writer.write_prompt(entries_of(prompt)).text_offset
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] < len(text)


def test_first_token_of_a_prompt_has_nulls() -> None:
    writer = LogprobWriter(None, TokenNames(None), 0)
    written = writer.write_prompt([TokenLogprob(5, None), TokenLogprob(6, float("-inf"), ((1, -0.5),))])
    assert written.tokens == ["token_id:5", "token_id:6"]
    assert written.token_logprobs == [None, -9999.0]
    assert written.top_logprobs == [None, {"token_id:1": -0.5, "token_id:6": -9999.0}]
    assert written.text_offset == [0, 0]


@given(
    ids=st.binary(max_size=16) | st.text(max_size=8).map(str.encode),
    cuts=st.lists(st.integers(0, 99), max_size=6),
    echo=st.none() | st.text(min_size=1, max_size=4),
    logprobs=st.booleans(),
)
def test_pieces_join_to_the_whole_however_they_are_cut(
    ids: bytes, cuts: list[int], echo: str | None, logprobs: bool
) -> None:
    def write(cuts: list[int]) -> list[object]:
        scores = LogprobWriter(TOKENIZER, TokenNames(TOKENIZER), len(echo or "")) if logprobs else None
        writer = ChoiceWriter(3, echo, scores)
        prompt = (echo or "").encode() if logprobs else b""
        return [piece for u in updates_of(ids, prompt, cuts) if (piece := writer.write(u)) is not None]

    whole, pieces = write([]), write(cuts)
    assert joined(pieces) == joined(whole)
    answer = joined(pieces)
    assert answer.text == (echo or "") + TOKENIZER.decode(ids)
    assert answer.token_ids == list(ids)
    assert answer.finish_reason == "length" and answer.index == 3
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    if logprobs:
        num_echoed = len((echo or "").encode())
        assert len(answer.logprobs.tokens) == num_echoed + len(ids)


def test_text_that_only_the_end_makes_certain_is_not_lost() -> None:
    writer = ChoiceWriter(0, None, None)
    first = writer.write(Update(0, [Token(1, "a")], None))
    last = writer.write(Update(0, [Token(2, "")], output_of(b"\x01\x02", "abc")))
    assert first is not None and last is not None
    assert (first.text, last.text) == ("a", "bc")
