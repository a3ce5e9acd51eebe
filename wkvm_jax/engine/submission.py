"""From what a caller asked for to sequences that the scheduler can queue."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import numpy as np

from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.request import MAX_STOP_IDS, Request, SamplingParams
from wkvm_jax.engine.sequence import Origin, Sequence
from wkvm_jax.engine.step import NewLanes
from wkvm_jax.engine.text import CONTEXT_TOKENS, RequestText
from wkvm_jax.errors import RequestError
from wkvm_jax.models.model import Model
from wkvm_jax.sampling import LaneParams, idle_fields
from wkvm_jax.state import INITIAL_SLOT
from wkvm_jax.store.records import TokenHistory, checked_name
from wkvm_jax.types import from_host


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a group begins: a state, its pending token, its handle, and its conversation so far."""

    origin: Origin = dataclasses.field(default_factory=lambda: Origin(INITIAL_SLOT))
    pending: int | None = None
    handle: str | None = None
    history: TokenHistory | None = None

    def consumed_ids(self) -> tuple[int, ...]:
        """Every token that the state has consumed."""
        ids = self.history.all_ids() if self.history else []
        return tuple(ids if self.pending is None else ids[:-1])


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A validated prompt and its parameters; what is left needs the engine's lock."""

    model: Model
    prompt_ids: tuple[int, ...]
    save_as: str | None
    params: SamplingParams

    def sequences(self, requests: Seq[Request], start: Start) -> tuple[Sequence, ...]:
        """One sequence, or a prefix and one sequence a request.

        Raises:
            RequestError: the prompt is empty and no token is pending.
        """
        tokens = [*([] if start.pending is None else [start.pending]), *self.prompt_ids]
        if not tokens:
            raise RequestError(
                "prompt",
                "the prompt is empty: give at least one token, or continue a state that has one pending",
            )
        if len(requests) == 1 or self.params.max_tokens == 0:
            # Choices that sample nothing would end before a shared prefix is scored.
            return tuple(
                self._sequence(request, tokens, start, None, choice)
                for choice, request in enumerate(requests)
            )
        # The prefix consumes all but the last token; the last is each choice's own.
        prefix_params = dataclasses.replace(self.params, max_tokens=0, min_tokens=0)
        prefix = Sequence(None, prefix_params, tokens, start.origin, continues=start.pending is not None)
        rest = [
            self._sequence(request, tokens[-1:], start, prefix, choice)
            for choice, request in enumerate(requests)
        ]
        return (prefix, *rest)

    def _sequence(
        self, request: Request, tokens: list[int], start: Start, parent: Sequence | None, choice: int
    ) -> Sequence:
        origin, before = start.origin, start.consumed_ids()
        prefix_tokens = () if parent is None else tuple(parent.tokens[:-1])
        tokenizer = self.model.tokenizer
        sequence = Sequence(
            request,
            self.params,
            list(tokens),
            dataclasses.replace(origin, num_tokens=origin.num_tokens + len(prefix_tokens)),
            parent=parent,
            choice=choice,
            save_as=self.save_as,
            stops_late=bool(self.params.stop),
            origin_handle=start.handle,
            continues=start.pending is not None,
            text=RequestText(
                tokenizer.detokenizer() if tokenizer else None,
                self.params.stop,
                [*before[-CONTEXT_TOKENS:], *prefix_tokens, *tokens],
            ),
            history=(*before, *prefix_tokens) if self.params.penalises else (),
            parent_history=start.history,
            prefix_tokens=prefix_tokens,
            num_prompt_tokens=len(self.prompt_ids),
            num_cached_tokens=origin.num_tokens,
        )
        if parent is not None:
            sequence.scores = parent.scores
        return sequence


def prepared_group(
    model: Model,
    config: EngineConfig,
    prompt: str | Seq[int],
    save_as: str | None,
    params: SamplingParams,
) -> Prepared:
    """Checks and encodes what a caller gave.

    Raises:
        RequestError: what is wrong, its `param` naming the argument.
    """
    prompt_ids = encoded(model, prompt)
    if len(prompt_ids) > config.max_prompt_tokens:
        raise RequestError(
            "prompt", f"the prompt has {len(prompt_ids)} tokens; this engine takes {config.max_prompt_tokens}"
        )
    if params.max_tokens > config.max_tokens_limit:
        raise RequestError(
            "max_tokens", f"max_tokens={params.max_tokens} is above this engine's {config.max_tokens_limit}"
        )
    vocab_size = model.config.vocab_size
    for param, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token_id in ids:
            if token_id >= vocab_size:
                raise RequestError(param, f"{param} names token {token_id}; the vocabulary has {vocab_size}")
    if params.stop and model.tokenizer is None:
        raise RequestError(
            "stop", "stop strings need a tokenizer, and this model has none: use stop_token_ids"
        )
    if len(stop_ids(model, params)) > MAX_STOP_IDS:
        raise RequestError("stop_token_ids", f"more than {MAX_STOP_IDS} stop ids with the tokenizer's own")
    if save_as is not None:
        checked_name(save_as, "save_as")
    return Prepared(model, prompt_ids, save_as, params)


def encoded(model: Model, prompt: str | Seq[int]) -> tuple[int, ...]:
    """The prompt's token ids, which are in the vocabulary."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise RequestError("prompt", "this model has no tokenizer: give the prompt as token ids")
        try:
            return tuple(model.tokenizer.encode(prompt))
        except ValueError as error:
            raise RequestError("prompt", str(error)) from error
    vocab_size = model.config.vocab_size
    ids = []
    for token_id in prompt:
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            raise RequestError("prompt", f"token ids must be integers; got {token_id!r}")
        if not 0 <= token_id < vocab_size:
            raise RequestError("prompt", f"token id {token_id} is outside the vocabulary of {vocab_size}")
        ids.append(int(token_id))
    return tuple(ids)


def stop_ids(model: Model, params: SamplingParams) -> tuple[int, ...]:
    """Ids that end the output: the caller's, and the tokenizer's unless they are to be ignored."""
    own = model.tokenizer.eos_ids if model.tokenizer and not params.ignore_eos else ()
    return tuple(dict.fromkeys([*params.stop_token_ids, *own]))


def new_lane(sequence: Sequence, model: Model) -> NewLanes:
    """A sequence's row of the sampler's table."""
    params, fields = sequence.params, idle_fields(1)
    fields["remaining"][0] = params.max_tokens
    fields["min_remaining"][0] = params.min_tokens
    fields["temperature"][0] = params.temperature
    fields["top_k"][0] = params.top_k
    fields["top_p"][0] = params.top_p
    fields["min_p"][0] = params.min_p
    fields["repetition"][0] = params.repetition_penalty
    fields["presence"][0] = params.presence_penalty
    fields["frequency"][0] = params.frequency_penalty
    fields["wants_logprobs"][0] = params.logprobs is not None
    ids = stop_ids(model, params)
    fields["stop_ids"][0, : len(ids)] = ids
    fields["bias_ids"][0, : len(params.logit_bias)] = list(params.logit_bias)
    fields["bias_values"][0, : len(params.logit_bias)] = list(params.logit_bias.values())
    seed = params.seed % (1 << 64)
    words = np.array([[seed >> 32, seed & 0xFFFFFFFF]], np.uint32)
    return NewLanes(
        lane_ids=from_host(np.array([sequence.lane], np.int32)),
        token=from_host(np.array([sequence.tokens[-1]], np.int32)),
        seed=from_host(words),
        choice=from_host(np.array([sequence.choice], np.int32)),
        params=LaneParams(**{name: from_host(field) for name, field in fields.items()}),
    )
