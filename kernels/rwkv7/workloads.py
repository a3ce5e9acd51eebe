"""Shapes of RWKV-7's time mixing, and operands for them: one list for tests and measurements."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float32

from wkvm_jax.kernels.rwkv7.operands import Projections
from wkvm_jax.state import NUM_RESERVED_SLOTS, Batch


@dataclasses.dataclass(frozen=True)
class Decode:
    """One token for each of some rows, through one layer after the other.

    Attributes:
        rows: conversations; each stays in its slot.
        heads: heads of 64 keys and 64 values.
        layers: layers of the arena, all of which a measurement passes through.
        dtype: of projections and parameters.
    """

    rows: int
    heads: int
    layers: int
    dtype: DTypeLike = jnp.bfloat16
    width: int = 64

    @property
    def arena_shape(self) -> tuple[int, int, int, int, int]:
        return (self.rows + NUM_RESERVED_SLOTS, self.layers, self.heads, self.width, self.width)

    @property
    def state_bytes(self) -> int:
        """Bytes of state read and written for one layer."""
        return 2 * 4 * self.rows * self.heads * self.width * self.width


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Many tokens for each of some rows, through one layer after the other.

    Attributes:
        rows, tokens: of the rectangle; every token counts.
        heads, layers, dtype, width: as in `Decode`.
    """

    rows: int
    tokens: int
    heads: int
    layers: int
    dtype: DTypeLike = jnp.bfloat16
    width: int = 64

    @property
    def arena_shape(self) -> tuple[int, int, int, int, int]:
        return (self.rows + NUM_RESERVED_SLOTS, self.layers, self.heads, self.width, self.width)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written for one layer: eight projections, the output, and states once each way."""
        tokens = 2 * 9 * self.rows * self.tokens * self.heads * self.width
        return tokens + 2 * 4 * self.rows * self.heads * self.width * self.width


TINY = (Decode(3, 2, 2),)
TINY_PREFILL = (Prefill(2, 130, 2, 2),)
PUBLISHED_PREFILL = (
    Prefill(1, 4096, 32, 4), Prefill(1, 16384, 32, 2), Prefill(8, 2048, 32, 4), Prefill(32, 1024, 32, 2),
)  # fmt: skip
"""The shapes of docs/performance.md: 32 heads of 64, as in the 1.5B model."""
PUBLISHED = tuple(Decode(rows, 32, 24) for rows in (1, 8, 32, 128, 256, 1024))
"""The 1.5B model's layers; the arena of the last holds more than 2^31 elements."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What `time_mix` takes beside the arena."""

    batch: Batch
    projections: Projections
    params: dict[str, Array]
    ln_x: dict[str, Array]


def make_arena(workload: Decode | Prefill, seed: int = 0) -> Float32[Array, "s l h k v"]:
    """Normal numbers, made in place."""
    return jax.random.normal(jax.random.key(seed, impl="rbg"), workload.arena_shape, jnp.float32)


def make_operands(workload: Decode | Prefill, seed: int = 0) -> Operands:
    """Operands of one layer beyond the first, its rows in a random order of slots."""
    tokens = workload.tokens if isinstance(workload, Prefill) else 1
    keys = iter(jax.random.split(jax.random.key(seed), 20))
    rows, channels = workload.rows, workload.heads * workload.width

    def normal(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape).astype(workload.dtype)

    slots = jax.random.permutation(next(keys), jnp.arange(rows, dtype=jnp.int32)) + NUM_RESERVED_SLOTS
    batch = Batch(
        tokens=jnp.zeros((rows, tokens), jnp.int32),
        lengths=jnp.full((rows,), tokens, jnp.int32),
        read_slots=slots,
        write_slots=slots,
        page_table=jnp.zeros((rows, 0), jnp.int32),
    )
    projections = Projections(*(normal(rows, tokens, channels) for _ in range(8)))
    params = {name: normal(channels) for name in ("w0", "a0", "v0", "k_k", "k_a")}
    params["r_k"] = normal(workload.heads, workload.width)
    return Operands(batch, projections, params, {name: normal(channels) for name in ("scale", "bias")})
