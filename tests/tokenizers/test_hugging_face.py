"""Hugging Face tokenizers, made small in the tests."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from wkvm_jax.errors import TokenizerError
from wkvm_jax.tokenizers.base import Tokenizer
from wkvm_jax.tokenizers.hugging_face import HuggingFaceTokenizer

Stream = Callable[[Tokenizer, Sequence[int], Sequence[int]], str]

CORPUS = ["the state, not a chain of blocks", "漢字かな 漢字", "é è ü", "👩‍👩‍👧 😀😀", "a  b   c\n\n\td"]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind, with special and plain added tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["    ", "<tool>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


def llama() -> tokenizers.Tokenizer:
    """SentencePiece's kind: a marked space before the text, byte tokens for what is not in the vocabulary."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "漢", "é", "▁▁"]:
        vocabulary[token] = len(vocabulary)
    model = models.BPE(
        vocabulary, [("▁", "a"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return tokenizer


def word_level(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    """Words between spaces, and whatever decoder."""
    vocabulary = {
        token: i for i, token in enumerate(["[UNK]", "state", "##s", ".", "n't", "a</w>", "b", "|"])
    }
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "llama": llama,
    "wordpiece": lambda: word_level(decoders.WordPiece()),
    "bpe": lambda: word_level(decoders.BPEDecoder()),
    "ctc": lambda: word_level(decoders.CTC()),
    "joined": lambda: word_level(None),
}


def save(tokenizer: tokenizers.Tokenizer, directory: Path, **files: Mapping[str, object]) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module", params=MAKERS)
def any_tokenizer(request: pytest.FixtureRequest) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(MAKERS[request.param](), ())


@pytest.fixture(scope="module", params=["byte_level", "llama"])
def lossless(request: pytest.FixtureRequest) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(MAKERS[request.param](), ())


@pytest.fixture(scope="module", params=[name for name in MAKERS if name != "llama"])
def library(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return MAKERS[request.param]()


@pytest.fixture(scope="module")
def byte_fallback() -> tokenizers.Tokenizer:
    return llama()


@given(ids=st.lists(st.integers(-1, 320)), cuts=st.lists(st.integers(0, 99)))
def test_streaming_equals_decoding(
    any_tokenizer: HuggingFaceTokenizer, stream: Stream, ids: list[int], cuts: list[int]
) -> None:
    assert stream(any_tokenizer, ids, cuts) == any_tokenizer.decode(ids)


@given(text=st.text() | st.text(alphabet="a b漢é😀\n"), cuts=st.lists(st.integers(0, 99)))
def test_round_trip(lossless: HuggingFaceTokenizer, stream: Stream, text: str, cuts: list[int]) -> None:
    ids = lossless.encode(text)
    assert lossless.decode(ids) == text
    assert stream(lossless, ids, cuts) == text


def test_awkward_texts_survive(lossless: HuggingFaceTokenizer, awkward_text: str) -> None:
    assert lossless.decode(lossless.encode(awkward_text)) == awkward_text


@given(ids=st.lists(st.integers(0, 265)))
def test_decoding_equals_the_library(library: tokenizers.Tokenizer, ids: list[int]) -> None:
    known = [i for i in ids if library.id_to_token(i) is not None]
    ours = HuggingFaceTokenizer(library, ())
    assert ours.decode(known) == library.decode(known, skip_special_tokens=False)


@given(text=st.text())
def test_decoding_byte_fallback_equals_the_library(byte_fallback: tokenizers.Tokenizer, text: str) -> None:
    ours = HuggingFaceTokenizer(byte_fallback, ())
    ids = [1, *ours.encode(text), 2]
    assert ours.decode(ids) == byte_fallback.decode(ids, skip_special_tokens=False)


def test_nothing_is_prepended_cut_or_padded() -> None:
    library = byte_level()
    library.enable_truncation(4)
    library.enable_padding(length=16)
    tokenizer = HuggingFaceTokenizer(library, (0,))
    ids = tokenizer.encode("0123456789")
    assert len(ids) == 10
    assert tokenizer.decode(ids) == "0123456789"
    assert tokenizer.encode("") == []


def test_special_tokens_are_recognised_and_shown() -> None:
    tokenizer = HuggingFaceTokenizer(byte_level(), ())
    ids = tokenizer.encode("é<|im_end|>")
    assert ids[-1] == 1
    assert tokenizer.decode(ids) == "é<|im_end|>"


def test_token_bytes_are_those_of_a_later_token() -> None:
    tokenizer = HuggingFaceTokenizer(llama(), ())
    ids = tokenizer.encode(" a")
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"  a"
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"
    assert HuggingFaceTokenizer(MAKERS["bpe"](), ()).token_bytes(1) == b"state"


def test_a_primed_detokenizer_keeps_the_space_of_the_first_word() -> None:
    tokenizer = HuggingFaceTokenizer(llama(), ())
    detokenizer = tokenizer.detokenizer()
    detokenizer.add(tokenizer.encode("b"))
    word = tokenizer.encode("a")
    assert detokenizer.add(word) == " a"
    assert tokenizer.detokenizer().add(word) == "a"


def test_unknown_ids_are_replacement_characters(any_tokenizer: HuggingFaceTokenizer) -> None:
    assert "\ufffd" in any_tokenizer.decode([1, 9_999, 1])
    assert any_tokenizer.decode([-1]).strip() == "\ufffd"
    assert any_tokenizer.token_bytes(1 << 40).decode().strip() == "\ufffd"


def test_texts_that_cannot_be_encoded_are_value_errors() -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        HuggingFaceTokenizer(byte_level(), ()).encode("\ud800")
    closed = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match="cannot encode the text"):
        HuggingFaceTokenizer(closed, ()).encode("b")


def test_digest_tells_vocabularies_apart() -> None:
    extended = byte_level()
    extended.add_tokens(["<more>"])
    digests = [HuggingFaceTokenizer(library, ()).digest for library in (byte_level(), byte_level(), extended)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        ({}, {}, ()),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, {"eos_token_id": 5}, (1,)),
        ({"tokenizer_config": {"eos_token": {"content": "<|endoftext|>"}}}, {}, (0,)),
        ({"tokenizer_config": {"eos_token": None}}, {"eos_token_id": 5}, (5,)),
        ({"tokenizer_config": {"eos_token": "<nowhere>"}}, {}, ()),
        ({"generation_config": {"eos_token_id": 1}}, {"eos_token_id": 5}, (1,)),
        ({"generation_config": {"eos_token_id": [1, 0, 1]}}, {}, (1, 0)),
        (
            {"generation_config": {"eos_token_id": [1]}, "tokenizer_config": {"eos_token": "<|endoftext|>"}},
            {},
            (1, 0),
        ),
        ({}, {"eos_token_id": [0, 1]}, (0, 1)),
        ({}, {"text_config": {"eos_token_id": 1}}, (1,)),
        ({}, {"eos_token_id": 99_999}, ()),
    ],
)
def test_eos_ids(
    tmp_path: Path, files: dict[str, dict[str, object]], config: dict[str, object], expected: tuple[int, ...]
) -> None:
    directory = save(byte_level(), tmp_path, **files)
    assert HuggingFaceTokenizer.from_directory(directory, config, 1_000).eos_ids == expected


@pytest.mark.parametrize("value", ["2", [1, "2"], -1, 1.5, {"id": 1}])
def test_an_eos_token_id_that_is_none_is_an_error(tmp_path: Path, value: object) -> None:
    directory = save(byte_level(), tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(TokenizerError, match=r"generation_config\.json: eos_token_id must be"):
        HuggingFaceTokenizer.from_directory(directory, {}, 1_000)


def test_an_eos_token_that_is_none_is_an_error(tmp_path: Path) -> None:
    directory = save(byte_level(), tmp_path, tokenizer_config={"eos_token": 2})
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: eos_token must be"):
        HuggingFaceTokenizer.from_directory(directory, {}, 1_000)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"model": {"type": "Nope"}}', b"\xff"])
def test_a_corrupt_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read: "):
        HuggingFaceTokenizer.from_directory(tmp_path, {}, 1_000)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_corrupt_config_is_named(tmp_path: Path, content: bytes) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: (is not valid JSON|must hold)"):
        HuggingFaceTokenizer.from_directory(tmp_path, {}, 1_000)


def test_a_vocabulary_that_is_too_large_names_both_numbers(tmp_path: Path) -> None:
    library = byte_level()
    save(library, tmp_path)
    num_ids = library.get_vocab_size()
    with pytest.raises(TokenizerError, match=rf"has {num_ids} ids, more than the model's vocab_size 200"):
        HuggingFaceTokenizer.from_directory(tmp_path, {}, 200)
    assert HuggingFaceTokenizer.from_directory(tmp_path, {}, num_ids).vocab_size == num_ids


def test_added_tokens_without_a_row_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = byte_level()
    save(library, tmp_path)
    num_ids = library.get_vocab_size()
    assert library.token_to_id("<tool>") == num_ids - 1
    with caplog.at_level(logging.WARNING):
        tokenizer = HuggingFaceTokenizer.from_directory(tmp_path, {}, num_ids - 1)
    assert "<tool>" in caplog.text
    assert tokenizer.vocab_size == num_ids - 1
    ids = tokenizer.encode("<tool>    <|im_end|>")
    assert max(ids) < num_ids - 1
    assert {1, library.token_to_id("    ")} <= set(ids)
    assert tokenizer.decode(ids) == "<tool>    <|im_end|>"
