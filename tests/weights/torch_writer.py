"""A writer of torch's zip format, opcode by opcode; it also writes what torch never would."""

import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

STORAGE_TYPES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    encoded = pickle.encode_long(value)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def row(*items: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(items) + b"t"


def numbers(values: tuple[int, ...]) -> bytes:
    return row(*map(number, values))


def named(module: str, attribute: str) -> bytes:
    """A global."""
    return f"c{module}\n{attribute}\n".encode()


def call(callee: bytes, *arguments: bytes) -> bytes:
    return callee + row(*arguments) + b"R"


def mapping(items: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


FALSE = b"\x89"
ORDERED_DICT = named("collections", "OrderedDict")
HOOKS = call(ORDERED_DICT)
REBUILD = named("torch._utils", "_rebuild_tensor_v2")


def storage(key: str, count: int, kind: str = "FloatStorage") -> bytes:
    return row(text("storage"), named("torch", kind), text(key), text("cpu"), number(count)) + b"Q"


def tensor(held: bytes, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    return call(REBUILD, held, number(offset), numbers(shape), numbers(strides), FALSE, HOOKS)


def parameter(held: bytes) -> bytes:
    return call(named("torch._utils", "_rebuild_parameter"), held, b"\x88", HOOKS)


def pickled(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def save(
    path: Path,
    data_pickle: bytes,
    storages: Mapping[str, bytes],
    *,
    folder: str = "archive",
    byteorder: bytes | None = b"little",
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """Write a zip file as torch lays it out, with these bytes as its pickle and its storages."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(f"{folder}/data.pkl", data_pickle)
        if byteorder is not None:
            archive.writestr(f"{folder}/byteorder", byteorder)
        for key, content in storages.items():
            archive.writestr(f"{folder}/data/{key}", content)
        archive.writestr(f"{folder}/version", b"3\n")
    return path


def state_dict(arrays: Mapping[str, np.ndarray]) -> tuple[bytes, dict[str, bytes]]:
    """The opcodes of a mapping of contiguous tensors, and its storages."""
    storages = {str(position): array.tobytes() for position, array in enumerate(arrays.values())}
    items = {}
    for key, (name, array) in zip(storages, arrays.items(), strict=True):
        strides = tuple(stride // array.itemsize for stride in np.empty(array.shape, array.dtype).strides)
        held = storage(key, array.size, STORAGE_TYPES[array.dtype.name])
        items[name] = tensor(held, array.shape, strides)
    return mapping(items), storages


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray], folder: str = "archive") -> Path:
    body, storages = state_dict(arrays)
    return save(path, pickled(body), storages, folder=folder)
