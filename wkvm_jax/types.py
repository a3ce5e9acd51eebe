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

from collections.abc import Mapping
from typing import TypeAlias

import jax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

Params: TypeAlias = Mapping[str, object]
"""A pytree of arrays: nested mappings and tuples, as the family's `param_spec` lays it out."""

Spec: TypeAlias = jax.ShapeDtypeStruct

Tokens: TypeAlias = Int32[Array, "b t"]
Rows: TypeAlias = Int32[Array, " b"]
Hidden: TypeAlias = Float[Array, "b t d"]
Logits: TypeAlias = Float32[Array, "*rows vocab"]

__all__ = [
    "Array",
    "Bool",
    "Float",
    "Float32",
    "Hidden",
    "Int",
    "Int32",
    "Logits",
    "Params",
    "Rows",
    "Spec",
    "Tokens",
    "UInt32",
]
