"""What every tokenizer offers, and the few rules that all of them share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from wkvm_jax.tokenizers.detokenize import Detokenizer

REPLACEMENT = "\ufffd".encode()
"""What an id that the vocabulary lacks decodes to: models pad their heads, so such ids can be sampled."""


class Tokenizer(Protocol):
    """Text to token ids and back.

    `decode` never fails: bytes that are not UTF-8 become U+FFFD exactly as
    `bytes.decode("utf-8", "replace")` makes them, and so does an id that the vocabulary lacks.
    """

    @property
    def name(self) -> str:
        """Which kind of tokenizer this is: "bytes", "world" or "huggingface"."""
        ...

    @property
    def digest(self) -> str:
        """A short fingerprint of the vocabulary; equal digests give the same text for the same ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text; empty when the tokenizer's files name none."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing prepended or appended; `ValueError` for a lone surrogate."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, tokens that end a text included where they have one."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to a text that has already begun."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental `decode`.

        To continue a text, add the ids it ends with first and drop what they give: a first token can
        read differently (SentencePiece drops its space), and the text may end inside a character.
        """
        ...


def utf8(text: str) -> bytes:
    """`text` as UTF-8; a lone surrogate is a `ValueError` that says where it stands."""
    try:
        return text.encode()
    except UnicodeEncodeError as fault:
        raise ValueError(
            f"text[{fault.start}] is the lone surrogate U+{ord(text[fault.start]):04X}, "
            "which no tokenizer can encode"
        ) from fault


def vocabulary_digest(tokens: Iterable[tuple[int, bytes]]) -> str:
    """A fingerprint of a vocabulary that does not depend on the order in which it is listed."""
    digest = hashlib.sha256()
    for token_id, token in sorted(tokens):
        # The length keeps neighbouring entries apart, whatever bytes they hold.
        digest.update(b"%d %d " % (token_id, len(token)) + token)
    return digest.hexdigest()[:16]
