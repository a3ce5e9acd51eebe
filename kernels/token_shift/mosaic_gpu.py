"""The token shift of one token a row as one Pallas Mosaic GPU kernel.

A row belongs to one block, or with few rows to several, each of which sums and norms the whole row and mixes
its own share of the width. The row's predecessor is read from the arena and replaced there.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from wkvm_jax.kernels.pallas import Ref, broadcast, in_place, kernel, load
from wkvm_jax.kernels.stacked import Weight, Weights, in_stack, places
from wkvm_jax.kernels.token_shift import xla
from wkvm_jax.state import Batch

THREADS = 128
WIDTH_MULTIPLE = 2 * THREADS
"""A thread writes at least two 16-bit values side by side."""
SHARED_ROWS = 32
"""Up to so many rows, several blocks share one: enough to occupy a GPU's multiprocessors."""
LEAST_SHARE = 512


def _share(num_rows: int, width: int) -> int:
    """How much of a row's width one block mixes."""
    share = width
    while num_rows <= SHARED_ROWS and share % (2 * WIDTH_MULTIPLE) == 0 and share > LEAST_SHARE:
        share //= 2
    return share


def _layout(width: int) -> plgpu.SomeLayout:
    vector = next(size for size in (4, 2) if width % (size * THREADS) == 0)
    return plgpu.Layout.WG_STRIDED((width,), vec_size=vector)


def mix(
    x: Float32[Array, "rows 1 d"],
    parts: Float32[Array, "part rows 1 d"] | None,
    leaf: Float32[Array, "s l place d"],
    batch: Batch,
    norm: Weights,
    mixes: Weight,
    layer: int,
    place: int,
    eps: float,
    dtype: jnp.dtype,
    interpreted: bool,
) -> tuple[Float32[Array, "rows 1 d"], list[Float[Array, "rows 1 d"]], Float32[Array, "s l place d"]]:
    """As `TokenShift.mix` says, with the leaf given and returned."""
    weights = [in_stack(weight) for weight in (mixes, norm["scale"], norm.get("bias")) if weight is not None]
    where = places(weights, layer, place)
    taken, *of_norm = (weight.stack for weight in weights)
    taken = taken.reshape(taken.shape[0], -1, taken.shape[-1])
    result: tuple[Array, list[Array], Array] = _jitted(
        x, parts, leaf, batch, where, of_norm, taken, eps, dtype, interpreted
    )
    return result


@partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _mix(
    x: Array, parts: Array | None, leaf: Array, batch: Batch, where: Array, norm: list[Array],
    mixes: Array, eps: float, dtype: jnp.dtype, interpreted: bool,
) -> tuple[Array, list[Array], Array]:  # fmt: skip
    rows, _, width = x.shape
    num_rows = batch.read_slots.shape[0]
    share = _share(num_rows, width)
    out_types = [jax.ShapeDtypeStruct((rows, width), jnp.float32)]
    out_types += [jax.ShapeDtypeStruct((rows, width), dtype)] * mixes.shape[1]
    run = kernel(
        "token_shift",
        partial(_one_share, share=share, eps=eps),
        out_types,
        {"row": num_rows, "share": width // share},
        interpreted=interpreted,
        in_step=False,  # a thread reads what it alone writes
    )
    added = None if parts is None else parts.reshape(-1, rows, width)
    slots = (batch.read_slots, batch.write_slots, batch.lengths)
    operands = (x.reshape(rows, width), added, slots, where, norm, mixes)
    (x, *mixed), leaf = in_place(run)(leaf, *operands)
    return x[:, None], [one[:, None] for one in mixed], leaf


def _one_share(
    x: Ref,
    parts: Ref | None,
    slots: tuple[Ref, Ref, Ref],
    where: Ref,
    norm: list[Ref],
    mixes: Ref,
    previous: Ref,
    x_out: Ref,
    *mixed: Ref,
    share: int,
    eps: float,
) -> None:
    """The kernel, on operands without the axis of one token."""
    row = jax.lax.axis_index("row")
    read_slots, write_slots, lengths = slots
    num_weights, width = 1 + len(norm), x.shape[-1]
    layer, place = where[num_weights], where[num_weights + 1]

    def summed(columns: pl.Slice | slice, layout: plgpu.SomeLayout) -> Array:
        total = load(x.at[row, columns], layout)
        if parts is not None:
            for part in range(parts.shape[0]):
                total = total + load(parts.at[part, row, columns], layout)
        return total

    # All loads come before the first sum over the block: nothing can be loaded early across its barriers.
    columns, layout = pl.ds(jax.lax.axis_index("share") * share, share), _layout(share)
    own = summed(columns, layout)
    whole = own if share == width else summed(slice(None), _layout(width))
    before = load(previous.at[read_slots[row], layer, place, columns], layout)
    of_norm = [load(weight.at[where[1 + number], columns], layout) for number, weight in enumerate(norm)]
    taken = [load(mixes.at[where[0], index, columns], layout) for index in range(len(mixed))]

    mean = jnp.sum(whole) * (1 / width)
    centred = whole - mean
    scale = jax.lax.rsqrt(jnp.sum(centred * centred) * (1 / width) + eps)
    x_out[row, columns] = own
    y = (own - mean) * scale * of_norm[0].astype(jnp.float32)
    if len(of_norm) > 1:
        y = y + of_norm[1].astype(jnp.float32)
    change = before - y
    for out, share_taken in zip(mixed, taken, strict=True):
        out[row, columns] = (y + change * share_taken.astype(jnp.float32)).astype(out.dtype)
    last = jnp.where(broadcast(lengths[row] > 0, (share,)), y, before)
    previous[write_slots[row], layer, place, columns] = last


_Operands = tuple[Array, Array | None, Array, Batch, Array, list[Array], Array]


def _forward(
    x: Array, parts: Array | None, leaf: Array, batch: Batch, where: Array, norm: list[Array],
    mixes: Array, eps: float, dtype: jnp.dtype, interpreted: bool,
) -> tuple[tuple[Array, list[Array], Array], _Operands]:  # fmt: skip
    operands = (x, parts, leaf, batch, where, norm, mixes)
    return _mix(*operands, eps, dtype, interpreted), operands


def _backward(
    eps: float, dtype: jnp.dtype, interpreted: bool, operands: _Operands,
    cotangents: tuple[Array, list[Array], Array],
) -> tuple[object, ...]:  # fmt: skip
    x, parts, leaf, batch, where, norm, mixes = operands
    own = slice(batch.read_slots.shape[0])  # rows beyond the batch's have no meaning and no gradient
    layer, place = where[-2], where[-1]

    def by_xla(
        x: Array, parts: Array | None, leaf: Array, norm: list[Array], mixes: Array
    ) -> tuple[Array, list[Array], Array]:
        parts = None if parts is None else parts[:, own]
        before = leaf[batch.read_slots, layer, place]
        taken, *of_norm = (stack[at] for stack, at in zip((mixes, *norm), where, strict=False))
        named = dict(zip(("scale", "bias"), of_norm, strict=False))
        x, mixed, last = xla.mix(x[own], parts, before, batch.lengths, named, taken, eps)
        leaf = leaf.at[batch.write_slots, layer, place].set(last)
        return x, [one.astype(dtype) for one in mixed], leaf

    _, pull_back = jax.vjp(by_xla, x, parts, leaf, norm, mixes)
    of_x, of_mixed, of_leaf = cotangents
    of_x, of_parts, of_leaf, *of_params = pull_back((of_x[own], [one[own] for one in of_mixed], of_leaf))
    no_batch, nowhere = jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), (batch, where))
    return of_x, of_parts, of_leaf, no_batch, nowhere, *of_params


_mix.defvjp(_forward, _backward)
_jitted = jax.jit(_mix, static_argnums=(7, 8, 9))  # so that a model's equal layers are lowered once
