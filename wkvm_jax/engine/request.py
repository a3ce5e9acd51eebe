"""Requests as callers see them: parameters, tokens as they come, and the outcome."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from wkvm_jax.errors import RequestError, WkvmError

logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_STOP_STRINGS = 1024
MAX_STOP_LENGTH = 4096
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_TOP_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when they end. Invalid values raise `RequestError` naming the field.

    Attributes:
        max_tokens: tokens to generate at most; 0 only reads the prompt.
        temperature: 0 (the default) always takes the most likely token.
        top_k, top_p, min_p: filters; 0, 1 and 0 switch them off. `top_p=0` takes the most likely token.
        repetition_penalty: divides or multiplies logits of tokens seen in prompt or output; 1 is off.
        presence_penalty, frequency_penalty: subtracted for tokens seen in the output, once or for each time.
        logit_bias: token id to a number added to its logit, at most 300 of them.
        seed: any integer; the stream of random numbers depends on it and on positions alone.
        stop: strings that end the text; the text is cut before the first one.
        stop_token_ids: ids that end the output, at most 64 with the tokenizer's own.
        ignore_eos: do not stop at the tokenizer's end-of-text ids.
        min_tokens: tokens before which neither stop ids nor stop strings count.
        logprobs: None for no log-probabilities; else how many alternatives to give beside each token's own,
            0 to 20.
        prompt_logprobs: give log-probabilities of the prompt's tokens too.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _integer("max_tokens", self.max_tokens, 0, 1 << 30)
        _integer("min_tokens", self.min_tokens, 0, 1 << 30)
        _integer("top_k", self.top_k, 0, 1 << 30)
        _number("temperature", self.temperature, 0.0, 1e4)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _number("presence_penalty", self.presence_penalty, -1e3, 1e3)
        _number("frequency_penalty", self.frequency_penalty, -1e3, 1e3)
        _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"{self.min_tokens=} is above {self.max_tokens=}")
        self._check_stops()
        self._check_bias()

    @property
    def takes_likeliest(self) -> bool:
        """Whether each token is simply that of the largest logit, with nothing else to say of it."""
        penalised = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        shaped = penalised or bool(self.logit_bias) or self.min_tokens > 0
        return self.temperature == 0 and not shaped and self.logprobs is None

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                "stop", f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS} are allowed"
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError("stop", f"stop strings must be non-empty text; got {text!r}")
            if len(text) > MAX_STOP_LENGTH:
                raise RequestError(
                    "stop", f"a stop string of {len(text)} characters; at most {MAX_STOP_LENGTH}"
                )
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError("stop_token_ids", f"{len(self.stop_token_ids)} ids; at most {MAX_STOP_IDS}")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, (1 << 31) - 1)

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError("logit_bias", f"{len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}")
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias", token_id, 0, (1 << 31) - 1)
            _number("logit_bias", bias, -1e4, 1e4)

    @property
    def penalises(self) -> bool:
        """Whether sampling depends on the tokens seen so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(name, f"{name}={value!r} must be an integer from {low} to {high}")


def _number(name: str, value: object, low: float, high: float) -> None:
    # NaN lies in no range.
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(name, f"{name}={value!r} must be a number from {low:g} to {high:g}")


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token under the model's own distribution (before penalties and temperature).

    `top` holds the most likely tokens and theirs, most likely first. `logprob` is None for a prompt's first
    token, which nothing precedes.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Token:
    """One generated token. `text` is what became certain with it: often all of its text, sometimes none."""

    token_id: int
    text: str
    logprob: TokenLogprob | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    """What a request came to.

    Attributes:
        token_ids: the tokens generated, a stop id included.
        text: their text, cut before a stop string or stop id; None without a tokenizer.
        logprobs: one entry a token, if asked for.
        prompt_logprobs: one entry a prompt token, if asked for.
        finish_reason: "stop", "length", "cancelled" or "error".
        handle: where the state was saved, `name@version`, if it was.
        num_prompt_tokens: tokens of the prompt, those of a continued state not counted.
        num_cached_tokens: tokens that a continued state had already consumed.
        error: what happened, for "error".
    """

    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    handle: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str | None = None


class Request:
    """A running generation. Iterate over it for tokens as they come; `result()` waits for the end.

    Iterating does not raise for a failed request: look at `result().finish_reason`.
    """

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        self.id = request_id
        self.created_s = time.time()
        self._cancel = cancel
        self._changed = threading.Condition()
        self._tokens: deque[Token] = deque()
        self._num_tokens = 0
        self._output: Output | None = None
        self._listener: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[Token]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tokens or self._output is not None)
                if not self._tokens:
                    return
                token = self._tokens.popleft()
            yield token

    def cancel(self) -> None:
        """Ends the request at the next step; what it generated stays in `result()`. Harmless afterwards."""
        self._cancel()

    def result(self, timeout_s: float | None = None) -> Output:
        """Waits for the end and returns the outcome.

        Raises:
            TimeoutError: it did not end within `timeout_s`; it runs on.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._output is not None, timeout_s):
                raise TimeoutError(f"request {self.id} is still running after {timeout_s} s")
            if self._output is None:
                raise WkvmError(f"request {self.id} ended without a result")
            return self._output

    @property
    def finished(self) -> bool:
        return self._output is not None

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return self._num_tokens

    def take(self) -> tuple[list[Token], Output | None]:
        """The tokens that came since the last call, and the outcome once there is one. Never waits."""
        with self._changed:
            tokens = list(self._tokens)
            self._tokens.clear()
            return tokens, self._output

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls `listener`, from the engine's thread, whenever `take` has something new; once at once."""
        with self._changed:
            self._listener = listener
        listener()

    def _push(self, tokens: Sequence[Token], output: Output | None) -> None:
        with self._changed:
            self._tokens.extend(tokens)
            self._num_tokens += len(tokens)
            if output is not None:
                self._output = output
            listener = self._listener
            self._changed.notify_all()
        if listener is None:
            return
        try:
            listener()
        except Exception:
            # The caller's fault must not become that of the engine, whose thread this is.
            logger.exception("the listener of request %s failed; it is not called again", self.id)
            self._listener = None
