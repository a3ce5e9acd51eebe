"""From a name or a path to a `Model`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.typing import DTypeLike

from wkvm_jax.errors import CheckpointError
from wkvm_jax.kernels.dispatch import choose_kernels
from wkvm_jax.models.family import Family, FamilyConfig, Layout
from wkvm_jax.models.model import Model
from wkvm_jax.models.registry import FAMILIES
from wkvm_jax.models.stacking import stacked
from wkvm_jax.tokenizers import load_tokenizer
from wkvm_jax.tokenizers.base import Tokenizer
from wkvm_jax.weights import Checkpoint, load_params, read_checkpoint

DEMO_DIRECTORY = Path(__file__).resolve().parent.parent / "demo_model"


def load(
    model: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    kernels: str = "auto",
    state_dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Loads a model.

    Args:
        model: "demo" for the model in the box; a `.pth` or `.safetensors` file; or a Hugging Face or
            fla-hub directory. What a file is, is told by its content.
        dtype: what the weights become. None keeps what is stored, except that 16-bit weights become
            float32 on a CPU, whose products are faster that way.
        tokenizer: used in place of what lies beside the checkpoint.
        kernels: what computes the model: "xla", "ampere", "hopper", or "auto" for the fastest that runs on
            the default device.
        state_dtype: what recurrent states are kept in: "float32", or "float16" for half the memory at some
            rounding a token (docs/performance.md). Not every family takes it.
        progress: called with the bytes done and the bytes there are.

    Returns:
        The model; its `tokenizer` is None where none was found.

    Raises:
        CheckpointError: what is wrong with which file.
        TokenizerError: the same for a tokenizer's files.
        KernelUnavailableError: the kernels asked for cannot run here; the message says why.
        ValueError: a dtype is none of those above.
    """
    choose_kernels(kernels)  # what cannot run here at all is refused before anything is read
    path = DEMO_DIRECTORY if model == "demo" else Path(model)
    checkpoint = read_checkpoint(path)
    family, layout = find_layout(checkpoint)
    params = load_params(
        checkpoint,
        layout.table,
        dtype=_resolved_dtype(checkpoint, layout, dtype),
        ignored=layout.ignored,
        progress=progress,
    )
    tokenizer = tokenizer or load_tokenizer(checkpoint.directory, checkpoint.config, layout.config.vocab_size)
    config = _with_state_dtype(family, layout.config, state_dtype)
    chosen = choose_kernels(kernels, misfit=family.kernel_misfit(config))
    laid_out = params if chosen == "xla" else stacked(params, free=True)
    return Model(family, config, laid_out, tokenizer, name=_name(model), kernels=chosen)


def _with_state_dtype(family: Family, config: FamilyConfig, state_dtype: str) -> FamilyConfig:
    if state_dtype == "float32":
        return config
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    if "state_dtype" not in {field.name for field in dataclasses.fields(config)}:
        raise ValueError(f"{family.name} models keep their states in float32 only, not {state_dtype=}")
    return dataclasses.replace(config, state_dtype=state_dtype)


def find_layout(checkpoint: Checkpoint) -> tuple[Family, Layout]:
    """The first family that knows the checkpoint.

    Raises:
        CheckpointError: none does, or the one that does cannot run it.
    """
    for family in FAMILIES:
        try:
            layout = family.layout(checkpoint.shapes, checkpoint.config)
        except ValueError as error:
            raise CheckpointError(checkpoint.path, str(error)) from error
        if layout is not None:
            return family, layout
    model_type = (checkpoint.config or {}).get("model_type", "unknown")
    known = ", ".join(family.name for family in FAMILIES)
    raise CheckpointError(
        checkpoint.path,
        f"no known model: config.json's model_type is {model_type!r} and the tensors' names "
        f"({', '.join(list(checkpoint.shapes)[:3])}, ...) fit none of: {known}",
    )


def _resolved_dtype(checkpoint: Checkpoint, layout: Layout, dtype: DTypeLike | None) -> np.dtype | None:
    if dtype is not None:
        resolved = np.dtype(dtype)
        if resolved not in (np.dtype("float32"), np.dtype(jax.numpy.bfloat16)):
            raise ValueError(f"{dtype=} must be float32 or bfloat16")
        return resolved
    return np.dtype("float32") if jax.default_backend() == "cpu" else None


def _name(model: str | os.PathLike[str]) -> str:
    path = Path(model)
    return path.name if path.is_dir() else path.stem or str(model)
