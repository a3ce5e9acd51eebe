"""The type checker that tests put on every function of wkvm_jax: beartype, with three allowances.

An `int` may stand where a `float` is asked for, as in PEP 484.
Protocols need no `runtime_checkable` in the source: beartype can only ask `isinstance`, so they get it here.
Bundles of arrays (`flax.struct` dataclasses) are not checked when they are built, because `jax.tree` also
builds them of shapes, numpy arrays, axes or None, and `vmap` of arrays with an axis more. The functions
that take and return arrays are checked in full.
"""

from __future__ import annotations

import functools
import sys
import typing
from collections.abc import Callable

from beartype import BeartypeConf, beartype
from typing_extensions import is_protocol

CHECKER = "tests.typechecking.checked"
"""`checked`, as `jaxtyping.install_import_hook` wants it."""

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., object]) -> Callable[..., object]:
    """`function` with its arguments and its result checked on each call."""
    _make_protocols_checkable(function.__module__)
    strict = _beartype(function)
    if function.__name__ != "__init__":
        return strict

    @functools.wraps(strict)
    def init(self: object, *args: object, **kwargs: object) -> object:
        is_bundle = "_flax_dataclass" in type(self).__dict__
        return None if is_bundle else strict(self, *args, **kwargs)

    return init


def _make_protocols_checkable(module: str) -> None:
    for value in list(vars(sys.modules[module]).values()):
        if isinstance(value, type) and is_protocol(value):
            typing.runtime_checkable(value)
