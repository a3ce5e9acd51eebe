"""safetensors files: views of the right values, and a clear error where the header or the size is untrue."""

import json
import random
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from wkvm_jax.errors import CheckpointError
from wkvm_jax.weights.safetensors_file import read_safetensors

from .safetensors_writer import DTYPES, entry, raw, save_arrays, save_raw

SIX = np.arange(6, dtype=np.float32)


def fault_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def test_reads_every_type_at_any_alignment(path: Path) -> None:
    whole = np.array([[1, 0, 3], [4, 5, 6]])
    # A first tensor of one byte puts all others at odd places.
    arrays = {"shift": np.array([7], np.int8)}
    arrays |= {name: whole.astype(np.dtype(name)) for name in DTYPES}
    read = read_safetensors(save_arrays(path, arrays))
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name].astype(np.float64), array.astype(np.float64))


def test_reads_what_the_library_writes(path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "a": SIX.reshape(2, 3),
        "b": np.arange(4, dtype=np.float16),
        "c": np.array([[0.5, -3.0]], ml_dtypes.bfloat16),
        "scalar": np.array(2.0, np.float32),
        "empty": np.empty((0, 4), np.float32),
    }
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    read = read_safetensors(path)
    assert set(read) == set(arrays)
    for name, array in arrays.items():
        assert read[name].shape == array.shape
        np.testing.assert_array_equal(read[name].astype(np.float32), array.astype(np.float32))


def test_arrays_are_read_only_views_of_the_file(path: Path) -> None:
    read = read_safetensors(save_arrays(path, {"w": SIX}))["w"]
    assert not read.flags.owndata
    assert not read.flags.writeable
    with path.open("r+b") as file:
        file.seek(-24, 2)
        file.write(np.float32(42).tobytes())
    assert read[0] == 42


def test_a_large_file_opens_without_being_read(path: Path) -> None:
    rows, columns = 1 << 20, 1 << 12
    header = json.dumps({"w": entry("F32", [rows, columns], 0, 4 * rows * columns)}).encode()
    path.write_bytes(raw(header))
    with path.open("r+b") as file:
        # 16 GiB, of which the file system stores nothing.
        file.truncate(8 + len(header) + 4 * rows * columns)
    read = read_safetensors(path)["w"]
    assert read.shape == (rows, columns)
    assert read[-1, -1] == 0


def test_metadata_is_no_tensor(path: Path) -> None:
    assert list(read_safetensors(save_arrays(path, {"w": SIX}, {"format": "pt"}))) == ["w"]
    assert read_safetensors(save_raw(path, {})) == {}


@pytest.mark.parametrize(
    ("header", "data_bytes", "fault"),
    [
        (
            {"w": entry("F32", [6], 0, 24)},
            20,
            "cut short: its tensors should have 24 bytes, and there are 20",
        ),
        ({"w": entry("F32", [6], 0, 24)}, 25, "1 bytes follow the last tensor"),
        ({"w": entry("F32", [7], 0, 24)}, 24, "cannot lie in 24 bytes"),
        ({"w": entry("F32", [2**40, 2**40], 0, 24)}, 24, "cannot lie in 24 bytes"),
        ({"w": entry("F32", [6], 4, 28)}, 28, "leaves a gap"),
        ({"v": entry("F32", [6], 0, 24), "w": entry("F32", [6], 20, 44)}, 44, "'w' overlaps"),
        ({"v": entry("F32", [6], 0, 24), "w": entry("F32", [6], 0, 24)}, 24, "overlaps"),
        ({"w": entry("F32", [-6], 0, 24)}, 24, "no sizes"),
        ({"w": entry("F32", [6], 24, 0)}, 24, "no sizes"),
        ({"w": entry("F32", [6], -24, 0)}, 24, "no sizes"),
        ({"w": {"dtype": "F32", "shape": [6.0], "data_offsets": [0, 24]}}, 24, "no sizes"),
        ({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, 4, "no sizes"),
        (
            {"w": {"dtype": "F32", "shape": 6, "data_offsets": [0, 24]}},
            24,
            "no dtype, shape and data_offsets",
        ),
        ({"w": {"dtype": "F32", "shape": [6]}}, 24, "no dtype, shape and data_offsets"),
        ({"w": {"dtype": "F32", "shape": [6], "data_offsets": [0]}}, 24, "no dtype, shape"),
        ({"w": [1]}, 24, "no dtype, shape and data_offsets"),
        ({"w": entry("F4", [6], 0, 3)}, 3, "dtype 'F4', which is not read"),
        ({"w": entry("F32", [0, 2**62, 2**62], 0, 0)}, 0, "cannot be held"),
        ({"w": entry("F32", [1] * 100, 0, 4)}, 4, "cannot be held"),
        ([], 0, "no JSON object"),
    ],
)
def test_refuses_untrue_headers(path: Path, header: object, data_bytes: int, fault: str) -> None:
    assert fault in fault_of(save_raw(path, header, bytes(data_bytes)))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is empty"),
        (b"\x08\x00", "too few for a safetensors file"),
        ((2**63).to_bytes(8, "little") + b"{}", "damaged header"),
        ((2**20).to_bytes(8, "little") + b"{}", "cut short: its header should have 1048576 bytes"),
        (raw(b"{"), "damaged header"),
        (raw(b"\xff\xfe"), "damaged header"),
        (raw(b"[" * 200_000), "damaged header"),
        (raw(b'{"w": 1' + b"0" * 5_000 + b"}"), "damaged header"),
        (raw(b'{"w": {"dtype": "F32"}, "w": {}}'), "it holds 'w' twice"),
    ],
)
def test_refuses_damaged_headers(path: Path, content: bytes, fault: str) -> None:
    path.write_bytes(content)
    assert fault in fault_of(path)


def test_every_truncation_is_told(path: Path, tmp_path: Path) -> None:
    content = save_arrays(path, {"w": SIX, "v": SIX}).read_bytes()
    cut = tmp_path / "cut"
    for size in range(1, len(content)):
        cut.write_bytes(content[:size])
        assert "cut short" in fault_of(cut)


def test_damage_is_always_told(path: Path, tmp_path: Path) -> None:
    """Whatever bytes change, the answer is arrays that can be touched or a `CheckpointError`."""
    random_source = random.Random(2)
    content = save_arrays(path, {"w": SIX, "v": SIX.reshape(2, 3)}, {"format": "pt"}).read_bytes()
    damaged_path = tmp_path / "damaged"
    for _ in range(1_500):
        damaged = bytearray(content)
        for _ in range(random_source.randint(1, 3)):
            damaged[random_source.randrange(len(damaged))] = random_source.choice(b'\0\1\x7f\xff09-.e{}[]",')
        damaged_path.write_bytes(damaged)
        try:
            for array in read_safetensors(damaged_path).values():
                array.tobytes()
        except CheckpointError:
            pass
