"""RWKV-7 checkpoints: BlinkDL's names and flash-linear-attention's, and how they become parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from wkvm_jax.models.family import Layout, Shapes
from wkvm_jax.models.rwkv7 import MIXES, Config
from wkvm_jax.weights.source import Source

_NORM = {"scale": "weight", "bias": "bias"}
_LORAS = ("w", "a", "v", "g")


def layout(shapes: Shapes, hf_config: Mapping[str, object] | None) -> Layout | None:
    """The layout of an RWKV-7 checkpoint, told by its tensors' names; None if it is something else.

    Raises:
        ValueError: an RWKV of another generation, a config.json field that is not supported, or tensors
            without which the model's sizes cannot be told.
    """
    if any(re.fullmatch(r"blocks\.\d+\.att\.(r_k|a0|k_k|k_a)", name) for name in shapes):
        config = _config_from_shapes(shapes)
        return Layout(config, _blinkdl_table(config), _unused_in_layer_0)
    if any(re.fullmatch(r"blocks\.\d+\.att\.time_\w+", name) for name in shapes):
        raise ValueError("an RWKV checkpoint of an older generation than RWKV-7; convert or retrain it")
    if any(re.fullmatch(r"model\.layers\.\d+\.attn\.(r_k|a_lora\.lora\.2\.bias)", name) for name in shapes):
        config = config_from_hf(hf_config or {}, shapes)
        packed = "model.layers.0.attn.x_x" in shapes
        return Layout(config, _fla_table(config, packed), lambda name: False)
    return None


# BlinkDL's names -----------------------------------------------------------------------------------


def _unused_in_layer_0(name: str) -> bool:
    return bool(re.fullmatch(r"blocks\.0\.att\.v[012]", name))


def _config_from_shapes(shapes: Shapes) -> Config:
    missing: list[str] = []

    def size(pattern: str, axis: int) -> int:
        for name, shape in shapes.items():
            if re.fullmatch(pattern, name) and len(shape) > max(axis, 0) and shape[axis]:
                return shape[axis]
        missing.append(pattern.replace("\\", "").replace("d+", "N"))
        return 1

    layers = [int(match[1]) for name in shapes if (match := re.match(r"blocks\.(\d+)\.", name))]
    vocab_size = size(r"emb\.weight|head\.weight", 0)
    hidden_size = size(r"emb\.weight|head\.weight", -1)
    head_dim = size(r"blocks\.\d+\.att\.r_k", -1)
    num_layers = max(layers) + 1
    config = {
        "intermediate_size": size(r"blocks\.\d+\.ffn\.key\.weight", 0),
        "decay_rank": size(r"blocks\.\d+\.att\.w1", -1),
        "iclr_rank": size(r"blocks\.\d+\.att\.a1", -1),
        "value_rank": size(r"blocks\.[1-9]\d*\.att\.v1", -1) if num_layers > 1 else 1,
        "gate_rank": size(r"blocks\.\d+\.att\.g1", -1),
    }
    if missing:
        raise ValueError(f"an RWKV-7 checkpoint without the tensors {', '.join(missing)}")
    if hidden_size % head_dim:
        raise ValueError(f"att.r_k's head size {head_dim} must divide the width {hidden_size}")
    return Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        head_dim=head_dim,
        value_dim=hidden_size,
        intermediate_size=config["intermediate_size"],
        decay_rank=config["decay_rank"],
        iclr_rank=config["iclr_rank"],
        value_rank=config["value_rank"],
        gate_rank=config["gate_rank"],
    )


def _blinkdl_table(config: Config) -> Mapping[str, object]:
    width, value, heads = config.hidden_size, config.value_dim, config.num_heads

    def norm(name: str, size: int) -> Mapping[str, Source]:
        return {"scale": _same(f"{name}.weight", size), "bias": _same(f"{name}.bias", size)}

    def time_mix(layer: int) -> Mapping[str, object]:
        at = f"blocks.{layer}.att."
        ranks = _ranks(config)
        table: dict[str, object] = {
            "x_rwkvag": _stacked([f"{at}x_{mix}" for mix in MIXES], width),
            "receptance": _transposed(f"{at}receptance.weight", width, width),
            "key": _transposed(f"{at}key.weight", width, width),
            "value": _transposed(f"{at}value.weight", value, width),
            "output": _transposed(f"{at}output.weight", width, value),
            "k_k": _same(f"{at}k_k", width),
            "k_a": _same(f"{at}k_a", width),
            "r_k": _same(f"{at}r_k", heads, config.head_dim),
        }
        for lora in _loras(layer):
            rank, out = ranks[lora]
            table[f"{lora}1"] = _same(f"{at}{lora}1", width, rank)
            table[f"{lora}2"] = _same(f"{at}{lora}2", rank, out)
            if lora != "g":
                table[f"{lora}0"] = _same(f"{at}{lora}0", out)
        return table

    def block(layer: int) -> Mapping[str, object]:
        at = f"blocks.{layer}."
        return {
            "ln1": norm(f"{at}ln1", width),
            "ln2": norm(f"{at}ln2", width),
            "ln_x": norm(f"{at}att.ln_x", value),
            "time_mix": time_mix(layer),
            "channel_mix": {
                "x_k": _same(f"{at}ffn.x_k", width),
                "key": _transposed(f"{at}ffn.key.weight", config.intermediate_size, width),
                "value": _transposed(f"{at}ffn.value.weight", width, config.intermediate_size),
            },
        }

    return {
        "embedding": _same("emb.weight", config.vocab_size, width),
        "ln0": norm("blocks.0.ln0", width),
        "blocks": tuple(block(layer) for layer in range(config.num_layers)),
        "ln_out": norm("ln_out", width),
        "head": _transposed("head.weight", config.vocab_size, width),
    }


# flash-linear-attention's names --------------------------------------------------------------------


def config_from_hf(hf_config: Mapping[str, object], shapes: Shapes) -> Config:
    """The `Config` of a flash-linear-attention config.json; sizes it leaves open come from the tensors.

    Raises:
        ValueError: names each field whose value is not supported.
    """
    fields = _Fields(hf_config, shapes)
    hidden = fields.size("hidden_size", r"model\.embeddings\.weight", 1)
    layers = fields.size("num_hidden_layers", None, 0)
    head_dim = fields.size("head_dim", r"model\.layers\.\d+\.attn\.r_k", 1)
    value_dim = fields.value_dim(hidden)
    fields.supported("attn", not hf_config.get("attn"), "null (no attention layers)")
    fields.supported("hidden_act", hf_config.get("hidden_act", "sqrelu") in ("sqrelu", "relu2"), "sqrelu")
    fields.supported("norm_first", hf_config.get("norm_first", True) is True, "true")
    fields.supported(
        "num_heads", hf_config.get("num_heads") in (None, hidden // head_dim), str(hidden // head_dim)
    )
    fields.supported("head_dim", hidden % head_dim == 0, f"a divisor of hidden_size {hidden}")
    norm_eps = hf_config.get("norm_eps", 1e-5)
    fields.supported("norm_eps", isinstance(norm_eps, float | int), "a number")
    fields.raise_faults()
    lora = (
        r"model\.layers\.[1-9]\d*\.attn\.{}_lora\.lora\.0\.weight"
        if layers > 1
        else r".*{}_lora\.lora\.0\.weight"
    )
    config = Config(
        vocab_size=fields.size("vocab_size", r"model\.embeddings\.weight", 0),
        hidden_size=hidden,
        num_layers=layers,
        head_dim=head_dim,
        value_dim=value_dim,
        intermediate_size=fields.size("intermediate_size", r"model\.layers\.\d+\.ffn\.key\.weight", 0),
        decay_rank=fields.size("decay_low_rank_dim", lora.format("w"), 0),
        iclr_rank=fields.size("a_low_rank_dim", lora.format("a"), 0),
        value_rank=fields.size("v_low_rank_dim", lora.format("v"), 0) if layers > 1 else 1,
        gate_rank=fields.size("gate_low_rank_dim", lora.format("g"), 0),
        norm_eps=float(str(norm_eps)),
        norm_bias=hf_config.get("norm_bias", True) is True,
        fused_norm=hf_config.get("fuse_norm", True) is True,
        tied_head=hf_config.get("tie_word_embeddings", False) is True,
    )
    fields.raise_faults()
    return config


class _Fields:
    """Reads config.json's fields and gathers what is wrong with them."""

    def __init__(self, hf_config: Mapping[str, object], shapes: Shapes) -> None:
        self._config = hf_config
        self._shapes = shapes
        self._faults: list[str] = []

    def size(self, field: str, pattern: str | None, axis: int) -> int:
        """A positive integer field; where it is null or absent, a tensor's size."""
        value = self._config.get(field)
        if value is None and pattern is not None:
            for name, shape in self._shapes.items():
                if re.fullmatch(pattern, name) and len(shape) > axis and shape[axis]:
                    return shape[axis]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self._faults.append(f"{field} is {value!r}, not a positive integer")
        return 1

    def value_dim(self, hidden: int) -> int:
        """Width of the values of all heads: one number, or one a layer."""
        value = self._config.get("value_dim") or hidden
        widths = value if isinstance(value, list) else [value]
        width = widths[0]
        if isinstance(width, int) and width > 0 and all(other == width for other in widths):
            return width
        self.supported("value_dim", False, "one width, the same in each layer")
        return hidden

    def supported(self, field: str, holds: bool, wanted: str) -> None:
        if not holds:
            self._faults.append(f"{field} is {self._config.get(field)!r}; supported is {wanted}")

    def raise_faults(self) -> None:
        if self._faults:
            raise ValueError("config.json: " + "; ".join(self._faults))


def _fla_table(config: Config, packed: bool) -> Mapping[str, object]:
    width, value, heads = config.hidden_size, config.value_dim, config.num_heads

    def norm(name: str, size: int) -> Mapping[str, Source]:
        table = {"scale": _same(f"{name}.weight", size)}
        return table | ({"bias": _same(f"{name}.bias", size)} if config.norm_bias else {})

    def time_mix(layer: int) -> Mapping[str, object]:
        at = f"model.layers.{layer}.attn."
        ranks = _ranks(config)
        mixes = _same(f"{at}x_x", len(MIXES), width)
        table: dict[str, object] = {
            "x_rwkvag": mixes if packed else _stacked([f"{at}x_{mix}" for mix in MIXES], width),
            "receptance": _transposed(f"{at}r_proj.weight", width, width),
            "key": _transposed(f"{at}k_proj.weight", width, width),
            "value": _transposed(f"{at}v_proj.weight", value, width),
            "output": _transposed(f"{at}o_proj.weight", width, value),
            "k_k": _same(f"{at}k_k", width),
            "k_a": _same(f"{at}k_a", width),
            "r_k": _same(f"{at}r_k", heads, config.head_dim),
        }
        for lora in _loras(layer):
            rank, out = ranks[lora]
            table[f"{lora}1"] = _transposed(f"{at}{lora}_lora.lora.0.weight", rank, width)
            table[f"{lora}2"] = _transposed(f"{at}{lora}_lora.lora.2.weight", out, rank)
            if lora != "g":
                table[f"{lora}0"] = _same(f"{at}{lora}_lora.lora.2.bias", out)
        return table

    def block(layer: int) -> Mapping[str, object]:
        at = f"model.layers.{layer}."
        return {
            "ln1": norm(f"{at}attn_norm", width),
            "ln2": norm(f"{at}ffn_norm", width),
            "ln_x": {name: _same(f"{at}attn.g_norm.{stored}", value) for name, stored in _NORM.items()},
            "time_mix": time_mix(layer),
            "channel_mix": {
                "x_k": _same(f"{at}ffn.x_k", width),
                "key": _transposed(f"{at}ffn.key.weight", config.intermediate_size, width),
                "value": _transposed(f"{at}ffn.value.weight", width, config.intermediate_size),
            },
        }

    table: dict[str, object] = {
        "embedding": _same("model.embeddings.weight", config.vocab_size, width),
        "ln0": norm("model.layers.0.pre_norm", width),
        "blocks": tuple(block(layer) for layer in range(config.num_layers)),
        "ln_out": norm("model.norm", width),
    }
    if not config.tied_head:
        table["head"] = _transposed("lm_head.weight", config.vocab_size, width)
    return table


# Both ----------------------------------------------------------------------------------------------


def _loras(layer: int) -> tuple[str, ...]:
    """The low-rank maps of a layer; layer 0 has no value residual."""
    return tuple(lora for lora in _LORAS if layer or lora != "v")


def _ranks(config: Config) -> Mapping[str, tuple[int, int]]:
    """Inner and outer width of each low-rank map."""
    return {
        "w": (config.decay_rank, config.hidden_size),
        "a": (config.iclr_rank, config.hidden_size),
        "v": (config.value_rank, config.value_dim),
        "g": (config.gate_rank, config.value_dim),
    }


def _source(names: list[str], shape: tuple[int, ...], build: Callable[..., np.ndarray]) -> Source:
    return Source(tuple(names), (shape,) * len(names), build)


def _same(name: str, *shape: int) -> Source:
    return _source([name], shape, lambda tensor: tensor)


def _transposed(name: str, *shape: int) -> Source:
    return _source([name], shape, lambda tensor: tensor.T)


def _stacked(names: list[str], width: int) -> Source:
    return _source(names, (width,), lambda *tensors: np.stack(tensors))
