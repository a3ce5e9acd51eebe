"""An engine without a model: the real one's surface, and tokens made of prompt, seed and choice alone."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import zlib
from collections.abc import Sequence

from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.request import FinishReason, Output, Request, SamplingParams, Token, TokenLogprob
from wkvm_jax.engine.text import RequestText
from wkvm_jax.errors import EngineClosedError, NoFreeSlotError, RequestError, UnknownHandleError
from wkvm_jax.serving.interface import TextTokenizer
from wkvm_jax.tokenizers import ByteTokenizer

SCRIPT = "The sea — 海 🌊 — was calm; Ünder it, nothing moved.\n".encode()
"""What every request says, from a place of its own, over and over."""

FAILING_PROMPT = "fail"
"""A prompt whose request ends as an error after three tokens."""


@dataclasses.dataclass(frozen=True)
class FakeConfig:
    vocab_size: int = 256


@dataclasses.dataclass(frozen=True)
class FakeModel:
    name: str
    tokenizer: TextTokenizer | None
    config: FakeConfig = FakeConfig()


@dataclasses.dataclass(frozen=True)
class FakeSlots:
    total: int
    free: int


@dataclasses.dataclass(frozen=True)
class FakeRecord:
    handle: str
    num_tokens: int
    durable: bool = False


class FakeStates:
    """Kept states: handles and how many tokens they hold."""

    def __init__(self) -> None:
        self.records: dict[str, FakeRecord] = {}

    def get(self, handle: str, /) -> FakeRecord:
        if handle not in self.records:
            raise UnknownHandleError(f"there is no state {handle!r}")
        return self.records[handle]


@dataclasses.dataclass(eq=False)
class _Running:
    request: Request
    prompt: list[int]
    params: SamplingParams
    start: int
    text: RequestText
    num_cached: int
    save_as: str | None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)


class FakeEngine:
    """A thread that gives each running request a token a step; the others wait.

    Attributes:
        gate: cleared, the thread pauses.
        step_s: pause after each step.
        submit_error: raised by the next submissions.
        submit_s: how long a submission takes.
        num_steps, num_submitted, num_cancelled: counted.
        lock: held while it steps; submissions and cancels wait for it.
    """

    def __init__(self, *, tokenizer: bool = True, max_rows: int = 32, step_s: float = 0.0) -> None:
        self.model = FakeModel("fake", ByteTokenizer() if tokenizer else None)
        self.config = EngineConfig(max_rows=max_rows, num_slots=64, max_prompt_tokens=4096)
        self.states = FakeStates()
        self.gate = threading.Event()
        self.gate.set()
        self.step_s = step_s
        self.submit_error: Exception | None = None
        self.submit_s = 0.0
        self.num_steps = self.num_submitted = self.num_cancelled = 0
        self._ids = itertools.count(1)
        self.lock = threading.RLock()
        self._work = threading.Condition(self.lock)
        self._live: dict[str, _Running] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self._closed

    def slots(self) -> FakeSlots:
        return FakeSlots(
            self.config.num_slots, self.config.num_slots - min(len(self._live), self.config.max_rows)
        )

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        state: str | None = None,
        save_as: str | None = None,
        params: SamplingParams | None = None,
    ) -> Request:
        return self._submit(prompt, 0, state, save_as, params or SamplingParams())

    def submit_choices(
        self, prompt: str | Sequence[int], n: int, *, state: str | None = None, params: SamplingParams
    ) -> list[Request]:
        return [self._submit(prompt, choice, state, None, params) for choice in range(n)]

    def close(self, timeout_s: float | None = None) -> None:
        with self._work:
            self._closed = True
            for running in list(self._live.values()):
                self._end(running, [], "cancelled")
            self._work.notify_all()
        self.gate.set()
        self._thread.join(timeout_s)

    def _submit(
        self,
        prompt: str | Sequence[int],
        choice: int,
        state: str | None,
        save_as: str | None,
        params: SamplingParams,
    ) -> Request:
        time.sleep(self.submit_s)
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self.submit_error is not None:
            raise self.submit_error
        tokenizer = self.model.tokenizer
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        if len(ids) > self.config.max_prompt_tokens:
            raise RequestError("prompt", f"the prompt has {len(ids)} tokens")
        num_cached = self.states.get(state).num_tokens if state else 0
        request_id = f"fake-{next(self._ids)}"
        request = Request(request_id, lambda: self._cancel(request_id))
        text = RequestText(ByteTokenizer().detokenizer() if tokenizer else None, params.stop, ids)
        # Greedy requests ignore the seed, as real ones do.
        seed = (params.seed, choice) if params.temperature else 0
        start = zlib.crc32(repr((ids, seed)).encode())
        with self._work:
            if len(self._live) >= self.config.max_waiting:
                raise NoFreeSlotError("too many requests are waiting")
            self.num_submitted += 1
            self._live[request_id] = _Running(request, ids, params, start, text, num_cached, save_as)
            self._work.notify_all()
        return request

    def _cancel(self, request_id: str) -> None:
        with self.lock:
            if request_id in self._live:
                self.num_cancelled += 1
                self._end(self._live[request_id], [], "cancelled")

    def _run(self) -> None:
        while not self._closed:
            self.gate.wait()
            with self._work:
                self._work.wait_for(lambda: self._live or self._closed)
                self.num_steps += 1
                for running in list(self._live.values())[: self.config.max_rows]:
                    self._step(running)
            time.sleep(self.step_s)

    def _step(self, running: _Running) -> None:
        params, text = running.params, running.text
        if len(running.token_ids) >= params.max_tokens:
            self._end(running, [], "length")
            return
        if bytes(running.prompt) == FAILING_PROMPT.encode() and len(running.token_ids) == 3:
            self._end(running, [], "error", "the model gave logits that are not finite")
            return
        token_id = SCRIPT[(running.start + len(running.token_ids)) % len(SCRIPT)]
        running.token_ids.append(token_id)
        logprob = None
        if params.logprobs is not None:
            logprob = _logprob(token_id, len(running.token_ids), params.logprobs)
            running.logprobs.append(logprob)
        if token_id in params.stop_token_ids and len(running.token_ids) > params.min_tokens:
            self._end(running, [Token(token_id, text.finish(), logprob)], "stop")
            return
        piece = text.add(token_id, armed=len(running.token_ids) > params.min_tokens)
        if text.stopped:
            self._end(running, [Token(token_id, piece, logprob)], "stop")
        elif len(running.token_ids) == params.max_tokens:
            self._end(running, [Token(token_id, piece + text.finish(), logprob)], "length")
        else:
            running.request._push([Token(token_id, piece, logprob)], None)

    def _end(
        self, running: _Running, tokens: list[Token], reason: FinishReason, error: str | None = None
    ) -> None:
        del self._live[running.request.id]
        params, handle = running.params, None
        if running.save_as is not None and reason in ("stop", "length"):
            num_tokens = running.num_cached + len(running.prompt) + len(running.token_ids)
            handle = f"{running.save_as}@1"
            self.states.records[handle] = FakeRecord(handle, num_tokens)
        prompt_logprobs = None
        if params.prompt_logprobs:
            scores = [_logprob(i, at, params.logprobs or 0) for at, i in enumerate(running.prompt)]
            prompt_logprobs = (TokenLogprob(running.prompt[0], None), *scores[1:])
        running.request._push(
            tokens,
            Output(
                token_ids=tuple(running.token_ids),
                text=running.text.text,
                logprobs=tuple(running.logprobs) if params.logprobs is not None else None,
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                handle=handle,
                num_prompt_tokens=len(running.prompt),
                num_cached_tokens=running.num_cached,
                error=error,
            ),
        )


def _logprob(token_id: int, position: int, num_top: int) -> TokenLogprob:
    """Made-up numbers: the token is the likeliest at even positions and beaten by the next id at odd ones."""
    other = (token_id + 1) % 256
    ranked = [token_id, other] if position % 2 == 0 else [other, token_id]
    ranked += [i for i in range(65, 90) if i not in ranked]
    top = tuple((i, -0.5 * (rank + 1)) for rank, i in enumerate(ranked))
    return TokenLogprob(token_id, dict(top)[token_id], top[:num_top])
