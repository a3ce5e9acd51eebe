"""The small held-out measurement during training, in the forward and at one shape of the training itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt8

from . import corpus, net
from .cases import make_cases
from .dialogues import Prose
from .net import Params, Shape

NUM_FACTS, FILLER_BYTES = 8, 1000


@partial(jax.jit, static_argnames=("shape", "recurrence", "dtype"))
def _measure(
    params: Params,
    text: UInt8[Array, "b t1"],
    counted: Bool[Array, "b t1"],
    shape: Shape,
    recurrence: str,
    dtype: str,
) -> tuple[Array, Array]:
    """Mean bits of the counted bytes, and the share of rows whose counted bytes are all the likeliest."""
    out = net.logits(
        params, text[:, :-1], shape=shape, recurrence=net.RECURRENCES[recurrence], dtype=jnp.dtype(dtype)
    )
    targets, counted = text[:, 1:], counted[:, 1:]
    picked = jnp.sum(jnp.where(jnp.arange(shape.vocab_size) == targets[..., None], out, 0.0), -1)
    bits = (jax.nn.logsumexp(out, axis=-1) - picked) / jnp.log(2.0)
    right = jnp.all((jnp.argmax(out, -1) == targets) | ~counted, axis=-1)
    return jnp.sum(bits * counted) / jnp.sum(counted), jnp.mean(right)


class Probe:
    """Recall of 8 facts over 1,000 bytes, and bits per byte of held-out prose, on a few rows."""

    def __init__(
        self,
        texts: Path,
        shape: Shape,
        recurrence: str,
        dtype: str,
        *,
        num_rows: int = 64,
        length: int = 2048,
    ) -> None:
        works = corpus.select(corpus.load_works(texts), "test")
        self._measure = partial(_measure, shape=shape, recurrence=recurrence, dtype=dtype)
        self._recall = _recall_rows(Prose(works), num_rows, length + 1)
        text = np.frombuffer(b"".join(work.text for work in works), np.uint8)
        starts = np.linspace(0, len(text) - length - 1, num_rows).astype(int)
        self._prose = np.stack([text[at : at + length + 1] for at in starts])

    def __call__(self, params: Params) -> dict[str, float]:
        """What the parameters reach."""
        _, recall = self._measure(params, *self._recall)
        bits, _ = self._measure(params, self._prose, np.ones(self._prose.shape, bool))
        return {"recall_8_facts": float(recall), "prose_bits_a_byte": float(bits)}


def _recall_rows(prose: Prose, num_rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    text, counted = np.zeros((num_rows, width), np.uint8), np.zeros((num_rows, width), bool)
    for row, case in enumerate(make_cases(1, prose, "recall", NUM_FACTS, FILLER_BYTES, num_rows, 1)):
        question, answer = case.asks[0]
        whole = case.context + question + answer
        start = len(whole) - len(answer)
        if len(whole) <= width:  # a longer one counts as right: rare, and the same at every step
            text[row, : len(whole)] = np.frombuffer(whole, np.uint8)
            counted[row, start : len(whole)] = True
    return text, counted
