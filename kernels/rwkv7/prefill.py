"""RWKV-7's time mixing of many tokens a row, on a Hopper GPU's tensor cores: two Pallas kernels.

A chunk is 64 tokens. What one does to the state of a head is affine, so every chunk can be summed up before
any state is known, all of them at once (`_sum_up`), and what is left to do one after the other is two
products a chunk (`_carry_on`). With `W_t` the cumulative decay within the chunk and the rows

    A_t = W_{t-1} a_t    R_t = W_t r_t    B_t = b_t / W_t    K_t = k_t / W_t    T = (I - tril(A B^T, -1))^{-1}

the recurrence of `reference.py` becomes, as `xla.chunked` derives it,

    y     = reads S_0 + local     reads  = R + tril(R B^T) T A
                                  local  = tril(R B^T) T tril(A K^T, -1) V + tril(R K^T) V
    S_end = W_end (S_0 + change S_0 + fresh)
                                  change = B^T T A
                                  fresh  = B^T T tril(A K^T, -1) V + K^T V

(section 3 of arXiv 2406.06484 for the form of T, section 4 of arXiv 2412.06464 for the decay in it). A
token's decay is at least 0.545, so `1 / W` stays below 1e17, which bfloat16 carries as well as any number: it
has float32's exponent. `T` is taken in two bfloat16 parts, and so are states where they meet `reads` and
`change`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wkvm_jax.kernels.pallas import (
    Barrier,
    Products,
    Ref,
    arrivals,
    broadcast,
    fetch,
    in_place,
    in_two,
    indices,
    kernel,
    load,
    one_by_one,
    read,
    send,
    swizzled,
    tile,
    wait_for,
    wait_for_sent,
)
from wkvm_jax.kernels.rwkv7 import xla
from wkvm_jax.kernels.rwkv7.gradient import Operands, backward, stacks_and_places
from wkvm_jax.kernels.rwkv7.operands import Projections, Variant, as_state
from wkvm_jax.kernels.stacked import Weights
from wkvm_jax.state import Batch

CHUNK = 64
"""Tokens a chunk. Heads have as many keys and values, so that all matrices are of one shape."""
LEAST_TOKENS = 32
"""Fewer tokens are quicker by XLA's shorter chunks than in one that is mostly padding."""
STEPS_AHEAD = 3
"""Chunks whose summaries `_carry_on` has under way."""
NUM_TILES = 13
"""The first layer's five projections and eight more, or the others' seven and six: two blocks fit beside each
other in a multiprocessor."""

SQUARE = (CHUNK, CHUNK)
MATRIX = plgpu.Layout.WGMMA
ROWS, COLUMNS = MATRIX.reduce(1), MATRIX.reduce(0)


def serves(arena: Float[Array, "s l h k v"], projections: Projections) -> bool:
    """Whether the kernels can take these operands."""
    return (
        arena.shape[3:] == SQUARE
        and projections.r.dtype == jnp.bfloat16
        and projections.r.shape[1] >= LEAST_TOKENS
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
) -> tuple[Float[Array, "b t hv"], Float[Array, "s l h k v"]]:
    """As `api.time_mix` says, for many tokens a row; gradients are those of the XLA path."""
    stacks, where = stacks_and_places(params, ln_x, layer)
    result: tuple[Array, Array] = _jitted(arena, batch, where, projections, stacks, variant, interpreted)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _time_mix(
    arena: Array, batch: Batch, where: Array, projections: Projections, stacks: dict[str, Array],
    variant: Variant, interpreted: bool,
) -> tuple[Array, Array]:  # fmt: skip
    num_rows, num_tokens, _ = projections.r.shape
    num_heads, num_chunks = arena.shape[2], -(-num_tokens // CHUNK)
    pad = ((0, 0), (0, num_chunks * CHUNK - num_tokens), (0, 0))
    projected = {name: jnp.pad(x, pad) for name, x in projections.present().items()}
    gate = projected.pop("g")
    stacks = {name: stack.reshape(stack.shape[0], -1) for name, stack in stacks.items()}
    lies_at = {name: number for number, name in enumerate(sorted(stacks))}
    product = Products(SQUARE, interpreted=interpreted)

    def each_chunk(*shape: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, num_chunks, num_heads, *shape), dtype)

    sum_up = kernel(
        "rwkv7_sum_up",
        partial(_sum_up, variant=variant, lies_at=lies_at, product=product),
        [
            *[each_chunk(*SQUARE, dtype=jnp.bfloat16)] * 4,
            each_chunk(*SQUARE, dtype=jnp.float32),
            each_chunk(CHUNK, dtype=jnp.float32),
        ],
        {"row": num_rows, "chunk": num_chunks, "head": num_heads},
        interpreted=interpreted,
        fast_math=True,
        scratch=[[tile(*SQUARE)] * NUM_TILES, arrivals(len(projected))],
    )
    norm = {name: stacks.pop(name) for name in ("scale", "bias")}
    summaries = one_by_one(sum_up)(batch.lengths, where, projected, stacks)
    carry_on = kernel(
        "rwkv7_carry_on",
        partial(_carry_on, variant=variant, lies_at=lies_at, product=product),
        [jax.ShapeDtypeStruct(gate.shape, gate.dtype)],
        {"row": num_rows, "head": num_heads},
        interpreted=interpreted,
        fast_math=True,
        scratch=[tile(*SQUARE)] * 3,
    )
    slots = (batch.read_slots, batch.write_slots, batch.lengths)
    out, arena = in_place(carry_on)(arena, slots, where, summaries, gate, norm)
    return out[0][:, :num_tokens], arena


def _sum_up(
    lengths: Ref, where: Ref, projected: Mapping[str, Ref], small: Mapping[str, Ref],
    reads: Ref, local: Ref, bonus: Ref, change: Ref, fresh: Ref, kept: Ref,
    tiles: Sequence[Ref],
    arrived: Barrier,
    *, variant: Variant, lies_at: Mapping[str, int], product: Products,
) -> None:  # fmt: skip
    """The first kernel: what one chunk does to one head's state, whatever that is."""
    row, chunk, head = (jax.lax.axis_index(name) for name in ("row", "chunk", "head"))
    num_counted = lengths[row] - chunk * CHUNK

    @pl.when((num_counted > 0) | (chunk == 0))  # a row without tokens has one chunk, which keeps its state
    def _() -> None:
        channels = pl.ds(head * CHUNK, CHUNK)
        landed = dict(zip(projected, tiles, strict=False))
        for name, source in projected.items():
            part = source.at[row, pl.ds(chunk * CHUNK, CHUNK), channels]
            fetch(part, landed[name], arrived)

        def of_channels(name: str) -> Array:
            vector = load(small[name].at[where[lies_at[name]], channels], COLUMNS).astype(jnp.float32)
            return broadcast(vector, SQUARE, (1,))

        wait_for(arrived)
        at = (row, chunk, head)
        targets = [ref.at[at] for ref in (reads, local, bonus, change, fresh, kept)]
        _one_chunk(landed, tiles[len(projected) :], of_channels, num_counted, targets, variant, product)


def _one_chunk(
    landed: Mapping[str, Ref],
    free: Sequence[Ref],
    of_channels: Callable[[str], Array],
    num_counted: Array,
    targets: Sequence[Ref],
    variant: Variant,
    product: Products,
) -> None:
    """Tiles `[token, channel]` to the chunk's summary. Each thread writes over what it alone has read."""
    to_reads, to_local, to_bonus, to_change, to_fresh, to_kept = targets
    r, w, k, v, a = (landed[name] for name in ("r", "w", "k", "v", "a"))
    b, bonus, scores, low_strict, *staged = free[:6]
    k_low, v_low = (landed["v_mix"], landed["v_first"]) if "v_mix" in landed else free[6:]
    row, column = indices(SQUARE, MATRIX)
    counted = row < num_counted
    of = partial(read, layout=MATRIX)

    def masked(x: Array) -> Array:
        return jnp.where(counted, x, 0.0)

    def over_channels(x: Array) -> Array:
        return broadcast(jnp.sum(x, axis=1), SQUARE, (0,))

    # The decay's sums over tokens, by the tensor cores, from three parts that hold float32's 24 bits.
    log_w = masked(-xla.DECAY_SCALE * jax.nn.sigmoid(of_channels("w0") + of(w)))
    to_kept[...] = jnp.exp(jnp.sum(log_w, axis=0))
    rest = log_w
    for part in (w, b, bonus):
        rounded = rest.astype(jnp.bfloat16)
        part[...] = rounded
        rest = rest - rounded.astype(jnp.float32)
    scores[...] = (row >= column).astype(jnp.bfloat16)
    plgpu.commit_smem()
    log_decay = product((scores, w), (scores, b), (scores, bonus))
    plgpu.commit_smem()  # all have read the parts

    iclr = jax.nn.sigmoid(of_channels("a0") + of(a))
    removal = of(k) * of_channels("k_k")
    square = over_channels(removal * removal)
    guarded = square + 1e-6 if variant.fused_norm else jnp.maximum(square, 1e-24)
    removal = masked(removal * jax.lax.rsqrt(guarded))
    a[...] = (-removal * jnp.exp(log_decay - log_w)).astype(jnp.bfloat16)
    inverse = jnp.exp(-log_decay)
    b[...] = masked(removal * iclr * inverse).astype(jnp.bfloat16)
    key = masked(of(k) * (1 + (iclr - 1) * of_channels("k_a")))
    value = of(v)
    if "v_mix" in landed:
        share = jax.nn.sigmoid(of_channels("v0") + of(landed["v_mix"]))
        value = value + (of(landed["v_first"]) - value) * share
    value = masked(value)
    k[...], k_low[...] = in_two(key * inverse)
    v[...], v_low[...] = in_two(value)
    receptance = masked(of(r))
    r[...] = (receptance * jnp.exp(log_decay)).astype(jnp.bfloat16)
    bonus[...] = (value * over_channels(receptance * key * of_channels("r_k"))).astype(jnp.bfloat16)
    send(bonus, to_bonus)

    before = row > column
    strict = jnp.where(before, product((a, b.T)), 0.0)
    scores[...] = jnp.where(before, product((a, k.T)), 0.0).astype(jnp.bfloat16)
    inverse_of = _inverse_of_unit_lower(strict, (w, low_strict), staged, (row, column), product)
    of_a = product(*((part, a) for part in inverse_of))
    of_scores = product(*((part, scores) for part in inverse_of)).astype(jnp.bfloat16)
    of_v = product((of_scores, v))
    changes, values = staged
    changes[...] = of_a.astype(jnp.bfloat16)
    values[...] = of_v.astype(jnp.bfloat16)
    plgpu.commit_smem()

    to_fresh[...] = product((b.T, values), (k.T, v), (k.T, v_low), (k_low.T, v))
    w[...] = product((b.T, changes)).astype(jnp.bfloat16)
    send(w, to_change)
    until_now = row >= column
    by_removal = jnp.where(until_now, product((r, b.T)), 0.0).astype(jnp.bfloat16)
    by_key = jnp.where(until_now, product((r, k.T)), 0.0).astype(jnp.bfloat16)
    scores[...] = product((by_removal, values), (by_key, v)).astype(jnp.bfloat16)
    send(scores, to_local)
    reads = of(r) + product((by_removal, changes))
    plgpu.commit_smem()  # all have read what the products take
    r[...] = reads.astype(jnp.bfloat16)
    send(r, to_reads)
    wait_for_sent()


def _inverse_of_unit_lower(
    strict: Array, parts: Sequence[Ref], staged: Sequence[Ref], index: tuple[Array, Array], product: Products
) -> tuple[Array, Array]:
    """`(I - strict)^{-1}` in two parts, for a strictly lower triangular matrix, by doubling the block size.

    With diagonal blocks inverted to P and Q, `[[P, 0], [-X, Q]]` has the inverse `[[P, 0], [Q X P, Q]]`.
    """
    row, column = index
    parts[0][...], parts[1][...] = in_two(strict)
    # Above the block's bit row and column are the same; at it, the row has 1 and the column 0.
    differing = jnp.where(row > column, row ^ column, CHUNK)

    def corner(block: int) -> Array:
        return (differing >= block) & (differing < 2 * block)

    inverse = jnp.where(row == column, 1.0, jnp.where(corner(1), strict, 0.0))
    block = 2
    while block < CHUNK:
        high, low = in_two(inverse)
        staged[0][...], staged[1][...] = high, low
        plgpu.commit_smem()
        left = in_two(product((high, parts[0]), (high, parts[1]), (low, parts[0])))
        both = product((left[0], staged[0]), (left[0], staged[1]), (left[1], staged[0]))
        inverse = inverse + jnp.where(corner(block), both, 0.0)
        plgpu.commit_smem()  # all have read what is staged
        block *= 2
    return in_two(inverse)


def _carry_on(
    slots: tuple[Ref, Ref, Ref], where: Ref, summaries: Sequence[Ref], gate: Ref, norm: Mapping[str, Ref],
    states: Ref, out: Ref, high: Ref, low: Ref, staged: Ref,
    *, variant: Variant, lies_at: Mapping[str, int], product: Products,
) -> None:  # fmt: skip
    """The second kernel: one head of one row from chunk to chunk, its state in registers."""
    row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
    read_slots, write_slots, lengths = slots
    layer, channels = where[len(lies_at)], pl.ds(head * CHUNK, CHUNK)
    num_chunks = jnp.maximum((lengths[row] + CHUNK - 1) // CHUNK, 1)

    def of_channels(name: str) -> Array:
        vector = load(norm[name].at[where[lies_at[name]], channels], COLUMNS).astype(jnp.float32)
        return broadcast(vector, SQUARE, (1,))

    def over_channels(x: Array) -> Array:
        return broadcast(jnp.sum(x, axis=1) * (1 / CHUNK), SQUARE, (0,))

    def one_chunk(
        index: tuple[Array, ...], reads: Ref, local: Ref, bonus: Ref, change: Ref, fresh: Ref, kept: Ref,
        gate: Ref, state: Array,
    ) -> Array:  # fmt: skip
        high[...], low[...] = in_two(state)
        plgpu.commit_smem()
        changed, y = product.at_once(((change, high), (change, low)), ((reads, high), (reads, low)))
        state = (state + changed + read(fresh, MATRIX)) * broadcast(load(kept, ROWS), SQUARE, (0,))
        y = y + read(local, MATRIX)
        centred = y - over_channels(y)
        y = centred * jax.lax.rsqrt(over_channels(centred * centred) + CHUNK * variant.norm_eps)
        y = y * of_channels("scale") + of_channels("bias") + read(bonus, MATRIX)
        wait_for_sent()
        staged[...] = (y * read(gate, MATRIX)).astype(out.dtype)
        # Once all have filled it, all have read the parts of the state, too.
        send(staged, out.at[row, pl.ds(index[0] * CHUNK, CHUNK), channels])
        return state

    def tiles(lead: tuple[None, ...], index: Callable[[Array], tuple[Array | int, ...]]) -> plgpu.BlockSpec:
        return plgpu.BlockSpec((*lead, *SQUARE), index, transforms=swizzled(CHUNK))

    of_chunk = tiles((None,) * 3, lambda chunk: (row, chunk, head, 0, 0))
    in_float32 = plgpu.BlockSpec(of_chunk.block_shape, of_chunk.index_map, transforms=swizzled(32, 4))
    of_tokens = tiles((None,), lambda chunk: (row, chunk, head))
    state = load(states.at[read_slots[row], layer, head], MATRIX).astype(jnp.float32)
    state = plgpu.emit_pipeline(
        one_chunk,
        grid=(num_chunks,),
        in_specs=[
            *[of_chunk] * 4,
            in_float32,
            plgpu.BlockSpec((None, None, None, CHUNK), lambda chunk: (row, chunk, head, 0)),
            of_tokens,
        ],
        max_concurrent_steps=STEPS_AHEAD,
        init_carry=state,
    )(*summaries, gate)
    wait_for_sent()
    states[write_slots[row], layer, head] = as_state(state, states.dtype)


def _forward(
    arena: Array, batch: Batch, where: Array, projections: Projections, stacks: dict[str, Array],
    variant: Variant, interpreted: bool,
) -> tuple[tuple[Array, Array], Operands]:  # fmt: skip
    operands = (arena, batch, where, projections, stacks)
    return _time_mix(*operands, variant, interpreted), operands


_time_mix.defvjp(_forward, backward)
_jitted = jax.jit(_time_mix, static_argnums=(5, 6))  # so that a model's equal layers are lowered once
