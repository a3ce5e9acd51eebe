"""Text of a running request: incremental detokenizing and stop strings."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from wkvm_jax.tokenizers.detokenize import Detokenizer, HoldingDetokenizer

CONTEXT_TOKENS = 16
"""Ids before the output that a detokenizer is shown; enough for any character or word mark they share."""


class StopStrings:
    """Finds the stop string that is complete first in a growing text, and holds back what could become one.

    What `add` and `finish` return, joined, is the text up to that stop string, however it was cut. Of stop
    strings that end together, the longest counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops))
        self._by_last_character: dict[str, list[str]] = {}
        for stop in sorted(self._stops, key=len, reverse=True):
            self._by_last_character.setdefault(stop[-1], []).append(stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found = False

    def add(self, piece: str, armed: bool = True) -> str:
        """The text that is now certain. With `armed` false, stop strings that end in `piece` do not count."""
        if not self._stops or self.found:
            return "" if self.found else piece
        text = self._held + piece
        cut = self._first_stop(text, len(self._held)) if armed else None
        if cut is not None:
            self.found, self._held = True, ""
            return text[:cut]
        self._held = self._possible_start(text)
        return text[: len(text) - len(self._held)]

    def finish(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str, num_old: int) -> int | None:
        """Where the first stop string begins that ends past the `num_old` characters known before."""
        for end in range(num_old + 1, len(text) + 1):
            for stop in self._by_last_character.get(text[end - 1], ()):
                if text.endswith(stop, 0, end):
                    return end - len(stop)
        return None

    def _possible_start(self, text: str) -> str:
        """The longest end of the text that a stop string begins with and goes on from."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            # In order, strings that begin with `end` follow it directly.
            after = bisect.bisect_right(self._stops, end)
            if after < len(self._stops) and self._stops[after].startswith(end):
                return end
        return ""


class RequestText:
    """A request's text as it grows: ids in, certain text out."""

    def __init__(self, detokenizer: Detokenizer | None, stops: Sequence[str], context: Sequence[int]) -> None:
        """Args:
        detokenizer: a fresh one, or None for a model without a tokenizer.
        stops: stop strings.
        context: ids before the output, whose text the output continues.
        """
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self.pieces: list[str] = []
        if detokenizer is not None and not isinstance(detokenizer, HoldingDetokenizer):
            detokenizer.add(context[-CONTEXT_TOKENS:])

    @property
    def stopped(self) -> bool:
        return self._stops.found

    @property
    def text(self) -> str | None:
        return None if self._detokenizer is None else "".join(self.pieces)

    def add(self, token_id: int, armed: bool) -> str:
        """The text that becomes certain with one more token; `armed` lets stop strings count."""
        if self._detokenizer is None:
            return ""
        return self._keep(self._stops.add(self._detokenizer.add([token_id]), armed))

    def finish(self) -> str:
        """The rest of the text: half characters become U+FFFD, held text is let go."""
        if self._detokenizer is None or self._stops.found:
            return ""
        rest = self._stops.add(self._detokenizer.finish())
        return self._keep(rest + self._stops.finish())

    def _keep(self, piece: str) -> str:
        if piece:
            self.pieces.append(piece)
        return piece
