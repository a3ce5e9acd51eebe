"""Puts the parts together: the public `Engine`."""

from __future__ import annotations

import os

import jax

from wkvm_jax.config import EngineConfig, compilation_cache_directory
from wkvm_jax.engine import engine as engine_module
from wkvm_jax.errors import RequestError
from wkvm_jax.models.model import Model
from wkvm_jax.store.memory import MemoryRecords


def Engine(  # noqa: N802 - reads as a class, and is documented as one
    model: Model,
    num_slots: int = 64,
    store: str | os.PathLike[str] | None = None,
    deterministic: bool = False,
    *,
    config: EngineConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> engine_module.Engine:
    """An engine for a model.

    Args:
        model: from `wkvm_jax.load`.
        num_slots: states that the arena holds: running requests, and states that are kept.
        store: a directory for durable states. None keeps them in memory, which is all that this version
            can do.
        deterministic: one decode and one prefill shape, so that tokens do not depend on what else runs.
        config: everything else; `num_slots` and `deterministic` are taken from it then.
        mesh: devices to spread the engine over, as in `jax.make_mesh((2, 2), ("data", "model"))`: slots and
            rows over the axis named "data", heads over the one named "model"; either may be absent. None is
            JAX's default device.

    Raises:
        RequestError: a size is out of range, or `store` is given.
        MeshError: the model cannot be spread over the mesh.
    """
    if store is not None:
        raise RequestError("store", "this version keeps states in memory only: pass store=None")
    use_compilation_cache()
    if config is None:
        config = EngineConfig(
            num_slots=num_slots, max_rows=default_max_rows(num_slots), deterministic=deterministic
        )
    return engine_module.Engine(model, config, MemoryRecords(), mesh)


def default_max_rows(num_slots: int) -> int:
    """Requests that run at once: all slots can hold, to a limit that the platform's speed suggests."""
    limit = 32 if jax.default_backend() == "cpu" else 1024
    return 1 << (min(num_slots, limit).bit_length() - 1)


def use_compilation_cache() -> None:
    """Keeps compiled steps on disk, unless JAX has been told of a cache already."""
    directory = compilation_cache_directory()
    if directory is None or jax.config.jax_compilation_cache_dir is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
