"""What goes into RWKV-7's time mixing."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

FLOAT16_MAX = 65_504.0


class Projections(flax.struct.PyTreeNode):
    """What the products of one layer's mixed inputs gave, heads side by side in the last axis.

    Attributes:
        r, k, v: receptance, key and value.
        w, a: the decay's and the in-context rate's low-rank maps, before their biases `w0` and `a0`.
        g: the output gate.
        v_mix: the value residual's low-rank map before its bias `v0`; None in the first layer.
        v_first: the first layer's `v`; None in the first layer.
    """

    r: Float[Array, "b t hk"]
    k: Float[Array, "b t hk"]
    v: Float[Array, "b t hv"]
    w: Float[Array, "b t hk"]
    a: Float[Array, "b t hk"]
    g: Float[Array, "b t hv"]
    v_mix: Float[Array, "b t hv"] | None = None
    v_first: Float[Array, "b t hv"] | None = None

    def present(self) -> dict[str, Array]:
        """The arrays that there are, by name."""
        first = {"r": self.r, "k": self.k, "v": self.v, "w": self.w, "a": self.a, "g": self.g}
        if self.v_mix is None or self.v_first is None:
            return first
        return first | {"v_mix": self.v_mix, "v_first": self.v_first}


def as_state(x: Float[Array, ...], dtype: jnp.dtype) -> Float[Array, ...]:
    """A float32 state as it is kept: float16 holds at most 65,504 and takes that for more."""
    if dtype == jnp.float16:
        x = jnp.maximum(jnp.minimum(x, FLOAT16_MAX), -FLOAT16_MAX)
    return x.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Variant:
    """What differs between published models.

    Attributes:
        norm_eps: of the group norm.
        fused_norm: keys are normalised with 1e-6 added under the root, and not with the norm clamped at
            1e-12 (flash-linear-attention's `fuse_norm`).
    """

    norm_eps: float
    fused_norm: bool
