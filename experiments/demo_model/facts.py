"""Facts to be told and asked for: what a fact says, the ways to say it, to ask for it and to correct it.

A fact has one short exact answer. Its `key` (who or what, and which property) is unique in a dialogue, so a
question never has two right answers. Wordings hold "{}" where the answer stands ("{a}" before it: a or an).

Example:
    >>> import random
    >>> fact = make_facts(random.Random(1), 1, "train")[0]
    >>> fact.tell(random.Random(2)), fact.ask(random.Random(2)), fact.answer  # doctest: +SKIP
    ("Mira's locker code is 4821.", "What is Mira's locker code?", "4821")
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from . import words
from .words import Split

ME = "me"  # the cast member that stands for the user: "my locker code", "I live in"
_Value = Callable[[random.Random, Split], str]


def _filled(wording: str, answer: str) -> str:
    """The sentence for an answer, which keeps its own letter case also at the beginning."""
    article = "an" if answer[0] in "aeiou" else "a"
    text = wording.replace("{a}", article).replace("{}", answer)
    return text if wording.startswith("{}") else _start(text)


def _start(text: str) -> str:
    return text[0].upper() + text[1:]


@dataclasses.dataclass(frozen=True)
class Fact:
    """One fact, with several wordings of the statement, the question and a later correction."""

    key: str
    answer: str
    value: _Value
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    corrections: tuple[str, ...]

    def tell(self, rng: random.Random) -> str:
        """A sentence that states the fact."""
        return _filled(rng.choice(self.statements), self.answer)

    def ask(self, rng: random.Random) -> str:
        """A question whose exact answer is `answer`."""
        return rng.choice(self.questions)

    def corrected(self, rng: random.Random, split: Split) -> tuple[str, Fact]:
        """A sentence that changes the answer, and the fact as it is from then on."""
        changed = self
        while changed.answer == self.answer:
            changed = dataclasses.replace(self, answer=self.value(rng, split))
        return _filled(rng.choice(self.corrections), changed.answer), changed


def _choice(items: Sequence[str]) -> _Value:
    return lambda rng, split: rng.choice(items)


def _small_number(rng: random.Random, split: Split) -> str:
    return str(rng.choice((rng.randint(2, 20), rng.randint(2, 99), rng.randint(100, 999))))


def _clock(rng: random.Random, split: Split) -> str:
    day, hour = rng.choice(words.WEEKDAYS), rng.randint(1, 12)
    return f"{day} at {hour}:{rng.choice(('00', '10', '15', '20', '30', '45'))}"


def _date(rng: random.Random, split: Split) -> str:
    return f"{rng.choice(words.MONTHS)} {rng.randint(1, 28)}"


def _spot(rng: random.Random, split: Split) -> str:
    shape, colour, look = rng.random(), rng.choice(words.COLOURS), rng.choice(words.ADJECTIVES)
    if shape < 0.35:
        return f"in the {colour} {rng.choice(words.FURNITURE)}"
    if shape < 0.6:
        return f"under the {rng.choice((colour, look))} {rng.choice(words.UNDERS)}"
    if shape < 0.8:
        return f"behind the {look} {rng.choice(words.FURNITURE)}"
    return f"in the {rng.choice(words.SPOTS)}"


def _meaning(rng: random.Random, split: Split) -> str:
    noun = rng.choice(words.NOUNS)
    return f"{rng.choice(words.COLOURS + words.ADJECTIVES)} {noun}" if rng.random() < 0.5 else noun


# What somebody's something is, and how its value is made: "Mira's locker code is 4821."
_CODES = (
    "locker code", "door code", "gate code", "safe code", "alarm code", "badge number", "ticket number",
    "room number", "order number", "phone extension", "library number", "customer number", "seat number",
    "bike lock code", "secret code", "access code", "PIN", "flight number", "licence plate",
    "account number", "code", "phone number",
)  # fmt: skip
_IS: tuple[tuple[str, _Value], ...] = (
    *((label, words.code) for label in _CODES),
    ("password", words.word),
    ("wifi password", words.word),
    ("secret word", words.word),
    ("code name", words.name),
    ("nickname", words.name),
    ("home town", words.town),
    ("last name", words.name),
    ("lucky number", _small_number),
    ("house number", _small_number),
    ("favourite colour", _choice(words.COLOURS)),
    ("favourite food", _choice(words.FOODS)),
    ("favourite animal", _choice(words.ANIMALS)),
    ("favourite sport", _choice(words.SPORTS)),
    ("birthday", _date),
)
# What is called by a name: "Mira's dog is called Rindo."
_CALLED = (
    "dog", "cat", "parrot", "horse", "rabbit", "goldfish", "boat", "band", "village", "school", "teacher",
    "sister", "brother", "neighbour", "doctor", "boss", "aunt", "uncle", "daughter", "son", "cousin",
    "street", "robot", "friend", "wife", "husband",
)  # fmt: skip
_THE_CODES = ("password", "code", "number", "secret word")
_RULERS = ("mayor", "king", "queen", "captain", "keeper", "governor", "oldest citizen")
_EVENTS = (
    "meeting", "concert", "dinner", "exam", "parade", "wedding", "lecture", "auction", "party", "rehearsal",
    "interview", "picnic", "ferry", "game",
)  # fmt: skip


def _owner(person: str) -> str:
    return "my" if person == ME else f"{person}'s"


def _fact(
    rng: random.Random,
    split: Split,
    value: _Value,
    key: str,
    say: Sequence[str],
    ask: Sequence[str],
    *correct: str,
) -> Fact:
    return Fact(key, value(rng, split), value, tuple(say), tuple(_start(q) for q in ask), correct)


def _possessive(rng: random.Random, person: str, split: Split) -> Fact:
    """Say "Mira's locker code is 4821."""
    label, value = rng.choice(_IS)
    thing = f"{_owner(person)} {label}"
    say = (f"{thing} is {{}}.",) * 4 + (f"{{}} is {thing}.",)
    ask = (
        f"What is {thing}?", f"What is {thing}?", f"What was {thing}?", f"{thing}?",
        f"What's {thing}?", f"Tell me {thing}.", f"What is {thing} again?",
    )  # fmt: skip
    return _fact(rng, split, value, thing, say, ask, f"{thing} is now {{}}.", f"{thing} has changed to {{}}.")


def _called(rng: random.Random, person: str, split: Split) -> Fact:
    """Say "Mira's dog is called Rindo."""
    thing = f"{_owner(person)} {rng.choice(_CALLED)}"
    say = (
        f"{thing} is called {{}}.", f"{thing} is named {{}}.", f"the name of {thing} is {{}}.",
        f"{thing}'s name is {{}}.",
    )  # fmt: skip
    ask = (
        f"What is {thing} called?", f"What is the name of {thing}?", f"What is {thing}'s name?",
        f"How is {thing} called?", f"Tell me the name of {thing}.",
    )  # fmt: skip
    return _fact(rng, split, words.name, thing, say, ask, f"{thing} is now called {{}}.")


def _lives(rng: random.Random, person: str, split: Split) -> Fact:
    """Say "Mira lives in Torvale."""
    who, live, do = ("I", "live", "do") if person == ME else (person, "lives", "does")
    say = (f"{who} {live} in {{}}.", f"{who} {live} in a place called {{}}.")
    ask = (f"Where {do} {who} live?", f"In which town {do} {who} live?", f"Where is {_owner(person)} home?")
    return _fact(
        rng,
        split,
        words.town,
        f"{who} lives",
        say,
        ask,
        f"{who} now {live} in {{}}.",
        f"{who} moved to {{}}.",
    )


def _named(rng: random.Random, person: str, split: Split) -> Fact:
    """Say the user's own name, or the job of anybody else."""
    if person == ME:
        say = ("my name is {}.", "I am called {}.", "I am {}.")
        ask = ("What is my name?", "What is my name?", "Who am I?", "What am I called?")
        return _fact(rng, split, words.person, "my name", say, ask, "my name is now {}.")
    say = (f"{person} works as {{a}} {{}}.", f"{person} is {{a}} {{}}.")
    ask = (f"What is {person}'s job?", f"What does {person} work as?", f"What does {person} do?")
    return _fact(
        rng, split, _choice(words.JOBS), f"{person} job", say, ask, f"{person} now works as {{a}} {{}}."
    )


def _hidden(rng: random.Random, person: str, split: Split) -> Fact:
    """Say "Mira left the brass key under the red carpet."""
    thing = f"the {rng.choice(words.COLOURS + words.ADJECTIVES)} {rng.choice(words.OBJECTS)}"
    if rng.random() < 0.5:
        say = (f"{thing} is {{}}.", f"you will find {thing} {{}}.")
        ask = (f"Where is {thing}?", f"Where is {thing}?", f"Where can I find {thing}?")
        return _fact(
            rng, split, _spot, thing, say, ask, f"{thing} is now {{}}.", f"{thing} was moved; it is {{}}."
        )
    who = "I" if person == ME else person
    verb, past = rng.choice((("hide", "hid"), ("leave", "left"), ("put", "put"), ("keep", "kept")))
    ask = (f"Where did {who} {verb} {thing}?", f"Where is {thing}?")
    return _fact(
        rng, split, _spot, thing, (f"{who} {past} {thing} {{}}.",), ask, f"{who} moved {thing}; it is {{}}."
    )


def _count(rng: random.Random, person: str, split: Split) -> Fact:
    """Say "Mira has 37 goats." or "There are 37 candles in the attic."""
    things = rng.choice(words.THINGS)
    if rng.random() < 0.4:
        spot = f"the {rng.choice(words.SPOTS)}"
        say = (f"there are {{}} {things} in {spot}.", f"{spot} has {{}} {things}.")
        ask = (f"How many {things} are in {spot}?", f"How many {things} are there in {spot}?")
        return _fact(
            rng,
            split,
            _small_number,
            f"{things} in {spot}",
            say,
            ask,
            f"there are now {{}} {things} in {spot}.",
        )
    who, has, do = ("I", "have", "do") if person == ME else (person, "has", "does")
    say = (f"{who} {has} {{}} {things}.", f"{who} {has} {{}} {things} at home.")
    ask = (f"How many {things} {do} {who} have?",)
    return _fact(rng, split, _small_number, f"{who} {things}", say, ask, f"{who} now {has} {{}} {things}.")


def _translated(rng: random.Random, person: str, split: Split) -> Fact:
    """Say "The word plock means green fish." or "In Vornish, water is called plock."""
    if rng.random() < 0.5:
        made = words.word(rng, split)
        say = (f"the word {made} means {{}}.", f'"{_start(made)}" means {{}}.')
        ask = (
            f"What does {made} mean?", f"What does the word {made} mean?", f"What is the meaning of {made}?",
        )  # fmt: skip
        return _fact(rng, split, _meaning, f"word {made}", say, ask, f"the word {made} now means {{}}.")
    tongue, noun = words.name(rng, split) + rng.choice(("ish", "ese", "ian")), rng.choice(words.NOUNS)
    say = (f"in {tongue}, {noun} is called {{}}.", f"the {tongue} word for {noun} is {{}}.")
    ask = (
        f"What is {noun} called in {tongue}?", f"What is the {tongue} word for {noun}?",
        f"What is {noun} in {tongue}?", f"How do you say {noun} in {tongue}?",
    )  # fmt: skip
    key = f"{noun} in {tongue}"
    return _fact(rng, split, words.word, key, say, ask, f"the {tongue} word for {noun} is now {{}}.")


def _of_place(rng: random.Random, person: str, split: Split) -> Fact:
    """Say "The capital of Vorland is Torvale." or "The password for the cellar is plock."""
    value: _Value
    if rng.random() < 0.5:
        role = rng.choice(("capital", *_RULERS))
        value = words.town if role == "capital" else words.person
        thing = f"the {role} of {words.town(rng, split)}"
        who = "What" if role == "capital" else "Who"
        ask = [f"{who} is {thing}?", f"Tell me {thing}.", f"{thing}?", f"What is the name of {thing}?"]
    else:
        label, look = rng.choice(_THE_CODES), rng.choice(words.COLOURS + words.ADJECTIVES)
        value = words.code if label in ("code", "number") else words.word
        thing = (
            f"the {label} {rng.choice(('for', 'of'))} the {look} {rng.choice(words.SPOTS + words.OBJECTS)}"
        )
        if rng.random() < 0.3:
            thing = f"the {label} for the {rng.choice(words.SPOTS)}"
        ask = [
            f"What is {thing}?",
            f"What is {thing}?",
            f"What was {thing}?",
            f"{thing}?",
            f"Tell me {thing}.",
        ]
    say = (f"{thing} is {{}}.",) * 4 + (f"{{}} is {thing}.",)
    return _fact(rng, split, value, thing, say, ask, f"{thing} is now {{}}.")


def _when(rng: random.Random, person: str, split: Split) -> Fact:
    """Say "The meeting with Mira is on Friday at 9:15." or "Mira's kite is green."""
    if rng.random() < 0.5:
        thing = f"{_owner(person)} {rng.choice(words.OBJECTS)}"
        say = (f"{thing} is {{}}.", f"the colour of {thing} is {{}}.")
        ask = (f"What colour is {thing}?", f"Which colour is {thing}?", f"What is the colour of {thing}?")
        return _fact(rng, split, _choice(words.COLOURS), f"colour {thing}", say, ask, f"{thing} is now {{}}.")
    thing = f"the {rng.choice(_EVENTS)}" + ("" if person == ME else f" with {person}")
    say = (f"{thing} is on {{}}.", f"{thing} starts on {{}}.")
    ask = (f"When is {thing}?", f"When does {thing} start?", f"When will {thing} be?")
    return _fact(
        rng, split, _clock, thing, say, ask, f"{thing} is now on {{}}.", f"{thing} was moved to {{}}."
    )


_MAKERS = (
    _possessive, _possessive, _possessive, _possessive, _called, _called, _lives, _named, _hidden, _hidden,
    _count, _count, _translated, _translated, _of_place, _of_place, _when,
)  # fmt: skip


def make_facts(rng: random.Random, count: int, split: Split) -> list[Fact]:
    """`count` facts with distinct keys, about several people and now and then the user."""
    size = max(1, round(count / rng.choice((1.0, 1.5, 2.0, 3.0, 5.0))))
    cast: list[str] = [ME] if rng.random() < 0.5 else []
    while len(cast) < size:
        someone = words.person(rng, split)
        if someone not in cast:
            cast.append(someone)
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        fact = rng.choice(_MAKERS)(rng, rng.choice(cast), split)
        facts.setdefault(fact.key, fact)
    return list(facts.values())
