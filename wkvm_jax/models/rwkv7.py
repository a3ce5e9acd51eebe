"""RWKV-7 "Goose" (arXiv 2503.14456): parameters, state and forward.

Small tensors keep the names of the paper's code (`w0 w1 w2 a0 ... k_k k_a r_k`). Matrices are stored
`[in, out]`. The residual stream and all elementwise work are float32, whatever dtype the weights have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NotRequired, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from wkvm_jax.kernels.dispatch import Kernels
from wkvm_jax.kernels.products import Product, padded_rows, products
from wkvm_jax.kernels.rwkv7 import Projections, Variant, misfit, time_mix
from wkvm_jax.kernels.stacked import Weight, Weights
from wkvm_jax.kernels.token_shift import TokenShift
from wkvm_jax.models.layers import layer_norm, product
from wkvm_jax.state import (
    MODEL_AXIS,
    Batch,
    LeafSpec,
    State,
    StateSpec,
    advance_num_tokens,
)
from wkvm_jax.types import Params

MIXES = ("r", "w", "k", "v", "a", "g")
"""Order of the token-shift mixes in the parameter `x_rwkvag`."""


STATE_DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and variants of an RWKV-7 model.

    Attributes:
        vocab_size, hidden_size, num_layers, head_dim, intermediate_size: sizes; `hidden_size` is a
            multiple of `head_dim`, the key width of a head.
        value_dim: width of all heads' values together; `hidden_size` in every published model.
        decay_rank, iclr_rank, value_rank, gate_rank: inner widths of the low-rank maps.
        norm_eps: of LayerNorms; GroupNorm's is `head_dim * norm_eps`.
        norm_bias: whether LayerNorms have a bias; GroupNorm has one always.
        fused_norm: flash-linear-attention's `fuse_norm`: keys are normalised with 1e-6 added under the
            root, and not with the norm clamped at 1e-12.
        tied_head: whether the output head is the embedding.
        state_dtype: what the matrix states are kept in: "float32", or "float16" or "bfloat16" for half the
            memory. Arithmetic is float32 all the same.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    head_dim: int
    intermediate_size: int
    value_dim: int
    decay_rank: int
    iclr_rank: int
    value_rank: int
    gate_rank: int
    norm_eps: float = 1e-5
    norm_bias: bool = True
    fused_norm: bool = False
    tied_head: bool = False
    state_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.hidden_size % self.head_dim:
            raise ValueError(f"{self.head_dim=} must divide {self.hidden_size=}")
        if self.value_dim % self.num_heads:
            raise ValueError(f"{self.num_heads=} must divide {self.value_dim=}")
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(f"{self.state_dtype=} must be one of {', '.join(STATE_DTYPES)}")

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def value_head_dim(self) -> int:
        return self.value_dim // self.num_heads


class BlockParams(TypedDict):
    """One layer; `param_spec` tells the shapes."""

    ln1: Weights
    ln2: Weights
    ln_x: Weights
    time_mix: Weights
    channel_mix: Weights


class ModelParams(TypedDict):
    """The whole model; "head" is absent when it is the embedding, and the blocks may be a `LayerStack`."""

    embedding: Array
    ln0: Mapping[str, Array]
    blocks: Sequence[BlockParams]
    ln_out: Mapping[str, Array]
    head: NotRequired[Array]


def param_spec(config: Config) -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct`s in float32; loaded weights may be bfloat16."""
    width, value = config.hidden_size, config.value_dim

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def norm(size: int) -> Params:
        return {"scale": array(size)} | ({"bias": array(size)} if config.norm_bias else {})

    def time_mix(layer: int) -> Params:
        value_residual = {
            "v0": array(value),
            "v1": array(width, config.value_rank),
            "v2": array(config.value_rank, value),
        }
        return {
            "x_rwkvag": array(len(MIXES), width),
            "receptance": array(width, width),
            "key": array(width, width),
            "value": array(width, value),
            "output": array(value, width),
            "w0": array(width),
            "w1": array(width, config.decay_rank),
            "w2": array(config.decay_rank, width),
            "a0": array(width),
            "a1": array(width, config.iclr_rank),
            "a2": array(config.iclr_rank, width),
            "g1": array(width, config.gate_rank),
            "g2": array(config.gate_rank, value),
            "k_k": array(width),
            "k_a": array(width),
            "r_k": array(config.num_heads, config.head_dim),
        } | (value_residual if layer else {})

    def block(layer: int) -> Params:
        return {
            "ln1": norm(width),
            "ln2": norm(width),
            "ln_x": {"scale": array(value), "bias": array(value)},
            "time_mix": time_mix(layer),
            "channel_mix": {
                "x_k": array(width),
                "key": array(width, config.intermediate_size),
                "value": array(config.intermediate_size, width),
            },
        }

    return {
        "embedding": array(config.vocab_size, width),
        "ln0": norm(width),
        "blocks": tuple(block(layer) for layer in range(config.num_layers)),
        "ln_out": norm(width),
    } | ({} if config.tied_head else {"head": array(width, config.vocab_size)})


def state_spec(config: Config) -> StateSpec:
    """One conversation: a matrix a head and layer, and the last token's two normed inputs a layer."""
    layers = config.num_layers
    return StateSpec(
        {
            "wkv": LeafSpec(
                shape=(layers, config.num_heads, config.head_dim, config.value_head_dim),
                dtype=jnp.dtype(config.state_dtype),
                axes=("layer", "head", "key", "value"),
                kind="recurrent",
            ),
            "shift": LeafSpec(
                shape=(layers, 2, config.hidden_size),
                dtype=jnp.float32,
                axes=("layer", "mix", "width"),
                kind="window",
            ),
        }
    )


def forward(
    params: ModelParams,
    batch: Batch,
    state: State,
    *,
    config: Config,
    kernels: Kernels = "xla",
    model_axis: str | None = None,
) -> tuple[Float32[Array, "b t d"], State]:
    """Runs the batch's tokens from their read slots and leaves the new states at their write slots.

    Args:
        params: as `param_spec` lays out, in any floating dtype; the blocks may be a `LayerStack`.
        batch: tokens `[b, t]` and where the rows read and write.
        state: an arena, or a research batch.
        kernels: what computes it.
        model_axis: under `shard_map`, the mesh axis that heads are spread over, as `partition` says.

    Returns:
        The final norm's output for each token and the new state.
    """
    num_rows, num_tokens = batch.tokens.shape
    rows = padded_rows(num_rows, num_tokens, kernels)
    tokens = jnp.pad(batch.tokens, ((0, rows - num_rows), (0, 0)))
    x = layer_norm(params["embedding"][tokens].astype(jnp.float32), params["ln0"], config.norm_eps)
    wkv, shift = state.leaves["wkv"], TokenShift(state.leaves["shift"], batch, kernels)
    mix = partial(shift.mix, eps=config.norm_eps, dtype=params["embedding"].dtype)
    variant = Variant(config.norm_eps, config.fused_norm)
    parts, v_first = None, None
    for layer, block in enumerate(params["blocks"]):
        weights = block["time_mix"]
        x, mixed = mix(x, parts, layer, 0, block["ln1"], weights["x_rwkvag"])
        projections = _projections(weights, mixed, v_first, kernels)
        v_first = projections.v if v_first is None else v_first
        out, wkv = time_mix(
            wkv, layer, batch, projections, _small(weights), block["ln_x"], variant=variant, kernels=kernels
        )
        (parts,) = products([Product(out, weights["output"])], kernels=kernels, in_parts=True)
        parts = _of_all_devices(parts, model_axis)
        weights = block["channel_mix"]
        x, (mixed_key,) = mix(x, parts, layer, 1, block["ln2"], weights["x_k"])
        (inner,) = products([Product(mixed_key, weights["key"], "square_relu")], kernels=kernels)
        # Squared relus are mostly zeros in trained models.
        value = Product(inner, weights["value"], sparse_rows=num_rows * num_tokens)
        (parts,) = products([value], kernels=kernels, in_parts=True)
        parts = _of_all_devices(parts, model_axis)
    x = x if parts is None else x + jnp.sum(parts, axis=0)
    hidden = layer_norm(x[:num_rows], params["ln_out"], config.norm_eps)
    leaves = {"wkv": wkv, "shift": shift.finish()}
    return hidden, state.replace(leaves=leaves, num_tokens=advance_num_tokens(state, batch))


def _of_all_devices(parts: Float32[Array, "part b t d"], model_axis: str | None) -> Array:
    """Parts whose sum is that over every device's heads."""
    if model_axis is None:
        return parts
    return jax.lax.psum(jnp.sum(parts, axis=0, keepdims=True), model_axis)


def head(
    params: ModelParams, hidden: Float[Array, "*rows d"], *, config: Config, model_axis: str | None = None
) -> Float32[Array, "*rows vocab"]:
    """Logits of the positions given."""
    if config.tied_head:
        return product(hidden, params["embedding"].T)
    logits = product(hidden, params["head"])
    if model_axis is None:
        return logits
    return jax.lax.all_gather(logits, model_axis, axis=logits.ndim - 1, tiled=True)


def partition(config: Config) -> Params:
    """How the parameters are split over a mesh: columns of what makes heads, rows of what joins them."""
    columns, rows = {"receptance", "key", "value", "w2", "a2", "v2", "g2", "head"}, {"output", "r_k"}
    vectors = {"w0", "a0", "v0", "k_k", "k_a"}

    def spec(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> P:
        *_, group, name = ("", *jax.tree_util.keystr(path, simple=True, separator=".").split("."))
        if name in vectors or group == "ln_x":
            return P(MODEL_AXIS)
        if name in rows or (group, name) == ("channel_mix", "value"):
            return P(MODEL_AXIS, None)
        return P(None, MODEL_AXIS) if name in columns else P()

    specs: Params = jax.tree_util.tree_map_with_path(spec, param_spec(config))
    return specs


def _projections(
    params: Weights,
    mixed: Sequence[Float[Array, "b t d"]],
    v_first: Float[Array, "b t hv"] | None,
    kernels: Kernels,
) -> Projections:
    """Everything that products make of one layer's mixed inputs, which come in the order of `MIXES`."""
    x_r, x_w, x_k, x_v, x_a, x_g = mixed
    first = [
        Product(x_r, params["receptance"]),
        Product(x_k, params["key"]),
        Product(x_v, params["value"]),
        Product(x_w, params["w1"], "tanh"),
        Product(x_a, params["a1"]),
        Product(x_g, params["g1"], "sigmoid"),
    ]
    if v_first is None:
        r, k, v, *inner = products(first, kernels=kernels)
        ups = [params[name] for name in ("w2", "a2", "g2")]
    else:
        r, k, v, *inner = products([*first, Product(x_v, params["v1"])], kernels=kernels)
        ups = [params[name] for name in ("w2", "a2", "g2", "v2")]
    w, a, g, *v_mix = products(list(map(Product, inner, ups)), kernels=kernels)
    return Projections(r, k, v, w, a, g, v_mix[0] if v_mix else None, v_first)


def _small(params: Weights) -> dict[str, Weight]:
    """The parameters that the time mixing takes beside its projections."""
    return {name: params[name] for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k") if name in params}


def kernel_misfit(config: Config) -> str | None:
    """Why this model cannot run on the Pallas kernels, if it cannot."""
    return misfit(config.head_dim, config.value_head_dim)


def init_params(config: Config, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> Params:
    """Fresh weights to train from, spread as in the paper's appendix on initialisation.

    Decay speeds and token-shift mixes vary over channels and layers; the output matrices start at zero,
    so that each block begins as the identity.
    """
    spec = param_spec(config)
    paths, tree = jax.tree_util.tree_flatten_with_path(spec)
    keys = jax.random.split(key, len(paths))
    leaves = [
        _initial(jax.tree_util.keystr(path, simple=True, separator="."), leaf.shape, key, config).astype(
            dtype
        )
        for (path, leaf), key in zip(paths, keys, strict=True)
    ]
    return jax.tree_util.tree_unflatten(tree, leaves)


def _initial(path: str, shape: tuple[int, ...], key: PRNGKeyArray, config: Config) -> Float32[Array, ...]:
    *_, group, name = ("", *path.split("."))
    layer = int(path.split(".")[1]) if path.startswith("blocks.") else 0
    depth = layer / max(config.num_layers - 1, 1)
    left = 1.0 - layer / config.num_layers
    place = jnp.arange(shape[-1]) / shape[-1]
    in_head = jnp.arange(shape[-1]) % config.head_dim / max(config.head_dim - 1, 1) - 0.5
    zigzag = (2 * in_head) * jnp.abs(2 * in_head)
    linear = jnp.arange(shape[-1]) / max(shape[-1] - 1, 1) - 0.5
    if name == "scale":
        return jnp.full(shape, ((1 + layer) / config.num_layers) ** 0.7 if group == "ln_x" else 1.0)
    if name == "x_rwkvag":
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        return jnp.stack([1.0 - place ** (powers[mix] * left) for mix in MIXES])
    if name == "x_k":
        return 1.0 - place ** (left**4)
    if name == "w0":
        return -6.0 + 6.0 * (place ** (1 + depth**0.3)) + 0.5 + zigzag * 2.5
    if name in ("a0", "v0"):
        return -0.19 + zigzag * 0.3 + linear * 0.4 if name == "a0" else 0.73 - linear * 0.4
    if name in ("k_k", "k_a"):
        return jnp.full(shape, 1.02) if name == "k_a" else 0.71 - linear * 0.1
    if name == "r_k":
        return jnp.full(shape, -0.04)
    if name in ("w1", "a1", "v1", "g1", "output", "bias") or (group, name) == ("channel_mix", "value"):
        return jnp.zeros(shape)
    if name == "embedding":
        return jax.random.uniform(key, shape, minval=-1e-4, maxval=1e-4)
    if name in ("w2", "a2", "v2", "g2"):
        return jax.nn.initializers.orthogonal(0.1)(key, shape)
    gain = math.sqrt(max(1.0, shape[1] / shape[0]))
    return jax.nn.initializers.orthogonal(0.5 * gain if name == "head" else gain)(key, shape)
