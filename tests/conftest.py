"""Set-up of the whole suite: types checked at run time, JAX on the CPU, GPU tests on request.

JAX itself is not imported here: the scheduler's tests run without it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

from tests.typechecking import CHECKER

jaxtyping.install_import_hook(["wkvm_jax", "tests.families"], CHECKER)

# Compilation makes first examples slow, so no deadline; a fixed seed keeps CI quiet.
hypothesis.settings.register_profile("wkvm", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("wkvm")


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the platform before the first array exists, and makes warnings errors."""
    config.addinivalue_line("markers", "gpu: needs a GPU; run with `-m gpu`")
    config.addinivalue_line("filterwarnings", "error")
    if not _asks_for_gpu(config):
        _set_jax("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
    # Most of a first run is compilation: with the cache a later one takes a fifth of the time.
    _set_jax("jax_compilation_cache_dir", str(_cache_directory()))
    _set_jax("jax_persistent_cache_min_compile_time_secs", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips GPU tests where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not (_asks_for_gpu(config) and _has_gpu()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs `-m gpu` and a GPU"))


def _asks_for_gpu(config: pytest.Config) -> bool:
    return bool(re.search(r"(?<!not )\bgpu\b", config.option.markexpr))


def _has_gpu() -> bool:
    import jax

    return jax.default_backend() == "gpu"


def _set_jax(name: str, value: str) -> None:
    """Sets an option whether or not some conftest has imported JAX by now."""
    os.environ[name.upper()] = value
    if "jax" in sys.modules:
        sys.modules["jax"].config.update(name, float(value) if name.endswith("secs") else value)


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "wkvm_jax" / "tests"
