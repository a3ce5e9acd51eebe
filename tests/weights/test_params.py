"""A table turns tensors into parameters, and tells all that does not fit at once."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from wkvm_jax.errors import CheckpointError
from wkvm_jax.weights.checkpoint import Checkpoint, read_checkpoint
from wkvm_jax.weights.params import load_params
from wkvm_jax.weights.source import Source

from . import safetensors_writer

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3) / 7
VECTOR = np.array([1.0, 2.5, 1e-3], np.float16)
BRAIN = np.array([[[0.5, -3.0]]], ml_dtypes.bfloat16)
TENSORS: dict[str, np.ndarray] = {
    "emb": WEIGHT,
    "a.x": VECTOR,
    "b.x": -VECTOR,
    "k": BRAIN,
    "aux": np.ones(1, np.int64),
}


def as_it_is(array: np.ndarray) -> np.ndarray:
    return array


def one(name: str, *shape: int, build: Callable[..., np.ndarray] = as_it_is) -> Source:
    return Source((name,), (shape,), build)


def stack(*arrays: np.ndarray) -> np.ndarray:
    return np.stack(arrays)


TABLE = {
    "emb": one("emb", 2, 3),
    "head": one("emb", 2, 3, build=np.transpose),
    "blocks": [{"x": Source(("a.x", "b.x"), ((3,), (3,)), stack)}, (one("k", 2),)],
}


def only_aux(name: str) -> bool:
    return name == "aux"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return read_checkpoint(safetensors_writer.save_arrays(tmp_path / "weights", TENSORS))


def leaves(params: object) -> dict[str, jax.Array]:
    found: list[tuple[tuple[object, ...], jax.Array]] = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}


def test_builds_what_the_table_says(checkpoint: Checkpoint) -> None:
    params = load_params(checkpoint, TABLE, dtype=None, ignored=only_aux)
    assert str(jax.tree.structure(params)) == str(jax.tree.structure(TABLE))
    built = leaves(params)
    assert all(isinstance(leaf, jax.Array) for leaf in built.values())
    np.testing.assert_array_equal(built["emb"], WEIGHT)
    np.testing.assert_array_equal(built["head"], WEIGHT.T)
    np.testing.assert_array_equal(built["blocks.0.x"], np.stack([VECTOR, -VECTOR]))
    np.testing.assert_array_equal(built["blocks.1.0"], BRAIN.reshape(2))
    assert {path: leaf.dtype.name for path, leaf in built.items()} == {
        "emb": "float32",
        "head": "float32",
        "blocks.0.x": "float16",
        "blocks.1.0": "bfloat16",
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, "bfloat16", np.dtype(np.float32)])
def test_casts_on_the_host(checkpoint: Checkpoint, dtype: np.dtype | type | str) -> None:
    built = leaves(load_params(checkpoint, TABLE, dtype=dtype, ignored=only_aux))
    assert {leaf.dtype for leaf in built.values()} == {np.dtype(dtype)}
    np.testing.assert_array_equal(built["emb"], WEIGHT.astype(np.dtype(dtype)))
    np.testing.assert_array_equal(built["blocks.1.0"], BRAIN.reshape(2).astype(np.dtype(dtype)))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_some_paths_are_float32_whatever_the_others_are(checkpoint: Checkpoint, dtype: type | None) -> None:
    asked: list[str] = []

    def last_is_x(path: str) -> bool:
        asked.append(path)
        return path.endswith(".x")

    built = leaves(load_params(checkpoint, TABLE, dtype=dtype, float32_paths=last_is_x, ignored=only_aux))
    assert built["blocks.0.x"].dtype == np.float32
    np.testing.assert_array_equal(built["blocks.0.x"], np.stack([VECTOR, -VECTOR]).astype(np.float32))
    assert built["blocks.1.0"].dtype == ml_dtypes.bfloat16
    assert set(asked) == set(built)


def test_float64_becomes_what_jax_can_hold(tmp_path: Path) -> None:
    path = safetensors_writer.save_arrays(tmp_path / "weights", {"w": WEIGHT.astype(np.float64)})
    built = leaves(load_params(read_checkpoint(path), {"w": one("w", 2, 3)}, dtype=None))
    assert built["w"].dtype == jax.dtypes.canonicalize_dtype(np.float64)


def test_parameters_are_no_views_of_the_file(checkpoint: Checkpoint) -> None:
    built = leaves(load_params(checkpoint, TABLE, dtype=None, ignored=only_aux))
    with checkpoint.path.open("r+b") as file:
        file.seek(-sum(array.nbytes for array in TENSORS.values()), 2)
        file.write(bytes(24))
    assert not checkpoint.tensors["emb"].any()
    np.testing.assert_array_equal(built["emb"], WEIGHT)


def test_nan_and_infinity_pass(tmp_path: Path) -> None:
    odd = np.array([np.nan, np.inf, -np.inf], np.float32)
    path = safetensors_writer.save_arrays(tmp_path / "weights", {"w": odd})
    built = leaves(load_params(read_checkpoint(path), {"w": one("w", 3)}, dtype=jnp.bfloat16))
    np.testing.assert_array_equal(built["w"].astype(np.float32), odd)


def test_progress_counts_bytes(checkpoint: Checkpoint) -> None:
    calls: list[tuple[int, int]] = []
    load_params(
        checkpoint,
        TABLE,
        dtype=None,
        ignored=only_aux,
        progress=lambda done, total: calls.append((done, total)),
    )
    # The embedding counts twice, since two parameters are read from it.
    total = 2 * WEIGHT.nbytes + 2 * VECTOR.nbytes + BRAIN.nbytes
    assert len(calls) == 4
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_tells_everything_at_once_and_builds_nothing(checkpoint: Checkpoint) -> None:
    def never(_: np.ndarray) -> np.ndarray:
        raise AssertionError("built before the check")

    table = {
        "emb": one("emb", 3, 2, build=never),
        "x": one("a.x", 3, build=never),
        "lost": [one("lost", 4, build=never), one("lost", 4, build=never)],
        "aux": one("aux", 1, build=never),
    }
    with pytest.raises(CheckpointError) as caught:
        load_params(checkpoint, table, dtype=None)
    message = str(caught.value)
    for part in (
        str(checkpoint.path),
        "takes 4 tensors: 1 missing, 1 of a wrong shape, 1 of a wrong type, 2 unexpected",
        "missing: 'lost', expected with shape (4,)",
        "wrong shape: 'emb' has (2, 3), expected (3, 2)",
        "wrong type: 'aux' is int64",
        "unexpected: 'b.x' with shape (3,)",
        "unexpected: 'k' with shape (1, 1, 2)",
    ):
        assert part in message


def test_long_lists_of_faults_are_cut(checkpoint: Checkpoint) -> None:
    table = {"layers": [one(f"layers.{index}", 1) for index in range(500)]}
    with pytest.raises(CheckpointError) as caught:
        load_params(checkpoint, table, dtype=None)
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  ... and 485 more"


@pytest.mark.parametrize(
    ("shape", "fits"), [((2,), True), ((1, 2), True), ((2, 1, 1), True), ((1, 1), False), ((2, 2), False)]
)
def test_only_axes_of_length_one_may_differ(
    checkpoint: Checkpoint, shape: tuple[int, ...], fits: bool
) -> None:
    seen: list[tuple[int, ...]] = []

    def note(array: np.ndarray) -> np.ndarray:
        seen.append(array.shape)
        return array

    table = {"k": one("k", *shape, build=note)}
    if fits:
        load_params(checkpoint, table, dtype=None, ignored=lambda name: name != "k")
        assert seen == [shape]
    else:
        with pytest.raises(CheckpointError, match="wrong shape"):
            load_params(checkpoint, table, dtype=None, ignored=lambda name: name != "k")


def test_a_table_holds_sources_alone(checkpoint: Checkpoint) -> None:
    with pytest.raises(TypeError, match=r"a str at layers\.0"):
        load_params(checkpoint, {"layers": ["emb"]}, dtype=None)
