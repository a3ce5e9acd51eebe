"""The model that a command's flags name."""

from __future__ import annotations

import argparse

from wkvm_jax.models.loading import load
from wkvm_jax.models.model import Model
from wkvm_jax.serving.progress import loading_progress


def load_chosen(arguments: argparse.Namespace) -> Model:
    """Loads `--model` as `--dtype`, `--state-dtype` and `--kernels` say, with a progress line."""
    return load(
        arguments.model,
        arguments.dtype,
        kernels=arguments.kernels,
        state_dtype=arguments.state_dtype,
        progress=loading_progress(),
    )
