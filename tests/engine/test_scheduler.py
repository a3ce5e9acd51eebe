from __future__ import annotations

import dataclasses
import functools
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.engine.traffic import World
from wkvm_jax.config import DETERMINISTIC_CHUNK, EngineConfig
from wkvm_jax.engine.scheduler import Need, StateShape
from wkvm_jax.engine.sequence import Sequence
from wkvm_jax.errors import CapacityError, NoFreeSlotError

CONFIG = EngineConfig(num_slots=6, max_rows=4, prefill_chunks=(2, 4, 16), tokens_per_slot=32)
REWRITTEN = StateShape(alternates=True)
RINGS = StateShape(alternates=False)
PAGED = StateShape(alternates=False, page_size=3, max_length=33)
SHAPES = {"rewritten": REWRITTEN, "rings": RINGS, "paged": PAGED}
MAX_CHOICES = 5


def world(
    shape: StateShape = REWRITTEN, costs_s: dict[tuple[int, int], float] | None = None, **sizes: int
) -> World:
    num_pages, num_shards = sizes.pop("num_pages", 24), sizes.pop("num_shards", 1)
    config = dataclasses.replace(CONFIG, **sizes)
    return World(shape, config, num_pages if shape.page_size else 0, costs_s, num_shards)


def submitted(world: World, prompt_length: int, max_tokens: int, **fields: object) -> Sequence:
    group = world.group(prompt_length, max_tokens, **fields)
    world.submit(group)
    return group[-1]


class Traffic(RuleBasedStateMachine):
    """Whatever callers do, every row reads its own state, kept states stay, and all comes back at the end."""

    def __init__(self, shape: StateShape, num_shards: int) -> None:
        super().__init__()
        sizes = {"num_slots": 6 * num_shards, "max_rows": 4 * num_shards, "num_pages": 24 * num_shards}
        self.world = world(shape, num_shards=num_shards, **sizes)

    @rule(
        prompt_length=st.integers(0, 2) | st.integers(3, 21),
        max_tokens=st.integers(0, 1) | st.integers(2, 7),
        n=st.sampled_from([1, 1, 1, 2, MAX_CHOICES]),
        save=st.booleans(),
        stops_in=st.sampled_from([None, None, 1, 3]),
        late_stop_in=st.sampled_from([None, 1, 2, 4]),
        data=st.data(),
    )
    def submit(self, prompt_length: int, n: int, save: bool, data: st.DataObject, **fields: int) -> None:
        kept = data.draw(st.sampled_from([None, *self.world.kept]))
        prompt_length = max(prompt_length, 0 if kept is not None else 1)
        group = self.world.group(prompt_length, n=n, save=save and n == 1, kept=kept, **fields)
        try:
            self.world.submit(group)
        except CapacityError:
            need, has = self.world.scheduler.need(group), self.world
            longest = max(sequence.max_length for sequence in group)
            assert (
                need.slots > has.slots.num_usable
                or need.lanes > has.lanes.num_usable
                or need.pages > has.pages.num_usable
                or longest > PAGED.max_length
            )

    @rule(turns=st.integers(1, 4))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.world.turn()

    @precondition(lambda self: any(not s.is_prefix for s in self.world.live))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from([s for s in self.world.live if not s.is_prefix])))

    @precondition(lambda self: self._snapshotable())
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        before = self.world.in_use()
        try:
            self.world.snapshot(data.draw(st.sampled_from(self._snapshotable())))
        except NoFreeSlotError:
            # Results that came meanwhile may have ended others.
            assert all(now <= then for now, then in zip(self.world.in_use(), before, strict=True))

    def _snapshotable(self) -> list[Sequence]:
        return [
            s
            for s in self.world.live
            if not s.is_prefix and s.slots and s.parent is None and not s.num_to_prefill
        ]

    @precondition(lambda self: self.world.kept)
    @rule(data=st.data(), again=st.booleans())
    def fork_or_delete(self, data: st.DataObject, again: bool) -> None:
        kept = data.draw(st.sampled_from(self.world.kept))
        (self.world.fork if again else self.world.delete)(kept)

    def teardown(self) -> None:
        self.world.drain()
        for kept in list(self.world.kept):
            self.world.delete(kept)
        assert self.world.in_use() == (0, 0, 0)
        assert not self.world.live


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_random_traffic(shape: StateShape, num_shards: int) -> None:
    settings = hypothesis.settings(max_examples=80, stateful_step_count=40, report_multiple_bugs=False)
    run_state_machine_as_test(functools.partial(Traffic, shape, num_shards), settings=settings)


# Admission ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "fields", "need"),
    [
        (REWRITTEN, {}, Need(1, 1, 0)),
        (REWRITTEN, {"save": True}, Need(1, 1, 0)),
        (REWRITTEN, {"save": True, "late_stop_in": 9}, Need(2, 1, 0)),
        (RINGS, {"save": True, "late_stop_in": 9}, Need(1, 1, 0)),
        (REWRITTEN, {"n": 3}, Need(4, 3, 0)),
        (PAGED, {}, Need(1, 1, 5)),
        (PAGED, {"n": 3}, Need(4, 3, 3 + 3 * 3)),
    ],
)
def test_a_request_reserves_all_that_it_can_come_to_need(
    shape: StateShape, fields: dict[str, int], need: Need
) -> None:
    one = world(shape)
    assert one.scheduler.need(one.group(8, 6, **fields)) == need


def test_a_prompt_alone_needs_no_row() -> None:
    one = world(PAGED)
    assert one.scheduler.need(one.group(7, 0)) == Need(1, 0, 2)


def test_a_continued_state_shares_its_full_pages() -> None:
    one = world(PAGED)
    submitted(one, 9, 0, save=True)
    one.drain()
    (kept,) = one.kept
    assert kept.place.num_tokens == 8
    assert one.scheduler.need(one.group(1, 4, kept=kept)) == Need(1, 1, (8 + 1 + 4 + 2) // 3 - 2)


@pytest.mark.parametrize(
    ("shape", "fields", "param", "numbers"),
    [
        (RINGS, {"n": 7}, "n", "8 slots, 7 rows and 0 pages; this engine has 6 slots, 4 rows"),
        (REWRITTEN, {"save": True, "late_stop_in": 1}, "num_slots", "2 slots, 1 rows and 0 pages"),
        (PAGED, {}, "max_tokens", "1 slots, 1 rows and 9 pages; this engine has 1 slots, 4 rows and 8 pages"),
    ],
)
def test_what_could_never_fit_is_refused_with_the_numbers(
    shape: StateShape, fields: dict[str, int], param: str, numbers: str
) -> None:
    one = world(shape, num_slots=6 if "n" in fields else 1, num_pages=8)
    with pytest.raises(CapacityError, match=numbers) as caught:
        one.submit(one.group(20, 6, **fields))
    assert caught.value.param == param
    assert one.scheduler.idle and one.in_use() == (0, 0, 0)


def test_a_conversation_longer_than_a_page_table_is_refused() -> None:
    one = world(PAGED)
    assert one.pages.num_usable * PAGED.page_size > 2 * PAGED.max_length
    with pytest.raises(
        CapacityError, match="may reach 34 tokens; this engine's page tables reach 33"
    ) as caught:
        one.submit(one.group(20, 15))
    assert caught.value.param == "max_tokens"
    submitted(one, 20, 14)
    one.drain()


def test_a_group_is_admitted_whole_or_not_at_all() -> None:
    one = world(REWRITTEN)
    for _ in range(2):
        submitted(one, 1, 4)
    choices = one.group(9, 2, n=3)
    one.submit(choices)
    one.turn()
    assert one.scheduler.num_running == 2 and one.scheduler.num_waiting == 4 and one.in_use()[0] == 2
    one.drain()
    assert all(sequence.finished for sequence in choices) and one.in_use() == (0, 0, 0)


def test_first_come_is_first_served() -> None:
    one = world(REWRITTEN)
    submitted(one, 1, 5)
    big, small = submitted(one, 3, 2, n=4), submitted(one, 1, 1)
    one.turn()
    assert not big.slots and not small.slots, "a small request does not overtake one that waits for room"
    one.drain()
    assert one.ended.index(big) >= 0 and small.finished


def test_a_request_that_kept_states_leave_no_room_for_is_given_back() -> None:
    one = world(REWRITTEN, num_slots=3)
    for _ in range(2):
        submitted(one, 2, 1, save=True)
        one.drain()
    assert len(one.kept) == 2
    group = one.group(3, 1, n=2)
    one.submit(group)
    one.turn()
    assert all(sequence in one.ended for sequence in group) and one.scheduler.idle
    assert submitted(one, 3, 1) and one.turn() != []


def test_waiting_requests_that_are_cancelled_let_their_state_go() -> None:
    one = world(REWRITTEN)
    submitted(one, 2, 1, save=True)
    one.drain()
    (kept,) = one.kept
    for _ in range(4):
        submitted(one, 1, 9)
    one.turn()
    waiting = submitted(one, 2, 1, kept=kept)
    one.delete(kept)
    assert one.slots.references(kept.place.slot) == 1
    one.cancel(waiting)
    assert one.slots.references(kept.place.slot) == 0 and one.scheduler.num_waiting == 0


# Planning -----------------------------------------------------------------------------------------


def test_rows_that_can_sample_step_together_in_the_smallest_bucket() -> None:
    one = world(REWRITTEN)
    for count in range(1, 5):
        submitted(one, 1, 9)
        (rectangle,) = one.turn()
        assert len(rectangle.rows) == count and rectangle.num_rows == {1: 1, 2: 2, 3: 4, 4: 4}[count]


@pytest.mark.parametrize(
    ("prompt_length", "chunks"),
    [
        (1, []),
        (2, [(2, 1)]),
        (3, [(2, 2)]),
        (4, [(4, 3)]),
        (6, [(4, 4), (2, 1)]),
        (9, [(4, 4), (4, 4)]),
        (10, [(16, 9)]),
        (40, [(16, 16), (16, 16), (4, 4), (4, 3)]),
    ],
)
def test_prompts_are_cut_so_that_little_of_a_bucket_is_padding(
    prompt_length: int, chunks: list[tuple[int, int]]
) -> None:
    one = world(REWRITTEN)
    submitted(one, prompt_length, 1)
    seen = []
    while not one.scheduler.idle:
        seen += [(r.num_tokens, r.rows[0].length) for r in one.turn() if r.num_tokens > 1]
    assert seen == chunks


@hypothesis.given(st.integers(2, 200))
def test_at_most_half_of_a_chunk_is_padding(prompt_length: int) -> None:
    one = world(REWRITTEN)
    submitted(one, prompt_length, 0)
    while not one.scheduler.idle:
        for rectangle in one.turn():
            assert 2 * rectangle.rows[0].length >= rectangle.num_tokens


def test_deterministic_prompts_are_cut_at_multiples_of_one_chunk() -> None:
    one = World(REWRITTEN, EngineConfig(num_slots=4, max_rows=4, deterministic=True))
    submitted(one, 2 * DETERMINISTIC_CHUNK + 8, 3)
    company = submitted(one, 1, 50)
    lengths, buckets = [], set()
    while not one.scheduler.idle:
        for rectangle in one.turn():
            buckets.add((rectangle.num_rows, rectangle.num_tokens))
            if rectangle.num_tokens > 1:
                lengths.append(rectangle.rows[0].length)
    assert lengths == [DETERMINISTIC_CHUNK, DETERMINISTIC_CHUNK, 7]
    assert buckets == {(4, 1), (1, DETERMINISTIC_CHUNK)} and company.finished


def test_a_long_prompt_and_short_ones_take_turns() -> None:
    one = world(REWRITTEN)
    long = submitted(one, 400, 1)
    for _ in range(3):
        submitted(one, 17, 1)
    turns = [one.turn() for _ in range(7)]
    prompts = [rectangles[-1].rows[0].sequence for rectangles in turns]
    assert [sequence is long for sequence in prompts] == [True, False, True, False, True, False, True]
    one.drain()


@pytest.mark.parametrize(
    ("step_s", "widest"), [(None, 2), (1.0, 2), (3.0, 2), (5.0, 4), (19.0, 4), (20.0, 16), (99.0, 16)]
)
def test_beside_sampling_rows_a_chunk_takes_no_longer_than_their_step(
    step_s: float | None, widest: int
) -> None:
    costs_s = {(1, 2): 2.0, (1, 4): 4.0, (1, 16): 20.0}
    if step_s is not None:
        costs_s |= {(1, 1): step_s}
    one = world(REWRITTEN, costs_s)
    submitted(one, 1, 400)
    one.turn()
    submitted(one, 100, 1)
    step, prompt = one.turn()
    assert step.num_tokens == 1 and prompt.num_tokens == widest


def test_alone_a_prompt_takes_the_widest_chunk_whatever_it_costs() -> None:
    one = world(REWRITTEN, {(1, 16): 99.0, (1, 1): 0.1, (1, 2): 0.1, (1, 4): 0.1})
    submitted(one, 100, 1)
    (prompt,) = one.turn()
    assert prompt.num_tokens == 16


# Kept rows ----------------------------------------------------------------------------------------


def test_kept_rows_that_can_stop_late_take_turns_on_two_slots() -> None:
    one = world(REWRITTEN)
    sequence = submitted(one, 3, 8, save=True, late_stop_in=4)
    writes = []
    while not one.scheduler.idle:
        writes += [rectangle.rows[0].write_slot for rectangle in one.turn()]
    assert len(set(writes)) == 2
    assert all(first != second for first, second in itertools.pairwise(writes))
    assert len(writes) == 1 + 5, "the device went one step past the stop"
    assert sequence.num_seen == 4 and len(one.kept[0].consumed) == 3 - 1 + 4


@pytest.mark.parametrize("shape", [RINGS, PAGED], ids=["rings", "paged"])
def test_elsewhere_they_wait_until_the_host_has_seen_their_token(shape: StateShape) -> None:
    one = world(shape)
    submitted(one, 3, 8, save=True, late_stop_in=4)
    company = submitted(one, 1, 12)
    steps = 0
    while not one.kept:
        for rectangle in one.turn():
            rows = [row.sequence for row in rectangle.rows]
            steps += rectangle.num_tokens == 1 and any(sequence is not company for sequence in rows)
    assert steps == 4 and len(one.kept[0].consumed) == 3 - 1 + 4
    one.drain()


def test_rows_that_end_on_the_device_keep_one_slot_and_do_not_wait() -> None:
    one = world(RINGS)
    submitted(one, 2, 5, save=True, stops_in=3)
    turns = 0
    while not one.kept:
        one.turn()
        turns += 1
    assert turns == 1 + 3 + 1
    one.drain()


# Snapshots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_a_snapshot_without_room_to_go_on_takes_nothing(shape: StateShape) -> None:
    one = world(shape, num_slots=1)
    sequence = submitted(one, 5, 6)
    for _ in range(4):
        one.turn()
    before = one.in_use()
    with pytest.raises(NoFreeSlotError):
        one.snapshot(sequence)
    assert one.in_use() == before and not one.kept
    one.drain()
    assert sequence.num_seen == 6 and one.in_use() == (0, 0, 0)


def test_a_snapshot_without_a_page_to_go_on_takes_no_slot() -> None:
    one = world(PAGED, num_pages=4)
    sequence = submitted(one, 5, 6)
    for _ in range(4):
        one.turn()
    one.collect(len(one.in_flight))
    if sequence.num_computed % PAGED.page_size == 0:
        one.turn()
    before = one.in_use()
    assert before[2] == 4
    with pytest.raises(NoFreeSlotError, match="page"):
        one.snapshot(sequence)
    assert one.in_use() == before
    one.drain()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_two_snapshots_of_one_moment_share_everything(shape: StateShape) -> None:
    one = world(shape)
    sequence = submitted(one, 5, 6)
    for _ in range(3):
        one.turn()
    one.snapshot(sequence)
    used = one.in_use()
    one.snapshot(sequence)
    assert one.in_use() == used and one.kept[0] == one.kept[1]
    one.drain()
    for kept in list(one.kept):
        one.check_kept(kept)


def test_choices_read_their_prompt_once() -> None:
    one = world(REWRITTEN, num_slots=8)
    choices = one.group(9, 2, n=4)
    one.submit(choices)
    prompts = 0
    while not one.scheduler.idle:
        prompts += sum(rectangle.num_tokens > 1 for rectangle in one.turn())
    assert prompts == 2 and all(sequence.num_seen == 2 for sequence in choices[1:])


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_prefix_that_nobody_needs_any_more_ends(turns: int) -> None:
    one = world(REWRITTEN)
    choices = one.group(60, 2, n=2)
    one.submit(choices)
    for _ in range(turns):
        one.turn()
    for choice in choices[1:]:
        one.cancel(choice)
    one.turn()
    assert one.scheduler.idle and one.in_use() == (0, 0, 0)
