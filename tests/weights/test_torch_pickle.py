"""The pickle is read as data: what torch writes is understood, anything else is refused and never run."""

import contextlib
import io
import pickle
import random
import subprocess
import sys
import time
import types
from collections import OrderedDict
from pathlib import Path

import pytest

from wkvm_jax.weights.torch_pickle import PickleFaultError, Storage, Tensor, read_pickle

from .torch_writer import (
    FALSE,
    HOOKS,
    ORDERED_DICT,
    REBUILD,
    call,
    mapping,
    named,
    number,
    numbers,
    parameter,
    pickled,
    row,
    storage,
    tensor,
    text,
)

HELD = storage("0", 6)
PLAIN = tensor(HELD, (2, 3), (3, 1))
EXPECTED = Tensor(Storage("0", "FloatStorage", 6), 0, (2, 3), (3, 1))


def fault_of(body: bytes) -> str:
    with pytest.raises(PickleFaultError) as caught:
        read_pickle(pickled(body))
    return str(caught.value)


def test_reads_a_tensor_a_parameter_and_module_versions() -> None:
    versions = mapping({"_metadata": mapping({"": mapping({"version": number(1)})})})
    body = ORDERED_DICT + b")R(" + text("a") + PLAIN + text("b") + parameter(PLAIN) + b"u" + versions + b"b"
    content = read_pickle(pickled(body))
    assert content == {"a": EXPECTED, "b": EXPECTED}
    assert not vars(content)


def test_reads_tensors_without_flags_and_without_hooks() -> None:
    assert read_pickle(pickled(PLAIN)) == EXPECTED
    without = call(REBUILD, HELD, number(0), numbers((2, 3)), numbers((3, 1)), FALSE, b"N", b"}")
    assert read_pickle(pickled(without)) == EXPECTED


def test_keeps_what_lies_beside_the_tensors() -> None:
    body = b"}(" + text("step") + number(2**40) + text("list") + b"](" + number(1) + number(2) + b"e"
    body += text("more") + b"]" + number(3) + b"a" + number(7) + b"\x88" + text("none") + b"Nu"
    body += text("rate") + b"G?\xb9\x99\x99\x99\x99\x99\x9as"
    assert read_pickle(pickled(body)) == {
        "step": 2**40,
        "list": [1, 2],
        "more": [3],
        7: True,
        "none": None,
        "rate": 0.1,
    }


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_reads_what_the_standard_pickler_writes(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("torch")
    utils = types.ModuleType("torch._utils")

    class FloatStorage:
        pass

    class FakeTensor:
        def __reduce__(self) -> tuple[object, ...]:
            return rebuild, (held, 0, (2, 3), (3, 1), False, OrderedDict())

    def rebuild() -> None:
        pass

    FloatStorage.__module__, FloatStorage.__qualname__ = "torch", "FloatStorage"
    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    monkeypatch.setitem(fake.__dict__, "FloatStorage", FloatStorage)
    monkeypatch.setitem(utils.__dict__, "_rebuild_tensor_v2", rebuild)
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    held = object()

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: object) -> tuple[object, ...] | None:
            return ("storage", FloatStorage, "0", "cpu", 6) if item is held else None

    content: OrderedDict[str, object] = OrderedDict(
        (f"weight.{number}", FakeTensor()) for number in range(300)
    )
    vars(content)["_metadata"] = OrderedDict({"": {"version": 2}})
    buffer = io.BytesIO()
    Pickler(buffer, protocol=protocol).dump(content)
    assert read_pickle(buffer.getvalue()) == dict.fromkeys(content, EXPECTED)


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("os", "system"),
        ("posix", "system"),
        ("subprocess", "Popen"),
        ("torch", "load"),
        ("torch", "Tensor"),
        ("torch.storage", "_load_from_bytes"),
        ("torch._utils", "_rebuild_tensor_v2.__globals__"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("torch", "FloatStorage.__init__"),
        ("collections", "OrderedDict.fromkeys"),
        ("collections", "Counter"),
        ("__main__", "Model"),
    ],
)
def test_names_the_global_that_it_refuses(module: str, attribute: str) -> None:
    for body in (named(module, attribute), text(module) + text(attribute) + b"\x93"):
        message = fault_of(call(body, text("1")))
        assert f"{module}.{attribute}" in message
        assert "nothing in the file was run" in message


def test_runs_nothing(tmp_path: Path) -> None:
    """A pickle that does run under `pickle.loads`, so that the absence of its trace means something."""
    trace = tmp_path / "trace"
    body = call(named("builtins", "open"), text(str(trace)), text("w"))
    subprocess.run(
        [sys.executable, "-c", "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"],
        input=pickled(body),
        check=True,
    )
    trace.unlink()
    assert "builtins.open" in fault_of(body)
    assert not trace.exists()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(named("torch", "FloatStorage") + row(number(1)) + b"R", id="call of a storage type"),
        pytest.param(call(ORDERED_DICT, b"]"), id="OrderedDict with arguments"),
        pytest.param(call(text("eval"), text("1")), id="call of a string"),
        pytest.param(call(PLAIN, text("1")), id="call of a tensor"),
        pytest.param(REBUILD + number(1) + b"R", id="arguments that are no tuple"),
        pytest.param(call(REBUILD), id="no arguments"),
        pytest.param(
            call(REBUILD, text("0"), number(0), numbers((1,)), numbers((1,)), FALSE, HOOKS), id="no storage"
        ),
        pytest.param(
            call(
                REBUILD,
                HELD,
                number(0),
                numbers((1,)),
                numbers((1,)),
                FALSE,
                mapping({"hook": ORDERED_DICT}),
            ),
            id="hooks",
        ),
        pytest.param(
            call(
                REBUILD,
                HELD,
                number(0),
                numbers((1,)),
                numbers((1,)),
                FALSE,
                HOOKS,
                mapping({"neg": b"\x88"}),
            ),
            id="negated",
        ),
        pytest.param(call(named("torch._utils", "_rebuild_parameter"), b"N", FALSE, HOOKS), id="no data"),
        pytest.param(REBUILD + mapping({"__globals__": b"}"}) + b"b", id="BUILD on a builder"),
        pytest.param(ORDERED_DICT + mapping({"__setstate__": REBUILD}) + b"b", id="BUILD on a class"),
        pytest.param(HOOKS + row(b"N", mapping({"update": REBUILD})) + b"b", id="BUILD with slots"),
        pytest.param(b"}" + mapping({"a": b"N"}) + b"b", id="BUILD on a dict"),
        pytest.param(PLAIN + mapping({"storage": b"N"}) + b"b", id="BUILD on a tensor"),
        pytest.param(ORDERED_DICT + b")\x81", id="NEWOBJ"),
        pytest.param(ORDERED_DICT + b")}\x92", id="NEWOBJ_EX"),
        pytest.param(b"(icollections\nOrderedDict\n", id="INST"),
        pytest.param(b"(" + ORDERED_DICT + b"o", id="OBJ"),
        pytest.param(b"\x82\x01", id="EXT1"),
        pytest.param(b"P0\n", id="PERSID"),
        pytest.param(b"C\x01a", id="bytes"),
        pytest.param(b"\x8f", id="set"),
        pytest.param(b"N2", id="DUP"),
        pytest.param(b"NN0", id="POP"),
        pytest.param(b"I1\n", id="INT"),
        pytest.param(b"S'a'\n", id="STRING"),
        pytest.param(b"N" + number(1) + b"a", id="append to None"),
        pytest.param(b")" + number(1) + number(2) + b"s", id="item of a tuple"),
        pytest.param(b"}" + PLAIN + b"Ns", id="tensor as key"),
        pytest.param(b"}NNs", id="None as key"),
    ],
)
def test_refuses(body: bytes) -> None:
    assert "nothing in the file was run" in fault_of(body)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"NN", id="two objects"),
        pytest.param(b"N(", id="open mark"),
        pytest.param(b"t", id="no mark"),
        pytest.param(b"u", id="no mark for items"),
        pytest.param(b"N(\x85", id="takes below a mark"),
        pytest.param(b"\x85", id="empty stack"),
        pytest.param(b"q\x00", id="stores nothing"),
        pytest.param(b"h\x05", id="recalls nothing"),
        pytest.param(b"}(" + text("a") + b"u", id="key without value"),
        pytest.param(b"X\xff\xff\xff\xffabc", id="string longer than the file"),
        pytest.param(b"\x8d" + b"\xff" * 8 + b"a", id="string longer than memory"),
        pytest.param(b"X\x01\x00\x00\x00\xff", id="not UTF-8"),
        pytest.param(b"\x8b\xff\xff\xff\x7f1", id="integer longer than the file"),
        pytest.param(b"\x8b\xff\xff\xff\xff1", id="integer of negative length"),
        pytest.param(number(2**63), id="integer too long"),
        pytest.param(number(-(2**63)), id="negative integer too long"),
        pytest.param(b"\x00", id="no opcode"),
        pytest.param(number(1) + text("a") + b"\x93", id="number as a module"),
        pytest.param(b"cos\nsystem", id="line without an end"),
        pytest.param(b"N.N", id="more after the end"),
        pytest.param(b"N." + pickled(named("os", "system")), id="a second pickle"),
        pytest.param(text("0") + b"Q", id="storage described by a string"),
        pytest.param(row(text("module"), *[text("0")] * 4) + b"Q", id="no storage"),
        pytest.param(storage("0", -1), id="storage of negative size"),
        pytest.param(tensor(HELD, (2,), (1,), -1), id="negative offset"),
        pytest.param(tensor(HELD, (-2,), (1,)), id="negative shape"),
        pytest.param(tensor(HELD, (2,), (-1,)), id="negative stride"),
        pytest.param(tensor(HELD, (2,), ()), id="fewer strides"),
        pytest.param(tensor(HELD, (1,) * 65, (1,) * 65), id="too many axes"),
        pytest.param(
            call(REBUILD, HELD, FALSE, numbers((1,)), numbers((1,)), FALSE, HOOKS), id="bool as offset"
        ),
        pytest.param(call(REBUILD, HELD, number(0), b"]", b"]", FALSE, HOOKS), id="lists as shape"),
        pytest.param(
            call(REBUILD, HELD, number(0), row(text("1")), numbers((1,)), FALSE, HOOKS), id="string as size"
        ),
    ],
)
def test_says_that_it_is_damaged(body: bytes) -> None:
    assert "its pickle is damaged" in fault_of(body)


def test_refuses_a_name_twice() -> None:
    assert "'a' twice" in fault_of(b"}(" + (text("a") + PLAIN) * 2 + b"u")


def test_bombs_cost_nothing() -> None:
    started = time.monotonic()
    # Python's unpickler reserves 32 GB for this memo index.
    assert read_pickle(pickled(PLAIN + b"r\xff\xff\xff\x7f")) == EXPECTED
    # A tuple of itself twice, 200 times over: to hash or print it would take for ever.
    nested = b")" + b"q\x00h\x00\x86" * 200
    assert "a key of type tuple" in fault_of(b"}" + nested + b"Ns")
    assert "with arguments" in fault_of(call(ORDERED_DICT, nested))
    assert "a call of something" in fault_of(nested + b")R")
    # As deep as a file can say it.
    read_pickle(pickled(b")" + b"\x85" * 100_000))
    assert "while" not in fault_of(call(named("a" * 10_000, "b" * 10_000)))
    assert len(fault_of(call(named("a" * 10_000, "b" * 10_000)))) < 1_000
    assert time.monotonic() - started < 20


def test_damage_is_always_told() -> None:
    """Whatever bytes change, the answer is an object or a `PickleFaultError`."""
    random_source = random.Random(0)
    whole = pickled(mapping({f"layer.{index}.weight": PLAIN for index in range(4)}))
    for _ in range(3_000):
        damaged = bytearray(whole)
        for _ in range(random_source.randint(1, 4)):
            damaged[random_source.randrange(len(damaged))] = random_source.randrange(256)
        if random_source.random() < 0.2:
            del damaged[random_source.randrange(len(damaged)) :]
        with contextlib.suppress(PickleFaultError):
            read_pickle(bytes(damaged))
