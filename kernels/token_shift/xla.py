"""The token shift in plain XLA, for any number of tokens."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


def mix(
    x: Float32[Array, "b t d"],
    parts: Float32[Array, "part b t d"] | None,
    before: Float32[Array, "b d"],
    lengths: Int32[Array, " b"],
    norm: Mapping[str, Array],
    mixes: Float[Array, "mix d"],
    eps: float,
) -> tuple[Float32[Array, "b t d"], list[Float32[Array, "b t d"]], Float32[Array, "b d"]]:
    """The new residual stream, the mixed inputs, and each row's normed input at its last counted token."""
    if parts is not None:
        x = x + jnp.sum(parts, axis=0)
    y = layer_norm(x, norm, eps)
    change = previous_tokens(y, before) - y
    mixed = [y + change * mixes[index].astype(jnp.float32) for index in range(mixes.shape[0])]
    return x, mixed, last_counted(y, before, lengths)


def layer_norm(
    x: Float32[Array, "*rows d"], params: Mapping[str, Array], eps: float
) -> Float32[Array, "*rows d"]:
    """LayerNorm over the last axis; `params` holds "scale" and, for norms that have one, "bias"."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    x = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    x = x * params["scale"].astype(jnp.float32)
    return x + params["bias"].astype(jnp.float32) if "bias" in params else x


def previous_tokens(x: Float32[Array, "b t d"], before: Float32[Array, "b d"]) -> Float32[Array, "b t d"]:
    """Each token's predecessor: `before` for the first token of a row."""
    return jnp.concatenate([before[:, None], x[:, :-1]], axis=1)


def last_counted(
    x: Float32[Array, "b t d"], before: Float32[Array, "b d"], lengths: Array
) -> Float32[Array, "b d"]:
    """Each row's value at its last counted token; `before` where none counts."""
    if x.shape[1] == 1:
        return jnp.where(lengths[:, None] > 0, x[:, 0], before)
    last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(lengths[:, None] > 0, last, before)
