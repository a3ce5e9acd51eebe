"""A product of a few rows that are mostly zeros, as one Pallas Mosaic GPU kernel for Hopper.

A row of the weight that meets only zeros adds nothing, and need not be read: exactly so, since what is
skipped are products with zero. A block takes 128 columns of the weight and an eighth of its rows, and each of
its warpgroups a quarter of these. A warpgroup lists the rows that meet anything, reads those alone, many at a
time since their latencies are all that counts, and adds them up in ordinary arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from wkvm_jax.kernels.pallas import Barrier, Ref, arrive, kernel, load, wait_for
from wkvm_jax.kernels.products.operands import Launch, Product

MAX_ROWS = 4
"""With more rows, their zeros rarely coincide: of rows with 87% zeros each, four leave 43% of a weight's."""
COLUMNS, NUM_PARTS, WARPGROUPS = 128, 8, 4
AT_ONCE = 16
"""Rows of the weight that are read together."""
WARPS, WORD = 4, 32
"""Which rows of the weight meet anything is noted in words of 32 bits."""

BITS = plgpu.Layout.TILED(
    fragmented_array.Tiling(((1, WORD), (1,))),
    warp_dims=(fragmented_array.Replicated(WARPS),),
    lane_dims=(-2,),
    vector_dim=-1,
)
"""All words in each warp, their bits in neighbouring lanes."""


def serves(jobs: Sequence[Product]) -> bool:
    """Whether the kernel can take these products."""
    if len(jobs) != 1 or not 0 < (jobs[0].sparse_rows or 0) <= MAX_ROWS:
        return False
    height, width = jobs[0].weight.shape
    return height % (NUM_PARTS * WARPGROUPS * WORD) == 0 and width % COLUMNS == 0


def launch(jobs: Sequence[Product], *, interpreted: bool) -> Launch:
    """The kernel for a product of this shape, in parts."""
    (job,) = jobs
    height, width = job.weight.shape
    rows, counted = job.num_rows, job.sparse_rows
    assert counted is not None
    num_words = height // NUM_PARTS // WARPGROUPS // WORD
    run = kernel(
        "sparse_product",
        _one_block,
        [jax.ShapeDtypeStruct((NUM_PARTS, rows, width), jnp.float32)],
        {"part": NUM_PARTS, "column": width // COLUMNS},
        scratch=[
            plgpu.SMEM((WARPGROUPS, counted, num_words, WORD), jnp.float32),
            plgpu.SMEM((WARPGROUPS, num_words), jnp.int32),
            plgpu.SMEM((WARPGROUPS, num_words * WORD + AT_ONCE), jnp.int32),
            plgpu.SMEM((WARPGROUPS, counted, COLUMNS), jnp.float32),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        warpgroups=WARPGROUPS,
        interpreted=interpreted,
        in_step=False,
    )

    def with_words(xs: list[Array], stacks: list[Array], where: Array) -> list[Array]:
        (x,), (stack,) = xs, stacks
        return run(x.reshape(rows, height // WORD, WORD), stack, where)

    return with_words


def _one_block(
    x: Ref, stack: Ref, where: Ref, out: Ref,
    shares: Ref, bits: Ref, lists: Ref, sums: Ref, all_summed: Barrier,
) -> None:  # fmt: skip
    """The kernel, on x in words. Shared memory holds each warpgroup's share of x, bits, list, and sums."""
    part, column = jax.lax.axis_index("part"), jax.lax.axis_index("column")
    warpgroup = jax.lax.axis_index("warpgroup")
    own_x, own_bits, own_list = (ref.at[warpgroup] for ref in (shares, bits, lists))
    counted, num_words, _ = own_x.shape
    number = part * WARPGROUPS + warpgroup
    _note(x, number, own_x, own_bits)
    plgpu.commit_smem()
    num_listed = _list(own_bits, own_list)
    plgpu.commit_smem()

    place, columns = where[0], pl.ds(column * COLUMNS, COLUMNS)
    one_each = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=1)

    def add(batch: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        for index in range(AT_ONCE):
            at = batch * AT_ONCE + index
            row = own_list[at]
            word = jax.lax.shift_right_logical(row, WORD.bit_length() - 1)
            weights = load(stack.at[place, number * num_words * WORD + row, columns], one_each).astype(
                jnp.float32
            )
            taken = (
                jnp.where(at < num_listed, own_x[r, word, row & (WORD - 1)], 0.0) for r in range(counted)
            )
            totals = tuple(total + weights * value for total, value in zip(totals, taken, strict=True))
        return totals

    nothing = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), one_each)
    num_batches = (num_listed + AT_ONCE - 1) // AT_ONCE
    totals = jax.lax.fori_loop(0, num_batches, add, (nothing,) * counted)
    for r, total in enumerate(totals):
        sums[warpgroup, r] = total
    arrive(all_summed)

    @pl.when(warpgroup == 0)
    def _of_all() -> None:
        wait_for(all_summed)
        for r in range(counted):
            of_all = (load(sums.at[each, r], one_each) for each in range(WARPGROUPS))
            out[part, r, columns] = sum(of_all, nothing)


def _note(x: Ref, number: Array, own_x: Ref, own_bits: Ref) -> None:
    """A warpgroup's share of the rows, and a bit for each column of it that is not all zeros."""
    counted, num_words, _ = own_x.shape
    meets = plgpu.layout_cast(jnp.zeros((num_words, WORD), jnp.int32), BITS)
    for r in range(counted):
        values = load(x.at[r, pl.ds(number * num_words, num_words)], BITS).astype(jnp.float32)
        meets = jnp.where(values != 0, 1, meets)
        own_x[r] = values
    bit = plgpu.broadcasted_iota(jnp.int32, meets.shape, 1, layout=BITS)
    own_bits[...] = jnp.sum(jax.lax.shift_left(meets, bit), axis=1)


def _list(own_bits: Ref, own_list: Ref) -> Array:
    """Lists the numbers of the bits that are set, and some more to fill up a batch; returns how many are."""

    def of_word(word: Array, num_listed: Array) -> Array:
        def lowest_first(state: tuple[Array, Array]) -> tuple[Array, Array]:
            left, num_listed = state
            lowest = left & -left
            own_list[num_listed] = word * WORD + (WORD - 1) - jax.lax.clz(lowest)
            return left ^ lowest, num_listed + 1

        return jax.lax.while_loop(lambda state: state[0] != 0, lowest_first, (own_bits[word], num_listed))[1]

    num_listed = jax.lax.fori_loop(0, own_bits.shape[0], of_word, jnp.int32(0))
    plgpu.commit_smem()
    last = own_list[jnp.maximum(num_listed - 1, 0)]
    for index in range(AT_ONCE - 1):
        own_list[num_listed + index] = last
    return num_listed
