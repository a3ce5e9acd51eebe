from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wkvm_jax.engine.slots import RefPool
from wkvm_jax.errors import NoFreeSlotError

SIZE, RESERVED = 9, 2
USABLE = SIZE - RESERVED


@pytest.fixture
def pool() -> RefPool:
    return RefPool("slot", SIZE, RESERVED)


def test_all_but_the_reserved_ids_are_handed_out_once(pool: RefPool) -> None:
    ids = [pool.acquire(1)[0] for _ in range(pool.num_usable)]
    assert sorted(ids) == list(range(RESERVED, SIZE))
    assert pool.num_free == 0 and all(pool.references(identity) == 1 for identity in ids)


def test_too_many_take_nothing_and_say_how_many_there_are(pool: RefPool) -> None:
    pool.acquire(3)
    with pytest.raises(NoFreeSlotError, match=r"5 slots are needed and 4 of 7 are free"):
        pool.acquire(5)
    assert pool.num_free == 4
    assert len(pool.acquire(4)) == 4


def test_none_are_always_free() -> None:
    empty = RefPool("page", 0, 1)
    assert empty.acquire(0) == [] and empty.num_usable == 0 and empty.num_free == 0
    with pytest.raises(NoFreeSlotError):
        empty.acquire(1)


def test_an_id_is_free_when_its_last_holder_lets_go(pool: RefPool) -> None:
    (identity,) = pool.acquire(1)
    pool.retain(identity)
    pool.release(identity)
    assert pool.references(identity) == 1 and pool.num_free == USABLE - 1
    pool.release(identity)
    assert pool.references(identity) == 0 and pool.num_free == USABLE


def test_what_was_freed_is_handed_out_last(pool: RefPool) -> None:
    first, second, third = pool.acquire(3)
    for identity in (second, first):
        pool.release(identity)
    assert pool.acquire(USABLE - 1)[-2:] == [second, first]
    assert pool.references(third) == 1


@pytest.mark.parametrize("identity", range(RESERVED))
def test_reserved_ids_are_not_counted(pool: RefPool, identity: int) -> None:
    pool.retain(identity)
    pool.release(identity)
    pool.release(identity)
    assert pool.references(identity) == 0 and pool.num_free == USABLE


@given(
    st.lists(st.tuples(st.sampled_from(["acquire", "retain", "release"]), st.integers(0, SIZE)), max_size=60)
)
def test_it_counts_as_a_plain_counter_does(operations: list[tuple[str, int]]) -> None:
    pool, model = RefPool("slot", SIZE, RESERVED), Counter[int]()
    freed = list(range(RESERVED, SIZE))
    for operation, number in operations:
        held = sorted(model)
        if operation == "acquire":
            if number > USABLE - len(held):
                with pytest.raises(NoFreeSlotError):
                    pool.acquire(number)
            else:
                ids = pool.acquire(number)
                assert ids == freed[:number]
                del freed[:number]
                model.update(ids)
        elif held:
            identity = held[number % len(held)]
            getattr(pool, operation)(identity)
            model[identity] += 1 if operation == "retain" else -1
            if not model[identity]:
                del model[identity]
                freed.append(identity)
        assert pool.num_free == USABLE - len(model)
        assert {identity: pool.references(identity) for identity in model} == dict(model)


def test_slots_scheduler_and_sequences_need_no_jax() -> None:
    tests = [
        f"tests.engine.{name}"
        for name in ("conftest", "traffic", "test_slots", "test_scheduler", "test_sequence")
    ]
    engine = [f"wkvm_jax.engine.{name}" for name in ("slots", "scheduler", "sequence")]
    code = f"import {', '.join([*engine, *tests, 'tests.conftest', 'sys'])}; assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
