"""A product of a few rows that are mostly zeros, as one Pallas Mosaic GPU kernel for Hopper.

A row of the weight that meets only zeros adds nothing, and need not be read: exactly so, since what is
skipped are products with zero. A block takes 128 columns of the weight and an eighth of its rows. It notes
which of these meet anything, fetches those alone, each by its own bulk copy, and adds them up in ordinary
arithmetic. Where too many meet something, one after the other is slower than all together, and the block
streams its whole share through the tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from wkvm_jax.kernels.pallas import Ref, fetch, kernel, load, wait_for_fetched
from wkvm_jax.kernels.products import few_rows
from wkvm_jax.kernels.products.operands import Launch, Product
from wkvm_jax.kernels.products.tiles import TILE

MAX_ROWS = 4
"""With more rows, their zeros rarely coincide: of rows with 87% zeros each, four leave 43% of a weight's."""
COLUMNS, NUM_PARTS = 128, 8
GROUP, MAX_GROUPS = 12, 32
"""Fetched rows of the weight that are waited for together, and how many such groups find room."""
WORTHWHILE = 3 / 8
"""Part of a block's share that may meet anything for one row after the other to be quicker than all."""
WORD, WARPS = 32, 4
"""Bits that note which rows of the weight meet anything."""

BITS = plgpu.Layout.TILED(
    fragmented_array.Tiling(((WARPS, WORD), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
"""A word a warp at a time, its bits in neighbouring lanes."""
ACROSS = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=1)


def serves(jobs: Sequence[Product]) -> bool:
    """Whether the kernel can take these products."""
    if len(jobs) != 1 or not 0 < (jobs[0].sparse_rows or 0) <= MAX_ROWS:
        return False
    height, width = jobs[0].weight.shape
    return height % (NUM_PARTS * WARPS * WORD) == 0 and width % COLUMNS == 0


def launch(jobs: Sequence[Product], *, interpreted: bool) -> Launch:
    """The kernel for a product of this shape, in parts."""
    (job,) = jobs
    height, width = job.weight.shape
    rows, counted = job.num_rows, job.sparse_rows
    assert counted is not None
    run = kernel(
        "sparse_product",
        partial(_one_block, counted=counted, dense=few_rows.of_parts(job, NUM_PARTS)),
        [jax.ShapeDtypeStruct((NUM_PARTS, rows, width), jnp.float32)],
        {"part": NUM_PARTS, "column": width // COLUMNS},
        scratch=[
            plgpu.SMEM((counted, height // NUM_PARTS), jnp.float32),
            plgpu.SMEM((height // NUM_PARTS // WORD,), jnp.int32),
        ],
        interpreted=interpreted,
    )

    def with_words(xs: list[Array], stacks: list[Array], where: Array) -> list[Array]:
        (x,), (stack,) = xs, stacks
        return run(x, x.reshape(rows, height // WORD, WORD), stack, where)

    return with_words


def _one_block(
    x: Ref, words: Ref, stack: Ref, where: Ref, out: Ref, own: Ref, meeting: Ref,
    *, counted: int, dense: few_rows.Plan,
) -> None:  # fmt: skip
    """The kernel; `own` gets the block's share of x, `meeting` bits for those columns of it that have any."""
    part, column = jax.lax.axis_index("part"), jax.lax.axis_index("column")
    place, (num_words,) = where[0], meeting.shape
    of_words = pl.ds(part * num_words, num_words)
    share = pl.ds(part * num_words * WORD, num_words * WORD)
    met = plgpu.layout_cast(jnp.zeros((num_words, WORD), jnp.int32), BITS)
    for row in range(counted):
        values = load(words.at[row, of_words], BITS)
        met = jnp.where(values != 0, 1, met)
        own[row] = load(x.at[row, share], plgpu.Layout.WG_STRIDED(own.shape[1:], vec_size=1)).astype(
            jnp.float32
        )
    bit = plgpu.broadcasted_iota(jnp.int32, met.shape, 1, layout=BITS)
    meeting[...] = jnp.sum(jax.lax.shift_left(met, bit), axis=1)
    number = jnp.sum(jnp.sum(met, axis=1))

    def gather() -> None:
        pl.run_scoped(
            partial(_gathered, own, meeting, stack, place, part, column, out),
            plgpu.SMEM((MAX_GROUPS * GROUP, COLUMNS), stack.dtype),
            plgpu.SMEM((MAX_GROUPS * GROUP,), jnp.int32),
            plgpu.Barrier(num_arrivals=GROUP, num_barriers=MAX_GROUPS),
        )

    def stream() -> None:
        for side in range(COLUMNS // TILE):
            index = part * dense.num_column_blocks + column * (COLUMNS // TILE) + side
            few_rows.columns(x, stack, place, out, dense, index)

    few = number <= min(MAX_GROUPS * GROUP, int(WORTHWHILE * own.shape[1]))
    pl.when(few)(gather)
    pl.when(~few)(stream)


def _gathered(
    own: Ref, meeting: Ref, stack: Ref, place: Array, part: Array, column: Array, out: Ref,
    fetched: Ref, listed: Ref, arrived: Ref,
) -> None:  # fmt: skip
    """The sums over those rows of the weight alone that meet anything."""
    counted, height = own.shape
    columns = pl.ds(column * COLUMNS, COLUMNS)

    def fetch_next(row: Array, number: Array) -> None:
        listed[number] = row
        source = stack.at[place, part * height + row, columns]
        fetch(source, fetched.at[number], arrived.at[number // GROUP])

    def of_word(word: Array, number: Array) -> Array:
        def fetch_lowest(state: tuple[Array, Array]) -> tuple[Array, Array]:
            bits, number = state
            lowest = bits & -bits
            fetch_next(word * WORD + (WORD - 1) - jax.lax.clz(lowest), number)
            return bits ^ lowest, number + 1

        return jax.lax.while_loop(lambda state: state[0] != 0, fetch_lowest, (meeting[word], number))[1]

    number = jax.lax.fori_loop(0, meeting.shape[0], of_word, jnp.int32(0))
    num_groups = (number + GROUP - 1) // GROUP
    # The last group is filled up with rows that are fetched and not added.
    jax.lax.fori_loop(number, num_groups * GROUP, lambda at, _: fetch_next(listed[number - 1], at), None)
    plgpu.commit_smem()

    def add_group(group: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        wait_for_fetched(arrived.at[group])
        for index in range(GROUP):
            at = group * GROUP + index
            row = listed[at]
            weights = load(fetched.at[at], ACROSS).astype(jnp.float32)
            taken = [jnp.where(at < number, own[r, row], 0.0) for r in range(counted)]
            sums = tuple(total + weights * x for total, x in zip(sums, taken, strict=True))
        return sums

    nothing = tuple(plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), ACROSS) for _ in range(counted))
    sums = jax.lax.fori_loop(0, num_groups, add_group, nothing)
    for row, total in enumerate(sums):
        out[part, row, columns] = total
