"""Random weights in the shapes of published models, for measuring speed without a checkpoint."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from wkvm_jax.kernels.dispatch import choose_kernels
from wkvm_jax.models import rwkv7
from wkvm_jax.models.model import Model
from wkvm_jax.models.registry import RWKV7
from wkvm_jax.models.stacking import stacked


def _rwkv7(num_layers: int, hidden_size: int, decay: int, iclr: int, value: int, gate: int) -> rwkv7.Config:
    return rwkv7.Config(
        vocab_size=65_536, hidden_size=hidden_size, num_layers=num_layers, head_dim=64,
        intermediate_size=4 * hidden_size, value_dim=hidden_size, decay_rank=decay, iclr_rank=iclr,
        value_rank=value, gate_rank=gate,
    )  # fmt: skip


SIZES: Mapping[str, rwkv7.Config] = {
    "0.1b": _rwkv7(12, 768, 64, 64, 32, 128),
    "0.4b": _rwkv7(24, 1024, 64, 64, 32, 128),
    "1.5b": _rwkv7(24, 2048, 96, 96, 64, 256),
    "2.9b": _rwkv7(32, 2560, 96, 96, 64, 320),
    "7.2b": _rwkv7(32, 4096, 128, 128, 96, 480),
}
"""RWKV-7 "Goose" World models by their published names (BlinkDL/rwkv7-g1 on Hugging Face)."""


def random_model(
    size: str,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    kernels: str = "auto",
    state_dtype: str = "float32",
    ffn_zeros: float = 0.5,
    seed: int = 0,
) -> Model:
    """A model of a published size with random weights, made on the default device.

    Args:
        size: a key of `SIZES`.
        dtype: of the weights.
        kernels, state_dtype: as for `wkvm_jax.load`.
        ffn_zeros: about what part of the channel mix's inner values is zero after the squared relu. A half
            is what plain random weights give; trained models have 0.84 to 0.90.
        seed: of the random numbers.

    Raises:
        ValueError: there is no such size or dtype, or `ffn_zeros` is not in [0.5, 1).
        KernelUnavailableError: the kernels asked for cannot run here.
    """
    if size not in SIZES:
        raise ValueError(f"{size=} must be one of {', '.join(SIZES)}")
    if not 0.5 <= ffn_zeros < 1.0:
        raise ValueError(f"{ffn_zeros=} must be in [0.5, 1)")
    config = dataclasses.replace(SIZES[size], state_dtype=state_dtype)
    chosen = choose_kernels(kernels, misfit=rwkv7.kernel_misfit(config))
    leaves, tree = jax.tree.flatten(rwkv7.param_spec(config))
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(leaves))
    params = [_random(key, leaf.shape, jnp.dtype(dtype)) for key, leaf in zip(keys, leaves, strict=True)]
    apart = jax.tree.unflatten(tree, params)
    if ffn_zeros > 0.5:
        apart["blocks"] = tuple(_with_ffn_zeros(block, ffn_zeros) for block in apart["blocks"])
    laid_out = apart if chosen == "xla" else stacked(apart, free=True)
    return Model(RWKV7, config, laid_out, name=f"random {size}", kernels=chosen)


@partial(jax.jit, static_argnums=(1, 2))
def _random(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Normal numbers that keep a stream's scale: matrices `[in, out]` by their inputs, vectors by a half."""
    spread = shape[0] ** -0.5 if len(shape) == 2 and shape[0] >= 32 else 0.5
    return (spread * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _with_ffn_zeros(block: rwkv7.BlockParams, share: float) -> rwkv7.BlockParams:
    """A block whose channel mix has that share of zeros: keys lean against a mean that its inputs have.

    With inputs x of mean m and a spread s, and keys N(-d, 1/n) in n dimensions, inner values before the relu
    are about N(-n m d, s^2): the share of those under zero is the normal distribution's at n m d / s.
    """
    mean, spread = 0.5, 0.94
    key, bias = block["channel_mix"]["key"], block["ln2"]["bias"]
    lean = spread * statistics.NormalDist().inv_cdf(share) / (mean * key.shape[0])
    shifted = block.copy()
    shifted["ln2"] = {**block["ln2"], "bias": _raised(bias, mean)}
    shifted["channel_mix"] = {**block["channel_mix"], "key": _raised(key, -lean)}
    return shifted


@partial(jax.jit, donate_argnums=0)
def _raised(x: Array, by: Array | float) -> Array:
    return (x.astype(jnp.float32) + by).astype(x.dtype)
