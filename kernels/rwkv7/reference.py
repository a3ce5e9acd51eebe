"""The RWKV-7 recurrence as a scan, one token at a time: what every implementation must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def recurrence_reference(
    r: Float[Array, "b t h k"],
    log_w: Float[Array, "b t h k"],
    k: Float[Array, "b t h k"],
    v: Float[Array, "b t h v"],
    a: Float[Array, "b t h k"],
    b: Float[Array, "b t h k"],
    initial_state: Float32[Array, "b h k v"],
) -> tuple[Float32[Array, "b t h v"], Float32[Array, "b h k v"]]:
    """`S_t = diag(exp(log_w_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T` and `y_t = S_t^T r_t`.

    This is equation 17 of arXiv 2503.14456 with the state transposed to `[key, value]`. The transition is
    `diag(w) + b a^T`; the model passes `a = -kappa` and `b = kappa * iclr`, with `kappa` of unit length.

    Args:
        r, log_w, k, v, a, b: receptance, logarithm of the decay (at most 0), key, value and the two
            vectors of the rank-one term.
        initial_state: the state before the first token.

    Returns:
        `y` for each token and the state after the last.
    """

    def one_token(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        r_t, log_w_t, k_t, v_t, a_t, b_t = inputs
        removed = jnp.einsum("bhk,bhkv->bhv", a_t, state, precision="highest")
        state = (
            jnp.exp(log_w_t)[..., None] * state
            + b_t[..., None] * removed[:, :, None]
            + k_t[..., None] * v_t[:, :, None]
        )
        return state, jnp.einsum("bhk,bhkv->bhv", r_t, state, precision="highest")

    by_time = [jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (r, log_w, k, v, a, b)]
    final_state, y = jax.lax.scan(one_token, initial_state.astype(jnp.float32), tuple(by_time))
    return jnp.moveaxis(y, 0, 1), final_state
