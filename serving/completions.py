"""`POST /v1/completions`: from a body to an answer, whole or as server-sent events."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wkvm_jax.engine.request import Output, SamplingParams
from wkvm_jax.errors import RequestError
from wkvm_jax.serving.choices import ChoiceWriter, LogprobWriter, TokenNames, joined
from wkvm_jax.serving.engine_loop import EngineLoop, RequestGroup, Update, ending_on_disconnect
from wkvm_jax.serving.interface import ServedEngine
from wkvm_jax.serving.protocol import (
    Choice,
    Completion,
    CompletionRequest,
    ErrorResponse,
    ModelNotFoundError,
    PromptTokensDetails,
    StateInfo,
    Usage,
    parse_completion,
)

DONE = b"data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True)
class _Job:
    """A call whose prompts are submitted: what it asked for, and how its answer is written."""

    call: CompletionRequest
    group: RequestGroup
    writers: Sequence[ChoiceWriter]
    answer_id: str
    model_name: str
    created_s: int
    outputs: dict[int, Output] = dataclasses.field(default_factory=dict)

    def write(self, update: Update) -> Choice | None:
        """The next piece of the update's choice; raises what its request died of."""
        if update.output is not None:
            self.group.raise_unless_complete(update.output)
            self.outputs[update.index] = update.output
        return self.writers[update.index].write(update)

    def answer(self, choices: list[Choice]) -> Completion:
        """An answer or a chunk with these choices."""
        return Completion(
            id=self.answer_id,
            object="text_completion",
            created=self.created_s,
            model=self.model_name,
            choices=choices,
        )

    def usage(self) -> Usage:
        """Tokens of the whole call, once it has ended.

        Tokens of a continued state count as prompt tokens, since cached tokens are a part of those.
        """
        outputs = [self.outputs[index] for index in sorted(self.outputs)]
        firsts = outputs[:: self.call.n]
        num_cached = sum(output.num_cached_tokens for output in firsts)
        num_prompt = sum(output.num_prompt_tokens for output in firsts)
        if self.call.state is not None:
            num_prompt += num_cached
        num_completion = sum(len(output.token_ids) for output in outputs)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        )


class Completions:
    """Answers completions with one engine.

    Args:
        engine: runs the prompts.
        engine_loop: carries calls to the engine and news from it.
        served_name: the model's name in requests and answers.
        max_tokens_limit: larger `max_tokens` are refused.
        describe: the error object for an exception, for errors after a stream has begun.
    """

    def __init__(
        self,
        engine: ServedEngine,
        engine_loop: EngineLoop,
        *,
        served_name: str,
        max_tokens_limit: int,
        describe: Callable[[Exception], ErrorResponse],
    ) -> None:
        self._engine = engine
        self._engine_loop = engine_loop
        self._served_name = served_name
        self._max_tokens_limit = max_tokens_limit
        self._describe = describe
        self._names = TokenNames(engine.model.tokenizer)

    async def respond(self, body: bytes, receive: Receive) -> Response:
        """The answer to a body; its client's departure, which `receive` tells, cancels it."""
        group = self._engine_loop.open()
        try:
            # Parsing, tokenizing and submitting may each take long, and the last may wait for the engine.
            job = await self._engine_loop.call(partial(self._start, body, group))
            if job.call.stream:
                close = partial(self._engine_loop.close_group, group)
                return EventStream(self._events(job), group, close)
            async with ending_on_disconnect(receive, group):
                completion = await self._collect(job)
        except BaseException:
            self._engine_loop.close_group(group)
            raise
        self._engine_loop.close_group(group)
        return Response(completion.model_dump_json(exclude_unset=True), media_type="application/json")

    # On a thread of the engine loop's -----------------------------------------------------------------

    def _start(self, body: bytes, group: RequestGroup) -> _Job:
        call = parse_completion(body)
        self._check(call)
        answer_id = ""
        writers: list[ChoiceWriter] = []
        for prompt in call.prompt:
            params = self._params(call)
            requests = (
                [self._engine.submit(prompt, state=call.state, save_as=call.save_as, params=params)]
                if call.n == 1
                else self._engine.submit_choices(prompt, call.n, state=call.state, params=params)
            )
            for request in requests:
                group.add(request)
            answer_id = answer_id or f"cmpl-{requests[0].id}"
            echo = self._text(prompt) if call.echo else None
            writers += [self._writer(call, len(writers) + choice, echo) for choice in range(call.n)]
        return _Job(call, group, writers, answer_id, self._served_name, int(time.time()))

    def _check(self, call: CompletionRequest) -> None:
        """Refuses what this server or its engine could not do, before anything is submitted."""
        if call.model not in (None, self._served_name):
            raise ModelNotFoundError(
                f"The model {call.model!r} does not exist; this server has {self._served_name!r}"
            )
        if call.max_tokens > self._max_tokens_limit:
            raise RequestError(
                "max_tokens", f"max_tokens={call.max_tokens} is above this server's {self._max_tokens_limit}"
            )
        max_rows = self._engine.config.max_rows
        if call.n > max_rows:
            raise RequestError("n", f"n={call.n} must be from 1 to {max_rows}, the rows of this engine")
        vocab_size = self._engine.model.config.vocab_size
        for prompt in call.prompt:
            if isinstance(prompt, str):
                if self._engine.model.tokenizer is None:
                    raise RequestError("prompt", "this model has no tokenizer: give prompt as token ids")
            elif prompt and not 0 <= min(prompt) <= max(prompt) < vocab_size:
                raise RequestError("prompt", f"prompt has token ids outside the vocabulary of {vocab_size}")

    def _params(self, call: CompletionRequest) -> SamplingParams:
        return SamplingParams(
            max_tokens=call.max_tokens,
            temperature=call.temperature,
            top_k=call.top_k,
            top_p=call.top_p,
            min_p=call.min_p,
            repetition_penalty=call.repetition_penalty,
            presence_penalty=call.presence_penalty,
            frequency_penalty=call.frequency_penalty,
            logit_bias=call.logit_bias,
            # Fresh for every prompt: equal prompts of one list would else draw the same tokens.
            seed=secrets.randbits(63) if call.seed is None else call.seed,
            stop=call.stop,
            stop_token_ids=call.stop_token_ids,
            ignore_eos=call.ignore_eos,
            min_tokens=call.min_tokens,
            logprobs=call.logprobs,
            prompt_logprobs=call.echo and call.logprobs is not None,
        )

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._engine.model.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt)

    def _writer(self, call: CompletionRequest, index: int, echo: str | None) -> ChoiceWriter:
        logprobs = None
        if call.logprobs is not None:
            logprobs = LogprobWriter(self._engine.model.tokenizer, self._names, len(echo or ""))
        return ChoiceWriter(index, echo, logprobs)

    # On the event loop --------------------------------------------------------------------------------

    async def _collect(self, job: _Job) -> Completion:
        """The whole answer."""
        pieces: list[list[Choice]] = [[] for _ in job.writers]
        async for updates in job.group.updates():
            for update in updates:
                piece = job.write(update)
                if piece is not None:
                    pieces[update.index].append(piece)
        answer = job.answer([joined(choice) for choice in pieces])
        answer.usage = job.usage()
        if job.call.save_as is not None:
            answer.state = await self._state(job.outputs[0])
        return answer

    async def _events(self, job: _Job) -> AsyncGenerator[bytes]:
        """The answer in pieces: an event for each choice that has news, all that came at once together."""
        events: list[bytes] = []
        try:
            async for updates in job.group.updates():
                for update in updates:
                    chunk = await self._chunk(job, update)
                    if chunk is not None:
                        events.append(_event(chunk))
                if events:
                    yield b"".join(events)
                    events = []
            if job.call.include_usage:
                chunk = job.answer([])
                chunk.usage = job.usage()
                events.append(_event(chunk))
        except ClientDisconnect:
            return
        except Exception as error:
            events.append(_event(self._describe(error)))
        yield b"".join([*events, DONE])

    async def _chunk(self, job: _Job, update: Update) -> Completion | None:
        piece = job.write(update)
        if piece is None:
            return None
        chunk = job.answer([piece])
        if job.call.include_usage:
            chunk.usage = None
        if job.call.save_as is not None and update.output is not None:
            chunk.state = await self._state(update.output)
        return chunk

    async def _state(self, output: Output) -> StateInfo | None:
        handle = output.handle
        if handle is None:
            return None
        record = await self._engine_loop.call(lambda: self._engine.states.get(handle))
        return StateInfo(handle=record.handle, num_tokens=record.num_tokens, durable=record.durable)


def _event(content: Completion | ErrorResponse) -> bytes:
    return b"data: " + content.model_dump_json(exclude_unset=True).encode() + b"\n\n"


class EventStream(Response):
    """Server-sent events, sent as they come, until they end or the client goes.

    Args:
        events: pieces of the body.
        group: ended when the client goes.
        close: called at the end, whatever the end is.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], group: RequestGroup, close: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._group = group
        self._close = close
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with (
                ending_on_disconnect(receive, self._group),
                contextlib.aclosing(self._events) as events,
            ):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()
