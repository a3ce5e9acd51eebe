"""Writes the trained weights as a checkpoint that RWKV tools read, and reads them back for the engine.

Names, shapes and matrix layout are BlinkDL's RWKV-7 ones (`blocks.0.att.receptance.weight`, linear weights
[out, in], the low-rank factors as they multiply), as bfloat16 safetensors with a `config.json` beside them.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from wkvm_jax.models.loading import load
from wkvm_jax.models.model import Model

from .net import Params, Shape

WEIGHTS, CONFIG = "demo.safetensors", "config.json"
_LINEAR = ("receptance", "key", "value", "output")
_VECTORS = ("w0", "a0", "v0", "k_k", "k_a")
_LOW_RANK = tuple(f"{name}{part}" for name in "wavg" for part in "12")
_MIXES = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")
_NORMS = ("ln1", "ln2")


def tensors(params: Params, shape: Shape) -> dict[str, np.ndarray]:
    """The parameters as float32 arrays under their published names."""
    blocks, ends = jax.device_get(params["blocks"]), jax.device_get(params["ends"])
    out = {"emb.weight": ends["emb"], "head.weight": ends["head"].T}
    for norm, name in (("ln0", "blocks.0.ln0"), ("ln_out", "ln_out")):
        out |= {f"{name}.{part}": ends[f"{norm}.{part}"] for part in ("weight", "bias")}
    for layer in range(shape.num_layers):
        p = {name: leaf[layer] for name, leaf in blocks.items()}
        at = f"blocks.{layer}"
        for norm in _NORMS:
            out |= {f"{at}.{norm}.{part}": p[f"{norm}.{part}"] for part in ("weight", "bias")}
        out |= {f"{at}.att.{name}": mix[None, None] for name, mix in zip(_MIXES, p["x_rwkvag"], strict=True)}
        out |= {f"{at}.att.{name}": p[name][None, None] for name in _VECTORS if layer or name[0] != "v"}
        out |= {f"{at}.att.{name}": p[name] for name in _LOW_RANK if layer or name[0] != "v"}
        out |= {f"{at}.att.{name}.weight": p[name].T for name in _LINEAR}
        out |= {f"{at}.att.ln_x.{part}": p[f"ln_x.{part}"] for part in ("weight", "bias")}
        out[f"{at}.att.r_k"] = p["r_k"]
        out[f"{at}.ffn.x_k"] = p["ffn.x_k"][None, None]
        out |= {f"{at}.ffn.{name}.weight": p[f"ffn.{name}"].T for name in ("key", "value")}
    return {name: np.ascontiguousarray(value, np.float32) for name, value in out.items()}


def config(shape: Shape) -> dict[str, object]:
    """What `config.json` holds."""
    return {
        "model_type": "rwkv7",
        "tokenizer": "bytes",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "decay_low_rank_dim": shape.decay_rank,
        "a_low_rank_dim": shape.iclr_rank,
        "v_low_rank_dim": shape.value_rank,
        "gate_low_rank_dim": shape.gate_rank,
        "norm_eps": shape.norm_eps,
        "norm_bias": True,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def write(params: Params, shape: Shape, folder: Path) -> Path:
    """Write weights, rounded to bfloat16, and config into `folder`; returns the weights' path."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors(params, shape).items()}
    save_file(rounded, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config(shape), indent=2) + "\n")
    return folder / WEIGHTS


def read(folder: Path) -> Model:
    """The model in a written folder, as the engine loads it, in float32."""
    return load(folder, dtype=np.float32)
