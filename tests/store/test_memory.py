from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from wkvm_jax.errors import RequestError, StatePinnedError, UnknownHandleError
from wkvm_jax.store.memory import MemoryRecords
from wkvm_jax.store.records import NewRecord, Record, RecordStore, TokenHistory

NAMES = ("a", "b", "long.name-1")


def new(name: str, *parents: str, num_tokens: int = 3) -> NewRecord:
    return NewRecord(
        name=name,
        parents=parents,
        operation="generate",
        params={"seed": 0},
        num_tokens=num_tokens,
        pending_token=7,
        fingerprint="f",
        dtype="float32",
        bytes=10,
    )


@pytest.fixture
def records() -> MemoryRecords:
    return MemoryRecords()


def test_it_is_a_record_store(records: MemoryRecords) -> None:
    store: RecordStore = records
    assert isinstance(store, MemoryRecords)


def test_a_record_keeps_what_it_was_given(records: MemoryRecords) -> None:
    before_s = time.time()
    record = records.add(new("a", "b@1"), TokenHistory((1, 2, 7)))
    assert (record.handle, record.name, record.version) == ("a@1", "a", 1)
    assert record.parents == ("b@1",) and record.pending_token == 7 and record.bytes == 10
    assert (record.tier, record.durable, record.tags, record.pinned) == ("device", False, (), False)
    assert before_s <= record.created_s <= time.time()
    assert records.get("a@1") is record is records.get("a")
    assert list(records.history("a").all_ids()) == [1, 2, 7]


def test_a_bare_name_is_the_newest_version(records: MemoryRecords) -> None:
    for version in (1, 2, 3):
        assert records.add(new("a"), TokenHistory(())).version == version
    assert records.get("a").handle == "a@3" and records.get("a@1").version == 1
    records.delete("a@3")
    assert records.get("a").handle == "a@2"


def test_versions_only_grow(records: MemoryRecords) -> None:
    records.add(new("a"), TokenHistory(()))
    records.delete("a")
    with pytest.raises(UnknownHandleError):
        records.get("a")
    assert records.add(new("a"), TokenHistory(())).handle == "a@2"
    with pytest.raises(UnknownHandleError):
        records.get("a@1")


@pytest.mark.parametrize("handle", ["a", "a@1", "b@7"])
def test_what_is_not_there(records: MemoryRecords, handle: str) -> None:
    records.add(new("b"), TokenHistory(()))
    for call in (records.get, records.history, records.delete, records.lineage, records.update):
        with pytest.raises(UnknownHandleError, match=handle.partition("@")[0]):
            call(handle)


def test_what_is_no_name_is_not_filed(records: MemoryRecords) -> None:
    with pytest.raises(RequestError):
        records.add(new("a/b"), TokenHistory(()))
    assert records.list() == []


def test_only_tags_and_pins_change(records: MemoryRecords) -> None:
    first = records.add(new("a"), TokenHistory(()))
    second = records.update("a", tags=["red"])
    assert second == dataclasses.replace(first, tags=("red",))
    assert records.update("a", pinned=True) == dataclasses.replace(second, pinned=True)
    assert records.update("a@1", tags=[], pinned=False) == first
    assert records.get("a") == first


def test_pinned_records_stay(records: MemoryRecords) -> None:
    records.add(new("a"), TokenHistory(()))
    records.update("a", pinned=True)
    with pytest.raises(StatePinnedError, match="a@1"):
        records.delete("a")
    records.update("a", pinned=False)
    assert records.delete("a").handle == "a@1"


def test_listing(records: MemoryRecords) -> None:
    for name in ("a", "b", "a"):
        records.add(new(name), TokenHistory(()))
    records.update("a@1", tags=["red"])
    assert [str(record) for record in records.list()] == ["a@1", "b@1", "a@2"]
    assert [str(record) for record in records.list(name="a")] == ["a@1", "a@2"]
    assert [str(record) for record in records.list(tag="red")] == ["a@1"]
    assert records.list(name="a", tag="blue") == [] == records.list(name="c")


def test_children_keep_their_history_without_their_parent(records: MemoryRecords) -> None:
    records.add(new("a"), TokenHistory((1, 2)))
    records.add(new("b", "a@1"), TokenHistory((3,), records.history("a")))
    records.delete("a")
    assert list(records.history("b").all_ids()) == [1, 2, 3]


def test_lineage_is_every_way_back(records: MemoryRecords) -> None:
    records.add(new("root"), TokenHistory(()))
    records.add(new("left", "root@1"), TokenHistory(()))
    records.add(new("right", "root@1"), TokenHistory(()))
    records.add(new("merged", "left@1", "right@1"), TokenHistory(()))
    records.add(new("other"), TokenHistory(()))
    nodes, edges = records.lineage("merged")
    assert sorted(map(str, nodes)) == ["left@1", "merged@1", "right@1", "root@1"]
    assert sorted(edges) == [
        ("left@1", "merged@1"),
        ("right@1", "merged@1"),
        ("root@1", "left@1"),
        ("root@1", "right@1"),
    ]


def test_lineage_leads_no_further_than_what_is_there(records: MemoryRecords) -> None:
    records.add(new("a"), TokenHistory(()))
    records.add(new("b", "a@1"), TokenHistory(()))
    records.delete("a")
    nodes, edges = records.lineage("b")
    assert [str(node) for node in nodes] == ["b@1"] and edges == []
    assert records.get("b").parents == ("a@1",), "the record itself still says where it came from"


class Model(RuleBasedStateMachine):
    """Against a plain list of records."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.records = MemoryRecords()
        self.expected: list[Record] = []
        self.made: dict[str, int] = {}

    @rule(target=handles, name=st.sampled_from(NAMES), tokens=st.lists(st.integers(0, 9), max_size=3))
    def add(self, name: str, tokens: list[int]) -> str:
        record = self.records.add(new(name), TokenHistory(tuple(tokens)))
        self.made[name] = self.made.get(name, 0) + 1
        assert record.version == self.made[name]
        self.expected.append(record)
        return record.handle

    @rule(handle=handles, pinned=st.booleans(), tags=st.lists(st.sampled_from(["x", "y"]), max_size=2))
    def update(self, handle: str, pinned: bool, tags: list[str]) -> None:
        self.expected = [
            dataclasses.replace(one, pinned=pinned, tags=tuple(tags)) if one.handle == handle else one
            for one in self.expected
        ]
        self.records.update(handle, pinned=pinned, tags=tags)

    @rule(handle=consumes(handles))
    def delete(self, handle: str) -> None:
        (record,) = (one for one in self.expected if one.handle == handle)
        if record.pinned:
            with pytest.raises(StatePinnedError):
                self.records.delete(handle)
            self.records.update(handle, pinned=False)
        assert self.records.delete(handle).handle == handle
        self.expected.remove(record)

    @invariant()
    def agrees(self) -> None:
        assert list(self.records.list()) == self.expected
        for name in NAMES:
            versions = [one for one in self.expected if one.name == name]
            assert list(self.records.list(name=name)) == versions
            if versions:
                assert self.records.get(name) == versions[-1]
            else:
                with pytest.raises(UnknownHandleError):
                    self.records.get(name)


Model.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestAgainstAModel = Model.TestCase
