"""Words for the generated dialogues: fixed lists, and names, words and codes made up on the spot.

Everything open-ended (first names, invented names, words, codes) is split by a checksum of its letters:
one item in sixteen belongs to the split "test" and is never produced for "train", so a held-out fact holds
strings that training has not seen.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Literal

Split = Literal["train", "test"]
_TEST_SHARE = 16


def split_of(item: str) -> Split:
    """The split an open-ended string belongs to: "test" for one in sixteen, whatever its letter case."""
    return "test" if zlib.crc32(item.lower().encode()) % _TEST_SHARE == 0 else "train"


def _drawn(make: Callable[[random.Random], str], rng: random.Random, split: Split) -> str:
    """The first item from `make` that belongs to `split`."""
    while True:
        item = make(rng)
        if split_of(item) == split:
            return item


FIRST_NAMES = tuple(
    "Ada Adam Agnes Aisha Alan Alice Amara Amy Ana Anders Andre Anita Anna Anton Arun Astrid Ben Bianca Bill "
    "Bob Boris Bruno Carla Carlos Cathy Chen Chloe Clara Colin Dana Daniel David Dee Diego Dina Dora Edgar Ella "
    "Elena Emil Emma Eric Eva Farah Felix Finn Frank Freya Gina Grace Greta Hana Hanna Harry Hector Helen Henry "
    "Hugo Ian Ida Igor Ines Ivan Iris Jack Jane Janek Jim Joan Joe Jonas Jorge Judy Jules June Kai Karim Karl Kate "
    "Ken Kira Lars Laura Layla Lena Leo Liam Lily Lina Linda Lisa Liv Lola Luca Lucy Luis Luke Maja Marco Maria "
    "Mark Marta Mary Mateo Maya Mei Mia Mike Mila Milo Mina Mira Mona Nadia Nela Nina Noah Nora Olga Oliver Omar "
    "Oscar Otto Pablo Paul Pedro Peter Petra Pia Priya Quinn Rana Ravi Rita Robin Rosa Ruben Ruth Sam Sana Sara "
    "Selma Simon Sofia Sven Tariq Tara Theo Tim Tina Tom Tova Uma Ursula Vera Victor Viola Walt Wanda Wei Will "
    "Yara Yusuf Zara Zoe".split()
)
COLOURS = tuple(
    "red blue green yellow black white grey brown orange purple pink silver golden violet turquoise crimson".split()
)
ADJECTIVES = tuple(
    "old new small large round square heavy light broken shiny dusty wooden iron glass paper copper velvet narrow "
    "tall hidden cracked spare striped painted folded empty locked plain carved rusty".split()
)
OBJECTS = tuple(
    "key coin ring map letter book lamp clock hammer candle mirror flute drum rope bottle basket kettle ladder "
    "umbrella camera compass button brush scarf hat glove coat boot bell box trunk medal ticket notebook pen "
    "envelope spoon cup plate vase statue guitar violin telescope lantern radio wallet blanket necklace bracelet "
    "chessboard kite whistle suitcase passport jar knife saw shovel bucket wrench battery cable diary stamp".split()
)
THINGS = tuple(
    "apples pears goats sheep horses ducks bees cats boats barrels candles chairs lamps stamps coins books maps "
    "kites marbles bottles baskets ladders windows plums tickets buttons spoons bicycles masks drums keys stones "
    "shells feathers tulips roses olives pumpkins melons eggs cheeses loaves pots rugs flags puzzles medals "
    "postcards records pencils hats scarves umbrellas clocks mirrors violins paintings tents canoes".split()
)
SPOTS = tuple(
    "cellar attic kitchen garden garage barn library office hall chapel bakery stable tower workshop pantry "
    "greenhouse harbour station museum theatre bedroom laundry lighthouse mill school shed cabin market".split()
)
FURNITURE = tuple(
    "drawer cupboard box shelf chest cabinet basket crate locker suitcase bag wardrobe desk bucket jar trunk".split()
)
UNDERS = tuple("carpet bed table sofa stairs mat bench piano stove pillow fridge rug oak bridge".split())
JOBS = tuple(
    "baker butcher carpenter cook dentist doctor driver farmer fisher gardener guard judge lawyer librarian mason "
    "mechanic miner musician nurse painter pilot plumber poet potter printer sailor shepherd singer smith surgeon "
    "tailor teacher waiter weaver welder writer astronomer chemist clerk diver".split()
)
FOODS = tuple(
    "soup bread rice noodles cheese honey plums cherries figs olives salmon lentils pancakes dumplings curry "
    "porridge mushrooms walnuts chocolate pumpkin pie spinach tacos yoghurt".split()
)
ANIMALS = tuple(
    "owl fox heron otter badger raven whale tiger lynx hare deer swan eagle wolf seal crane".split()
)
SPORTS = tuple(
    "chess tennis rowing fencing judo football hockey archery sailing climbing skating golf".split()
)
NOUNS = tuple(
    "water fire bread stone tree river house bird fish moon sun star night snow wind rain salt milk horse dog cat "
    "road bridge door window child friend king queen ship sea hill forest field flower grass iron gold song dance "
    "dream sleep word name hand eye heart foot winter summer spring thunder shadow cloud island mountain valley "
    "garden market feast bell sword shield crown mother father brother sister".split()
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip

_ONSETS = (
    "b c d f g h j k l m n p r s t v w z br bl cr dr fl fr gl gr kr kl pl pr qu sc sh sk sl sn sp st str sw th tr "
    "tw vr y ch"
).split()
_VOWELS = ("a e i o u a e i o u ai au ea ee ei ia ie io oa oo ou y ae").split()
_CODAS = "b d g k l m n p r s t x z ck ft ld lf lk ll lm lt mp nd ng nk nt rd rk rl rm rn rt rth sh sk st th v".split()
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_TOWN_ENDS = ("ton", "ford", "by", "mouth", "field", "burg", "haven", "dale", "stead", "wick", "vale", "port")


def _syllables(rng: random.Random, count: int) -> str:
    parts: list[str] = []
    for place in range(count):
        parts.append(rng.choice(_ONSETS) if place or rng.random() < 0.85 else "")
        parts.append(rng.choice(_VOWELS))
        if rng.random() < (0.6 if place == count - 1 else 0.25):
            parts.append(rng.choice(_CODAS))
    return "".join(parts)


def _word(rng: random.Random) -> str:
    return _syllables(rng, rng.choice((1, 2, 2, 2, 3)))


def _town(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return (_syllables(rng, 1) + rng.choice(_TOWN_ENDS)).capitalize()
    return _syllables(rng, 2).capitalize()


def _code(rng: random.Random) -> str:
    def digits(count: int) -> str:
        return "".join(rng.choice("0123456789") for _ in range(count))

    def letters(count: int) -> str:
        return "".join(rng.choice(_LETTERS) for _ in range(count))

    shape = rng.random()
    if shape < 0.55:
        return digits(rng.choice((3, 4, 4, 4, 5, 6)))
    if shape < 0.7:
        return f"{letters(rng.choice((1, 2, 2, 3)))}-{digits(rng.choice((2, 3, 4)))}"
    if shape < 0.8:
        return f"{digits(rng.choice((2, 3)))}-{digits(rng.choice((2, 3)))}"
    if shape < 0.9:
        return f"{digits(rng.choice((1, 2, 3)))}{letters(rng.choice((1, 2)))}"
    return "".join(rng.choice(_LETTERS + "23456789") for _ in range(rng.choice((4, 5, 6))))


def word(rng: random.Random, split: Split) -> str:
    """An invented lower-case word of one to three syllables."""
    return _drawn(_word, rng, split)


def name(rng: random.Random, split: Split) -> str:
    """An invented capitalised name."""
    return word(rng, split).capitalize()


def person(rng: random.Random, split: Split) -> str:
    """Somebody's first name: half of the time a common one, else an invented one."""
    if rng.random() < 0.5:
        return _drawn(lambda r: r.choice(FIRST_NAMES), rng, split)
    return name(rng, split)


def town(rng: random.Random, split: Split) -> str:
    """An invented place name."""
    return _drawn(_town, rng, split)


def code(rng: random.Random, split: Split) -> str:
    """A code of digits, or of letters and digits."""
    return _drawn(_code, rng, split)
