"""Admission by counting, and what to run next. Knows slots, pages and lanes by number, and no arrays."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.sequence import Origin, Sequence
from wkvm_jax.engine.slots import RefPool
from wkvm_jax.errors import CapacityError


@dataclasses.dataclass(frozen=True)
class StateShape:
    """What admission needs to know of a family's state.

    Attributes:
        alternates: rows that are kept may take turns on two slots.
        page_size: tokens a page; 0 without paged leaves.
        max_length: tokens that a row's page table reaches; of no meaning without paged leaves.
    """

    alternates: bool
    page_size: int = 0
    max_length: int = 0

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) if self.page_size else 0


@dataclasses.dataclass(frozen=True)
class Row:
    """One sequence's share of a rectangle: `length` tokens from `first` on, from slot to slot."""

    sequence: Sequence
    first: int
    length: int
    read_slot: int
    write_slot: int
    page_copy: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Rectangle:
    """Rows of like length and the bucket they run in. One token wide, they sample; wider, they do not.

    Attributes:
        rows: what runs.
        places: where in the bucket each row lies; the others are padding. Each shard has an equal share.
        num_rows, num_tokens: the bucket.
    """

    rows: tuple[Row, ...]
    places: tuple[int, ...]
    num_rows: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class Need:
    """Slots, lanes and pages that a group takes from the pools."""

    slots: int
    lanes: int
    pages: int

    def __str__(self) -> str:
        return f"{self.slots} slots, {self.lanes} rows and {self.pages} pages"


class Scheduler:
    """Queues groups of sequences, admits them when everything they can need is free, and forms rectangles.

    A group is admitted whole: one sequence, or a prefix and the choices that fork from it.

    Args:
        config: limits and buckets.
        shape: the family's needs.
        slots, pages, lanes: the pools to count in; they have the same shards.
        cost_s: measured seconds of a bucket `(rows, tokens)`, None while unknown.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: StateShape,
        slots: RefPool,
        pages: RefPool,
        lanes: RefPool,
        cost_s: Callable[[int, int], float | None],
    ) -> None:
        self._config = config
        self._shape = shape
        self._slots = slots
        self._pages = pages
        self._lanes = lanes
        self._cost_s = cost_s
        self._shards = range(slots.num_shards)
        self._waiting: deque[tuple[Sequence, ...]] = deque()
        self._running: list[Sequence] = []
        self._oldest_next = True

    @property
    def num_waiting(self) -> int:
        return sum(len(group) for group in self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def sequences(self) -> list[Sequence]:
        """All that wait or run."""
        return [sequence for group in self._waiting for sequence in group] + self._running

    # Admission ------------------------------------------------------------------------------------

    def need(self, group: tuple[Sequence, ...]) -> Need:
        """Everything that the group can come to need, so that nothing can run out later."""
        slots = sum(self._slots_of(sequence) for sequence in group)
        lanes = sum(1 for sequence in group if sequence.params.max_tokens > 0)
        return Need(slots, lanes, sum(self._new_pages_of(sequence) for sequence in group))

    def check_fits(self, group: tuple[Sequence, ...]) -> None:
        """Raises `CapacityError`, with the numbers, for a group that an empty engine could not hold."""
        longest = max(sequence.max_length for sequence in group)
        if self._shape.page_size and longest > self._shape.max_length:
            raise CapacityError(
                "max_tokens",
                f"the conversation may reach {longest} tokens; this engine's page tables reach "
                f"{self._shape.max_length}. Ask for less, or raise tokens_per_slot",
            )
        need = self.need(group)
        has = Need(self._slots.num_usable, self._lanes.num_usable, self._pages.num_usable)
        if need.slots > has.slots or need.lanes > has.lanes or need.pages > has.pages:
            param = "n" if need.lanes > has.lanes else "max_tokens" if need.pages > has.pages else "num_slots"
            raise CapacityError(
                param,
                f"the request needs {need}; this engine has {has}. Ask for less, or start a larger engine",
            )

    def submit(self, group: tuple[Sequence, ...]) -> None:
        """Queues a group that fits; first come, first served."""
        self._waiting.append(group)

    def admit(self) -> list[Sequence]:
        """Moves groups from the queue to the running set while their needs are free."""
        admitted: list[Sequence] = []
        while self._waiting and (shard := self._shard_for(self._waiting[0])) is not None:
            group = self._waiting.popleft()
            for sequence in group:
                self._give(sequence, shard)
            admitted.extend(group)
        self._running.extend(admitted)
        return admitted

    def stuck(self) -> tuple[Sequence, ...]:
        """The first waiting group, taken off the queue, when nothing runs that could make room for it."""
        if self._running or not self._waiting or self._shard_for(self._waiting[0]) is not None:
            return ()
        return self._waiting.popleft()

    def _shard_for(self, group: tuple[Sequence, ...]) -> int | None:
        """Where the group can start now: beside the state it continues, else where most slots are free."""
        need = self.need(group)
        origins = [s.origin.slot for s in group if s.parent is None]
        kept = [slot for slot in origins if self._slots.references(slot)]  # the initial state is everywhere
        if kept:
            shards = [self._slots.shard_of(kept[0])]
        else:
            shards = sorted(self._shards, key=self._slots.num_free_on, reverse=True)
        fitting = (
            shard
            for shard in shards
            if need.slots <= self._slots.num_free_on(shard)
            and need.lanes <= self._lanes.num_free_on(shard)
            and need.pages <= self._pages.num_free_on(shard)
        )
        return next(fitting, None)

    def _slots_of(self, sequence: Sequence) -> int:
        return 2 if self._takes_turns(sequence) else 1

    def _takes_turns(self, sequence: Sequence) -> bool:
        return self._shape.alternates and sequence.keeps_state and sequence.stops_late

    def _new_pages_of(self, sequence: Sequence) -> int:
        if not self._shape.page_size:
            return 0
        start = sequence.origin.num_tokens
        if sequence.parent is not None:
            start = sequence.parent.max_length
        return self._shape.pages_for(sequence.max_length) - start // self._shape.page_size

    def _give(self, sequence: Sequence, shard: int) -> None:
        sequence.shard = shard
        sequence.slots = self._slots.acquire(self._slots_of(sequence), shard)
        if sequence.params.max_tokens > 0:
            (sequence.lane,) = self._lanes.acquire(1, shard)
        sequence.pages = self._pages.acquire(self._new_pages_of(sequence), shard)
        if sequence.parent is None:
            self._start_from(sequence, sequence.origin)

    def _start_from(self, sequence: Sequence, origin: Origin) -> None:
        """Points an admitted sequence at its origin, whose slot and pages the caller has retained."""
        sequence.origin = origin
        sequence.current = sequence.held = origin.slot
        if self._shape.page_size:
            full, rest = divmod(origin.num_tokens, self._shape.page_size)
            if rest:
                sequence.page_copy = (origin.pages[full], sequence.pages[0])
            sequence.pages = [*origin.pages[:full], *sequence.pages]

    # Planning -------------------------------------------------------------------------------------

    def plan(self) -> list[Rectangle]:
        """The next dispatches, in order: a step of every row that can sample, and some prompt beside it.

        While rows sample, the prompt's share is the widest chunk that takes no longer than their step, so
        that neither starves. Each shard reads one prompt, which take turns: the oldest, then the shortest.
        """
        self._fork_ready_children()
        sampling = [sequence for sequence in self._running if self._can_sample(sequence)]
        rectangles = []
        if sampling:
            rectangles.append(self._rectangle(sampling, self._config.decode_buckets, 1))
        prefilling = [s for s in self._running if s.parent is None and s.num_to_prefill and not s.finished]
        if prefilling:
            chosen = self._next_prompts(prefilling)
            limit = self._widest_chunk(rectangles[0].num_rows if rectangles else 0)
            chunk = max(self._chunk(sequence.num_to_prefill, limit) for sequence in chosen)
            rectangles.append(self._rectangle(chosen, (len(self._shards),), chunk))
        return rectangles

    def _rectangle(self, sequences: list[Sequence], buckets: tuple[int, ...], num_tokens: int) -> Rectangle:
        """The next tokens of some sequences, in the smallest bucket whose shares hold each shard's rows."""
        on_shard = [[s for s in sequences if s.shard == shard] for shard in self._shards]
        most = max(map(len, on_shard))
        num_rows = next(size for size in buckets if size >= most * len(self._shards))
        share = num_rows // len(self._shards)
        rows, places = [], []
        for shard, those in enumerate(on_shard):
            for index, sequence in enumerate(those):
                length = 1 if num_tokens == 1 else min(num_tokens, sequence.num_to_prefill)
                rows.append(self._row(sequence, length))
                places.append(shard * share + index)
        return Rectangle(tuple(rows), tuple(places), num_rows, num_tokens)

    def _can_sample(self, sequence: Sequence) -> bool:
        waits = sequence.keeps_state and sequence.stops_late and not self._takes_turns(sequence)
        return (
            sequence.parent is None
            and not sequence.finished
            and sequence.num_to_prefill == 0
            and sequence.num_dispatched < sequence.params.max_tokens
            and not (waits and sequence.num_dispatched > sequence.num_seen)
        )

    def _fork_ready_children(self) -> None:
        """Gives children of consumed prefixes their origin, and ends prefixes that nobody needs any more."""
        for sequence in self._running:
            if sequence.parent is not None and sequence.ready:
                self._fork_from_parent(sequence)
        needed = {id(sequence.parent) for sequence in self._running if sequence.parent is not None}
        for sequence in [s for s in self._running if s.is_prefix and id(s) not in needed]:
            self.finish(sequence)

    def _fork_from_parent(self, sequence: Sequence) -> None:
        parent = sequence.parent
        assert parent is not None
        sequence.parent = None
        origin = self.state_of(parent)
        self.retain(origin)
        self._start_from(sequence, origin)

    def _next_prompts(self, prefilling: list[Sequence]) -> list[Sequence]:
        """One prompt of each shard that has any."""
        oldest_first, self._oldest_next = self._oldest_next, not self._oldest_next
        on_shard = ([s for s in prefilling if s.shard == shard] for shard in self._shards)
        return [
            those[0] if oldest_first else min(those, key=lambda s: s.num_to_prefill)
            for those in on_shard
            if those
        ]

    def _widest_chunk(self, num_sampling_rows: int) -> int:
        buckets = self._config.prefill_buckets
        if not num_sampling_rows:
            return buckets[-1]
        step_s = self._cost_s(num_sampling_rows, 1)
        if step_s is None:
            return buckets[0]
        costs = {bucket: self._cost_s(len(self._shards), bucket) for bucket in buckets}
        return max(
            (b for b, cost in costs.items() if cost is not None and cost <= step_s), default=buckets[0]
        )

    def _chunk(self, remaining: int, limit: int) -> int:
        """The bucket to use: no wider than `limit`, and not more than half of it padding if that can be."""
        buckets = [bucket for bucket in self._config.prefill_buckets if bucket <= limit]
        enough = next((bucket for bucket in buckets if bucket >= remaining), None)
        if enough is not None and 2 * remaining > enough:
            return enough
        return max((bucket for bucket in buckets if bucket <= remaining), default=buckets[0])

    def _row(self, sequence: Sequence, length: int) -> Row:
        read_slot = sequence.current
        write_slot = next((slot for slot in sequence.slots if slot != read_slot), sequence.slots[0])
        row = Row(
            sequence, sequence.num_computed, length, read_slot, write_slot, sequence.page_copy or (0, 0)
        )
        samples = sequence.num_to_prefill == 0
        sequence.add_span(length, "decode" if samples else "prefill")
        sequence.num_computed += length
        sequence.num_dispatched += samples
        sequence.num_in_flight += 1
        self._move_to(sequence, write_slot)
        return row

    def _move_to(self, sequence: Sequence, slot: int) -> None:
        """What the sequence read without owning it is let go: later dispatches run after this one."""
        sequence.current = slot
        if sequence.held is not None:
            self._slots.release(sequence.held)
            sequence.held = None
        if sequence.page_copy is not None:
            self._pages.release(sequence.page_copy[0])
            sequence.page_copy = None

    # States ---------------------------------------------------------------------------------------

    def state_of(self, sequence: Sequence, slot: int | None = None, num_tokens: int | None = None) -> Origin:
        """A sequence's newest dispatched state, or an earlier one that still lies in `slot`."""
        if num_tokens is None:
            num_tokens = sequence.origin.num_tokens + sequence.num_computed
        pages = self._readable_pages(sequence)[: self._shape.pages_for(num_tokens)]
        return Origin(sequence.current if slot is None else slot, tuple(pages), num_tokens)

    def _readable_pages(self, sequence: Sequence) -> list[int]:
        """Its page table, with the shared page in place of a copy that no step has made yet."""
        if sequence.page_copy is None:
            return sequence.pages
        source, destination = sequence.page_copy
        return [source if page == destination else page for page in sequence.pages]

    def retain(self, state: Origin) -> None:
        """One more holder of a state's slot and pages."""
        self._slots.retain(state.slot)
        for page in state.pages:
            self._pages.retain(page)

    def release(self, state: Origin) -> None:
        """One holder fewer."""
        self._slots.release(state.slot)
        for page in state.pages:
            self._pages.release(page)

    def share(self, sequence: Sequence) -> Origin:
        """Lets somebody hold the sequence's newest state, which it will not write again.

        Raises:
            NoFreeSlotError: the sequence needs a slot or page to go on in, and none is free.
        """
        state = self.state_of(sequence)
        shares_slot = sequence.current in sequence.slots
        shares_page = bool(state.num_tokens % self._shape.page_size) if self._shape.page_size else False
        shares_page = shares_page and sequence.page_copy is None
        successor = self._slots.acquire(1, sequence.shard) if shares_slot else []
        try:
            fresh_page = self._pages.acquire(1, sequence.shard) if shares_page else []
        except Exception:
            for slot in successor:
                self._slots.release(slot)
            raise
        self.retain(state)
        if shares_slot:
            # The reference that came with ownership now guards what the next step reads.
            sequence.slots[sequence.slots.index(sequence.current)] = successor[0]
            sequence.held = sequence.current
        if shares_page:
            last = len(state.pages) - 1
            sequence.page_copy = (sequence.pages[last], fresh_page[0])
            sequence.pages[last] = fresh_page[0]
        return state

    def finish(self, sequence: Sequence) -> None:
        """Takes back all that the sequence holds. In-flight steps may still write its slots: whoever gets
        them next writes later."""
        if sequence.finished:
            return
        sequence.finished = True
        if sequence in self._running:
            self._running.remove(sequence)
            self._take_back(sequence)
        else:
            self._waiting = deque(
                rest for group in self._waiting if (rest := tuple(s for s in group if s is not sequence))
            )
            if sequence.parent is None:
                self.release(sequence.origin)

    def _take_back(self, sequence: Sequence) -> None:
        if sequence.held is not None:
            self._slots.release(sequence.held)
        for slot in sequence.slots:
            self._slots.release(slot)
        for page in sequence.pages:
            self._pages.release(page)
        if sequence.page_copy is not None:
            self._pages.release(sequence.page_copy[0])
        if sequence.lane is not None:
            self._lanes.release(sequence.lane)
        sequence.slots, sequence.pages, sequence.held, sequence.page_copy = [], [], None, None
        sequence.lane = None
