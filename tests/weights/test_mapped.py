"""Files as arrays, and views that stay inside them."""

import os
from pathlib import Path

import numpy as np
import pytest

from wkvm_jax.errors import CheckpointError
from wkvm_jax.weights.mapped import map_file, view

FLOAT = np.dtype(np.float32)


def test_a_view_outlives_the_file_and_the_mapping(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" + np.arange(6, dtype=np.float32).tobytes())
    array = view(map_file(path), FLOAT, 1, (2, 3))
    path.unlink()
    np.testing.assert_array_equal(array, np.arange(6).reshape(2, 3))
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1


def test_what_cannot_be_mapped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name, fault in (("missing", "cannot be opened"), ("pipe", "not a regular"), ("empty", "is empty")):
        with pytest.raises(CheckpointError, match=fault):
            map_file(tmp_path / name)


@pytest.mark.parametrize(
    ("start", "shape", "strides"),
    [
        (0, (7,), None),
        (1, (6,), None),
        (-4, (1,), None),
        (25, (), None),
        (0, (2,), (6,)),
        (4, (2,), (-2,)),
        (0, (2**62,), (2**62,)),
        (0, (2**70,), None),
        (2**70, (1,), None),
        (0, (0, 2**62, 2**62), None),
        (0, (1,) * 65, None),
    ],
)
def test_views_stay_inside(start: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError):
        view(np.zeros(24, np.uint8), FLOAT, start, shape, strides)
