"""Random RWKV-7 checkpoints of any size, in the names of either source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.weights import safetensors_writer
from wkvm_jax.models.rwkv7 import Config

Tensors = dict[str, np.ndarray]


def small_config(**changes: object) -> Config:
    """A config small enough to compile in a moment."""
    sizes: dict[str, object] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_layers": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "value_dim": 32,
        "decay_rank": 4,
        "iclr_rank": 6,
        "value_rank": 5,
        "gate_rank": 8,
    }
    return Config(**(sizes | changes))


def random_tensors(config: Config, seed: int = 0) -> Tensors:
    """Tensors in BlinkDL's names and shapes, spread so that every part of the model matters."""
    rng = np.random.default_rng(seed)
    width, value, ffn = config.hidden_size, config.value_dim, config.intermediate_size
    heads, ranks = config.num_heads, {"w": config.decay_rank, "a": config.iclr_rank, "g": config.gate_rank}
    tensors: Tensors = {}

    def matrix(name: str, *shape: int, fan_in: int, gain: float = 1.0) -> None:
        tensors[name] = gain * rng.standard_normal(shape) / fan_in**0.5

    def vector(name: str, *shape: int, low: float = -0.5, high: float = 0.5) -> None:
        tensors[name] = rng.uniform(low, high, shape)

    def norm(name: str, size: int) -> None:
        vector(f"{name}.weight", size, low=0.5, high=1.5)
        if config.norm_bias or name.endswith("ln_x"):
            vector(f"{name}.bias", size)

    matrix("emb.weight", config.vocab_size, width, fan_in=1)
    norm("blocks.0.ln0", width)
    for layer in range(config.num_layers):
        norm(f"blocks.{layer}.ln1", width)
        norm(f"blocks.{layer}.ln2", width)
        at = f"blocks.{layer}.att."
        for mix in "rwkvag":
            vector(f"{at}x_{mix}", 1, 1, width, low=0, high=1)
        for lora, rank in (ranks | ({"v": config.value_rank} if layer else {})).items():
            out = value if lora in "vg" else width
            matrix(f"{at}{lora}1", width, rank, fan_in=width)
            matrix(f"{at}{lora}2", rank, out, fan_in=rank, gain=2.0)
            if lora != "g":
                vector(f"{at}{lora}0", 1, 1, out, low=-2, high=2)
        vector(f"{at}k_k", 1, 1, width, low=0.5, high=1)
        vector(f"{at}k_a", 1, 1, width, low=0.5, high=1.1)
        vector(f"{at}r_k", heads, config.head_dim)
        matrix(f"{at}receptance.weight", width, width, fan_in=width)
        matrix(f"{at}key.weight", width, width, fan_in=width)
        matrix(f"{at}value.weight", value, width, fan_in=width)
        matrix(f"{at}output.weight", width, value, fan_in=value)
        norm(f"{at}ln_x", value)
        vector(f"blocks.{layer}.ffn.x_k", 1, 1, width, low=0, high=1)
        matrix(f"blocks.{layer}.ffn.key.weight", ffn, width, fan_in=width)
        matrix(f"blocks.{layer}.ffn.value.weight", width, ffn, fan_in=ffn)
    norm("ln_out", width)
    if not config.tied_head:
        matrix("head.weight", config.vocab_size, width, fan_in=width)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


_PARTS = {
    "ln0": "pre_norm",
    "ln1": "attn_norm",
    "ln2": "ffn_norm",
    "receptance": "r_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "ln_x": "g_norm",
}
_WITHOUT_USE = {f"blocks.0.att.v{part}" for part in range(3)}
"""Some files of BlinkDL's have them; they do nothing."""
_TOP = {"emb.weight": "model.embeddings.weight", "head.weight": "lm_head.weight"}


def to_fla(tensors: Mapping[str, np.ndarray], packed: bool = False) -> Tensors:
    """The same weights in flash-linear-attention's names; `packed` as its first versions had the mixes."""
    renamed = {}
    for name, tensor in tensors.items():
        if name in _WITHOUT_USE:
            continue
        new_name, tensor = _in_fla(name, tensor)
        renamed[new_name] = np.ascontiguousarray(tensor)
    for name in [name for name in renamed if packed and name.endswith(".attn.x_r")]:
        at = name.removesuffix("x_r")
        renamed[f"{at}x_x"] = np.concatenate([renamed.pop(f"{at}x_{mix}").reshape(1, -1) for mix in "rwkvag"])
    return renamed


def _in_fla(name: str, tensor: np.ndarray) -> tuple[str, np.ndarray]:
    if name in _TOP:
        return _TOP[name], tensor
    if name.startswith("ln_out."):
        return name.replace("ln_out", "model.norm"), tensor
    _, layer, part, *rest = name.split(".")
    at = f"model.layers.{layer}."
    if part == "ffn":
        return f"{at}ffn.{'.'.join(rest)}", tensor.reshape(-1) if rest == ["x_k"] else tensor
    if part != "att":
        return f"{at}{_PARTS[part]}.{rest[0]}", tensor
    at += "attn."
    if rest[0][0] in "wavg" and rest[0][1:] in ("0", "1", "2"):
        lora = f"{at}{rest[0][0]}_lora.lora."
        number = rest[0][1:]
        if number == "0":
            return f"{lora}2.bias", tensor.reshape(-1)
        return f"{lora}{'0' if number == '1' else '2'}.weight", tensor.T
    if rest[0] in ("k_k", "k_a"):
        return f"{at}{rest[0]}", tensor.reshape(-1)
    if rest[0] in _PARTS:
        return f"{at}{_PARTS[rest[0]]}.{rest[1]}", tensor
    return f"{at}{rest[0]}", tensor


def fla_config(config: Config, **changes: object) -> dict[str, object]:
    """A config.json's content."""
    return {
        "model_type": "rwkv7",
        "architectures": ["RWKV7ForCausalLM"],
        "attn": None,
        "hidden_act": "sqrelu",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "head_dim": config.head_dim,
        "num_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "value_dim": [config.value_dim] * config.num_layers,
        "decay_low_rank_dim": config.decay_rank,
        "a_low_rank_dim": config.iclr_rank,
        "v_low_rank_dim": config.value_rank,
        "gate_low_rank_dim": config.gate_rank,
        "norm_first": True,
        "norm_eps": config.norm_eps,
        "norm_bias": config.norm_bias,
        "fuse_norm": config.fused_norm,
        "tie_word_embeddings": config.tied_head,
        "vocab_size": config.vocab_size,
    } | changes


def write_fla(
    directory: Path, tensors: Mapping[str, np.ndarray], content: Mapping[str, object], shards: int = 1
) -> Path:
    """A Hugging Face directory; with several shards, an index says which tensor is where."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(content))
    if shards == 1:
        safetensors_writer.save_arrays(directory / "model.safetensors", tensors)
        return directory
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        some = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        safetensors_writer.save_arrays(directory / file_name, some)
        weight_map |= dict.fromkeys(some, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
