"""Residual sum, LayerNorm, and mixes of each token with the one before it."""

from wkvm_jax.kernels.token_shift.api import TokenShift

__all__ = ["TokenShift"]
