"""A sequence: what the scheduler knows of one conversation that runs."""

from __future__ import annotations

import dataclasses

from wkvm_jax.engine.request import Request, SamplingParams, TokenLogprob
from wkvm_jax.engine.text import RequestText
from wkvm_jax.store.records import TokenHistory


@dataclasses.dataclass(frozen=True)
class Origin:
    """A state that sequences continue from: its slot, its pages and the tokens it has consumed."""

    slot: int
    pages: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclasses.dataclass(eq=False)
class Sequence:
    """One conversation under way, or (with no request) a prefix that others fork from.

    `tokens[i]` stands at position `origin.num_tokens + i`. A sequence advances by one number,
    `num_computed`, the tokens that dispatched steps have consumed; sampling begins when all but the last
    of its first `num_prompt` tokens are consumed, and each step then adds one token.

    Attributes:
        request: who receives the tokens.
        params: how to sample; `max_tokens` 0 only consumes the prompt.
        tokens: first the pending token of a continued state, then the prompt, then the output seen so far.
        num_prompt: how many of `tokens` were there at the start.
        origin: the state it starts from.
        parent: a prefix that must be consumed first; it gives the origin then.
        choice: which of the request's choices this is.
        stops_late: the host may find the end one step after the device went past it.
        text: detokenizing and stop strings.
        parent_history: the continued state's conversation, its pending token included.
        prefix_tokens: prompt tokens that a parent consumes before `tokens`.
        num_prompt_tokens, num_cached_tokens: what `Output` reports.
        scores, logprobs: log-probabilities of the prompt's and of the output's tokens.
        save_as: the name under which the final state is kept.
        origin_handle: the state it continues, if one.
        continues: whether `tokens[0]` is a continued state's pending token and no part of the prompt.
        history: every token before `tokens`, for penalties; empty if they do not matter.
        shard: the device, along the mesh's data axis, that has its slots; chosen when it is admitted.
        slots: slots that it alone writes.
        current: the slot with its newest state.
        held: a slot it reads without owning it, until its first step has moved off.
        pages: its page table.
        page_copy: a shared page to copy before the next step, (source, destination).
        lane: its row in the sampler's table.
        num_computed: tokens that dispatched steps consume.
        num_dispatched, num_seen: samples dispatched, samples seen by the host.
        num_in_flight: dispatches whose results the host has not seen.
        finished: no further step includes it.
        spans: (first position, length, "prefill" or "decode"), joined where they continue each other.
    """

    request: Request | None
    params: SamplingParams
    tokens: list[int]
    origin: Origin
    parent: Sequence | None = None
    choice: int = 0
    save_as: str | None = None
    stops_late: bool = False
    origin_handle: str | None = None
    continues: bool = False
    text: RequestText | None = None
    history: tuple[int, ...] = ()
    parent_history: TokenHistory | None = None
    prefix_tokens: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    scores: list[TokenLogprob] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    num_prompt: int = 0
    shard: int = 0
    slots: list[int] = dataclasses.field(default_factory=list)
    current: int = 0
    held: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    page_copy: tuple[int, int] | None = None
    lane: int | None = None
    num_computed: int = 0
    num_dispatched: int = 0
    num_seen: int = 0
    num_in_flight: int = 0
    finished: bool = False
    spans: list[tuple[int, int, str]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def max_length(self) -> int:
        """Tokens that the state may have consumed when the sequence ends."""
        return self.origin.num_tokens + self.num_prompt - 1 + self.params.max_tokens

    @property
    def is_prefix(self) -> bool:
        """Whether it only exists for others to fork from."""
        return self.request is None

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def keeps_state(self) -> bool:
        """Whether somebody will keep the final state."""
        return self.save_as is not None

    @property
    def num_to_prefill(self) -> int:
        """Prompt tokens not yet consumed; the last one belongs to the first sampling step."""
        return max(self.num_prompt - 1 - self.num_computed, 0)

    @property
    def ready(self) -> bool:
        """Whether its origin exists: no parent, or a parent that is consumed."""
        return self.parent is None or self.parent.num_to_prefill == 0

    def add_span(self, length: int, kind: str) -> None:
        position = self.origin.num_tokens + self.num_computed
        if self.spans and self.spans[-1][2] == kind == "decode":
            first, joined, _ = self.spans[-1]
            self.spans[-1] = (first, joined + length, kind)
        else:
            self.spans.append((position, length, kind))
