"""A writer of safetensors files whose header may say anything."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def save_raw(path: Path, header: object, data: bytes = b"") -> Path:
    path.write_bytes(raw(json.dumps(header).encode(), data))
    return path


def save_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> Path:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, array in arrays.items():
        header[name] = entry(DTYPES[array.dtype.name], list(array.shape), position, position + array.nbytes)
        position += array.nbytes
    return save_raw(path, header, b"".join(array.tobytes() for array in arrays.values()))
