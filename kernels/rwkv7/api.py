"""One signature for the RWKV-7 recurrence, whatever computes it."""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from wkvm_jax.kernels.rwkv7 import xla
from wkvm_jax.state import Batch, read_layer, write_layer


class Recurrence(Protocol):
    """What a replacement for `recurrence` must accept and return."""

    def __call__(
        self,
        arena: Float32[Array, "s l h k v"],
        layer: int,
        batch: Batch,
        inputs: tuple[Float[Array, "b t h _"], ...],
    ) -> tuple[Float32[Array, "b t h v"], Float32[Array, "s l h k v"]]: ...


def recurrence(
    arena: Float32[Array, "s l h k v"],
    layer: int,
    batch: Batch,
    inputs: tuple[Float[Array, "b t h _"], ...],
) -> tuple[Float32[Array, "b t h v"], Float32[Array, "s l h k v"]]:
    """Runs one layer's recurrence for every row of a batch, from its read slot to its write slot.

    Args:
        arena: matrix states, slot-major, `[key, value]` a head.
        layer: which layer's states to use.
        batch: says where rows read and write and how many tokens of each count.
        inputs: `(r, log_w, k, v, a, b)` as `recurrence_reference` explains. `log_w` is at least
            -exp(-0.5), as the model's is; chunks lose accuracy below about -5.

    Returns:
        The output for each token (of no meaning past a row's length) and the arena with the rows' new
        states at their write slots. A row's state is that after its last counted token.

    Gradients flow through every floating argument.
    """
    r, log_w, k, v, a, b = (x.astype(jnp.float32) for x in inputs)
    counted = _counted(batch)
    log_w = jnp.where(counted, log_w, 0.0)
    k, a = jnp.where(counted, k, 0.0), jnp.where(counted, a, 0.0)
    if r.shape[1] == 1:
        one = tuple(x[:, 0] for x in (r, log_w, k, v, a, b))
        y, arena = xla.step_in_arena(arena, layer, batch.read_slots, batch.write_slots, one)
        return y[:, None], arena
    several = xla.scanned if r.shape[1] <= xla.MAX_SCANNED else xla.chunked
    y, final_state = several((r, log_w, k, v, a, b), read_layer(arena, batch, layer))
    return y, write_layer(arena, batch, layer, final_state)


def _counted(batch: Batch) -> Bool[Array, "b t 1 1"]:
    return (jnp.arange(batch.tokens.shape[1]) < batch.lengths[:, None])[:, :, None, None]
