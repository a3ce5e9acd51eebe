"""RWKV-7's time mixing of one token a row, as one Pallas Mosaic GPU kernel over the arena.

One block of four warps takes one head of one row. It reads the head's matrix from the row's read slot, does
everything between the projections and the output product, and writes the matrix to the write slot: each byte
of state moves once each way, and nothing else of any size moves at all. On Hopper, bulk copies move the
matrix to shared memory and back, as one piece each; elsewhere threads read and write device memory
themselves, in 16-byte pieces, without instructions newer than Ampere's.

What has one value a channel is computed once a warp, two channels a thread, and handed through shared memory
to whoever needs it. Of the matrix a warp holds a quarter of the value channels and every key channel, 8 lanes
side by side along the keys: so the recurrence's sums over keys stay within a warp, as shuffles. Both of its
products are taken of the matrix as it was, with S' = diag(w) S + b (a^T S) + k v^T and

    y = S'^T r = S^T (w r) + (r.b) (S^T a) + (r.k) v,

so that the output does not wait for the new matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from wkvm_jax.kernels.pallas import (
    Ref,
    arrivals,
    broadcast,
    fetch,
    in_place,
    kernel,
    load,
    send,
    wait_for,
    wait_for_sent,
)
from wkvm_jax.kernels.rwkv7 import xla
from wkvm_jax.kernels.rwkv7.gradient import Operands, backward, stacks_and_places
from wkvm_jax.kernels.rwkv7.operands import Projections, Variant, as_state
from wkvm_jax.kernels.stacked import Weights
from wkvm_jax.state import Batch

CHANNELS = 64
"""Key and value channels of a head are handled in multiples of this."""
KEY_STEP, KEY_LANES, VALUES_A_WARP, VECTOR, WARPS = 32, 8, 16, 4, 4
"""A step takes so many keys' rows of the matrix; fewer registers let more blocks share a multiprocessor."""

MATRIX = plgpu.Layout.TILED(
    fragmented_array.Tiling(((KEY_STEP, CHANNELS), (KEY_STEP // KEY_LANES, VALUES_A_WARP), (VECTOR,))),
    warp_dims=(-4,),
    lane_dims=(-5, -2),
    vector_dim=-1,
)
KEYS, VALUES = MATRIX.reduce(1), MATRIX.reduce(0)
ONCE = plgpu.Layout.TILED(
    fragmented_array.Tiling(((CHANNELS,), (2,))),
    warp_dims=(fragmented_array.Replicated(WARPS),),
    lane_dims=(-2,),
    vector_dim=-1,
)
"""Each channel in one thread of a warp, and in every warp; `KEYS` and `VALUES` have it in several."""


def misfit(num_keys: int, num_values: int) -> str | None:
    """Why heads of these widths do not fit the kernel, if they do not."""
    if num_keys % CHANNELS == 0 and num_values % CHANNELS == 0:
        return None
    return (
        f"heads must have a multiple of {CHANNELS} keys and of {CHANNELS} values, "
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
    bulk: bool,
    interpreted: bool,
) -> tuple[Float[Array, "b 1 hv"], Float[Array, "s l h k v"]]:
    """As `api.time_mix` says, for one token a row; gradients are those of the XLA path.

    Args:
        bulk: whether Hopper's bulk copies move the matrices.

    Raises:
        ValueError: the heads' widths do not fit the kernel.
    """
    fault = misfit(*arena.shape[3:])
    if fault is not None:
        raise ValueError(fault)
    stacks, where = stacks_and_places(params, ln_x, layer)
    result: tuple[Array, Array] = _jitted(
        arena, batch, where, projections, stacks, variant, bulk, interpreted
    )
    return result


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _time_mix(
    arena: Array, batch: Batch, where: Array, projections: Projections, stacks: dict[str, Array],
    variant: Variant, bulk: bool, interpreted: bool,
) -> tuple[Array, Array]:  # fmt: skip
    rows, num_rows = projections.r.shape[0], batch.read_slots.shape[0]
    _, _, num_heads, num_keys, num_values = arena.shape
    own = [plgpu.SMEM((5, num_keys), jnp.float32), plgpu.SMEM((2, num_values), jnp.float32)]
    of_bulk = [plgpu.SMEM((num_keys, num_values), arena.dtype), arrivals(1)] if bulk else []
    run = kernel(
        "rwkv7_decode",
        partial(_one_head, variant=variant),
        [jax.ShapeDtypeStruct((rows, num_heads, num_values), projections.r.dtype)],
        {"row": num_rows, "head": num_heads},
        interpreted=interpreted,
        scratch=own + of_bulk,
        fast_math=True,
        in_step=not bulk,
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
    of_keys: Ref,
    of_values: Ref,
    *bulk: Ref,
    variant: Variant,
) -> None:
    """The kernel, on operands with the heads as an axis of their own."""
    row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
    read_slots, write_slots, lengths = slots
    num_keys, num_values = of_keys.shape[1], of_values.shape[1]
    layer = where[len(small)]
    before, after = (states.at[slot[row], layer, head] for slot in (read_slots, write_slots))
    if bulk:
        tile, arrived = bulk
        fetch(before, tile, arrived)
    lies_at = {name: where[number] for number, name in enumerate(sorted(small))}
    loaded = {name: load(ref.at[row, head], ONCE) for name, ref in projected.items()}
    loaded |= {name: load(ref.at[lies_at[name], head], ONCE) for name, ref in small.items()}
    counts = lengths[row] > 0

    def vector(name: str) -> Array:
        return loaded[name].astype(jnp.float32)

    def hand_over() -> None:
        """Lets the block's threads see what the others stored; without bulk copies each store does."""
        if bulk:
            plgpu.commit_smem()

    def if_counted(x: Array, otherwise: float = 0.0) -> Array:
        """A row that consumes nothing hands its state on, whatever its operands hold."""
        return jnp.where(broadcast(counts, x.shape), x, otherwise)

    r, k, v = vector("r"), vector("k"), vector("v")
    decay = jnp.exp(-xla.DECAY_SCALE * jax.nn.sigmoid(vector("w0") + vector("w")))
    iclr = jax.nn.sigmoid(vector("a0") + vector("a"))
    removal = k * vector("k_k")
    square = jnp.sum(removal * removal)
    to_unit = jax.lax.rsqrt(square + 1e-6 if variant.fused_norm else jnp.maximum(square, 1e-24))
    r_b = jnp.sum(r * removal * iclr) * to_unit
    removal = removal * to_unit
    k = k * (1 + (iclr - 1) * vector("k_a"))
    r_k, bonus = jnp.sum(r * k), jnp.sum(r * k * vector("r_k"))
    if "v_mix" in projected:
        share = jax.nn.sigmoid(vector("v0") + vector("v_mix"))
        v = v + (vector("v_first") - v) * share
    b = if_counted(removal * iclr)
    shared = (if_counted(-removal), decay * r, if_counted(decay, 1.0), b, if_counted(k))
    for index, x in enumerate(shared):
        of_keys[index] = x
    of_values[0] = v
    hand_over()
    target = after
    if bulk:
        wait_for(arrived)
        before = target = tile

    steps = [pl.ds(start, KEY_STEP) for start in range(0, num_keys, KEY_STEP)]
    size = (KEY_STEP, num_values)

    def along_keys(index: int, step: pl.Slice) -> Array:
        return broadcast(load(of_keys.at[index, step], KEYS), size, (0,))

    removed = y = jnp.float32(0)
    for step in steps:
        state = load(before.at[step], MATRIX).astype(jnp.float32)
        removed = removed + jnp.sum(along_keys(0, step) * state, axis=0)
        y = y + jnp.sum(along_keys(1, step) * state, axis=0)
    taken_up = load(of_values.at[0], VALUES)
    of_values[1] = y + r_b * removed + r_k * taken_up
    hand_over()
    removed, taken_up = (broadcast(x, size, (1,)) for x in (removed, if_counted(taken_up)))
    for step in steps:
        state = load(before.at[step], MATRIX).astype(jnp.float32)
        state = along_keys(2, step) * state + along_keys(3, step) * removed + along_keys(4, step) * taken_up
        target[step] = as_state(state, states.dtype)
    if bulk:
        send(tile, after)

    y = load(of_values.at[1], ONCE)
    centred = y - jnp.sum(y) * (1 / num_values)
    variance = jnp.sum(centred * centred) * (1 / num_values)
    y = centred * jax.lax.rsqrt(variance + num_keys * variant.norm_eps)
    y = y * vector("scale") + vector("bias") + v * bonus
    out[row, head] = (y * vector("g")).astype(out.dtype)
    if bulk:
        wait_for_sent()


def _forward(
    arena: Array, batch: Batch, where: Array, projections: Projections, stacks: dict[str, Array],
    variant: Variant, bulk: bool, interpreted: bool,
) -> tuple[tuple[Array, Array], Operands]:  # fmt: skip
    operands = (arena, batch, where, projections, stacks)
    return _time_mix(*operands, variant, bulk, interpreted), operands


def _backward(
    variant: Variant, bulk: bool, interpreted: bool, operands: Operands, cotangents: tuple[Array, Array]
) -> tuple[object, ...]:
    return backward(variant, interpreted, operands, cotangents)


_time_mix.defvjp(_forward, _backward)
_jitted = jax.jit(_time_mix, static_argnums=(5, 6, 7))  # so that a model's equal layers are lowered once
