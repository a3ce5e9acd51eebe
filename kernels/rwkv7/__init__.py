"""RWKV-7's time mixing (Peng et al., "RWKV-7 Goose", arXiv 2503.14456)."""

from wkvm_jax.kernels.rwkv7.api import time_mix
from wkvm_jax.kernels.rwkv7.mosaic_gpu import misfit
from wkvm_jax.kernels.rwkv7.operands import Projections, Variant

__all__ = ["Projections", "Variant", "misfit", "time_mix"]
