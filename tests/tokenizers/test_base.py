"""The rules that all tokenizers share."""

from __future__ import annotations

import pytest

from wkvm_jax.tokenizers.base import REPLACEMENT, utf8, vocabulary_digest


def test_utf8_encodes_every_valid_text() -> None:
    assert utf8("é\0😀") == b"\xc3\xa9\x00\xf0\x9f\x98\x80"
    assert utf8("") == b""


@pytest.mark.parametrize("surrogate", [0xD800, 0xDFFF])
def test_a_lone_surrogate_is_a_clear_value_error(surrogate: int) -> None:
    with pytest.raises(ValueError, match=rf"text\[2\] is the lone surrogate U\+{surrogate:04X}"):
        utf8("ab" + chr(surrogate))


def test_replacement_is_one_character() -> None:
    assert REPLACEMENT.decode() == "\ufffd"


def test_digest_depends_on_the_vocabulary_and_not_on_its_order() -> None:
    tokens = [(1, b"a"), (2, b"bc"), (3, b"\xff")]
    digest = vocabulary_digest(tokens)
    assert digest == vocabulary_digest(reversed(tokens))
    assert len(digest) == 16
    assert digest != vocabulary_digest([(1, b"ab"), (2, b"c"), (3, b"\xff")])
    assert digest != vocabulary_digest([(1, b"a"), (2, b"bc"), (4, b"\xff")])


def test_digest_of_a_known_vocabulary_never_changes() -> None:
    # Saved states carry digests: another value here would make every one of them look foreign.
    assert vocabulary_digest([(0, b""), (1, b"a")]) == "b8a06d8482a696ce"
