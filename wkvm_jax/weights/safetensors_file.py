"""One safetensors file, memory-mapped.

The `safetensors` package copies each tensor when it is asked for; here the tensors are views of the
mapped file, so that a checkpoint of any size opens at once and a parameter is copied once, to its device.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from wkvm_jax.errors import CheckpointError
from wkvm_jax.weights.listing import quoted
from wkvm_jax.weights.mapped import map_file, view
from wkvm_jax.weights.sniff import MAX_HEADER_BYTES

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class _Entry:
    """What the header says of one tensor; `begin` and `end` count bytes after the header."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, each a read-only view of the mapped file; only the header is read.

    The data must hold exactly what the header tells, without a gap, an overlap or a rest, as the format
    demands.

    Raises:
        CheckpointError: the file cannot be read, is cut short, or its header is damaged or untrue.
    """
    buffer = map_file(path)
    header, data_start = _header(path, buffer)
    entries = [_entry(path, name, fields) for name, fields in header.items() if name != _METADATA]
    _check_layout(path, entries, buffer.size - data_start)
    tensors: dict[str, np.ndarray] = {}
    for entry in entries:
        try:
            tensors[entry.name] = view(buffer, entry.dtype, data_start + entry.begin, entry.shape)
        except ValueError as error:
            raise CheckpointError(
                path, f"{quoted(entry.name)} has a shape that cannot be held: {error}"
            ) from error
    return tensors


def _header(path: Path, buffer: np.ndarray) -> tuple[dict[str, object], int]:
    """The header's JSON object, and where the data begins."""
    if buffer.size < _LENGTH_BYTES:
        raise CheckpointError(
            path, f"is cut short: it has {buffer.size} bytes, too few for a safetensors file"
        )
    length = int.from_bytes(buffer[:_LENGTH_BYTES].tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            path, f"has a damaged header: {length} bytes, and the format allows {MAX_HEADER_BYTES}"
        )
    data_start = _LENGTH_BYTES + length
    if data_start > buffer.size:
        raise CheckpointError(
            path,
            f"is cut short: its header should have {length} bytes, and the file has {buffer.size}; "
            "fetch it again",
        )
    try:
        text = buffer[_LENGTH_BYTES:data_start].tobytes().decode("utf-8")
        header = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"has a damaged header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(path, "has a damaged header: it is no JSON object")
    return header, data_start


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it holds {quoted(name)} twice")
        found[name] = value
    return found


def _entry(path: Path, name: str, fields: object) -> _Entry:
    match fields:
        case {"dtype": str(dtype_name), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise CheckpointError(
                path, f"has a damaged header: {quoted(name)} has no dtype, shape and data_offsets"
            )
    if dtype_name not in _DTYPES:
        raise CheckpointError(
            path,
            f"{quoted(name)} has dtype {quoted(dtype_name)}, which is not read; {', '.join(_DTYPES)} are",
        )
    dtype = _DTYPES[dtype_name]
    if any(type(number) is not int or number < 0 for number in (begin, end, *shape)) or end < begin:
        raise CheckpointError(
            path, f"has a damaged header: the shape or the offsets of {quoted(name)} are no sizes"
        )
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise CheckpointError(
            path,
            f"has an untrue header: {quoted(name)}, {dtype_name} of shape {shape}, cannot lie in "
            f"{end - begin} bytes",
        )
    return _Entry(name, dtype, tuple(shape), begin, end)


def _check_layout(path: Path, entries: list[_Entry], data_bytes: int) -> None:
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            what = "overlaps the tensor before it" if entry.begin < position else "leaves a gap before it"
            raise CheckpointError(path, f"has an untrue header: {quoted(entry.name)} {what}")
        position = entry.end
    if position > data_bytes:
        raise CheckpointError(
            path,
            f"is cut short: its tensors should have {position} bytes, and there are {data_bytes}; "
            "fetch it again",
        )
    if position < data_bytes:
        raise CheckpointError(
            path, f"has an untrue header: {data_bytes - position} bytes follow the last tensor"
        )
