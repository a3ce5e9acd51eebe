"""The families that this version knows, in the order in which a checkpoint is offered to them."""

from __future__ import annotations

from wkvm_jax.models import rwkv7, rwkv7_checkpoint
from wkvm_jax.models.family import Family

RWKV7 = Family(
    name="rwkv7",
    param_spec=rwkv7.param_spec,
    state_spec=rwkv7.state_spec,
    forward=rwkv7.forward,
    head=rwkv7.head,
    layout=rwkv7_checkpoint.layout,
    partition=rwkv7.partition,
    kernel_misfit=rwkv7.kernel_misfit,
)

FAMILIES: tuple[Family, ...] = (RWKV7,)
