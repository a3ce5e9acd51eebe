"""RWKV-7 once more, in numpy and token by token, with the names of BlinkDL's checkpoints.

Written from the published formulas to check the real one; nothing here is shared with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from wkvm_jax.models.rwkv7 import Config

Tensors = Mapping[str, np.ndarray]


@dataclasses.dataclass
class NumpyState:
    """What one conversation carries from token to token."""

    att_x: np.ndarray
    """`[layer, width]`: what the time mix saw last."""
    ffn_x: np.ndarray
    """`[layer, width]`: what the channel mix saw last."""
    wkv: np.ndarray
    """`[layer, head, value, key]`."""


def run(
    tensors: Tensors, config: Config, ids: Sequence[int], dtype: type[np.floating] = np.float64
) -> tuple[np.ndarray, NumpyState]:
    """Logits `[token, vocab]` from the initial state, and the state at the end."""
    layers, width = config.num_layers, config.hidden_size
    matrices = (layers, config.num_heads, config.value_head_dim, config.head_dim)
    shifts = np.zeros((2, layers, width), dtype)
    state = NumpyState(shifts[0], shifts[1], np.zeros(matrices, dtype))
    weights = {name: np.squeeze(np.asarray(tensor, dtype)) for name, tensor in tensors.items()}
    logits = np.zeros((len(ids), config.vocab_size), dtype)
    for place, token in enumerate(ids):
        logits[place] = _one_token(weights, config, token, state)
    return logits, state


def _one_token(w: Tensors, config: Config, token: int, state: NumpyState) -> np.ndarray:
    x = _layer_norm(w, "blocks.0.ln0", w["emb.weight"][token], config)
    v_first = None
    for layer in range(config.num_layers):
        y = _layer_norm(w, f"blocks.{layer}.ln1", x, config)
        out, v_first = _time_mix(w, config, layer, y, v_first, state)
        x = x + out
        state.att_x[layer] = y
        y = _layer_norm(w, f"blocks.{layer}.ln2", x, config)
        at = f"blocks.{layer}.ffn."
        mixed = y + (state.ffn_x[layer] - y) * w[f"{at}x_k"]
        x = x + w[f"{at}value.weight"] @ np.maximum(w[f"{at}key.weight"] @ mixed, 0) ** 2
        state.ffn_x[layer] = y
    head = w["emb.weight"] if config.tied_head else w["head.weight"]
    return head @ _layer_norm(w, "ln_out", x, config)


def _time_mix(
    w: Tensors, config: Config, layer: int, x: np.ndarray, v_first: np.ndarray | None, state: NumpyState
) -> tuple[np.ndarray, np.ndarray]:
    p = {
        name.split(".att.")[1]: tensor
        for name, tensor in w.items()
        if name.startswith(f"blocks.{layer}.att.")
    }
    heads, size = config.num_heads, config.head_dim
    xr, xw, xk, xv, xa, xg = (x + (state.att_x[layer] - x) * p[f"x_{mix}"] for mix in "rwkvag")
    r, k, v = p["receptance.weight"] @ xr, p["key.weight"] @ xk, p["value.weight"] @ xv
    decay = np.exp(-math.exp(-0.5) * _sigmoid(p["w0"] + np.tanh(xw @ p["w1"]) @ p["w2"]))
    a = _sigmoid(p["a0"] + (xa @ p["a1"]) @ p["a2"])
    g = _sigmoid(xg @ p["g1"]) @ p["g2"]
    if v_first is None:
        v_first = v
    else:
        v = v + (v_first - v) * _sigmoid(p["v0"] + (xv @ p["v1"]) @ p["v2"])
    kk = (k * p["k_k"]).reshape(heads, size)
    square = (kk**2).sum(-1, keepdims=True)
    kk = kk / np.sqrt(square + 1e-6) if config.fused_norm else kk / np.maximum(np.sqrt(square), 1e-12)
    k = (k * (1 + (a - 1) * p["k_a"])).reshape(heads, size)
    r, v, a = r.reshape(heads, size), v.reshape(heads, -1), a.reshape(heads, size)
    decay = decay.reshape(heads, size)
    out = np.empty_like(v)
    for head in range(heads):
        matrix = state.wkv[layer, head]
        removed = np.outer(matrix @ -kk[head], kk[head] * a[head])
        matrix = matrix * decay[head] + removed + np.outer(v[head], k[head])
        state.wkv[layer, head] = matrix
        out[head] = matrix @ r[head]
    out = _normalised(out, config.head_dim * config.norm_eps).reshape(-1) * p["ln_x.weight"] + p.get(
        "ln_x.bias", 0
    )
    bonus = (r * k * p["r_k"].reshape(heads, size)).sum(-1, keepdims=True) * v
    return p["output.weight"] @ ((out + bonus.reshape(-1)) * g), v_first


def _layer_norm(w: Tensors, name: str, x: np.ndarray, config: Config) -> np.ndarray:
    return _normalised(x, config.norm_eps) * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


def _normalised(x: np.ndarray, eps: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
