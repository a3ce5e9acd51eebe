from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wkvm_jax.errors import RequestError
from wkvm_jax.store.records import Record, TokenHistory, checked_name, parse_handle

RECORD = Record(
    handle="a@2",
    name="a",
    version=2,
    parents=("a@1",),
    operation="generate",
    params={"seed": 1},
    num_tokens=3,
    pending_token=7,
    fingerprint="f",
    dtype="float32",
    bytes=10,
    tier="device",
    durable=False,
    tags=(),
    pinned=False,
    created_s=1.0,
)


def test_a_record_reads_as_its_handle() -> None:
    assert str(RECORD) == "a@2"
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECORD.version = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["a", "0", "A.b-c_d", "x" * 128, "v1.0"])
def test_names(name: str) -> None:
    assert checked_name(name) == name
    assert parse_handle(name) == (name, None)
    assert parse_handle(f"{name}@12") == (name, 12)


@pytest.mark.parametrize(
    "name", ["", ".a", "-a", "_a", "a b", "a/b", "a@1", "\u00e9", "a\n", "a\0", "x" * 129, "../a"]
)
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(RequestError, match="is no state name") as caught:
        checked_name(name)
    assert caught.value.param == "name"
    with pytest.raises(RequestError) as caught:
        checked_name(name, "save_as")
    assert caught.value.param == "save_as"


@pytest.mark.parametrize(
    "handle",
    [
        "",
        "@",
        "@1",
        "a@",
        "a@0",
        "a@01",
        "a@-1",
        "a@+1",
        "a@1.0",
        "a@1@2",
        "a@x",
        "a@1 ",
        "a@\u0661",
        "a b@1",
    ],
)
def test_what_is_no_handle(handle: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_handle(handle)
    assert caught.value.param == "state"


def test_versions_have_a_largest_length() -> None:
    assert parse_handle("a@" + "9" * 18) == ("a", int("9" * 18))
    with pytest.raises(RequestError):
        parse_handle("a@" + "9" * 19)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=8))
def test_a_history_joins_its_parts(parts: list[list[int]]) -> None:
    history = None
    for part in parts:
        history = TokenHistory(tuple(part), history)
    assert history is not None
    assert list(history.all_ids()) == [token_id for part in parts for token_id in part]


def test_branches_share_their_past() -> None:
    root = TokenHistory((1, 2))
    one, other = TokenHistory((3,), root), TokenHistory((4, 5), root)
    assert one.parent is other.parent is root
    assert list(one.all_ids()) == [1, 2, 3] and list(other.all_ids()) == [1, 2, 4, 5]


def test_a_history_may_be_long() -> None:
    history = TokenHistory((0,))
    for token_id in range(1, 5000):
        history = TokenHistory((token_id,), history)
    assert list(history.all_ids()) == list(range(5000))
