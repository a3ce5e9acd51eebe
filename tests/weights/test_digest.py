"""The digest changes with the weights and with nothing else."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from wkvm_jax.weights.digest import weights_digest

PARAMS = {
    "emb": np.arange(6, dtype=np.float32).reshape(2, 3),
    "blocks": [{"w": np.array([0.5, -3.0], ml_dtypes.bfloat16)}, {"w": np.float16(2.0)}],
    "none": np.empty((0, 3), np.float32),
}


class Pair(NamedTuple):
    w: np.ndarray


def test_is_short_and_always_the_same() -> None:
    # Written down, since saved states compare it across versions and machines.
    assert weights_digest(PARAMS) == "f88e7d5bf20b66fa160322d262d2f8ac"


def test_does_not_depend_on_device_layout_or_container() -> None:
    expected = weights_digest(PARAMS)
    assert weights_digest(jax.tree.map(jnp.asarray, PARAMS)) == expected
    same = {
        "none": PARAMS["none"],
        "blocks": (Pair(np.array([0.5, -3.0], ml_dtypes.bfloat16)), {"w": np.float16(2.0)}),
        "emb": np.asfortranarray(PARAMS["emb"]),
    }
    assert weights_digest(same) == expected


@pytest.mark.parametrize(
    "other",
    [
        {"w": np.array([1.0, 0.0, 3.0, 2.0], np.float32)},
        {"w": np.array([1.0, -0.0, 2.0, 3.0], np.float32)},
        {"w": np.array([[1.0, 0.0], [2.0, 3.0]], np.float32)},
        {"w": np.array([1.0, 0.0, 2.0, 3.0], np.float32).view(np.int32)},
        {"v": np.array([1.0, 0.0, 2.0, 3.0], np.float32)},
        {"w": {"w": np.array([1.0, 0.0, 2.0, 3.0], np.float32)}},
        {"w": [np.array([1.0, 0.0], np.float32), np.array([2.0, 3.0], np.float32)]},
        {},
    ],
)
def test_any_difference_changes_it(other: object) -> None:
    assert weights_digest({"w": np.array([1.0, 0.0, 2.0, 3.0], np.float32)}) != weights_digest(other)


def test_every_byte_of_a_large_array_counts() -> None:
    # Larger than the pieces that threads take, and no multiple of them.
    large = np.zeros((33 << 20) + 5, np.uint8)
    digests = {weights_digest([large])}
    for position in (0, (16 << 20) - 1, 16 << 20, large.size - 1):
        large[position] = 1
        digests.add(weights_digest([large]))
    assert len(digests) == 5


def test_refuses_what_is_no_array_of_numbers() -> None:
    with pytest.raises(TypeError, match=r"the leaf blocks\.0"):
        weights_digest({"blocks": ["text"]})
    with pytest.raises(ValueError, match=r"two leaves have the path a\.b"):
        weights_digest({"a": {"b": 1.0}, "a.b": 1.0})
