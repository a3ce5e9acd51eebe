"""The RWKV-7 recurrence (Peng et al., "RWKV-7 Goose", arXiv 2503.14456)."""

from wkvm_jax.kernels.rwkv7.api import Recurrence, recurrence

__all__ = ["Recurrence", "recurrence"]
