"""From a checkpoint's tensors to a model's parameters, by the name table that its family supplies."""

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import numpy.typing as npt

from wkvm_jax.errors import CheckpointError
from wkvm_jax.weights.checkpoint import Checkpoint
from wkvm_jax.weights.listing import listed, quoted
from wkvm_jax.weights.source import Source

_FLOATS = frozenset(np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))


def _never(_: str) -> bool:
    return False


def load_params(
    checkpoint: Checkpoint,
    table: Mapping[str, object],
    *,
    dtype: npt.DTypeLike | None,
    float32_paths: Callable[[str], bool] = _never,
    ignored: Callable[[str], bool] = _never,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, object]:
    """The parameters of a model: `table` with a `jax.Array` in the place of each `Source`.

    Everything is checked before anything is read. Then parameters are read, built, cast and moved to the
    default device one by one, so the host needs the memory of one parameter beside the result. Casts happen
    on the host, so every device gets the same bits. NaN and infinity pass.

    Args:
        checkpoint: where the tensors are.
        table: nested dicts, lists and tuples with a `Source` at each leaf. Shapes must be equal, but for
            axes of length 1: some tools store a vector as `[1, 1, d]`. `build` gets the table's shape.
        dtype: what parameters are cast to. None keeps each as it is stored (float64 becomes float32 unless
            JAX has 64-bit types enabled).
        float32_paths: says of a parameter's path in the table, such as `blocks.0.att.w0`, that it is float32
            whatever `dtype` is.
        ignored: says of a tensor's name that it may be in the checkpoint though no `Source` uses it.
        progress: called after each parameter with the bytes of the checkpoint done, and all there are to do.

    Raises:
        CheckpointError: tensors are missing, unexpected, of another shape or of no floating-point type; all
            of them are in the one message.
        TypeError: a leaf of the table is no `Source`.
    """
    import jax

    target = None if dtype is None else np.dtype(dtype)
    leaves, structure = jax.tree_util.tree_flatten_with_path(table)
    sources: list[tuple[str, Source]] = []
    for key_path, source in leaves:
        path = jax.tree_util.keystr(key_path, simple=True, separator=".")
        if not isinstance(source, Source):
            raise TypeError(f"the table holds a {type(source).__name__} at {path}, not a Source")
        sources.append((path, source))
    _check(checkpoint, [source for _, source in sources], ignored)
    total_bytes = sum(_source_bytes(checkpoint, source) for _, source in sources)
    done_bytes = 0
    arrays = []
    for path, source in sources:
        tensors = [
            checkpoint.tensors[name].reshape(shape)
            for name, shape in zip(source.names, source.shapes, strict=True)
        ]
        built = source.build(*tensors)
        wanted = np.dtype(np.float32) if float32_paths(path) else (target or built.dtype)
        # Always a copy: on the CPU a device array may share its memory, and must not be the file.
        host = np.array(built, dtype=jax.dtypes.canonicalize_dtype(wanted), order="C", copy=True)
        # Waiting frees the host copy before the next one is made.
        arrays.append(jax.device_put(host).block_until_ready())
        done_bytes += _source_bytes(checkpoint, source)
        if progress is not None:
            progress(done_bytes, total_bytes)
    params: dict[str, object] = jax.tree_util.tree_unflatten(structure, arrays)
    return params


def _source_bytes(checkpoint: Checkpoint, source: Source) -> int:
    return sum(checkpoint.tensors[name].nbytes for name in source.names)


def _check(checkpoint: Checkpoint, sources: list[Source], ignored: Callable[[str], bool]) -> None:
    """Raise one error for all that does not fit between the checkpoint and the table."""
    missing: list[str] = []
    shapes: list[str] = []
    dtypes: list[str] = []
    used: dict[str, None] = {}
    for source in sources:
        for name, shape in zip(source.names, source.shapes, strict=True):
            first_use = name not in used
            used[name] = None
            if name not in checkpoint.tensors:
                if first_use:
                    missing.append(f"missing: {quoted(name)}, expected with shape {shape}")
                continue
            found = checkpoint.shapes[name]
            if _without_ones(found) != _without_ones(shape):
                shapes.append(f"wrong shape: {quoted(name)} has {found}, expected {shape}")
            found_dtype = checkpoint.tensors[name].dtype
            if first_use and found_dtype not in _FLOATS:
                dtypes.append(f"wrong type: {quoted(name)} is {found_dtype}, expected a 16 to 64-bit float")
    unexpected = [
        f"unexpected: {quoted(name)} with shape {shape}"
        for name, shape in checkpoint.shapes.items()
        if name not in used and not ignored(name)
    ]
    faults = [*missing, *shapes, *dtypes, *unexpected]
    if faults:
        raise CheckpointError(
            checkpoint.path,
            f"does not fit the model, which takes {len(used)} tensors: {len(missing)} missing, "
            f"{len(shapes)} of a wrong shape, {len(dtypes)} of a wrong type, {len(unexpected)} unexpected."
            f"{listed(faults)}",
        )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
