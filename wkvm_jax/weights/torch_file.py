"""torch's zip files (`.pth`, `.pt`, `.bin`), read without torch and without running what they say."""

import math
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from wkvm_jax.errors import CheckpointError
from wkvm_jax.weights.listing import quoted
from wkvm_jax.weights.mapped import map_file, view
from wkvm_jax.weights.sniff import ZIP_ERRORS, ZIP_SIGNATURE, is_data_pickle
from wkvm_jax.weights.torch_pickle import STORAGE_TYPES, PickleFaultError, Tensor, read_pickle

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_LOCAL_HEADER_BYTES = 30
_ENCRYPTED_FLAG = 0x1
_DTYPES = {
    name: np.dtype(ml_dtypes.bfloat16 if element == "bfloat16" else element)
    for name, element in STORAGE_TYPES.items()
}


def read_torch(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a torch zip file, each a read-only view of the mapped file.

    Only the zip's directory and the pickle are read, so the time goes with the number of tensors and not
    with their size; a checksum of the whole is therefore not verified. The file may hold the mapping of
    names to tensors itself, or wrap it as `state_dict`, `model_state_dict`, `model` or `module` beside
    things that are no tensors.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or holds anything but tensors by name.
    """
    archive = _open(path)
    try:
        content = read_pickle(archive.read("data.pkl"))
    except PickleFaultError as error:
        raise CheckpointError(path, str(error)) from error
    return {name: _array(archive, name, tensor) for name, tensor in _state_dict(path, content).items()}


@dataclass(frozen=True)
class _Archive:
    """The bytes of a zip file whose entries all lie in one folder, and where they are."""

    path: Path
    buffer: np.ndarray
    folder: str
    entries: dict[str, zipfile.ZipInfo]

    def span(self, entry: str) -> tuple[int, int]:
        """Where in the file the content of `entry` begins, and its size in bytes."""
        info = self.entries.get(f"{self.folder}/{entry}")
        if info is None:
            raise CheckpointError(self.path, f"is damaged: it has no entry {quoted(entry)}")
        if info.flag_bits & _ENCRYPTED_FLAG:
            raise CheckpointError(
                self.path, f"has an encrypted entry {quoted(entry)}: save it again with torch"
            )
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                self.path,
                f"has a compressed entry {quoted(entry)}, which torch never writes and which cannot be "
                "mapped: unpack it and pack it again uncompressed (zip -0), or save it again with torch",
            )
        header = self.buffer[max(info.header_offset, 0) :][:_LOCAL_HEADER_BYTES].tobytes()
        misplaced = info.header_offset < 0 or len(header) < _LOCAL_HEADER_BYTES
        if misplaced or not header.startswith(ZIP_SIGNATURE):
            raise CheckpointError(self.path, f"is damaged: the header of {quoted(entry)} is misplaced")
        name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
        start = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if info.compress_size != info.file_size or start + info.file_size > self.buffer.size:
            raise CheckpointError(self.path, f"is damaged: {quoted(entry)} reaches past the end of the file")
        return start, info.file_size

    def read(self, entry: str) -> bytes:
        """The content of `entry`, copied."""
        start, size = self.span(entry)
        return self.buffer[start : start + size].tobytes()


def _open(path: Path) -> _Archive:
    buffer = map_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except ZIP_ERRORS as error:
        raise CheckpointError(
            path,
            f"is a damaged zip file ({error}): a download or a copy was probably cut short; fetch it again",
        ) from error
    entries = {info.filename: info for info in infos}
    if len(entries) != len(infos):
        raise CheckpointError(path, "is damaged: its zip directory lists an entry twice")
    pickles = [name for name in entries if is_data_pickle(name)]
    if len(pickles) != 1:
        raise CheckpointError(path, f"is no torch checkpoint: it has {len(pickles)} data.pkl instead of one")
    archive_folder = pickles[0].removesuffix("/data.pkl")
    opened = _Archive(path, buffer, archive_folder, entries)
    # Files from before torch 2.1 have no such record; they are little-endian but for rare machines.
    if f"{archive_folder}/byteorder" in entries and opened.read("byteorder") != b"little":
        raise CheckpointError(
            path, "was saved on a big-endian machine: load it and save it again on a little-endian one"
        )
    return opened


def _state_dict(path: Path, content: object) -> dict[str, Tensor]:
    """The one mapping of names to tensors in `content`."""
    if not isinstance(content, dict):
        raise CheckpointError(path, f"holds a {type(content).__name__} and not tensors by name")
    tensors, fault = _only_tensors(content)
    if not fault:
        return tensors
    # One dict under several names is looked at once, so the time stays linear in the file.
    inner = {id(value): (name, value) for name, value in content.items() if isinstance(value, dict)}
    checked = [(name, *_only_tensors(value)) for name, value in inner.values()]
    wrapped = [(name, inner_tensors) for name, inner_tensors, inner_fault in checked if not inner_fault]
    if not tensors and len(wrapped) == 1 and wrapped[0][0] in _WRAPPERS:
        return wrapped[0][1]
    if wrapped:
        names = ", ".join(quoted(str(name)) for name, _ in wrapped[:9])
        fault += f"; it also has tensors by name under {names}"
    raise CheckpointError(path, f"{fault}. Save the plain weights: torch.save(model.state_dict(), path)")


def _only_tensors(mapping: dict[object, object]) -> tuple[dict[str, Tensor], str]:
    """The tensors of `mapping`, and what else is in it, or an empty string."""
    tensors: dict[str, Tensor] = {}
    fault = "" if mapping else "holds no tensors"
    for key, value in mapping.items():
        if isinstance(key, str) and isinstance(value, Tensor):
            tensors[key] = value
        elif not fault:
            kind = type(value).__name__
            fault = f"holds {quoted(str(key))} of type {kind}, where a state dict has only tensors"
    return tensors, fault


def _array(archive: _Archive, name: str, tensor: Tensor) -> np.ndarray:
    path, storage = archive.path, tensor.storage
    dtype = _DTYPES[storage.type_name]
    start, num_bytes = archive.span(f"data/{storage.key}")
    if storage.num_elements * dtype.itemsize > num_bytes:
        raise CheckpointError(
            path,
            f"is damaged: the storage of {quoted(name)} should have {storage.num_elements} elements of "
            f"{dtype}, and its entry has {num_bytes} bytes",
        )
    # A stride of 0 repeats an element, which is fine but for shapes made up to exhaust the reader.
    if math.prod(tensor.shape) * dtype.itemsize > archive.buffer.size:
        raise CheckpointError(path, f"{quoted(name)} of shape {tensor.shape} is larger than the whole file")
    last = tensor.offset + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    )
    if 0 not in tensor.shape and last >= storage.num_elements:
        raise CheckpointError(
            path,
            f"is damaged: {quoted(name)} reaches to element {last} of a storage of {storage.num_elements}",
        )
    first = start + tensor.offset * dtype.itemsize
    try:
        return view(archive.buffer, dtype, first, tensor.shape, tensor.strides)
    except ValueError as error:
        raise CheckpointError(path, f"{quoted(name)} has a shape that cannot be held: {error}") from error
