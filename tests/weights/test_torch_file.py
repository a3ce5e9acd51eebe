"""torch zip files: right values from any strides, and a clear error for any damage."""

import random
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from wkvm_jax.errors import CheckpointError
from wkvm_jax.weights.torch_file import read_torch

from .torch_writer import (
    STORAGE_TYPES,
    call,
    mapping,
    named,
    number,
    pickled,
    save,
    save_arrays,
    state_dict,
    storage,
    tensor,
    text,
)

SIX = np.arange(6, dtype=np.float32)


def fault_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_torch(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.mark.parametrize("folder", ["a", "ab", "abc", "model"])
def test_reads_every_type_at_any_alignment(path: Path, folder: str) -> None:
    whole = np.array([[1, 0, 3], [4, 5, 6]])
    arrays = {name: whole.astype(np.dtype(name)) for name in STORAGE_TYPES}
    read = read_torch(save_arrays(path, arrays, folder))
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)
        np.testing.assert_array_equal(read[name].astype(np.float64), array.astype(np.float64))


def test_bfloat16_keeps_its_bits(path: Path) -> None:
    bits = np.array([0x3F80, 0x8000, 0x7F80, 0x0001, 0xC2C8], np.uint16)
    read = read_torch(save_arrays(path, {"w": bits.view(ml_dtypes.bfloat16)}))["w"]
    np.testing.assert_array_equal(read.view(np.uint16), bits)


def test_arrays_are_read_only_views_of_the_file(path: Path) -> None:
    read = read_torch(save_arrays(path, {"w": SIX}))["w"]
    assert not read.flags.owndata
    assert not read.flags.writeable
    content = bytearray(path.read_bytes())
    position = content.index(SIX.tobytes())
    with path.open("r+b") as file:
        file.seek(position)
        file.write(np.float32(42).tobytes())
    assert read[0] == 42


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "expected"),
    [
        ((3, 2), (1, 3), 0, SIX.reshape(2, 3).T),
        ((2, 2), (3, 1), 1, SIX.reshape(2, 3)[:, 1:]),
        ((3,), (2,), 1, SIX[1::2]),
        ((2, 3), (0, 1), 3, np.stack([SIX[3:], SIX[3:]])),
        ((), (), 5, SIX[5]),
        ((0, 3), (3, 1), 6, np.empty((0, 3))),
        ((1, 1, 6), (2**62, 7, 1), 0, SIX.reshape(1, 1, 6)),
    ],
)
def test_strides_and_offsets(
    path: Path, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, expected: np.ndarray
) -> None:
    body = mapping({"w": tensor(storage("0", 6), shape, strides, offset)})
    read = read_torch(save(path, pickled(body), {"0": SIX.tobytes()}))["w"]
    assert read.shape == shape
    assert not read.flags.writeable
    np.testing.assert_array_equal(read, expected)


def test_tensors_may_share_a_storage(path: Path) -> None:
    held = storage("0", 6)
    body = mapping({"a": tensor(held, (6,), (1,)), "b": tensor(held, (2, 3), (3, 1))})
    read = read_torch(save(path, pickled(body), {"0": SIX.tobytes()}))
    np.testing.assert_array_equal(read["a"].reshape(2, 3), read["b"])


def test_no_byteorder_record_means_little_endian(path: Path) -> None:
    body, storages = state_dict({"w": SIX})
    np.testing.assert_array_equal(read_torch(save(path, pickled(body), storages, byteorder=None))["w"], SIX)


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model", "module"])
def test_unwraps_the_one_mapping_of_tensors(path: Path, wrapper: str) -> None:
    body, storages = state_dict({"w": SIX})
    outer = mapping({"epoch": number(3), "optimizer": mapping({"step": number(1)}), wrapper: body})
    np.testing.assert_array_equal(read_torch(save(path, pickled(outer), storages))["w"], SIX)


def test_refuses_to_choose(path: Path) -> None:
    body, storages = state_dict({"w": SIX})
    save(path, pickled(mapping({"model": body, "ema": body})), storages)
    message = fault_of(path)
    assert "under 'model', 'ema'" in message
    save(path, pickled(mapping({"moments": body})), storages)
    assert "under 'moments'" in fault_of(path)
    save(path, pickled(mapping({"w": tensor(storage("0", 6), (6,), (1,)), "model": body})), storages)
    assert "holds 'model' of type dict, where a state dict has only tensors" in fault_of(path)


def test_refuses_what_is_no_mapping_of_tensors(path: Path) -> None:
    assert "holds no tensors" in fault_of(save(path, pickled(b"}"), {}))
    assert "holds a list" in fault_of(save(path, pickled(b"]"), {}))
    assert "holds '7'" in fault_of(save(path, pickled(b"}" + number(7) + b"Ns"), {}))
    assert "holds 'epoch' of type int" in fault_of(save(path, pickled(mapping({"epoch": number(1)})), {}))
    # A mapping that holds itself.
    itself = b"}q\x00(" + text("model") + b"h\x00u"
    assert "holds 'model' of type dict" in fault_of(save(path, pickled(itself), {}))


def test_names_a_refused_global(path: Path) -> None:
    body = mapping({"w": call(named("os", "system"), text("true"))})
    message = fault_of(save(path, pickled(body), {}))
    assert "'os.system'" in message
    assert "nothing in the file was run" in message


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "fault"),
    [
        ((7,), (1,), 0, "reaches to element 6 of a storage of 6"),
        ((6,), (1,), 1, "reaches to element 6"),
        ((2, 3), (4, 1), 0, "reaches to element 6"),
        ((1,), (1,), 6, "reaches to element 6"),
        ((), (), 2**62, "reaches to element"),
        ((2,), (2**62,), 0, "reaches to element"),
        ((2**40,), (0,), 0, "larger than the whole file"),
        ((2**62, 2**62), (0, 0), 0, "larger than the whole file"),
        ((0, 2**62, 2**62), (1, 1, 1), 0, "cannot be held"),
    ],
)
def test_shapes_stay_inside_the_storage(
    path: Path, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, fault: str
) -> None:
    body = mapping({"w": tensor(storage("0", 6), shape, strides, offset)})
    message = fault_of(save(path, pickled(body), {"0": SIX.tobytes()}))
    assert fault in message
    assert "'w'" in message


@pytest.mark.parametrize(
    ("count", "key", "fault"),
    [
        (7, "0", "should have 7 elements of float32, and its entry has 24 bytes"),
        (2**62, "0", "and its entry has 24 bytes"),
        (6, "1", "has no entry 'data/1'"),
        (6, "../data.pkl", "has no entry"),
        (6, "/etc/hostname", "has no entry"),
    ],
)
def test_storages_are_what_they_claim(path: Path, count: int, key: str, fault: str) -> None:
    body = mapping({"w": tensor(storage(key, count), (6,), (1,))})
    assert fault in fault_of(save(path, pickled(body), {"0": SIX.tobytes()}))


def test_refuses_big_endian(path: Path) -> None:
    body, storages = state_dict({"w": SIX})
    assert "big-endian" in fault_of(save(path, pickled(body), storages, byteorder=b"big"))


def test_refuses_compressed_entries(path: Path) -> None:
    body, storages = state_dict({"w": SIX})
    save(path, pickled(body), storages, compression=zipfile.ZIP_DEFLATED)
    assert "compressed entry 'byteorder'" in fault_of(path)


def test_refuses_encrypted_entries(path: Path) -> None:
    content = bytearray(save_arrays(path, {"w": SIX}).read_bytes())
    for position in _every(content, b"PK\x01\x02"):
        content[position + 8] |= 1
    path.write_bytes(content)
    assert "encrypted" in fault_of(path)


def test_refuses_two_pickles_and_none(path: Path) -> None:
    with zipfile.ZipFile(save_arrays(path, {"w": SIX}), "a") as archive:
        archive.writestr("other/data.pkl", pickled(b"}"))
    assert "it has 2 data.pkl" in fault_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("array.npy", b"")
    assert "it has 0 data.pkl" in fault_of(path)


def test_refuses_an_entry_twice(path: Path) -> None:
    save_arrays(path, {"w": SIX})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("archive/data/0", bytes(24))
    assert "lists an entry twice" in fault_of(path)


def test_headers_must_be_where_the_directory_says(path: Path) -> None:
    content = bytearray(save_arrays(path, {"w": SIX}).read_bytes())
    content[0:4] = b"XXXX"
    path.write_bytes(content)
    assert "the header of 'data.pkl' is misplaced" in fault_of(path)
    content[0:4] = b"PK\x03\x04"
    # The name's length in the local header decides where the content begins.
    for position in _every(content, b"PK\x03\x04"):
        content[position + 26 : position + 28] = b"\xff\xff"
    path.write_bytes(content)
    assert "reaches past the end" in fault_of(path)


def test_missing_empty_and_odd_files(path: Path, tmp_path: Path) -> None:
    assert "cannot be opened" in fault_of(path)
    path.write_bytes(b"")
    assert "is empty" in fault_of(path)
    assert "is not a regular file" in fault_of(tmp_path)


def test_every_truncation_is_told(path: Path, tmp_path: Path) -> None:
    content = save_arrays(path, {"w": SIX, "v": SIX}).read_bytes()
    cut = tmp_path / "cut"
    for size in range(1, len(content), 7):
        cut.write_bytes(content[:size])
        assert "cut short" in fault_of(cut)


def test_damage_is_always_told(path: Path, tmp_path: Path) -> None:
    """Whatever bytes change, the answer is arrays that can be touched or a `CheckpointError`."""
    random_source = random.Random(1)
    content = save_arrays(path, {"w": SIX, "v": SIX.reshape(2, 3)}).read_bytes()
    damaged_path = tmp_path / "damaged"
    for _ in range(1_500):
        damaged = bytearray(content)
        for _ in range(random_source.randint(1, 3)):
            damaged[random_source.randrange(len(damaged))] = random_source.choice([0, 1, 127, 128, 255])
        damaged_path.write_bytes(damaged)
        try:
            for array in read_torch(damaged_path).values():
                array.tobytes()
        except CheckpointError:
            pass


def _every(content: bytearray, signature: bytes) -> list[int]:
    return [position for position in range(len(content)) if content.startswith(signature, position)]
