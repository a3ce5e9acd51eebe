"""RWKV-7's time mixing in plain XLA: one token in the arena, or many tokens in chunks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from wkvm_jax.kernels.rwkv7.operands import Projections, Variant, as_state
from wkvm_jax.kernels.rwkv7.reference import recurrence_reference
from wkvm_jax.state import Batch, read_layer, write_layer

DECAY_SCALE = math.exp(-0.5)
"""The decay is `exp(-DECAY_SCALE * sigmoid(...))`, so it stays above 0.545 (arXiv 2503.14456, eq. 14)."""

CHUNK = 16
"""Tokens a chunk. The decay of one token is at least exp(-exp(-0.5)) = 0.545, so the inverse of a chunk's
cumulative decay stays under 1.7e4 and float32 carries it without loss."""

MAX_SCANNED = 8
"""Tokens up to which one after the other beats a chunk that is mostly padding."""

_einsum = partial(jnp.einsum, precision="highest")


def time_mix(
    arena: Float[Array, "s l h k v"],
    layer: int | Int32[Array, ""],
    batch: Batch,
    projections: Projections,
    params: Mapping[str, Array],
    ln_x: Mapping[str, Array],
    variant: Variant,
) -> tuple[Float[Array, "b t hv"], Float[Array, "s l h k v"]]:
    """As `api.time_mix` says, for any number of tokens."""
    num_heads, head_dim = arena.shape[2], arena.shape[3]
    p = jax.tree.map(lambda x: x.astype(jnp.float32), projections)
    params = {name: param.astype(jnp.float32) for name, param in params.items()}
    log_w = -DECAY_SCALE * jax.nn.sigmoid(params["w0"] + p.w)
    iclr = jax.nn.sigmoid(params["a0"] + p.a)
    v = p.v
    if p.v_mix is not None:
        v = v + (p.v_first - v) * jax.nn.sigmoid(params["v0"] + p.v_mix)
    heads = partial(_split_heads, num_heads=num_heads)
    removal = _unit_length(heads(p.k * params["k_k"]), variant.fused_norm)
    k = p.k * (1 + (iclr - 1) * params["k_a"])
    r, log_w, k, v, iclr = map(heads, (p.r, log_w, k, v, iclr))
    bonus = jnp.sum(r * k * params["r_k"], axis=-1, keepdims=True) * v
    y, arena = recurrence(arena, layer, batch, (r, log_w, k, v, -removal, removal * iclr))
    y = _group_norm(y, ln_x, head_dim * variant.norm_eps) + bonus.reshape(p.v.shape)
    return (y * p.g).astype(projections.r.dtype), arena


def _split_heads(x: Float32[Array, "b t hc"], num_heads: int) -> Float32[Array, "b t h c"]:
    return x.reshape(*x.shape[:-1], num_heads, -1)


def _unit_length(x: Float32[Array, "b t h k"], fused_norm: bool) -> Float32[Array, "b t h k"]:
    """`x` divided by its length in the last axis, with either source's guard against zero."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    if fused_norm:
        return x * jax.lax.rsqrt(square + 1e-6)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def _group_norm(
    x: Float32[Array, "b t h v"], params: Mapping[str, Array], eps: float
) -> Float32[Array, "b t hv"]:
    """GroupNorm with one group a head, heads joined in the result."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    x = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    x = x.reshape(*x.shape[:-2], -1) * params["scale"].astype(jnp.float32)
    return x + params["bias"].astype(jnp.float32)


def recurrence(
    arena: Float[Array, "s l h k v"],
    layer: int | Int32[Array, ""],
    batch: Batch,
    inputs: tuple[Float32[Array, "b t h _"], ...],
) -> tuple[Float32[Array, "b t h v"], Float[Array, "s l h k v"]]:
    """The recurrence for every row of a batch, from its read slot to its write slot.

    Args:
        arena, layer, batch: as in `time_mix`.
        inputs: `(r, log_w, k, v, a, b)` as `recurrence_reference` explains. `log_w` is at least
            -exp(-0.5), as the model's is; chunks lose accuracy below about -5.

    Returns:
        The output for each token and the arena; a row's state is that after its last counted token.
    """
    r, log_w, k, v, a, b = inputs
    counted = _counted(batch)
    # Whatever tokens that do not count hold, it reaches no state.
    log_w, k, v, a, b = (jnp.where(counted, x, 0.0) for x in (log_w, k, v, a, b))
    inputs = (r, log_w, k, v, a, b)

    def in_arena(arena: Array) -> tuple[Array, Array]:
        one = tuple(x[:, 0] for x in inputs)
        y, arena = step_in_arena(arena, layer, batch.read_slots, batch.write_slots, one)
        return y[:, None], arena

    def gathered(arena: Array) -> tuple[Array, Array]:
        several = scanned if r.shape[1] <= MAX_SCANNED else chunked
        y, final_state = several(inputs, read_layer(arena, batch, layer).astype(jnp.float32))
        return y, write_layer(arena, batch, layer, as_state(final_state, arena.dtype))

    if r.shape[1] > 1:
        return gathered(arena)
    result: tuple[Array, Array] = jax.lax.platform_dependent(arena, cpu=in_arena, default=gathered)
    return result


def _counted(batch: Batch) -> Bool[Array, "b t 1 1"]:
    return (jnp.arange(batch.tokens.shape[1]) < batch.lengths[:, None])[:, :, None, None]


def step_in_arena(
    arena: Float[Array, "s l h k v"],
    layer: int | Int32[Array, ""],
    read_slots: Int32[Array, " rows"],
    write_slots: Int32[Array, " rows"],
    inputs: tuple[Float32[Array, "rows h _"], ...],
) -> tuple[Float32[Array, "rows h v"], Float[Array, "s l h k v"]]:
    """One token a row, one head after the other, straight in the arena.

    A head's matrix stays in the first-level cache from read to write: on a CPU this takes under half the
    time of gather, update and scatter over all rows.
    """
    r, log_w, k, v, a, b = inputs
    w = jnp.exp(log_w)
    num_rows, num_heads, _ = k.shape
    _, _, _, *matrix = arena.shape
    index_dtype = read_slots.dtype
    at_layer, zero = jnp.asarray(layer, index_dtype), jnp.zeros((), index_dtype)

    def one_head(index: Int32[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        arena, y = carry
        row, head = index // num_heads, index % num_heads
        place = (read_slots[row], at_layer, head.astype(index_dtype), zero, zero)
        state = jax.lax.dynamic_slice(arena, place, (1, 1, 1, *matrix))[0, 0, 0].astype(jnp.float32)
        removed = _einsum("k,kv->v", a[row, head], state)
        state = (
            w[row, head][:, None] * state
            + b[row, head][:, None] * removed[None, :]
            + k[row, head][:, None] * v[row, head][None, :]
        )
        y = y.at[row, head].set(_einsum("k,kv->v", r[row, head], state))
        place = (write_slots[row], *place[1:])
        return jax.lax.dynamic_update_slice(arena, as_state(state, arena.dtype)[None, None, None], place), y

    arena, y = jax.lax.fori_loop(0, num_rows * num_heads, one_head, (arena, jnp.zeros_like(v)))
    return y, arena


def scanned(
    inputs: tuple[Float32[Array, "rows t h _"], ...],
    initial_state: Float32[Array, "rows h k v"],
) -> tuple[Float32[Array, "rows t h v"], Float32[Array, "rows h k v"]]:
    """A few tokens a row, one after the other: under half a chunk this is quicker than a padded chunk."""
    r, log_w, k, v, a, b = inputs
    return recurrence_reference(r, log_w, k, v, a, b, initial_state)


def chunked(
    inputs: tuple[Float32[Array, "rows t h _"], ...],
    initial_state: Float32[Array, "rows h k v"],
) -> tuple[Float32[Array, "rows t h v"], Float32[Array, "rows h k v"]]:
    """Many tokens a row in the WY form of diagonal-plus-low-rank transitions, `CHUNK` tokens at a time.

    Within a chunk let `W_t` be the cumulative decay and `removed_t = a_t^T S_{t-1}`. Then, with
    `A_t = W_{t-1} a_t`, `R_t = W_t r_t`, `B_t = b_t / W_t`, `K_t = k_t / W_t`,

        removed = (I - tril(A B^T, -1))^{-1} (A S_0 + tril(A K^T, -1) V)
        y       = R S_0 + tril(R B^T) removed + tril(R K^T) V
        S_end   = diag(W_end) (S_0 + B^T removed + K^T V)

    which is matrix products only (section 3 of arXiv 2406.06484 for the delta rule; the diagonal is
    folded into A, B, K and R as in arXiv 2312.06635).
    """
    num_tokens = inputs[0].shape[1]
    pad = -num_tokens % CHUNK

    def by_chunk(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
        rows, _, heads, channels = x.shape
        return jnp.transpose(x.reshape(rows, -1, CHUNK, heads, channels), (1, 0, 3, 2, 4))

    chunks = tuple(by_chunk(x) for x in inputs)
    final_state, y = jax.lax.scan(_one_chunk, initial_state, chunks)
    num_chunks, rows, heads, _, channels = y.shape
    y = jnp.transpose(y, (1, 0, 3, 2, 4)).reshape(rows, num_chunks * CHUNK, heads, channels)
    return y[:, :num_tokens], final_state


def _one_chunk(
    state: Float32[Array, "rows h k v"], chunk: tuple[Float32[Array, "rows h c _"], ...]
) -> tuple[Float32[Array, "rows h k v"], Float32[Array, "rows h c v"]]:
    r, log_w, k, v, a, b = chunk
    log_decay = jnp.cumsum(log_w, axis=2)
    decay, inverse = jnp.exp(log_decay), jnp.exp(-log_decay)
    before = jnp.exp(log_decay - log_w)
    a, r, b, k = a * before, r * decay, b * inverse, k * inverse
    strict = jnp.tril(jnp.ones((CHUNK, CHUNK), bool), -1)
    causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))

    def scores(x: Array, y: Array, mask: Array) -> Array:
        return jnp.where(mask, _einsum("bhtk,bhsk->bhts", x, y), 0.0)

    right = _einsum("bhtk,bhkv->bhtv", a, state) + _einsum("bhts,bhsv->bhtv", scores(a, k, strict), v)
    removed = _einsum("bhts,bhsv->bhtv", _inverse_of_unit_lower(-scores(a, b, strict)), right)
    y = (
        _einsum("bhtk,bhkv->bhtv", r, state)
        + _einsum("bhts,bhsv->bhtv", scores(r, b, causal), removed)
        + _einsum("bhts,bhsv->bhtv", scores(r, k, causal), v)
    )
    state = state + _einsum("bhtk,bhtv->bhkv", b, removed) + _einsum("bhtk,bhtv->bhkv", k, v)
    return state * decay[:, :, -1, :, None], y


def _inverse_of_unit_lower(strict: Float32[Array, "*batch c c"]) -> Float32[Array, "*batch c c"]:
    """The inverse of `I + strict`, for a strictly lower triangular matrix, by doubling the block size.

    With diagonal blocks already inverted to P and Q, `[[P, 0], [X, Q]]` has the inverse
    `[[P, 0], [-Q X P, Q]]`. Unlike the product of powers, this loses no accuracy when keys repeat.
    """
    size = strict.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=strict.dtype), strict.shape)
    index = jnp.arange(size)
    block = 1
    while block < size:
        pair = index // (2 * block)
        lower = (index // block) % 2 == 1
        corner = (pair[:, None] == pair[None, :]) & lower[:, None] & ~lower[None, :]
        inside = jnp.where(corner, strict, 0.0)
        inverse = inverse - _einsum("...ij,...jk,...kl->...il", inverse, inside, inverse)
        block *= 2
    return inverse
