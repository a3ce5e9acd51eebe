"""Held-out questions: dialogues of the split "test", each cut where its questions begin.

A case holds the facts and the talk in between as one `context`, and several questions; every question is
asked alone, straight after the context, so no answer can help another.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

from .dialogues import UNKNOWN, Document, Prose, add_facts, add_filler, asked, groups_of, told
from .facts import Fact, make_facts

Kind = Literal["recall", "corrected", "unknown"]
BOT = "Bot:"


@dataclasses.dataclass(frozen=True)
class Case:
    """The text before the questions, and (question with the Bot's name, answer with its newline) pairs."""

    context: bytes
    asks: tuple[tuple[bytes, bytes], ...]


def _ask(rng: random.Random, fact: Fact, answer: str) -> tuple[bytes, bytes]:
    question = asked(rng, fact.ask(rng))
    return f"User: {question}\n{BOT}".encode(), f" {answer}\n".encode()


def make_case(
    rng: random.Random, prose: Prose, kind: Kind, num_facts: int, filler_bytes: int, num_questions: int
) -> Case:
    """Tell `num_facts` facts, talk for `filler_bytes` or a little more, then ask for some of the facts.

    "corrected" asks for facts whose answer was changed after all had been told, "unknown" for facts that were
    never told.
    """
    withheld = num_questions if kind == "unknown" else 0
    facts = make_facts(rng, num_facts + withheld, "test")
    wanted, facts = facts[:withheld], facts[withheld:]
    document = Document()
    for group, style in groups_of(rng, facts):
        add_facts(document, rng, [fact.tell(rng) for fact in group], style)
    if not withheld:
        wanted = rng.sample(facts, min(num_questions, num_facts))
    if kind == "corrected":
        changes = [fact.corrected(rng, "test") for fact in wanted]
        for sentence, _ in changes:
            add_facts(document, rng, [told(rng, sentence)], "alone")
        wanted = [fact for _, fact in changes]
    add_filler(document, rng, prose, filler_bytes, rng.choice((0.0, 0.3, 0.7, 1.0)))
    asks = tuple(_ask(rng, fact, UNKNOWN if withheld else fact.answer) for fact in wanted)
    return Case(bytes(document.text), asks)


def make_cases(
    seed: int,
    prose: Prose,
    kind: Kind,
    num_facts: int,
    filler_bytes: int,
    num_questions: int,
    questions_a_case: int,
) -> list[Case]:
    """Cases with `num_questions` questions in all, the same for the same arguments."""
    num_cases = -(-num_questions // questions_a_case)
    name = f"{seed}/{kind}/{num_facts}/{filler_bytes}"
    return [
        make_case(random.Random(f"{name}/{index}"), prose, kind, num_facts, filler_bytes, questions_a_case)
        for index in range(num_cases)
    ]
