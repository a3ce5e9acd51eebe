"""The exceptions that wkvm_jax raises on purpose.

Everything derives from `WkvmError`, so `except wkvm_jax.WkvmError` catches what the engine refuses and
lets programming errors through. Each message says what was wrong and what to do about it.
"""

from __future__ import annotations

import os


class WkvmError(Exception):
    """Base of every error that wkvm_jax raises on purpose."""


class CheckpointError(WkvmError):
    """A checkpoint that cannot be read or does not fit its model."""

    def __init__(self, path: str | os.PathLike[str], fault: str) -> None:
        super().__init__(f"{os.fspath(path)}: {fault}")
        self.path = path
        self.fault = fault


class KernelUnavailableError(WkvmError):
    """Kernels that cannot run where they were asked for."""

    def __init__(self, requested: str, obstacle: str) -> None:
        super().__init__(f"kernels {requested!r}: {obstacle}")
        self.requested = requested
        self.obstacle = obstacle


class MeshError(WkvmError, ValueError):
    """A mesh of devices that a model cannot be spread over."""


class TokenizerError(WkvmError):
    """Tokenizer files that cannot be read or do not fit the model."""

    def __init__(self, path: str | os.PathLike[str], fault: str) -> None:
        super().__init__(f"{os.fspath(path)}: {fault}")
        self.path = path
        self.fault = fault


class RequestError(WkvmError, ValueError):
    """A request's parameter is out of range; `param` is its name in the public API."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(RequestError):
    """A request that could never fit into this engine, whatever else runs."""


class NoFreeSlotError(WkvmError):
    """Every slot is in use by running requests or kept states."""


class UnknownHandleError(WkvmError, LookupError):
    """No state has this handle."""


class UnknownRequestError(WkvmError, LookupError):
    """No request has this id."""


class VersionConflictError(WkvmError):
    """`if_version` names a version that is no longer the newest."""


class StateMismatchError(WkvmError):
    """A state that belongs to another model, or whose leaves do not fit this one."""


class StatePinnedError(WkvmError):
    """A pinned state cannot be deleted or evicted."""


class EngineClosedError(WkvmError):
    """The engine was closed, or ended after a device failure that it could not repair."""


class StepFailedError(WkvmError):
    """A dispatch failed on the device; the requests that ran in it end with this error."""
