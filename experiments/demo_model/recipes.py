"""The two recipes: the demo model, and a tiny one that a CPU trains in a minute."""

from __future__ import annotations

import argparse

from .batches import Phase
from .net import Shape
from .training import Recipe

# Short rows with few facts first, so that copying is learnt soon; then more of both; then long rows. Every
# batch is 65,536 bytes, in two shapes: two compilations. Twice the rows a step take twice the time.
PHASES = (
    Phase(until=0.06, num_rows=32, length=2048, max_facts=8, max_filler_bytes=300, prose_share=0.15),
    Phase(until=0.70, num_rows=32, length=2048, max_facts=20, max_filler_bytes=1200, prose_share=0.2),
    Phase(until=1.00, num_rows=8, length=8192, max_facts=40, max_filler_bytes=5000, prose_share=0.2),
)
TINY_PHASES = (
    Phase(until=0.5, num_rows=4, length=256, max_facts=2, max_filler_bytes=60, prose_share=0.3),
    Phase(until=1.0, num_rows=2, length=512, max_facts=4, max_filler_bytes=100, prose_share=0.3),
)
TINY_SHAPE = Shape(
    num_layers=2, hidden_size=64, head_dim=32, intermediate_size=128,
    decay_rank=8, iclr_rank=8, value_rank=8, gate_rank=8,
)  # fmt: skip


def demo(options: argparse.Namespace) -> Recipe:
    """The model that ships."""
    return Recipe(
        shape=Shape(), phases=PHASES, num_steps=options.steps, seed=options.seed,
        peak_rate=options.peak_rate, recurrence=options.recurrence, hold=0.1,
    )  # fmt: skip


def tiny(options: argparse.Namespace) -> Recipe:
    """A model that learns little, quickly."""
    return Recipe(
        shape=TINY_SHAPE, phases=TINY_PHASES, num_steps=options.steps, seed=options.seed,
        peak_rate=options.peak_rate, recurrence=options.recurrence, warmup_steps=5, dtype="float32",
    )  # fmt: skip
