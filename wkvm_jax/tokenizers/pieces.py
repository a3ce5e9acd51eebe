"""What a Hugging Face decoder makes of one token, so that text can be streamed token by token.

The decoders of language models map each token to its own piece of the text: bytes that depend on the
token, and on nothing else but whether it is the first. `compile_decoder` recognises those. The pieces
themselves come from the library's decoder wherever it keeps them apart; only its two byte decoders, which
turn broken characters into U+FFFD too early, are restated here.

The library's `DecodeStream` does not serve: it never gives up an incomplete end, and raises where a wrong
byte token turns characters that it has already given into U+FFFD.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import decoders

from wkvm_jax.tokenizers.base import utf8
from wkvm_jax.tokenizers.detokenize import ByteDetokenizer

_Stage = Mapping[str, object]

_TOKENWISE = {"Replace", "Metaspace", "WordPiece", "Strip"}
"""Decoders that map a list of tokens to a list as long, looking only at a token and whether it is first."""

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = " "


@dataclass(frozen=True)
class Pieces:
    """The text is `first` of the first token and `later` of all others, less `num_stripped` spaces.

    The spaces are cut from the start of the whole text, as many of them as there are.
    """

    first: Callable[[str], bytes]
    later: Callable[[str], bytes]
    num_stripped: int = 0


class PieceDetokenizer(ByteDetokenizer):
    """Decodes a sequence of which the first token may read differently and leading spaces may be cut."""

    def __init__(
        self, first: Callable[[int], bytes], later: Callable[[int], bytes], num_stripped: int
    ) -> None:
        super().__init__(later)
        self._first = first
        self._num_to_strip = num_stripped
        self._begun = False

    def _join(self, ids: Sequence[int]) -> bytes:
        if self._begun or len(ids) == 0:
            data = super()._join(ids)
        else:
            self._begun = True
            data = self._first(ids[0]) + super()._join(ids[1:])
        while self._num_to_strip and data:
            if data.startswith(b" "):
                data = data[1:]
                self._num_to_strip -= 1
            else:
                self._num_to_strip = 0
        return data


def compile_decoder(decoder: decoders.Decoder | None) -> Pieces | None:
    """The pieces of a decoder; None if its text does not fall into pieces.

    Recognised are tokenwise stages, then `ByteFallback` or `ByteLevel`, then `Fuse`, then `Strip` of
    leading spaces, each of them optional.
    """
    if decoder is None:
        # The library joins with spaces then.
        return Pieces(first=utf8, later=lambda token: utf8(_SPACE + token))
    stages = _flatten(json.loads(decoder.__getstate__()))
    tokenwise = list(itertools.takewhile(lambda stage: stage["type"] in _TOKENWISE, stages))
    rest = stages[len(tokenwise) :]
    to_bytes: Callable[[str], bytes] = utf8
    is_fused = False
    if rest and rest[0]["type"] in _TO_BYTES:
        is_fused = rest[0]["type"] == "ByteLevel"
        to_bytes = _TO_BYTES[str(rest.pop(0)["type"])]
    if rest and rest[0]["type"] == "Fuse":
        is_fused = True
        rest.pop(0)
    # On a fused text `Strip` cuts the ends of the whole, else those of every token.
    if rest and not (is_fused and all(map(_strips_leading_spaces, rest))):
        return None
    return _tokenwise_pieces(tokenwise, to_bytes, sum(_start(stage) for stage in rest))


def _tokenwise_pieces(
    stages: Sequence[_Stage], to_bytes: Callable[[str], bytes], num_stripped: int
) -> Pieces:
    if not stages:
        return Pieces(to_bytes, to_bytes, num_stripped)
    decoder = decoders.Sequence([])
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": stages}).encode())
    # Any token serves: what follows it is decoded as a later token.
    leader = "a"
    num_leading = len(decoder.decode([leader]))
    return Pieces(
        first=lambda token: to_bytes(decoder.decode([token])),
        later=lambda token: to_bytes(decoder.decode([leader, token])[num_leading:]),
        num_stripped=num_stripped,
    )


def _flatten(stage: _Stage) -> list[_Stage]:
    nested = stage.get("decoders")
    if not isinstance(nested, list):
        return [stage]
    return [inner for outer in nested for inner in _flatten(outer)]


def _strips_leading_spaces(stage: _Stage) -> bool:
    return stage["type"] == "Strip" and stage["content"] == _SPACE and stage["stop"] == 0


def _start(strip: _Stage) -> int:
    start = strip["start"]
    assert isinstance(start, int), start
    return start


def _fallback_bytes(token: str) -> bytes:
    match = _FALLBACK_BYTE.fullmatch(token)
    return utf8(token) if match is None else bytes([int(match[1], 16)])


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        # An added token, which the library passes through as it stands.
        return utf8(token)


_TO_BYTES = {"ByteFallback": _fallback_bytes, "ByteLevel": _byte_level_bytes}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable Latin-1 for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()
