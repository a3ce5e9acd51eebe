"""RWKV-7's time mixing of one token a row, as one Pallas Mosaic GPU kernel over the arena.

One block of four warps takes one head of one row. It reads the head's matrix from the row's read slot into
registers, does everything between the projections and the output product, and writes the matrix to the
write slot: each byte of state moves once each way, and nothing else of any size moves at all. Matrices go
straight between memory and registers, in 16-byte pieces, without instructions newer than Ampere's.

In registers a warp holds a quarter of the value channels and every key channel, 8 lanes side by side along
the keys: so the recurrence's two sums over keys stay within a warp, as shuffles, and only the group norm's
sums over values cross warps.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from wkvm_jax.kernels.pallas import Ref, broadcast, in_place, kernel, load
from wkvm_jax.kernels.rwkv7 import xla
from wkvm_jax.kernels.rwkv7.gradient import Operands, backward, stacks_and_places
from wkvm_jax.kernels.rwkv7.operands import Projections, Variant, as_state
from wkvm_jax.kernels.stacked import Weights
from wkvm_jax.state import Batch

KEY_LANES, VALUES_A_WARP, VECTOR, WARPS = 8, 16, 4, 4
VALUE_BLOCK = WARPS * VALUES_A_WARP
"""Value channels are handled in multiples of this, key channels in multiples of `KEY_LANES`."""

MATRIX = plgpu.Layout.TILED(
    fragmented_array.Tiling(((KEY_LANES, VALUE_BLOCK), (KEY_LANES, VALUES_A_WARP), (VECTOR,))),
    warp_dims=(-4,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
KEYS, VALUES = MATRIX.reduce(1), MATRIX.reduce(0)


def misfit(num_keys: int, num_values: int) -> str | None:
    """Why heads of these widths do not fit the kernel, if they do not."""
    if num_keys % KEY_LANES == 0 and num_values % VALUE_BLOCK == 0:
        return None
    return (
        f"heads must have a multiple of {KEY_LANES} keys and of {VALUE_BLOCK} values, "
        f"and these have {num_keys=} and {num_values=}"
    )


def time_mix(
    arena: Float[Array, "s l h k v"],
    batch: Batch,
    projections: Projections,
    params: Weights,
    ln_x: Weights,
    layer: int,
    variant: Variant,
    interpreted: bool,
) -> tuple[Float[Array, "b 1 hv"], Float[Array, "s l h k v"]]:
    """As `api.time_mix` says, for one token a row; gradients are those of the XLA path.

    Raises:
        ValueError: the heads' widths do not fit the kernel.
    """
    fault = misfit(*arena.shape[3:])
    if fault is not None:
        raise ValueError(fault)
    stacks, where = stacks_and_places(params, ln_x, layer)
    result: tuple[Array, Array] = _jitted(arena, batch, where, projections, stacks, variant, interpreted)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _time_mix(
    arena: Array, batch: Batch, where: Array, projections: Projections, stacks: dict[str, Array],
    variant: Variant, interpreted: bool,
) -> tuple[Array, Array]:  # fmt: skip
    rows, num_rows = projections.r.shape[0], batch.read_slots.shape[0]
    _, _, num_heads, num_keys, num_values = arena.shape
    run = kernel(
        "rwkv7_decode",
        partial(_one_head, variant=variant, size=(num_keys, num_values)),
        [jax.ShapeDtypeStruct((rows, num_heads, num_values), projections.r.dtype)],
        {"row": num_rows, "head": num_heads},
        interpreted=interpreted,
    )
    by_head = {name: x.reshape(rows, num_heads, -1) for name, x in projections.present().items()}
    small = {name: stack.reshape(stack.shape[0], num_heads, -1) for name, stack in stacks.items()}
    slots = (batch.read_slots, batch.write_slots, batch.lengths)
    out, arena = in_place(run)(arena, slots, where, by_head, small)
    return out[0].reshape(projections.v.shape), arena


def _one_head(
    slots: tuple[Ref, Ref, Ref],
    where: Ref,
    projected: Mapping[str, Ref],
    small: Mapping[str, Ref],
    states: Ref,
    out: Ref,
    *,
    variant: Variant,
    size: tuple[int, int],
) -> None:
    """The kernel, on operands with the heads as an axis of their own."""
    row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
    read_slots, write_slots, lengths = slots
    layer, (num_keys, num_values) = where[len(small)], size
    lies_at = {name: where[number] for number, name in enumerate(sorted(small))}
    along_keys, along_values = (partial(broadcast, shape=size, axes=(axis,)) for axis in (0, 1))

    def vector(name: str, layout: plgpu.SomeLayout) -> Array:
        if name in projected:
            return load(projected[name].at[row, head], layout).astype(jnp.float32)
        ref = small[name].at[lies_at[name], head]
        return load(ref, layout).astype(jnp.float32)

    of_keys, of_values = partial(vector, layout=KEYS), partial(vector, layout=VALUES)

    state = load(states.at[read_slots[row], layer, head], MATRIX).astype(jnp.float32)
    k, r = of_keys("k"), of_keys("r")
    decay = jax.nn.sigmoid(of_keys("w0") + of_keys("w"))
    decay = jnp.exp(-xla.DECAY_SCALE * decay)
    iclr = jax.nn.sigmoid(of_keys("a0") + of_keys("a"))
    removal = k * of_keys("k_k")
    square = jnp.sum(removal * removal)
    guarded = square + 1e-6 if variant.fused_norm else jnp.maximum(square, 1e-24)
    removal = removal * jax.lax.rsqrt(guarded)
    k = k * (1 + (iclr - 1) * of_keys("k_a"))
    bonus = jnp.sum(r * k * of_keys("r_k"))
    v = of_values("v")
    if "v_mix" in projected:
        share = jax.nn.sigmoid(of_values("v0") + of_values("v_mix"))
        v = v + (of_values("v_first") - v) * share

    removed = jnp.sum(along_keys(-removal) * state, axis=0)
    changed = (
        along_keys(decay) * state
        + along_keys(removal * iclr) * along_values(removed)
        + along_keys(k) * along_values(v)
    )
    y = jnp.sum(along_keys(r) * changed, axis=0)
    # A row that consumes nothing hands its state on, whatever its operands hold.
    kept = jnp.where(broadcast(lengths[row] > 0, size), changed, state)
    states[write_slots[row], layer, head] = as_state(kept, states.dtype)

    centred = y - jnp.sum(y) * (1 / num_values)
    variance = jnp.sum(centred * centred) * (1 / num_values)
    y = centred * jax.lax.rsqrt(variance + num_keys * variant.norm_eps)
    y = y * of_values("scale") + of_values("bias") + v * bonus
    out[row, head] = (y * of_values("g")).astype(out.dtype)


def _forward(
    arena: Array, batch: Batch, where: Array, projections: Projections, stacks: dict[str, Array],
    variant: Variant, interpreted: bool,
) -> tuple[tuple[Array, Array], Operands]:  # fmt: skip
    operands = (arena, batch, where, projections, stacks)
    return _time_mix(*operands, variant, interpreted), operands


_time_mix.defvjp(_forward, backward)
_jitted = jax.jit(_time_mix, static_argnums=(5, 6))  # so that a model's equal layers are lowered once
