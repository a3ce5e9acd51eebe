"""Axis glossary and array aliases.

| axis | meaning |
| --- | --- |
| b | rows of a rectangle: one request's share of a dispatch |
| t | tokens of a row, time |
| s | slots of an arena |
| n | lanes: places of running requests in the sampler's table |
| l | layers |
| h | heads |
| k | key channels of a head |
| v | value channels of a head |
| d | model width |
| p | pages of a row's page table |
| c | page copies of a dispatch |
| vocab | token ids |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

import jax
import numpy as np

Params: TypeAlias = Mapping[str, object]
"""A pytree of arrays: nested mappings and tuples, as the family's `param_spec` lays it out."""


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array


from_host = cast(Callable[[np.ndarray], jax.Array], _as_it_is)
"""A numpy array where a jitted function takes a `jax.Array`: it is moved when the function is called."""
