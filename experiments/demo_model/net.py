"""The training forward of RWKV-7: the same function as `wkvm_jax.models.rwkv7`, laid out for fast steps.

The layers' parameters are stacked on a leading axis, so that one compiled block serves all of them, and every
row starts from the initial state. Matrix products run in bfloat16 on a GPU. Weights are kept [in, out] here;
`export` writes them in BlinkDL's names and layout, and a test holds this forward to the engine's own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

Params = dict[str, dict[str, Array]]
Heads = Float[Array, "b t h n"]
# (r, log decay, k, v, a, b) -> y, from the zero state
Recurrence = Callable[[Heads, Heads, Heads, Heads, Heads, Heads], Heads]

_LOG_DECAY_SCALE = 0.6065306597126334  # exp(-1/2)
_MIXES = "rwkvag"
# The time mix's first products, and the letter of the mix that each takes.
_MIXED = {"receptance": "r", "key": "k", "value": "v", "w1": "w", "a1": "a", "v1": "v", "g1": "g"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    num_layers: int = 8
    hidden_size: int = 256
    head_dim: int = 64
    intermediate_size: int = 1024
    decay_rank: int = 64
    iclr_rank: int = 64
    value_rank: int = 32
    gate_rank: int = 64
    vocab_size: int = 256
    norm_eps: float = 1e-5


def xla_recurrence(r: Heads, log_w: Heads, k: Heads, v: Heads, a: Heads, b: Heads) -> Heads:
    """The engine's chunked form, for any platform."""
    from wkvm_jax.kernels.rwkv7 import xla

    rows, _, num_heads, head_dim = r.shape
    inputs = tuple(x.astype(jnp.float32) for x in (r, log_w, k, v, a, b))
    y, _ = xla.chunked(inputs, jnp.zeros((rows, num_heads, head_dim, head_dim), jnp.float32))
    return y


def jla_recurrence(r: Heads, log_w: Heads, k: Heads, v: Heads, a: Heads, b: Heads) -> Heads:
    """The Hopper kernels of the package `jax-linear-attention`, forward and backward."""
    from jla.ops.mosaic_gpu import rwkv7

    r, k, v = (x.astype(jnp.bfloat16) for x in (r, k, v))
    y, _ = rwkv7.rwkv7(r, k, v, log_w, a, b, scale=1.0, lower_bound=-0.61)
    return y


RECURRENCES: dict[str, Recurrence] = {"xla": xla_recurrence, "jla": jla_recurrence}


def _orthogonal(key: PRNGKeyArray, shape: tuple[int, ...], gain: float) -> Array:
    return jax.nn.initializers.orthogonal(gain)(key, shape, jnp.float32)


def _layer_params(shape: Shape, layer: int, key: PRNGKeyArray) -> dict[str, Array]:
    """One layer's start values, as the authors of RWKV-7 choose them."""
    width, num_heads = shape.hidden_size, shape.hidden_size // shape.head_dim
    depth = layer / max(shape.num_layers - 1, 1)
    rest = 1.0 - layer / shape.num_layers
    n = jnp.arange(width, dtype=jnp.float32)
    share, linear = n / width, n / max(width - 1, 1) - 0.5
    middle = (shape.head_dim - 1) / 2
    zigzag = (n % shape.head_dim - middle) / middle
    zigzag = zigzag * jnp.abs(zigzag)
    bound = 0.5 / width**0.5
    keys = iter(jax.random.split(key, 16))

    def uniform(out: int, scale: float) -> Array:
        return jax.random.uniform(next(keys), (width, out), jnp.float32, -scale, scale)

    params = {
        "x_rwkvag": jnp.stack([1.0 - share ** (power * rest) for power in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]),
        "ffn.x_k": 1.0 - share ** (rest**4),
        "w0": -6.0 + 6.0 * (n / max(width - 1, 1)) ** (1.0 + depth**0.3) + 0.5 + 2.5 * zigzag,
        "a0": -0.19 + 0.3 * zigzag + 0.4 * linear,
        "v0": 0.73 - 0.4 * linear,
        "k_k": 0.71 - 0.1 * linear,
        "k_a": jnp.full(width, 1.02),
        "r_k": jnp.full((num_heads, shape.head_dim), -0.04),
        "receptance": uniform(width, bound),
        "key": uniform(width, 0.1 * bound),
        "value": uniform(width, bound),
        "output": jnp.zeros((width, width)),
        "ffn.key": uniform(shape.intermediate_size, bound),
        "ffn.value": jnp.zeros((shape.intermediate_size, width)),
        "ln_x.weight": jnp.full(width, ((1 + layer) / shape.num_layers) ** 0.7),
        "ln_x.bias": jnp.zeros(width),
    }
    for norm in ("ln1", "ln2"):
        params |= {f"{norm}.weight": jnp.ones(width), f"{norm}.bias": jnp.zeros(width)}
    ranks = {"w": shape.decay_rank, "a": shape.iclr_rank, "v": shape.value_rank, "g": shape.gate_rank}
    for name, rank in ranks.items():
        params |= {
            f"{name}1": jnp.zeros((width, rank)),
            f"{name}2": _orthogonal(next(keys), (rank, width), 0.1),
        }
    return params


def init_params(shape: Shape, key: PRNGKeyArray) -> Params:
    """Float32 start values; the layers' arrays have a leading layer axis."""
    keys = jax.random.split(key, shape.num_layers + 2)
    layers = [_layer_params(shape, layer, keys[layer]) for layer in range(shape.num_layers)]
    ones, zeros = jnp.ones(shape.hidden_size), jnp.zeros(shape.hidden_size)
    table = (shape.vocab_size, shape.hidden_size)
    return {
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
        "ends": {
            "emb": jax.random.uniform(keys[-1], table, jnp.float32, -1e-4, 1e-4),
            "head": _orthogonal(keys[-2], table, 0.5).T,
            "ln0.weight": ones, "ln0.bias": zeros, "ln_out.weight": ones, "ln_out.bias": zeros,
        },
    }  # fmt: skip


def _norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + eps)
    return centred * scale * weight + bias


def _product(x: Array, weight: Array, dtype: DTypeLike | None = None) -> Array:
    """`x @ weight`, by default in the dtype of `x`."""
    dtype = dtype or x.dtype
    # Rows are made flat, since on a CPU the gradient's sum over two axes takes six times as long.
    flat = jnp.matmul(x.reshape(-1, x.shape[-1]), weight.astype(x.dtype), preferred_element_type=dtype)
    return flat.reshape(*x.shape[:-1], -1)


def _shifted(x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """The input of the token before, zero at the start."""
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def _mixed_products(p: dict[str, Array], x: Float[Array, "b t d"], dtype: DTypeLike) -> list[Array]:
    """The seven products of the time mix's inputs, each `(x + delta * mix) @ W`, in the order of `_MIXED`.

    One product with twice the contraction, `[x, delta] @ [W; mix * W]`, is the same sum and never writes the
    six mixed inputs: fewer bytes forward, and no reduction over all tokens for the gradient of `mix`.
    """
    mixes = dict(zip(_MIXES, p["x_rwkvag"], strict=True))
    weights = [p[name] for name in _MIXED]
    scaled = [mixes[mix][:, None] * p[name] for name, mix in _MIXED.items()]
    both = jnp.concatenate([x, _shifted(x) - x], -1).astype(dtype)
    out = _product(both, jnp.concatenate([jnp.concatenate(weights, 1), jnp.concatenate(scaled, 1)], 0))
    ends = list(itertools.accumulate(weight.shape[1] for weight in weights))
    return jnp.split(out, ends[:-1], axis=-1)


def _recurrence_inputs(
    p: dict[str, Array], x: Float[Array, "b t d"], v_first: Array, is_first: Array, shape: Shape
) -> tuple[tuple[Heads, ...], Array, Array]:
    """The recurrence's inputs, the output gate, and the first layer's values."""
    rows, length, width = x.shape
    dtype, f32 = v_first.dtype, jnp.float32
    heads = (rows, length, width // shape.head_dim, shape.head_dim)
    x = _norm(x, p["ln1.weight"], p["ln1.bias"], shape.norm_eps)
    inner = dict(zip(_MIXED, _mixed_products(p, x, dtype), strict=True))

    def low_rank(name: str, activation: Callable[[Array], Array] = lambda y: y) -> Array:
        return _product(activation(inner[f"{name}1"].astype(f32)).astype(dtype), p[f"{name}2"])

    r, v = inner["receptance"], inner["value"]
    k = inner["key"].astype(f32)
    v_first = jnp.where(is_first, v, v_first)
    share = jax.nn.sigmoid(p["v0"] + low_rank("v").astype(f32))
    v = (v + (v_first - v).astype(f32) * share).astype(dtype)
    log_w = -_LOG_DECAY_SCALE * jax.nn.sigmoid(p["w0"] + low_rank("w", jnp.tanh).astype(f32))
    iclr = jax.nn.sigmoid(p["a0"] + low_rank("a").astype(f32))
    gate = low_rank("g", jax.nn.sigmoid)
    kk = (k * p["k_k"]).reshape(heads)
    kk = kk * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(kk), -1, keepdims=True), 1e-24))
    k = (k * (1.0 + (iclr - 1.0) * p["k_a"])).astype(dtype)
    a, b = -kk.astype(dtype), (kk * iclr.reshape(heads)).astype(dtype)
    return (r.reshape(heads), log_w.reshape(heads), k.reshape(heads), v.reshape(heads), a, b), gate, v_first


def _after_recurrence(
    p: dict[str, Array],
    x: Float[Array, "b t d"],
    y: Heads,
    inputs: tuple[Heads, ...],
    gate: Array,
    keep: Array,
    shape: Shape,
) -> Float[Array, "b t d"]:
    """The residual stream after the layer: the rest of the time mix, and the channel mix."""
    r, _, k, v, _, _ = inputs
    dtype, f32 = gate.dtype, jnp.float32
    y = _norm(y.astype(f32), 1.0, 0.0, shape.head_dim * shape.norm_eps).reshape(x.shape)
    y = y * p["ln_x.weight"] + p["ln_x.bias"]
    bonus = jnp.sum(r.astype(f32) * k.astype(f32) * p["r_k"], -1, keepdims=True) * v.astype(f32)
    y = ((y + bonus.reshape(x.shape)) * gate.astype(f32)).astype(dtype)
    x = x + _product(y, p["output"]).astype(f32) * keep[0]
    normed = _norm(x, p["ln2.weight"], p["ln2.bias"], shape.norm_eps)
    mixed = (normed + (_shifted(normed) - normed) * p["ffn.x_k"]).astype(dtype)
    inner = jnp.square(jax.nn.relu(_product(mixed, p["ffn.key"])))
    return x + _product(inner, p["ffn.value"]).astype(f32) * keep[1]


def _block(
    carry: tuple[Array, Array],
    layer: tuple[dict[str, Array], Array, Array],
    shape: Shape,
    recurrence: Recurrence,
) -> tuple[tuple[Array, Array], None]:
    """One layer. Only products and the recurrence are kept for the gradient; the rest is cheaper to redo."""
    x, v_first = carry
    p, is_first, keep = layer
    again = partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    inputs, gate, v_first = again(partial(_recurrence_inputs, shape=shape))(p, x, v_first, is_first)
    y = recurrence(*inputs)
    return (again(partial(_after_recurrence, shape=shape))(p, x, y, inputs, gate, keep), v_first), None


def logits(
    params: Params,
    text: UInt8[Array, "b t"],
    *,
    shape: Shape,
    recurrence: Recurrence,
    dtype: jnp.dtype = jnp.bfloat16,
    keep: Float[Array, "l 2 b 1 d"] | None = None,
) -> Float[Array, "b t v"]:
    """Logits for the byte after each byte, in float32.

    `keep` scales each layer's two branches, channel by channel and row by row (dropout); None means 1.
    """
    ends = params["ends"]
    # A product, since the gradient of a gather is a scatter of all rows into 256: slow on a GPU.
    one_hot = jax.nn.one_hot(text, shape.vocab_size, dtype=dtype)
    x = _product(one_hot, ends["emb"], jnp.float32)
    x = _norm(x, ends["ln0.weight"], ends["ln0.bias"], shape.norm_eps)
    if keep is None:
        keep = jnp.ones((shape.num_layers, 2, 1, 1, 1), jnp.float32)

    block = partial(_block, shape=shape, recurrence=recurrence)
    layers = (params["blocks"], jnp.arange(shape.num_layers) == 0, keep)
    carry = (x, jnp.zeros(x.shape, dtype))
    (x, _), _ = jax.lax.scan(block, carry, layers)
    x = _norm(x, ends["ln_out.weight"], ends["ln_out.bias"], shape.norm_eps).astype(dtype)
    return _product(x, ends["head"], jnp.float32)
