"""The demo model's tokenizer: every byte of UTF-8 is a token."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from wkvm_jax.tokenizers.base import REPLACEMENT, utf8, vocabulary_digest
from wkvm_jax.tokenizers.detokenize import ByteDetokenizer

_TOKENS = {byte: bytes([byte]) for byte in range(256)}


class ByteTokenizer:
    """Ids 0 to 255 are bytes.

    Id 0 also ends a text. It still decodes to the character U+0000, so every text survives the round
    trip; whoever stops at `eos_ids` drops it.
    """

    name = "bytes"
    vocab_size = 256
    eos_ids = (0,)

    @functools.cached_property
    def digest(self) -> str:
        """A short fingerprint of the vocabulary."""
        return vocabulary_digest(_TOKENS.items())

    def encode(self, text: str) -> list[int]:
        """The bytes of `text` in UTF-8."""
        return list(utf8(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The byte itself; U+FFFD for an id outside 0 to 255."""
        return _TOKENS.get(token_id, REPLACEMENT)

    def detokenizer(self) -> ByteDetokenizer:
        """A fresh incremental `decode`."""
        return ByteDetokenizer(self.token_bytes)
