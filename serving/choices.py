"""A request's tokens as pieces of an OpenAI choice: text, token names, offsets and log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from wkvm_jax.engine.request import Output, Token, TokenLogprob
from wkvm_jax.serving.engine_loop import Update
from wkvm_jax.serving.interface import TextTokenizer
from wkvm_jax.serving.protocol import Choice, FinishReason, Logprobs, finite


class TokenNames:
    """How tokens are called in log-probabilities, so that different bytes have different names.

    Text for a token whose bytes are text; `bytes:\\xe6\\xbc` for one whose bytes are not, as OpenAI writes
    it; `token_id:7` where there is no tokenizer.
    """

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = self._name(token_id)
        return name

    def _name(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        content = self._tokenizer.token_bytes(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class _Characters:
    """Counts the characters that tokens' bytes make, wherever tokens cut them."""

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_complete = 0

    def add(self, token_id: int) -> int:
        """The number of characters before the one that holds the token's first byte."""
        content = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        if not content:
            return self._num_complete
        self._num_complete += len(self._utf8.decode(content[:1]))
        is_within = bool(self._utf8.getstate()[0])
        first = self._num_complete if is_within else self._num_complete - 1
        self._num_complete += len(self._utf8.decode(content[1:]))
        return first

    def total(self) -> int:
        """The number of characters; nothing may be added afterwards."""
        return self._num_complete + len(self._utf8.decode(b"", final=True))


class LogprobWriter:
    """Writes one choice's log-probabilities, a few tokens at a time.

    Args:
        tokenizer: tells how much text each token adds; None for a model without.
        names: of tokens.
        first_offset: where the output begins, which is where an echoed prompt ends.
    """

    def __init__(self, tokenizer: TextTokenizer | None, names: TokenNames, first_offset: int) -> None:
        self._tokenizer = tokenizer
        self._names = names
        self._first_offset = first_offset
        self._characters = _Characters(tokenizer)

    def write(self, entries: Iterable[TokenLogprob]) -> Logprobs:
        """The output's next tokens."""
        written = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for entry in entries:
            self._append(written, entry, self._first_offset + self._characters.add(entry.token_id))
        return written

    def write_prompt(self, entries: Sequence[TokenLogprob]) -> Logprobs:
        """The prompt's tokens, all of them."""
        written = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        characters = _Characters(self._tokenizer)
        offsets = [characters.add(entry.token_id) for entry in entries]
        # Counted from the end: some tokenizers give a text's first token less text than it has elsewhere.
        shift = self._first_offset - characters.total()
        for entry, offset in zip(entries, offsets, strict=True):
            self._append(written, entry, max(offset + shift, 0))
        return written

    def _append(self, written: Logprobs, entry: TokenLogprob, offset: int) -> None:
        written.tokens.append(self._names[entry.token_id])
        written.token_logprobs.append(None if entry.logprob is None else finite(entry.logprob))
        written.top_logprobs.append(self._top(entry))
        written.text_offset.append(offset)

    def _top(self, entry: TokenLogprob) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in [*entry.top, (entry.token_id, entry.logprob)]:
            # Several ids may have one text; the likeliest, which comes first, stands for it.
            top.setdefault(self._names[token_id], finite(logprob))
        return top


class ChoiceWriter:
    """Turns the updates of one request into pieces of its choice.

    An echoed prompt opens the first piece. Its log-probabilities are known at the end only and yet come
    first, so a choice that has them comes in one piece.

    Args:
        index: of the choice.
        echo: the prompt's text; None without echo.
        logprobs: writes log-probabilities; None if they were not asked for.
    """

    def __init__(self, index: int, echo: str | None, logprobs: LogprobWriter | None) -> None:
        self._index = index
        self._unsent_echo = echo or ""
        self._logprobs = logprobs
        self._is_whole = echo is not None and logprobs is not None
        self._waiting: list[Token] = []
        self._num_characters = 0

    def write(self, update: Update) -> Choice | None:
        """The next piece; None if there is nothing to say yet."""
        tokens, output = [*self._waiting, *update.tokens], update.output
        self._waiting = []
        if self._is_whole and output is None:
            self._waiting = tokens
            return None
        text = "".join(token.text for token in tokens)
        self._num_characters += len(text)
        if output is not None and output.text is not None:
            # What only the end made certain.
            text += output.text[self._num_characters :]
        text, self._unsent_echo = self._unsent_echo + text, ""
        return Choice(
            index=self._index,
            text=text,
            logprobs=None if self._logprobs is None else self._write_logprobs(self._logprobs, tokens, output),
            finish_reason=_finish_reason(output),
            token_ids=[token.token_id for token in tokens],
        )

    def _write_logprobs(
        self, writer: LogprobWriter, tokens: Sequence[Token], output: Output | None
    ) -> Logprobs:
        written = writer.write(token.logprob for token in tokens if token.logprob is not None)
        if self._is_whole and output is not None:
            return _joined_logprobs([writer.write_prompt(output.prompt_logprobs or ()), written])
        return written


def _finish_reason(output: Output | None) -> FinishReason | None:
    if output is None:
        return None
    return "stop" if output.finish_reason == "stop" else "length"


def joined(pieces: Sequence[Choice]) -> Choice:
    """The whole choice."""
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return Choice(
        index=pieces[0].index,
        text="".join(piece.text for piece in pieces),
        logprobs=_joined_logprobs(logprobs) if logprobs else None,
        finish_reason=pieces[-1].finish_reason,
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
    )


def _joined_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    return Logprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )
