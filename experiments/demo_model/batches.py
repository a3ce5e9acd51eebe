"""Training batches: rows of packed documents, each batch a function of (seed, step) alone.

A row holds whole dialogues and ends with prose, or is all prose. Worker processes make the batches ahead of
the device; since nothing depends on order, a resumed run sees the batches that it would have seen.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import numpy as np

from . import corpus
from .dialogues import END, NO_WEIGHT, PROSE, Document, Plan, Prose, make_chat, make_dialogue

_BYTES_A_FACT = 95  # told and asked once, roughly
_MIN_DIALOGUE_BYTES = 160


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of the training: up to which share of the steps, and what its batches are like."""

    until: float
    num_rows: int
    length: int
    max_facts: int
    max_filler_bytes: int
    prose_share: float


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of `length + 1` bytes, the loss weight of each byte, and which rows are all prose."""

    text: np.ndarray
    weights: np.ndarray
    is_prose: np.ndarray


def phase_at(phases: tuple[Phase, ...], step: int, num_steps: int) -> Phase:
    """The phase that `step` of `num_steps` belongs to."""
    return next(phase for phase in phases if step < round(phase.until * num_steps))


def _plan(rng: random.Random, phase: Phase, space: int) -> Plan:
    """A dialogue for `space` bytes: often few facts, often as many as fit."""
    most = max(1, min(phase.max_facts, (space - 60) // _BYTES_A_FACT))
    spread = (
        math.exp(rng.uniform(0.0, math.log(most + 0.99)))
        if rng.random() < 0.5
        else rng.uniform(1, most + 0.99)
    )
    num_facts = int(spread)
    room = max(0, min(phase.max_filler_bytes, space - 60 - num_facts * _BYTES_A_FACT))
    filler = int(room * (0.0 if rng.random() < 0.1 else rng.random()))
    return Plan(num_facts, filler, space)


def _fill_with_prose(row: Document, rng: random.Random, prose: Prose, num_bytes: int) -> None:
    while len(row) < num_bytes:
        left = num_bytes - len(row)
        text = prose.excerpt(rng, left)
        row.add(text, PROSE)
        if len(text) < left:  # cut off, or the end of the work: no end for the model to guess
            row.add(bytes((END,)), NO_WEIGHT)


def make_row(rng: random.Random, phase: Phase, prose: Prose) -> tuple[Document, bool]:
    """One row of `phase.length + 1` bytes, and whether it is all prose."""
    num_bytes = phase.length + 1
    row = Document()
    is_prose = rng.random() < phase.prose_share
    while not is_prose and (space := num_bytes - len(row)) > _MIN_DIALOGUE_BYTES:
        made = (
            make_chat(rng, space)
            if rng.random() < 0.06
            else make_dialogue(rng, _plan(rng, phase, space), prose, "train")
        )
        if made is None or len(made) > space:
            break
        row.text += made.text
        row.weights += made.weights
    _fill_with_prose(row, rng, prose, num_bytes)
    return row, is_prose


def make_batch(seed: int, step: int, phase: Phase, prose: Prose) -> Batch:
    """The batch of one step."""
    shape = (phase.num_rows, phase.length + 1)
    text, weights = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    is_prose = np.zeros(phase.num_rows, bool)
    for index in range(phase.num_rows):
        row, is_prose[index] = make_row(random.Random(f"{seed}/{step}/{index}"), phase, prose)
        text[index] = np.frombuffer(bytes(row.text[: shape[1]]), np.uint8)
        weights[index] = np.frombuffer(bytes(row.weights[: shape[1]]), np.uint8)
    return Batch(text, weights, is_prose)


class _Worker:
    """What a worker process keeps between batches."""

    prose: Prose


def _start_worker(texts: Path) -> None:
    _Worker.prose = Prose(corpus.select(corpus.load_works(texts), "train"))


def _work(seed: int, step: int, phase: Phase) -> Batch:
    return make_batch(seed, step, phase, _Worker.prose)


def batches(
    texts: Path, seed: int, phases: tuple[Phase, ...], num_steps: int, *, first_step: int, num_workers: int
) -> Iterator[Batch]:
    """The batches of the steps from `first_step` on, made ahead by `num_workers` processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (texts,)) as pool:
        waiting: collections.deque[Future[Batch]] = collections.deque()
        steps = iter(range(first_step, num_steps))
        try:
            while True:
                while len(waiting) < 4 * num_workers and (step := next(steps, None)) is not None:
                    waiting.append(pool.submit(_work, seed, step, phase_at(phases, step, num_steps)))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
