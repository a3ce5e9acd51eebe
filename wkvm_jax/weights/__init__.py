"""Checkpoints on disk, and how they become parameters.

JAX is imported by `load_params` and `weights_digest` when they run, not before.
"""

from wkvm_jax.weights.checkpoint import Checkpoint, read_checkpoint
from wkvm_jax.weights.digest import weights_digest
from wkvm_jax.weights.params import load_params
from wkvm_jax.weights.source import Source

__all__ = ["Checkpoint", "Source", "load_params", "read_checkpoint", "weights_digest"]
