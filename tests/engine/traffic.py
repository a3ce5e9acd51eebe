"""A stand-in for device and host around a real scheduler, in plain Python and without JAX.

Slots and pages hold the tokens that their state has consumed, so a row that reads the wrong slot, a page that
two conversations write, or a kept state that changes shows at once. Results reach the host one turn late,
as in the engine.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque

from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.request import Request, SamplingParams
from wkvm_jax.engine.scheduler import Rectangle, Row, Scheduler, StateShape
from wkvm_jax.engine.sequence import Origin, Sequence
from wkvm_jax.engine.slots import RefPool

INITIAL_SLOT, NUM_RESERVED_SLOTS, NUM_RESERVED_PAGES, NUM_RESERVED_LANES = 0, 2, 1, 1

Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Kept:
    """A kept state: where it lies, what it has consumed, and the token after that."""

    place: Origin
    consumed: Tokens = ()
    pending: int | None = None


@dataclasses.dataclass
class Conversation:
    """What the device knows of a sequence: all its tokens, those that the host has not seen included.

    Attributes:
        tokens: from the start of the conversation.
        start: how many of them came before the sequence's own.
        samples_left: tokens that the device may still sample.
        stops_in: samples after which the device finds a stop id; None for never.
        late_stop_in: samples after which the host finds a stop string; None for never.
    """

    tokens: list[int]
    start: int
    samples_left: int
    stops_in: int | None
    late_stop_in: int | None

    @property
    def done(self) -> bool:
        return self.samples_left == 0 or self.stops_in == 0


@dataclasses.dataclass(frozen=True)
class RowResult:
    """One row's outcome; `token` is None for a prompt's rows and for rows that are done."""

    token: int | None
    last: bool


class World:
    """A scheduler with the device and the host that its decisions are meant for.

    Args:
        shape: the family's.
        config: sizes and buckets.
        num_pages: pages that may be taken.
        costs_s: measured seconds of a bucket (rows, tokens).
        num_shards: shards that share slots, pages and rows equally.
    """

    def __init__(
        self,
        shape: StateShape,
        config: EngineConfig,
        num_pages: int = 0,
        costs_s: dict[tuple[int, int], float] | None = None,
        num_shards: int = 1,
    ) -> None:
        self.shape = shape
        self.config = config

        def pool(name: str, size: int, num_reserved: int) -> RefPool:
            return RefPool(name, size // num_shards + num_reserved, num_reserved, num_shards)

        self.slots = pool("slot", config.num_slots, NUM_RESERVED_SLOTS)
        self.pages = pool("page", num_pages, NUM_RESERVED_PAGES)
        self.lanes = pool("row", config.max_rows, NUM_RESERVED_LANES)
        self.costs_s = costs_s or {}
        self.scheduler = Scheduler(
            config,
            shape,
            self.slots,
            self.pages,
            self.lanes,
            lambda rows, tokens: self.costs_s.get((rows, tokens)),
        )
        self.slot_content: dict[int, Tokens] = {INITIAL_SLOT: ()}
        self.page_content: dict[tuple[int, int], int] = {}
        self.conversations: dict[int, Conversation] = {}
        self.kept: list[Kept] = []
        self.live: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.in_flight: deque[tuple[Rectangle, list[RowResult]]] = deque()
        self.token_ids = itertools.count(1)

    # Callers --------------------------------------------------------------------------------------

    def group(
        self,
        prompt_length: int,
        max_tokens: int,
        *,
        n: int = 1,
        save: bool = False,
        kept: Kept | None = None,
        stops_in: int | None = None,
        late_stop_in: int | None = None,
    ) -> tuple[Sequence, ...]:
        """Sequences for one request, as the engine makes them: one, or a prefix and `n` choices."""
        kept = kept or Kept(Origin(INITIAL_SLOT))
        own = [*([] if kept.pending is None else [kept.pending])]
        own += [next(self.token_ids) for _ in range(prompt_length)]
        params = SamplingParams(max_tokens=max_tokens)
        start = len(kept.consumed)

        def sequence(tokens: list[int], parent: Sequence | None, before: int) -> Sequence:
            result = Sequence(
                Request("r", lambda: None),
                params,
                list(tokens),
                dataclasses.replace(kept.place, num_tokens=start + before),
                parent=parent,
                save_as="kept" if save else None,
                stops_late=late_stop_in is not None,
            )
            self.conversations[id(result)] = Conversation(
                [*kept.consumed, *own], start + before, max_tokens, stops_in, late_stop_in
            )
            return result

        if n == 1:
            return (sequence(own, None, 0),)
        prefix = Sequence(None, SamplingParams(max_tokens=0), list(own), kept.place)
        self.conversations[id(prefix)] = Conversation([*kept.consumed, *own], start, 0, None, None)
        return (prefix, *(sequence(own[-1:], prefix, len(own) - 1) for _ in range(n)))

    def submit(self, group: tuple[Sequence, ...]) -> None:
        """Queues a group; raises `CapacityError` for one that can never fit."""
        self.scheduler.check_fits(group)
        for sequence in group:
            if sequence.parent is None:
                self.scheduler.retain(sequence.origin)
        self.live += group
        self.scheduler.submit(group)

    def cancel(self, sequence: Sequence) -> None:
        self._end(sequence)

    def snapshot(self, sequence: Sequence) -> None:
        """Keeps a running sequence's newest state; the host has seen all by then."""
        self.collect(len(self.in_flight))
        if sequence.finished:
            return
        place = self.scheduler.share(sequence)
        self._keep(place, sequence)

    def delete(self, kept: Kept) -> None:
        self.check_kept(kept)
        self.kept.remove(kept)
        self.scheduler.release(kept.place)

    def fork(self, kept: Kept) -> None:
        self.scheduler.retain(kept.place)
        self.kept.append(dataclasses.replace(kept))

    # The engine's turn ----------------------------------------------------------------------------

    def turn(self) -> list[Rectangle]:
        """Admits, dispatches, and hands the host the results of the turn before."""
        before = self.in_use()
        admitted = self.scheduler.admit()
        self._check_admission(admitted, before)
        rectangles = self.scheduler.plan()
        for prefix in [sequence for sequence in self.live if sequence.is_prefix and sequence.finished]:
            self._forget(prefix)
        for rectangle in rectangles:
            self.in_flight.append((rectangle, self._dispatch(rectangle)))
        for sequence in admitted:
            if sequence.params.max_tokens == 0 and sequence.num_prompt == 1 and not sequence.is_prefix:
                self._end_saving(sequence, sequence.current)
        self.collect(len(self.in_flight) - len(rectangles))
        while group := self.scheduler.stuck():
            for sequence in group:
                if sequence.parent is None:
                    self.scheduler.release(sequence.origin)
                sequence.finished = True
                self._forget(sequence)
        return rectangles

    def drain(self, max_turns: int = 2000) -> None:
        """Turns until nothing is left to do."""
        for _ in range(max_turns):
            if self.scheduler.idle and not self.in_flight:
                return
            self.turn()
        raise AssertionError(f"{self.scheduler.num_running} sequences never ended")

    def collect(self, count: int) -> None:
        for _ in range(count):
            rectangle, results = self.in_flight.popleft()
            for row, result in zip(rectangle.rows, results, strict=True):
                self._report(row, result)

    def in_use(self) -> tuple[int, int, int]:
        pools = (self.slots, self.lanes, self.pages)
        return tuple(pool.num_shards * pool.num_usable - pool.num_free for pool in pools)

    # The device -----------------------------------------------------------------------------------

    def _dispatch(self, rectangle: Rectangle) -> list[RowResult]:
        self._check_bucket(rectangle)
        reads = [row.read_slot for row in rectangle.rows]
        writes = [row.write_slot for row in rectangle.rows]
        assert len(set(writes)) == len(writes), "two rows write one slot"
        for index, write in enumerate(writes):
            assert self.slots.references(write) == 1
            assert write not in [read for other, read in enumerate(reads) if other != index]
        before = [self.slot_content.get(read) for read in reads]
        for row in rectangle.rows:
            self._copy_page(row)
        return [
            self._run_row(row, rectangle.num_tokens == 1, content)
            for row, content in zip(rectangle.rows, before, strict=True)
        ]

    def _run_row(self, row: Row, samples: bool, content: Tokens | None) -> RowResult:
        conversation = self.conversations[id(row.sequence)]
        if samples and conversation.done:
            return RowResult(None, False)
        first = conversation.start + row.first
        end = first + row.length
        assert content == tuple(conversation.tokens[:first]), "the row read another conversation's state"
        assert end <= len(conversation.tokens)
        self.slot_content[row.write_slot] = tuple(conversation.tokens[:end])
        self._write_pages(row.sequence, first, conversation.tokens[first:end])
        if not samples:
            return RowResult(None, False)
        assert row.length == 1 and end == len(conversation.tokens) and row.sequence.lane is not None
        token = next(self.token_ids)
        conversation.tokens.append(token)
        conversation.samples_left -= 1
        if conversation.stops_in is not None:
            conversation.stops_in -= 1
        return RowResult(token, conversation.done)

    def _copy_page(self, row: Row) -> None:
        source, destination = row.page_copy
        if not destination:
            return
        assert self.pages.references(destination) == 1
        for offset in range(self.shape.page_size):
            if (source, offset) in self.page_content:
                self.page_content[destination, offset] = self.page_content[source, offset]

    def _write_pages(self, sequence: Sequence, first: int, tokens: list[int]) -> None:
        size = self.shape.page_size
        if not size:
            return
        for position in range(first):
            stored = self.page_content.get((sequence.pages[position // size], position % size))
            assert stored == self.conversations[id(sequence)].tokens[position]
        for position, token in enumerate(tokens, first):
            page = sequence.pages[position // size]
            assert self.pages.references(page) == 1, "a shared page is written"
            self.page_content[page, position % size] = token

    # The host -------------------------------------------------------------------------------------

    def _report(self, row: Row, result: RowResult) -> None:
        sequence = row.sequence
        sequence.num_in_flight -= 1
        if sequence.finished:
            return
        if result.token is not None:
            sequence.num_seen += 1
            sequence.tokens.append(result.token)
            conversation = self.conversations[id(sequence)]
            if result.last or conversation.late_stop_in == sequence.num_seen:
                self._end_saving(sequence, row.write_slot)
            return
        consumed = row.first + row.length >= sequence.num_prompt - 1
        if consumed and sequence.params.max_tokens == 0 and not sequence.is_prefix:
            self._end_saving(sequence, row.write_slot)

    def _end_saving(self, sequence: Sequence, slot: int) -> None:
        if sequence.keeps_state:
            num_tokens = sequence.origin.num_tokens + len(sequence.tokens) - 1
            place = self.scheduler.state_of(sequence, slot, num_tokens)
            self.scheduler.retain(place)
            self._keep(place, sequence)
        self._end(sequence)

    def _keep(self, place: Origin, sequence: Sequence) -> None:
        tokens = self.conversations[id(sequence)].tokens
        assert tokens[place.num_tokens] == sequence.tokens[-1], "the pending token is the last one seen"
        kept = Kept(place, tuple(tokens[: place.num_tokens]), sequence.tokens[-1])
        self.check_kept(kept)
        self.kept.append(kept)

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        if sequence in self.live:
            self.live.remove(sequence)
            self.ended.append(sequence)

    # What must hold -------------------------------------------------------------------------------

    def check_kept(self, kept: Kept) -> None:
        """A kept state holds what it held when it was kept."""
        place = kept.place
        assert self.slot_content[place.slot] == kept.consumed
        assert place.num_tokens == len(kept.consumed)
        if place.slot != INITIAL_SLOT:
            assert self.slots.references(place.slot) >= 1
        if size := self.shape.page_size:
            assert len(place.pages) == self.shape.pages_for(place.num_tokens)
            for position, token in enumerate(kept.consumed):
                page = place.pages[position // size]
                assert self.page_content[page, position % size] == token
                assert self.pages.references(page) >= 1

    def _check_admission(self, admitted: list[Sequence], before: tuple[int, int, int]) -> None:
        """Groups are admitted whole, and took what they were said to need."""
        waiting = {id(sequence) for group in self.scheduler._waiting for sequence in group}
        need = self.scheduler.need(tuple(admitted))
        after = self.in_use()
        taken = tuple(now - then for now, then in zip(after, before, strict=True))
        assert taken == (need.slots, need.lanes, need.pages)
        for sequence in admitted:
            assert sequence.parent is None or id(sequence.parent) not in waiting

    def _check_bucket(self, rectangle: Rectangle) -> None:
        shards = self.slots.num_shards
        share = rectangle.num_rows // shards
        used = Counter(place // share for place in rectangle.places)
        if rectangle.num_tokens == 1:
            assert rectangle.num_rows in self.config.decode_buckets
            assert 2 * max(used.values()) > share or self.config.deterministic
        else:
            assert rectangle.num_tokens in self.config.prefill_buckets and share == 1
        assert len(set(rectangle.places)) == len(rectangle.places) == len(rectangle.rows) > 0
        for row, place in zip(rectangle.rows, rectangle.places, strict=True):
            own = row.sequence.shard
            assert place // share == own == self.slots.shard_of(row.write_slot)
            assert row.read_slot == INITIAL_SLOT or self.slots.shard_of(row.read_slot) == own
            assert all(self.pages.shard_of(page) == own for page in row.sequence.pages)
            assert row.sequence.lane is None or self.lanes.shard_of(row.sequence.lane) == own
        assert len({id(row.sequence) for row in rectangle.rows}) == len(rectangle.rows)
        assert all(0 < row.length <= rectangle.num_tokens for row in rectangle.rows)
        assert all(not row.sequence.finished for row in rectangle.rows)
