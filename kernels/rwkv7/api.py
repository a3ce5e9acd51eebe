"""RWKV-7's time mixing between its projections and its output product: one signature for all platforms."""

from __future__ import annotations

from jaxtyping import Array, Float

from wkvm_jax.kernels.dispatch import Kernels, for_hopper, interpreted
from wkvm_jax.kernels.rwkv7 import mosaic_gpu, prefill, xla
from wkvm_jax.kernels.rwkv7.operands import Projections, Variant
from wkvm_jax.kernels.stacked import Weights, all_by_themselves
from wkvm_jax.state import Batch


def time_mix(
    arena: Float[Array, "s l h k v"],
    layer: int,
    batch: Batch,
    projections: Projections,
    params: Weights,
    ln_x: Weights,
    *,
    variant: Variant,
    kernels: Kernels,
) -> tuple[Float[Array, "b t hv"], Float[Array, "s l h k v"]]:
    """Runs one layer's time mixing for every row of a batch, from its read slot to its write slot.

    Equations 7 to 17 of arXiv 2503.14456: decay, in-context rate, value residual, key normalisation, the
    recurrence, group norm, the current token's bonus and the gate.

    Args:
        arena: matrix states, slot-major, `[key, value]` a head, in float32 or a 16-bit type that they are
            rounded to at each write; arithmetic is float32.
        layer: which layer's states to use.
        batch: says where rows read and write and how many tokens of each count.
        projections: the layer's products. Where one kernel runs they may have more rows than the batch; what
            those give has no meaning.
        params: `w0 a0 k_k k_a r_k` and, beyond the first layer, `v0`.
        ln_x: the group norm's "scale" and "bias".
        variant: see `Variant`.
        kernels: what computes it. On a GPU, one token a row is one kernel; on Hopper, `prefill.LEAST_TOKENS`
            or more in bfloat16 are two, whose accuracy is that of bfloat16. All else takes the XLA path.

    Returns:
        The gated output, in the projections' dtype and of no meaning past a row's length, and the arena
        with the rows' new states at their write slots: those after the last counted token.

    Gradients flow through every floating argument, on every platform as those of the XLA path.
    """
    operands = (arena, batch, projections, params, ln_x, layer, variant)
    if kernels != "xla" and projections.r.shape[1] == 1:
        return mosaic_gpu.time_mix(*operands, bulk=for_hopper(kernels), interpreted=interpreted(kernels))
    if for_hopper(kernels) and prefill.serves(arena, projections):
        return prefill.time_mix(*operands, interpreted(kernels))
    params, ln_x = all_by_themselves(params), all_by_themselves(ln_x)
    return xla.time_mix(arena, layer, batch, projections, params, ln_x, variant)
