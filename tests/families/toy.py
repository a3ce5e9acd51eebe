"""A small hybrid family with one leaf of each kind, for tests of everything that must not know a family.

A layer adds three readings of the past to the stream: a decaying matrix memory (gated linear attention,
arXiv 2312.06635), attention over the last `window` tokens, whose keys and values lie in a ring, and
attention over all tokens, whose keys and values lie in pages. Scores fall with distance, so a token that
is read from the wrong place shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, PRNGKeyArray

from wkvm_jax.kernels.dispatch import Kernels
from wkvm_jax.models.family import Family, Layout, Shapes
from wkvm_jax.models.layers import layer_norm, product
from wkvm_jax.models.model import Model
from wkvm_jax.state import (
    Batch,
    LeafSpec,
    State,
    StateSpec,
    advance_num_tokens,
    read_layer,
    read_rows,
    write_layer,
)
from wkvm_jax.tokenizers.byte_level import ByteTokenizer
from wkvm_jax.types import Params

SLOPE = 0.05
"""How much a score falls for each token of distance."""
PROJECTIONS = ("memory_q", "memory_k", "memory_v", "ring_q", "ring_k", "ring_v", "page_q", "page_k", "page_v")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; `window` is the ring's length and `page_size` the tokens of a page."""

    vocab_size: int = 256
    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 2
    window: int = 5
    page_size: int = 4


def param_spec(config: Config) -> Params:
    """A square matrix for each projection, a decay gate a head, and norms."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    width = config.hidden_size
    block = {name: array(width, width) for name in (*PROJECTIONS, "output")} | {
        "norm": {"scale": array(width)},
        "gate": array(width, config.num_heads),
    }
    return {
        "embedding": array(config.vocab_size, width),
        "blocks": tuple(block for _ in range(config.num_layers)),
        "norm": {"scale": array(width)},
        "head": array(width, config.vocab_size),
    }


def state_spec(config: Config) -> StateSpec:
    """A matrix a head, a ring written entry by entry, and pages; keys and values side by side."""
    layers, width, heads = config.num_layers, config.hidden_size, config.num_heads
    names = ("layer", "token", "kv", "width")
    return StateSpec(
        {
            "memory": LeafSpec(
                (layers, heads, width // heads, width // heads),
                jnp.float32,
                ("layer", "head", "key", "value"),
                "recurrent",
            ),
            "ring": LeafSpec(
                (layers, config.window, 2, width), jnp.float32, names, "window", rewritten=False
            ),
            "pages": LeafSpec((layers, config.page_size, 2, width), jnp.float32, names, "paged"),
        }
    )


def forward(
    params: Params, batch: Batch, state: State, *, config: Config, kernels: Kernels = "xla"
) -> tuple[Array, State]:
    """Runs the batch's tokens; see `wkvm_jax.models.family.Family`."""
    start = read_rows(state.num_tokens, batch)
    x = params["embedding"][batch.tokens].astype(jnp.float32)
    memory, ring, pages = state.leaves["memory"], state.leaves["ring"], state.pools["pages"]
    for layer, block in enumerate(params["blocks"]):
        y = layer_norm(x, block["norm"], 1e-5)
        q, k, v = (product(y, block[f"memory_{name}"]) for name in "qkv")
        gate = jax.nn.sigmoid(product(y, block["gate"]) + 2.0)
        remembered, rows = _recall((q, k, v), gate, read_layer(memory, batch, layer), batch, config)
        memory = write_layer(memory, batch, layer, rows)
        q, k, v = (product(y, block[f"ring_{name}"]) for name in "qkv")
        recent, ring = _attend_ring(q, jnp.stack([k, v], axis=2), ring, layer, batch, start, config)
        q, k, v = (product(y, block[f"page_{name}"]) for name in "qkv")
        far, pages = _attend_pages(q, jnp.stack([k, v], axis=2), pages, layer, batch, start, config)
        x = x + product(jax.nn.silu(remembered + recent + far), block["output"])
    state = state.replace(
        leaves={"memory": memory, "ring": ring},
        pools={"pages": pages},
        num_tokens=advance_num_tokens(state, batch),
    )
    return layer_norm(x, params["norm"], 1e-5), state


def head(params: Params, hidden: Array, *, config: Config) -> Array:
    """Logits of the positions given."""
    return product(hidden, params["head"])


def _recall(
    qkv: tuple[Array, ...],
    gate: Float32[Array, "b t h"],
    memory: Float32[Array, "b h k v"],
    batch: Batch,
    config: Config,
) -> tuple[Float32[Array, "b t d"], Float32[Array, "b h k v"]]:
    """`M_t = gate_t M_{t-1} + k_t v_t^T`, read with `q_t`; tokens past a row's length change nothing."""
    counted = _counted(qkv[0], batch)[..., None]
    heads = [x.reshape(*x.shape[:2], config.num_heads, -1) for x in qkv]
    gate, heads[1] = jnp.where(counted, gate, 1.0), jnp.where(counted[..., None], heads[1], 0.0)

    def one_token(memory: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, gate = inputs
        memory = gate[..., None, None] * memory + k[..., None] * v[:, :, None]
        return memory, jnp.einsum("bhk,bhkv->bhv", q, memory, precision="highest")

    by_time = tuple(jnp.moveaxis(x, 1, 0) for x in (*heads, gate))
    memory, read = jax.lax.scan(one_token, memory, by_time)
    return jnp.moveaxis(read, 0, 1).reshape(qkv[0].shape), memory


def _attend_ring(
    q: Float32[Array, "b t d"],
    kv: Float32[Array, "b t two d"],
    ring: Float32[Array, "s l w two d"],
    layer: int,
    batch: Batch,
    start: Int32[Array, " b"],
    config: Config,
) -> tuple[Float32[Array, "b t d"], Float32[Array, "s l w two d"]]:
    """Attention over the last `window` tokens. Token `p` lies in entry `p % window` of the write slot."""
    window, index = config.window, jnp.arange(q.shape[1])
    last = start[:, None] - 1
    old_at = last - (last - jnp.arange(window)) % window
    new_at = start[:, None] + index
    key_at = jnp.concatenate([old_at, new_at], axis=1)[:, None]
    distance = new_at[..., None] - key_at
    seen = (distance >= 0) & (distance < window) & (key_at >= 0) & _counted(q, batch)[..., None]
    keys_values = jnp.concatenate([ring[batch.write_slots, layer], kv], axis=1)
    kept = _counted(q, batch) & (index >= batch.lengths[:, None] - window)
    entry = jnp.where(kept, new_at % window, window)
    ring = ring.at[batch.write_slots[:, None], layer, entry].set(kv, mode="drop")
    return _attention(q, keys_values, seen, distance), ring


def _attend_pages(
    q: Float32[Array, "b t d"],
    kv: Float32[Array, "b t two d"],
    pages: Float32[Array, "page l w two d"],
    layer: int,
    batch: Batch,
    start: Int32[Array, " b"],
    config: Config,
) -> tuple[Float32[Array, "b t d"], Float32[Array, "page l w two d"]]:
    """Attention over all tokens. Token `p` lies in page `page_table[p // page_size]`."""
    size = config.page_size
    at = start[:, None] + jnp.arange(q.shape[1])
    page = jnp.take_along_axis(batch.page_table, at // size, axis=1, mode="clip")
    held = _counted(q, batch) & (at // size < batch.page_table.shape[1])
    pages = pages.at[jnp.where(held, page, pages.shape[0]), layer, at % size].set(kv, mode="drop")
    keys_values = pages[batch.page_table, layer].reshape(q.shape[0], -1, *kv.shape[2:])
    distance = at[..., None] - jnp.arange(keys_values.shape[1])
    return _attention(q, keys_values, (distance >= 0) & held[..., None], distance), pages


def _counted(q: Float32[Array, "b t d"], batch: Batch) -> Bool[Array, "b t"]:
    return jnp.arange(q.shape[1]) < batch.lengths[:, None]


def _attention(
    q: Float32[Array, "b t d"],
    keys_values: Float32[Array, "b j two d"],
    seen: Bool[Array, "b t j"],
    distance: Int32[Array, "b t j"],
) -> Float32[Array, "b t d"]:
    """One head of softmax attention. What no query sees may hold anything, NaN included."""
    anyone = seen.any(axis=1)[..., None, None]
    keys, values = jnp.moveaxis(jnp.where(anyone, keys_values, 0.0), 2, 0)
    scores = jnp.einsum("btd,bjd->btj", q, keys, precision="highest") / q.shape[-1] ** 0.5
    scores = jnp.where(seen, scores - SLOPE * distance, -1e30)
    return jnp.einsum("btj,bjd->btd", jax.nn.softmax(scores, axis=-1), values, precision="highest")


def layout(shapes: Shapes, hf_config: Mapping[str, object] | None) -> Layout | None:
    """No checkpoint is of this family."""
    return None


TOY = Family("toy", param_spec, state_spec, forward, head, layout)


def make_params(config: Config, key: PRNGKeyArray) -> Params:
    """Random weights that keep the stream's scale."""
    leaves, tree = jax.tree.flatten(param_spec(config))

    def one(leaf: jax.ShapeDtypeStruct, key: PRNGKeyArray) -> Array:
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape)
        fan_in = 1 if leaf.shape[0] == config.vocab_size else leaf.shape[0]
        return jax.random.normal(key, leaf.shape) / fan_in**0.5

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, map(one, leaves, keys))


def toy_model(config: Config = Config(), seed: int = 0) -> Model:
    """A toy with random weights and the byte tokenizer."""
    return Model(TOY, config, make_params(config, jax.random.key(seed)), ByteTokenizer(), name="toy")
