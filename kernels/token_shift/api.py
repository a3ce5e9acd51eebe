"""The token shift of one step: one interface for all platforms."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wkvm_jax.kernels.dispatch import Kernels, interpreted
from wkvm_jax.kernels.stacked import Weight, Weights, all_by_themselves, by_itself
from wkvm_jax.kernels.token_shift import mosaic_gpu, xla
from wkvm_jax.state import Batch, read_rows, write_rows


class TokenShift:
    """Normed inputs of each row's last token, `[s, l, place, d]` in the arena, over one step.

    Lives while a step is traced: `mix` is called for each place in order, then `finish` gives the new leaf.

    Args:
        leaf: the arena's leaf.
        batch: says where rows read and write and how many tokens of each count.
        kernels: what computes it. One token a row, of a width that is a multiple of 256, goes through one
            kernel a call, which also updates the arena; everything else is XLA's.
    """

    def __init__(self, leaf: Float32[Array, "s l place d"], batch: Batch, kernels: Kernels) -> None:
        self._leaf, self._batch = leaf, batch
        self._interpreted = interpreted(kernels)
        one_token = batch.tokens.shape[1] == 1
        self._fused = kernels != "xla" and one_token and leaf.shape[-1] % mosaic_gpu.WIDTH_MULTIPLE == 0
        self._rows = None if self._fused else read_rows(leaf, batch)
        self._new_rows: list[Array] = []

    def mix(
        self,
        x: Float32[Array, "b t d"],
        parts: Float32[Array, "part b t d"] | None,
        layer: int,
        place: int,
        norm: Weights,
        mixes: Weight,
        *,
        eps: float,
        dtype: DTypeLike,
    ) -> tuple[Float32[Array, "b t d"], list[Float[Array, "b t d"]]]:
        """Adds to the residual stream, norms it, and mixes each token with its predecessor.

        Args:
            x: the residual stream. It may have more rows than the batch: what they give has no meaning.
            parts: what to add to it first.
            layer, place: where in the leaf the predecessor of a row's first token lies.
            norm: LayerNorm's "scale" and, for norms that have one, "bias".
            mixes: `[mix, d]` or, for one, `[d]`: how much of the predecessor each result takes, which is
                `y + (previous - y) * mix`.
            eps: of the norm.
            dtype: of the mixed results.

        Returns:
            The residual stream after the sum, and one result a mix.
        """
        if self._fused:
            x, mixed, self._leaf = mosaic_gpu.mix(
                x, parts, self._leaf, self._batch, norm, mixes, layer, place, eps, jnp.dtype(dtype),
                self._interpreted,
            )  # fmt: skip
            return x, mixed
        assert self._rows is not None
        before = self._rows[:, layer, place]
        norm, taken = all_by_themselves(norm), jnp.atleast_2d(by_itself(mixes))
        x, mixed, last = xla.mix(x, parts, before, self._batch.lengths, norm, taken, eps)
        self._new_rows.append(last)
        return x, [one.astype(dtype) for one in mixed]

    def finish(self) -> Float32[Array, "s l place d"]:
        """The leaf with the rows' last tokens at their write slots."""
        if self._rows is None:
            return self._leaf
        rows = jnp.stack(self._new_rows, axis=1).reshape(self._rows.shape)
        return write_rows(self._leaf, self._batch, rows)
