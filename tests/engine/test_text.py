from __future__ import annotations

import random
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wkvm_jax.engine.text import RequestText, StopStrings
from wkvm_jax.tokenizers.byte_level import ByteTokenizer
from wkvm_jax.tokenizers.detokenize import HoldingDetokenizer

TEXTS = st.text("ab\u00e9", max_size=24)
STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=4)
EMOJI = "a\U0001f468\u200d\U0001f469\u200d\U0001f467b\u732b\u00e9"


def reference(text: str, stops: list[str], counts_from: int = 0) -> tuple[str, bool]:
    """The text before the stop string that ends first (the longest of those), and whether there is one."""
    for end in range(counts_from + 1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces, some of them empty."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[first:last] for first, last in zip([0, *ends], [*ends, len(text)], strict=True)]


@given(TEXTS, STOPS, st.lists(st.integers(0, 99), max_size=8))
def test_stop_strings_are_found_however_the_text_is_cut(
    text: str, stops: list[str], places: list[int]
) -> None:
    watched = StopStrings(stops)
    given = [watched.add(piece) for piece in cut(text, places)]
    assert ("".join(given) + watched.finish(), watched.found) == reference(text, stops)


@given(TEXTS, STOPS, st.lists(st.integers(0, 99), max_size=8), st.integers(0, 8))
def test_stop_strings_that_end_before_they_count_are_passed_over(
    text: str, stops: list[str], places: list[int], unarmed: int
) -> None:
    watched, pieces = StopStrings(stops), cut(text, places)
    given = [watched.add(piece, armed=index >= unarmed) for index, piece in enumerate(pieces)]
    expected = reference(text, stops, counts_from=len("".join(pieces[:unarmed])))
    assert ("".join(given) + watched.finish(), watched.found) == expected


@given(TEXTS, STOPS)
def test_no_more_is_held_back_than_could_become_a_stop_string(text: str, stops: list[str]) -> None:
    watched, given = StopStrings(stops), ""
    for index, character in enumerate(text, 1):
        given += watched.add(character)
        if watched.found:
            break
        held = text[len(given) : index]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["END"], ["the E", "ND of"], ["the ", ""]),
        (["END"], ["the E", "NTRY"], ["the ", "ENTRY"]),
        (["abc", "b"], ["abc"], ["a"]),
        (["abcd", "bc"], ["abcd"], ["a"]),
        (["abc", "bc"], ["xabc"], ["x"]),
        (["aab"], ["aaa", "ab"], ["a", "a"]),
        (["\n\n", "\n"], ["one", "\n", "\n"], ["one", "", ""]),
        ([], ["all", " of it"], ["all", " of it"]),
        (["never"], ["", "all", ""], ["", "all", ""]),
    ],
)
def test_stop_strings(stops: list[str], pieces: list[str], expected: list[str]) -> None:
    watched = StopStrings(stops)
    assert [watched.add(piece) for piece in pieces] == expected


def test_nothing_comes_after_a_stop_string() -> None:
    watched = StopStrings(["."])
    assert watched.add("One. Two") == "One" and watched.found
    assert watched.add("three") == "" and watched.finish() == ""


def test_a_thousand_stop_strings() -> None:
    draw = random.Random(0)
    stops = ["".join(draw.choices("abcd", k=draw.randint(6, 12))) for _ in range(1000)]
    text = "".join(draw.choices("abcd", k=4000))
    watched = StopStrings(stops)
    given = "".join(watched.add(text[at : at + 3]) for at in range(0, len(text), 3)) + watched.finish()
    assert (given, watched.found) == reference(text, stops)


def test_a_thousand_long_stop_strings_cost_little() -> None:
    stops = ["ab" * 1000 + f"{index:08d}" for index in range(1000)]
    text = ("ab" * 999 + "c") * 4
    tracemalloc.start()
    started = time.perf_counter()
    watched = StopStrings(stops)
    given = "".join(watched.add(text[at : at + 2]) for at in range(0, len(text), 2))
    elapsed_s, (_, peak_bytes) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert given + watched.finish() == text
    assert peak_bytes < 8 << 20 and elapsed_s < 5


# Requests -----------------------------------------------------------------------------------------


def request_text(stops: tuple[str, ...] = (), context: list[int] | None = None) -> RequestText:
    return RequestText(ByteTokenizer().detokenizer(), stops, context or [])


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_pieces_join_to_the_text(text: str, stops: list[str]) -> None:
    one = request_text(tuple(stops))
    pieces = [one.add(token_id, armed=True) for token_id in text.encode()]
    pieces.append(one.finish())
    assert "".join(pieces) == one.text == reference(text, stops)[0]
    assert one.stopped == reference(text, stops)[1]


def test_no_piece_ends_inside_a_character() -> None:
    one = request_text()
    pieces = [one.add(token_id, armed=True) for token_id in EMOJI.encode()]
    assert [piece for piece in pieces if piece] == list(EMOJI)
    assert one.finish() == "" and one.text == EMOJI


def test_a_character_that_was_left_incomplete_is_replaced_at_the_end() -> None:
    one = request_text()
    assert [one.add(token_id, armed=True) for token_id in b"a\xf0\x9f"] == ["a", "", ""]
    assert one.finish() == "\ufffd" and one.text == "a\ufffd"


def test_a_stop_string_that_ends_inside_the_last_token() -> None:
    one = request_text(("\ufffd",))
    assert one.add(0xF0, armed=True) == "" and not one.stopped
    assert one.finish() == "" and one.stopped and one.text == ""


def test_a_character_that_the_prompt_began_is_finished_by_the_output() -> None:
    cat = "\u732b".encode()
    one = request_text(context=[*b"a", *cat[:2]])
    assert one.add(cat[2], armed=True) == "\u732b"


def test_only_the_end_of_a_long_context_is_read() -> None:
    one = request_text(context=[*("\U0001f600" * 9).encode()])
    assert one.add(ord("a"), armed=True) == "a"


def test_held_text_is_given_at_the_end() -> None:
    one = request_text(("abc",))
    assert [one.add(token_id, armed=True) for token_id in b"xab"] == ["x", "", ""]
    assert one.text == "x" and one.finish() == "ab" and one.text == "xab" and not one.stopped


def test_stop_strings_wait_until_they_count() -> None:
    one = request_text(("ab",))
    given = [one.add(token_id, armed=index >= 3) for index, token_id in enumerate(b"abab")]
    assert "".join(given) == "ab" and one.stopped


def test_without_a_tokenizer_there_is_no_text() -> None:
    one = RequestText(None, (), [1, 2])
    assert one.add(7, armed=True) == "" and one.finish() == ""
    assert one.text is None and not one.stopped


def test_a_tokenizer_whose_text_only_its_end_makes_certain() -> None:
    one = RequestText(HoldingDetokenizer(ByteTokenizer().decode), ("b",), [*b"context"])
    assert [one.add(token_id, armed=True) for token_id in b"abc"] == ["", "", ""]
    assert one.finish() == "a" and one.stopped and one.text == "a"
