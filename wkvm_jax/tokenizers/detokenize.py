"""Token ids to text, a few at a time.

The pieces that a detokenizer returns join to exactly what decoding all ids at once gives, however the
ids were cut, and no piece ends inside a character. Characters are code points: an emoji that is joined
from several of them arrives as the model writes it.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """The text of one growing sequence of token ids."""

    def add(self, ids: Sequence[int]) -> str:
        """The text that has become certain with `ids`."""
        ...

    def finish(self) -> str:
        """The rest of the text; nothing may be added afterwards."""
        ...

    def copy(self) -> Detokenizer:
        """An independent detokenizer in the same position, for a sequence that forks."""
        ...


class ByteDetokenizer:
    """Decodes a sequence whose every token stands for fixed bytes of UTF-8."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = _utf8_decoder()

    def add(self, ids: Sequence[int]) -> str:
        """The characters that `ids` complete."""
        return self._utf8.decode(self._join(ids))

    def finish(self) -> str:
        """U+FFFD if the last character was left incomplete, else nothing."""
        return self._utf8.decode(b"", final=True)

    def copy(self) -> ByteDetokenizer:
        """An independent detokenizer in the same position."""
        twin = copy.copy(self)
        twin._utf8 = _utf8_decoder()
        twin._utf8.setstate(self._utf8.getstate())
        return twin

    def _join(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self._token_bytes, ids))


class HoldingDetokenizer:
    """Keeps all ids to the end, for decoders whose text no prefix of the ids makes certain."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []

    def add(self, ids: Sequence[int]) -> str:
        """Nothing: no text is certain yet."""
        self._ids.extend(ids)
        return ""

    def finish(self) -> str:
        """The whole text."""
        return self._decode(self._ids)

    def copy(self) -> HoldingDetokenizer:
        """An independent detokenizer in the same position."""
        twin = HoldingDetokenizer(self._decode)
        twin._ids = self._ids.copy()
        return twin


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
