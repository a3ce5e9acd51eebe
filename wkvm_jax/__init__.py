"""A hypervisor for model state, in JAX.

`load` gives a model whose functions are pure; `Engine` runs many conversations on one arena of states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wkvm_jax.errors import WkvmError

if TYPE_CHECKING:
    from wkvm_jax.api import Engine
    from wkvm_jax.config import EngineConfig
    from wkvm_jax.engine.request import Output, Request, SamplingParams
    from wkvm_jax.models.loading import load
    from wkvm_jax.models.model import Model
    from wkvm_jax.state import State

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "EngineConfig",
    "Model",
    "Output",
    "Request",
    "SamplingParams",
    "State",
    "WkvmError",
    "load",
]

_HOMES = {
    "Engine": "wkvm_jax.api",
    "EngineConfig": "wkvm_jax.config",
    "Model": "wkvm_jax.models.model",
    "Output": "wkvm_jax.engine.request",
    "Request": "wkvm_jax.engine.request",
    "SamplingParams": "wkvm_jax.engine.request",
    "State": "wkvm_jax.state",
    "load": "wkvm_jax.models.loading",
}


def __getattr__(name: str) -> object:
    """Public names are imported when they are first used, so that `wkvm --help` need not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'wkvm_jax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
