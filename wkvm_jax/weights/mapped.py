"""A file as an array of bytes that the operating system pages in when they are touched."""

import math
import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np

from wkvm_jax.errors import CheckpointError


def open_regular(path: Path) -> BinaryIO:
    """Open `path` to read bytes.

    Raises:
        CheckpointError: it cannot be opened, or is no regular file.
    """
    try:
        # O_NONBLOCK, since opening a named pipe would otherwise wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(path, f"cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(path, "is not a regular file")
    return open(descriptor, "rb")


def map_file(path: Path) -> np.ndarray:
    """Map `path` read-only, as `uint8[size]`; nothing is read yet.

    The mapping lives as long as any view of it. A file that somebody shortens meanwhile kills the process
    on the next touch (SIGBUS): copy what must outlive the file.

    Raises:
        CheckpointError: the file cannot be opened, is no regular file, or is empty.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise CheckpointError(path, "is empty (0 bytes)")
        try:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(path, f"cannot be mapped into memory: {error.strerror}") from error
    return np.frombuffer(mapping, dtype=np.uint8)


def view(
    buffer: np.ndarray,
    dtype: np.dtype,
    start: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
) -> np.ndarray:
    """A read-only array over bytes of `buffer`, beginning at `start`; `strides` count elements.

    Without strides it is contiguous, the last axis fastest. Nothing is copied, so the array need not be
    aligned.

    Raises:
        ValueError: it would reach outside `buffer`, or is of a shape that NumPy cannot hold.
    """
    if strides is None:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    # The stride of an axis of length 1 is never walked, so whatever the file says of it is dropped.
    byte_strides = tuple(
        dtype.itemsize * (stride if size > 1 else 1) for size, stride in zip(shape, strides, strict=True)
    )
    try:
        if 0 in shape:
            array: np.ndarray = np.empty(shape, dtype)
        else:
            array = np.ndarray(shape, dtype, buffer=buffer, offset=start, strides=byte_strides)
    except (OverflowError, TypeError, MemoryError) as error:
        raise ValueError(str(error)) from error
    array.flags.writeable = False
    return array
