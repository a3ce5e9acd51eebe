"""Text to token ids and back: bytes, RWKV World, and Hugging Face's `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from wkvm_jax.errors import TokenizerError
from wkvm_jax.tokenizers import world
from wkvm_jax.tokenizers.base import Tokenizer
from wkvm_jax.tokenizers.byte_level import ByteTokenizer
from wkvm_jax.tokenizers.detokenize import Detokenizer
from wkvm_jax.tokenizers.files import read_json_object
from wkvm_jax.tokenizers.world import WorldTokenizer

__all__ = [
    "ByteTokenizer",
    "Detokenizer",
    "Tokenizer",
    "WorldTokenizer",
    "load_tokenizer",
    "tokenizer_named",
]

_WORLD_VOCAB_SIZES = (65_529, world.WORLD_VOCAB_SIZE)


def tokenizer_named(name: str) -> Tokenizer:
    """The tokenizer that needs no files of the model's: "bytes" or "world"."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "world":
        return WorldTokenizer.from_package()
    raise ValueError(f"{name=} must be 'bytes' or 'world'")


def load_tokenizer(directory: Path, config: Mapping[str, object] | None, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of the model in `directory`; None if it has none, so that it takes ids only.

    Looked for, in this order: `tokenizer.json`; a World vocabulary under any name; the mark of a byte
    tokenizer (`"tokenizer": "bytes"` in the config, or `"tokenizer_class": "ByteTokenizer"` in
    `tokenizer_config.json`); and, for a `vocab_size` that only RWKV World has, the vocabulary that the
    `rwkv` package brings.

    `config` is the content of the model's `config.json`, which is read from `directory` if None is
    given. A tokenizer with more ids than `vocab_size` is a `TokenizerError`.
    """
    if not directory.is_dir():
        raise TokenizerError(directory, "is not a directory")
    if config is None:
        config = read_json_object(directory / "config.json")
    tokenizer = _find_tokenizer(directory, config, vocab_size)
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            directory,
            f"the {tokenizer.name} tokenizer has {tokenizer.vocab_size} ids, "
            f"more than the model's vocab_size {vocab_size}",
        )
    return tokenizer


def _find_tokenizer(directory: Path, config: Mapping[str, object], vocab_size: int) -> Tokenizer | None:
    if (directory / "tokenizer.json").exists():
        # Only here, since the library is not needed by models that bring no such file.
        from wkvm_jax.tokenizers.hugging_face import HuggingFaceTokenizer

        return HuggingFaceTokenizer.from_directory(directory, config, vocab_size)
    vocabulary = world.find_in_directory(directory)
    if vocabulary is not None:
        return WorldTokenizer.from_file(vocabulary)
    settings = read_json_object(directory / "tokenizer_config.json")
    if config.get("tokenizer") == "bytes" or settings.get("tokenizer_class") == "ByteTokenizer":
        return ByteTokenizer()
    if vocab_size in _WORLD_VOCAB_SIZES and world.find_in_package() is not None:
        return WorldTokenizer.from_package(vocab_size)
    return None
