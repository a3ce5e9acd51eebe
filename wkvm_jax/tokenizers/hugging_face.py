"""Tokenizers of Hugging Face's `tokenizer.json`; importing this module needs the `tokenizers` package."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tokenizers

from wkvm_jax.errors import TokenizerError
from wkvm_jax.tokenizers.base import REPLACEMENT, utf8, vocabulary_digest
from wkvm_jax.tokenizers.detokenize import Detokenizer, HoldingDetokenizer
from wkvm_jax.tokenizers.files import read_json_object
from wkvm_jax.tokenizers.pieces import PieceDetokenizer, compile_decoder

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
CONFIG_FILE = "config.json"

_logger = logging.getLogger(__name__)


class HuggingFaceTokenizer:
    """A `tokenizers.Tokenizer`, used without the special tokens that its post-processor would add.

    Special tokens written in a text are recognised, as chat templates need, and `decode` shows them: it
    is `tokenizers.Tokenizer.decode(ids, skip_special_tokens=False)` but for two things. Bytes that are
    no UTF-8 are replaced by Python's rule; the library's `ByteFallback` replaces every byte of a run when
    one is wrong, so nothing of a run would be certain before its end. And an id that the vocabulary
    lacks is U+FFFD, where the library leaves it out.
    """

    name = "huggingface"

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos_ids: tuple[int, ...]) -> None:
        # Limits that a training run left in the file would cut prompts without a word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size = _num_ids(tokenizer, with_added_tokens=True)
        self.eos_ids = eos_ids
        self._token_bytes: Callable[[int], bytes] = lambda token_id: utf8(self._decode_all([token_id]))
        self._pristine: Detokenizer = HoldingDetokenizer(self._decode_all)
        pieces = compile_decoder(tokenizer.decoder)
        if pieces is not None:
            first = _Memo(tokenizer, pieces.first)
            later = _Memo(tokenizer, pieces.later)
            self._token_bytes = later.__getitem__
            self._pristine = PieceDetokenizer(first.__getitem__, later.__getitem__, pieces.num_stripped)

    @classmethod
    def from_directory(
        cls, directory: Path, config: Mapping[str, object], vocab_size: int
    ) -> HuggingFaceTokenizer:
        """The tokenizer of a model with this `config.json` and `vocab_size` rows in its embedding.

        A vocabulary with ids from `vocab_size` on is an error, unless only added tokens have such ids
        (Gemma 3 ships an image token for which its text models have no row): those are left out, so
        that their text encodes as any other text.
        """
        path = directory / TOKENIZER_FILE
        tokenizer = _read(path, lambda: tokenizers.Tokenizer.from_file(str(path)))
        num_ids = _num_ids(tokenizer, with_added_tokens=True)
        if num_ids > vocab_size >= _num_ids(tokenizer, with_added_tokens=False):
            tokenizer = _without_added_tokens(path, vocab_size)
            num_ids = _num_ids(tokenizer, with_added_tokens=True)
        if num_ids > vocab_size:
            raise TokenizerError(
                path, f"the vocabulary has {num_ids} ids, more than the model's vocab_size {vocab_size}"
            )
        return cls(tokenizer, read_eos_ids(directory, config, tokenizer))

    @functools.cached_property
    def digest(self) -> str:
        """A short fingerprint of the vocabulary, added tokens included."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary_digest((token_id, utf8(token)) for token, token_id in vocabulary.items())

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; `ValueError` if the tokenizer's model has none for it."""
        utf8(text)
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as fault:  # the library raises nothing narrower
            raise ValueError(f"the tokenizer cannot encode the text: {fault}") from fault

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        detokenizer = self.detokenizer()
        return detokenizer.add(ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text that has begun, whole characters or not."""
        return self._token_bytes(token_id)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental `decode`, constant work a token.

        For the decoders whose text does not fall into pieces (`CTC`, `BPEDecoder`, and stages in an
        order that no language model uses) it returns everything at the end.
        """
        return self._pristine.copy()

    def _decode_all(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decoder.decode([_token(self._tokenizer, i) for i in ids])
        return text


class _Memo(dict[int, bytes]):
    """The pieces of the ids asked for so far."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, piece: Callable[[str], bytes]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._piece = piece

    def __missing__(self, token_id: int) -> bytes:
        piece = self._piece(_token(self._tokenizer, token_id))
        self[token_id] = piece
        return piece


def read_eos_ids(
    directory: Path, config: Mapping[str, object], tokenizer: tokenizers.Tokenizer
) -> tuple[int, ...]:
    """The ids that end a text, those of chat turns included.

    They are the `eos_token` of `tokenizer_config.json` and the `eos_token_id` of
    `generation_config.json`. Only when neither says anything does the model's config decide: its
    `eos_token_id` is often a default that nobody set.
    """
    tokenizer_config = read_json_object(directory / TOKENIZER_CONFIG_FILE)
    generation_config = read_json_object(directory / GENERATION_CONFIG_FILE)
    ids = [
        *_eos_token_ids(directory / GENERATION_CONFIG_FILE, generation_config),
        *_eos_of_token(directory / TOKENIZER_CONFIG_FILE, tokenizer_config, tokenizer),
    ]
    if not ids:
        text_config = config.get("text_config")
        for level in (config, text_config if isinstance(text_config, Mapping) else {}):
            ids += _eos_token_ids(directory / CONFIG_FILE, level)
    return tuple(dict.fromkeys(i for i in ids if tokenizer.id_to_token(i) is not None))


def _eos_token_ids(path: Path, settings: Mapping[str, object]) -> list[int]:
    value = settings.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = [item for item in values if isinstance(item, int) and item >= 0]
    if len(ids) < len(values):
        raise TokenizerError(path, f"eos_token_id must be an id or a list of ids, not {value!r}")
    return ids


def _eos_of_token(path: Path, settings: Mapping[str, object], tokenizer: tokenizers.Tokenizer) -> list[int]:
    value = settings.get("eos_token")
    token = value.get("content") if isinstance(value, Mapping) else value
    if token is None:
        return []
    if not isinstance(token, str):
        raise TokenizerError(path, f"eos_token must be a token, not {value!r}")
    token_id = tokenizer.token_to_id(token)
    return [] if token_id is None else [token_id]


def _read(path: Path, read: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    try:
        return read()
    except Exception as fault:  # the library raises nothing narrower
        raise TokenizerError(path, f"cannot be read: {fault}") from fault


def _without_added_tokens(path: Path, vocab_size: int) -> tokenizers.Tokenizer:
    """The tokenizer in `path` without its added tokens from id `vocab_size` on."""
    content = read_json_object(path)
    added = content.get("added_tokens")
    assert isinstance(added, list), "the tokenizer was read from this file, and has added tokens"
    content["added_tokens"] = [token for token in added if token["id"] < vocab_size]
    left_out = [token["content"] for token in added if token["id"] >= vocab_size]
    _logger.warning("%s: left out the added tokens without a row in the model: %s", path, left_out)
    return _read(path, lambda: tokenizers.Tokenizer.from_str(json.dumps(content)))


def _num_ids(tokenizer: tokenizers.Tokenizer, *, with_added_tokens: bool) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=with_added_tokens).values(), default=-1) + 1


def _token(tokenizer: tokenizers.Tokenizer, token_id: int) -> str:
    # Negative ids and those beyond 32 bits would be an OverflowError.
    token = tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
    return REPLACEMENT.decode() if token is None else token
