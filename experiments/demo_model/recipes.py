"""The two recipes: the demo model, and a tiny one that a CPU trains in a minute."""

from __future__ import annotations

import argparse

from .batches import Phase
from .net import Shape
from .training import Recipe

# Short rows with few facts first, so that copying is learnt soon; then more of both; then long rows. Every
# batch is 131,072 bytes, in two shapes: two compilations.
PHASES = (
    Phase(until=0.08, num_rows=64, length=2048, max_facts=8, max_filler_bytes=300, prose_share=0.2),
    Phase(until=0.60, num_rows=64, length=2048, max_facts=20, max_filler_bytes=1200, prose_share=0.25),
    Phase(until=1.00, num_rows=16, length=8192, max_facts=48, max_filler_bytes=6000, prose_share=0.3),
)
# For the last stretch of a run that was cut short: small batches, and a rate that falls from the start.
ANNEAL_PHASES = (
    Phase(until=1.00, num_rows=8, length=2048, max_facts=20, max_filler_bytes=1200, prose_share=0.1),
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
        peak_rate=options.peak_rate, recurrence=options.recurrence, optimizer="muon",
    )  # fmt: skip


def anneal(options: argparse.Namespace) -> Recipe:
    """Go on from written weights with a falling rate; a CPU with bfloat16 products needs 15 s a step."""
    return Recipe(
        shape=Shape(), phases=ANNEAL_PHASES, num_steps=options.steps, seed=options.seed,
        peak_rate=options.peak_rate, recurrence=options.recurrence, warmup_steps=20, hold=0.0,
        start_from=options.start_from,
    )  # fmt: skip


def tiny(options: argparse.Namespace) -> Recipe:
    """A model that learns little, quickly."""
    return Recipe(
        shape=TINY_SHAPE, phases=TINY_PHASES, num_steps=options.steps, seed=options.seed,
        peak_rate=options.peak_rate, recurrence=options.recurrence, warmup_steps=5, dtype="float32",
    )  # fmt: skip
