"""Dialogues that need memory: facts told, other talk for a while, questions later.

The format is plain text, one turn a line; an answer ends with the newline and a document with byte 0:

    User: Mira's locker code is 4821.
    Bot: Noted.
    User: What is Mira's locker code?
    Bot: 4821

Every byte carries a loss weight, in units of 1 / WEIGHT_UNIT: what nobody could predict (an invented name as
it is told) counts little, the answers count much.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import random
from collections.abc import Sequence

from . import chat
from .corpus import GROUP_SHARES, Work
from .facts import Fact, make_facts
from .words import Split

END = 0  # the byte after every document
WEIGHT_UNIT = 8
NO_WEIGHT, TOLD, FILLER, PROSE, ANSWER = 0, 2, 4, 8, 32
NOTED, UNKNOWN = "Noted.", "I do not know."

_TELL_PREFIXES = (
    "Remember that ", "Please remember that ", "Note that ", "By the way, ", "Also, ", "Remember this: ",
    "Remember: ", "Just so you know, ", "I want you to know that ", "Please note: ", "Another fact: ",
)  # fmt: skip
_LIST_HEADS = (
    "Here are some facts:",
    "Please remember these:",
    "Some facts for you:",
    "Remember this list:",
    "Facts:",
)
_ASK_PREFIXES = (
    "Now, ",
    "Quick question: ",
    "Tell me, ",
    "One question: ",
    "Please tell me: ",
    "And ",
    "So, ",
)
_READ_PREFIXES = ("Read this: ", "Listen: ", "Here is a text: ", "I read this today: ", "")
_LOWERABLE = (
    "The ",
    "My ",
    "There ",
    "In ",
    "You ",
    "What",
    "Where",
    "When",
    "Which",
    "Who",
    "How ",
    "Tell ",
)


class Prose:
    """Excerpts of the works of one split, drawn by group and then by length."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._groups = [name for name in GROUP_SHARES if any(work.group == name for work in works)]
        self._shares = [GROUP_SHARES[name] for name in self._groups]
        self._works = {name: [work.text for work in works if work.group == name] for name in self._groups}
        self._ends = {
            name: list(itertools.accumulate(len(text) for text in texts))
            for name, texts in self._works.items()
        }

    def excerpt(self, rng: random.Random, length: int) -> bytes:
        """Up to `length` bytes that begin at the start of a line, or of a sentence in a long line."""
        group = rng.choices(self._groups, self._shares)[0]
        ends = self._ends[group]
        at = rng.randrange(ends[-1])
        which = bisect.bisect_right(ends, at)
        text = self._works[group][which]
        at = max(0, at - (ends[which - 1] if which else 0) - length // 2)
        if at:
            breaks = [
                found + size for mark, size in ((b"\n", 1), (b". ", 2)) if (found := text.find(mark, at)) >= 0
            ]
            at = min(breaks, default=0)
        return text[at : at + length].lstrip(b"\n")

    def passage(self, rng: random.Random, length: int) -> str:
        """An excerpt of about `length` bytes that ends with a whole word."""
        text = self.excerpt(rng, length + 1).decode()
        return text[: max(text.rfind(" "), text.rfind("\n"), 1)].strip() or "..."


class Document:
    """Text with a loss weight for each byte."""

    def __init__(self) -> None:
        self.text = bytearray()
        self.weights = bytearray()

    def __len__(self) -> int:
        return len(self.text)

    def add(self, text: str | bytes, weight: int) -> None:
        """Append text, all of it with one weight."""
        data = text.encode() if isinstance(text, str) else text
        self.text += data
        self.weights += bytes((weight,)) * len(data)

    def turn(self, said: str, answer: str, said_weight: int = FILLER, answer_weight: int = FILLER) -> None:
        """Append what the user says and what the Bot answers."""
        self.add(f"User: {said}\nBot: ", said_weight)
        self.add(f"{answer}\n", answer_weight)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How large a dialogue is to be: facts, bytes of other talk, and the most bytes in all."""

    num_facts: int
    filler_bytes: int
    max_bytes: int


def _lowered(sentence: str) -> str:
    """The sentence as it stands after a prefix: only names keep their capital."""
    return sentence[0].lower() + sentence[1:] if sentence.startswith(_LOWERABLE) else sentence


def told(rng: random.Random, sentence: str) -> str:
    """The sentence as a user might say it."""
    if rng.random() < 0.6:
        return sentence
    return rng.choice(_TELL_PREFIXES) + _lowered(sentence)


def asked(rng: random.Random, question: str) -> str:
    """The question as a user might type it."""
    shape = rng.random()
    if shape < 0.12:
        return rng.choice(_ASK_PREFIXES) + _lowered(question)
    if shape < 0.18:
        question = question.rstrip("?")
    if shape < 0.15 or shape > 0.96:
        question = _lowered(question)
    return question


def add_facts(document: Document, rng: random.Random, sentences: Sequence[str], style: str) -> None:
    """One turn that tells some facts."""
    if style == "list":
        lines = "".join(f"\n- {sentence}" for sentence in sentences)
        document.turn(rng.choice(_LIST_HEADS) + lines, NOTED, TOLD)
    else:
        document.turn(" ".join(told(rng, sentence) for sentence in sentences), NOTED, TOLD)


def add_filler(
    document: Document, rng: random.Random, prose: Prose, num_bytes: int, prose_share: float
) -> None:
    """At least `num_bytes` of talk and reading without facts, and few bytes more."""
    end = len(document) + num_bytes
    while (left := end - len(document)) > 0:
        if left < 80 or rng.random() >= prose_share:
            said, answer = chat.small_talk(rng)
            document.turn(said, answer)
            continue
        text = prose.passage(rng, min(left, rng.randint(80, 800)))
        if rng.random() < 0.5:
            document.add(text + "\n", FILLER)
        else:
            document.turn(rng.choice(_READ_PREFIXES) + text.replace("\n", " "), "I see.")


def add_question(document: Document, rng: random.Random, question: str, answer: str) -> None:
    """One question with its weighty answer."""
    document.turn(asked(rng, question), answer, FILLER, ANSWER)


def groups_of(rng: random.Random, facts: Sequence[Fact]) -> list[tuple[Sequence[Fact], str]]:
    """The facts cut into turns, each with its style: alone, several in a line, or as a list."""
    style = rng.choice(("alone", "alone", "line", "list", "mixed"))
    groups: list[tuple[Sequence[Fact], str]] = []
    at = 0
    while at < len(facts):
        now = rng.choice(("alone", "line", "list")) if style == "mixed" else style
        size = {"alone": 1, "line": rng.randint(1, 4), "list": rng.randint(2, 16)}[now]
        groups.append((facts[at : at + size], now))
        at += size
    return groups


def make_dialogue(rng: random.Random, plan: Plan, prose: Prose, split: Split) -> Document | None:
    """A dialogue of at most `plan.max_bytes`, or None when not even one question fits."""
    withheld = rng.randint(1, 2) if rng.random() < 0.15 else 0
    facts = make_facts(rng, plan.num_facts + withheld, split)
    known, unknown = facts[withheld:], facts[:withheld]
    document = Document()
    if rng.random() < 0.2:
        document.turn(*chat.small_talk(rng))
    prose_share = rng.choice((0.0, 0.3, 0.7, 1.0))
    groups = groups_of(rng, known)
    scattered = plan.filler_bytes / len(groups) if rng.random() < 0.35 else 0.0
    so_far: list[Fact] = []
    for group, style in groups:
        add_facts(document, rng, [fact.tell(rng) for fact in group], style)
        so_far += group
        if scattered:
            add_filler(document, rng, prose, rng.randint(0, int(2 * scattered)), prose_share)
        if rng.random() < 0.08:
            fact = rng.choice(so_far)
            add_question(document, rng, fact.ask(rng), fact.answer)
    if not scattered:
        add_filler(document, rng, prose, plan.filler_bytes, prose_share)
    if rng.random() < 0.15:
        _correct(document, rng, known, split)
    asks = [(fact.ask(rng), fact.answer) for fact in rng.sample(known, _num_questions(rng, len(known)))]
    asks += [(fact.ask(rng), UNKNOWN) for fact in unknown]
    rng.shuffle(asks)
    return document if _ask_all(document, rng, asks, plan.max_bytes) else None


def _num_questions(rng: random.Random, num_facts: int) -> int:
    return num_facts if rng.random() < 0.7 else rng.randint(1, num_facts)


def _correct(document: Document, rng: random.Random, known: list[Fact], split: Split) -> None:
    """Change the answers of some facts, in the dialogue and in `known`."""
    for at in rng.sample(range(len(known)), min(len(known), rng.randint(1, 3))):
        sentence, known[at] = known[at].corrected(rng, split)
        document.turn(told(rng, sentence), NOTED, TOLD)


def _ask_all(document: Document, rng: random.Random, asks: Sequence[tuple[str, str]], max_bytes: int) -> bool:
    """Ask as long as the dialogue stays within `max_bytes`; False when nothing fitted."""
    asked_any = False
    for question, answer in asks:
        turn = Document()
        if rng.random() < 0.05:
            turn.turn(*chat.small_talk(rng))
        add_question(turn, rng, question, answer)
        if len(document) + len(turn) + 1 > max_bytes:
            return asked_any
        document.text += turn.text
        document.weights += turn.weights
        asked_any = True
    document.add(bytes((END,)), FILLER)
    return True


def make_chat(rng: random.Random, max_bytes: int) -> Document:
    """A dialogue of small talk only."""
    document = Document()
    for _ in range(rng.randint(1, 8)):
        said, answer = chat.small_talk(rng)
        if len(document) + len(said) + len(answer) + 14 > max_bytes:
            break
        document.turn(said, answer, FILLER, PROSE)
    document.add(bytes((END,)), FILLER)
    return document
