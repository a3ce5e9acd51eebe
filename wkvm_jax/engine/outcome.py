"""What became of dispatched rows: tokens to requests, ends to sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from wkvm_jax.engine.request import FinishReason, Output, Token, TokenLogprob
from wkvm_jax.engine.scheduler import Rectangle, Row
from wkvm_jax.engine.sequence import Sequence
from wkvm_jax.engine.step import Scores
from wkvm_jax.errors import WkvmError
from wkvm_jax.sampling import Sampled

NOT_FINITE = "the model gave logits that are not finite (NaN or infinity)"


@dataclasses.dataclass(frozen=True)
class FetchedStep:
    """`Sampled` on the host; log-probabilities only if a row asked."""

    token: list[int]
    live: list[bool]
    stopped: list[bool]
    exhausted: list[bool]
    invalid: list[bool]
    logprob: np.ndarray | None
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class FetchedScores:
    """`Scores` on the host; log-probabilities only if a row asked."""

    invalid: list[bool]
    logprob: np.ndarray | None
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


def fetch(rectangle: Rectangle, result: object) -> FetchedStep | FetchedScores:
    """Waits for a dispatch and copies what its rows need to the host."""
    if isinstance(result, Sampled):
        wanted = any(row.sequence.params.logprobs is not None for row in rectangle.rows)
        return FetchedStep(
            token=np.asarray(result.token).tolist(),
            live=np.asarray(result.live).tolist(),
            stopped=np.asarray(result.stopped).tolist(),
            exhausted=np.asarray(result.exhausted).tolist(),
            invalid=np.asarray(result.invalid).tolist(),
            logprob=np.asarray(result.logprob) if wanted else None,
            top_ids=np.asarray(result.top_ids) if wanted else None,
            top_logprobs=np.asarray(result.top_logprobs) if wanted else None,
        )
    assert isinstance(result, Scores)
    wanted = any(row.sequence.params.prompt_logprobs for row in rectangle.rows)
    return FetchedScores(
        invalid=np.asarray(result.invalid).tolist(),
        logprob=np.asarray(result.logprob) if wanted else None,
        top_ids=np.asarray(result.top_ids) if wanted else None,
        top_logprobs=np.asarray(result.top_logprobs) if wanted else None,
    )


class Outcomes:
    """Turns results into tokens and outputs.

    Args:
        finish: takes back what an ended sequence holds.
        keep: keeps the final state of a sequence that asked for it, and returns its handle.
    """

    def __init__(
        self, finish: Callable[[Sequence, Output], None], keep: Callable[[Sequence, int], str]
    ) -> None:
        self._finish = finish
        self._keep = keep

    def report(self, rectangle: Rectangle, fetched: FetchedStep | FetchedScores) -> None:
        """Hands out one dispatch's results."""
        for index, row in zip(rectangle.places, rectangle.rows, strict=True):
            sequence = row.sequence
            sequence.num_in_flight -= 1
            if sequence.finished and not sequence.is_prefix:
                continue
            if isinstance(fetched, FetchedStep):
                self._report_token(row, index, fetched)
                continue
            # Choices that fork from a prefix find out themselves.
            if fetched.invalid[index] and not sequence.is_prefix:
                self.end(sequence, "error", NOT_FINITE)
                continue
            if sequence.params.prompt_logprobs:
                self._add_scores(row, index, fetched)
            consumed = row.first + row.length >= sequence.num_prompt - 1
            if consumed and sequence.params.max_tokens == 0 and not sequence.is_prefix:
                self._end_saving(sequence, "length", row.write_slot)

    def end_without_output(self, sequence: Sequence) -> None:
        """Ends a sequence that neither had a prompt to consume nor may sample."""
        self._end_saving(sequence, "length", sequence.current)

    def end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Ends a sequence early; its state is not kept."""
        if sequence.request is not None and not sequence.request.finished:
            self._push(sequence, [], reason, None, error)
        elif sequence.is_prefix:
            self._finish(sequence, self._output(sequence, reason, None, error))

    def _report_token(self, row: Row, index: int, step: FetchedStep) -> None:
        sequence = row.sequence
        if not step.live[index]:
            return
        if step.invalid[index]:
            self.end(sequence, "error", NOT_FINITE)
            return
        token_id = step.token[index]
        sequence.num_seen += 1
        sequence.tokens.append(token_id)
        logprob = self._logprob(sequence, index, token_id, step)
        if logprob is not None:
            sequence.logprobs.append(logprob)
        assert sequence.text is not None
        if step.stopped[index]:
            self._end_with(sequence, Token(token_id, sequence.text.finish(), logprob), "stop", row.write_slot)
            return
        piece = sequence.text.add(token_id, armed=sequence.num_seen > sequence.params.min_tokens)
        if sequence.text.stopped:
            self._end_with(sequence, Token(token_id, piece, logprob), "stop", row.write_slot)
        elif step.exhausted[index]:
            rest = sequence.text.finish()
            reason: FinishReason = "stop" if sequence.text.stopped else "length"
            self._end_with(sequence, Token(token_id, piece + rest, logprob), reason, row.write_slot)
        else:
            assert sequence.request is not None
            sequence.request._push([Token(token_id, piece, logprob)], None)

    def _logprob(
        self, sequence: Sequence, index: int, token_id: int, step: FetchedStep
    ) -> TokenLogprob | None:
        count = sequence.params.logprobs
        if count is None or step.logprob is None or step.top_ids is None or step.top_logprobs is None:
            return None
        top = zip(
            step.top_ids[index, :count].tolist(), step.top_logprobs[index, :count].tolist(), strict=True
        )
        return TokenLogprob(token_id, float(step.logprob[index]), tuple(top))

    def _add_scores(self, row: Row, index: int, scores: FetchedScores) -> None:
        sequence = row.sequence
        count = sequence.params.logprobs or 0
        assert scores.logprob is not None and scores.top_ids is not None and scores.top_logprobs is not None
        if row.first == 0 and not sequence.continues:
            sequence.scores.append(TokenLogprob(sequence.tokens[0], None))
        for at in range(row.length):
            ids, values = scores.top_ids[index, at, :count], scores.top_logprobs[index, at, :count]
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            target = sequence.tokens[row.first + at + 1]
            sequence.scores.append(TokenLogprob(target, float(scores.logprob[index, at]), top))

    def _end_with(self, sequence: Sequence, token: Token, reason: FinishReason, slot: int) -> None:
        self._end_saving(sequence, reason, slot, [token])

    def _end_saving(
        self, sequence: Sequence, reason: FinishReason, slot: int, tokens: list[Token] | None = None
    ) -> None:
        handle = None
        if sequence.keeps_state:
            try:
                handle = self._keep(sequence, slot)
            except WkvmError as error:
                self._push(sequence, tokens or [], "error", None, f"the state was not kept: {error}")
                return
        self._push(sequence, tokens or [], reason, handle, None)

    def _push(
        self,
        sequence: Sequence,
        tokens: list[Token],
        reason: FinishReason,
        handle: str | None,
        error: str | None,
    ) -> None:
        output = self._output(sequence, reason, handle, error)
        self._finish(sequence, output)
        assert sequence.request is not None
        sequence.request._push(tokens, output)

    def _output(
        self, sequence: Sequence, reason: FinishReason, handle: str | None, error: str | None
    ) -> Output:
        params = sequence.params
        scores = sequence.scores
        if params.prompt_logprobs and not scores and not sequence.continues:
            scores = [TokenLogprob(token_id, None) for token_id in sequence.tokens[: sequence.num_prompt]]
        return Output(
            token_ids=tuple(sequence.output_ids),
            text=sequence.text.text if sequence.text else None,
            logprobs=tuple(sequence.logprobs) if params.logprobs is not None else None,
            prompt_logprobs=tuple(scores) if params.prompt_logprobs else None,
            finish_reason=reason,
            handle=handle,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            error=error,
        )
