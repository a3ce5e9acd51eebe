"""What a file is, by its first bytes; never by its name."""

import codecs
import enum
import struct
import zipfile
from pathlib import Path

from wkvm_jax.errors import CheckpointError
from wkvm_jax.weights.listing import quoted
from wkvm_jax.weights.mapped import open_regular

MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors format allows."""

_HEAD_BYTES = 512
ZIP_SIGNATURE = b"PK\x03\x04"
"""How each entry of a zip file begins, and so the file."""

ZIP_ERRORS = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error, OSError)
"""What `zipfile` raises on damaged files."""

_PICKLE_PROTOCOLS = tuple(b"\x80" + bytes([protocol]) for protocol in range(1, 6))


class Kind(enum.Enum):
    """What a file holds. The value of a kind that holds no readable weights says what to do about it."""

    TORCH_ZIP = "is a torch zip file"
    SAFETENSORS = "is a safetensors file"
    EMPTY = "is empty (0 bytes): a download or a copy was cut short; fetch the file again"
    LFS_POINTER = (
        "is a git-lfs pointer and not the weights themselves: run `git lfs pull` in its repository, "
        "or download the file directly"
    )
    HTML = (
        "is a web page (HTML) and not weights: the server answered the download with a page, often a "
        "login or an error; fetch the raw file again"
    )
    PICKLE = (
        "is a bare pickle, perhaps torch's format from before 1.6, and is not opened: in a program that "
        "trusts it, load it and save its state dict again with torch >= 1.6"
    )
    OTHER_ZIP = (
        "is a zip file without torch's data.pkl, so not a torch checkpoint; if the weights are packed "
        "inside it, unpack it"
    )
    GGUF = "is a GGUF file, which is not read: give the safetensors or .pth files that it was made from"
    TEXT = "is a text file and not weights: name a .pth or safetensors file, or the directory that holds them"
    UNKNOWN = "is neither a torch zip file (.pth, .bin) nor a safetensors file"


WEIGHTS = frozenset({Kind.TORCH_ZIP, Kind.SAFETENSORS})
"""The kinds that hold weights which can be read."""


def sniff(path: Path) -> Kind:
    """Say what the regular file `path` holds, from its first bytes (for a zip, its directory too).

    Raises:
        CheckpointError: the file cannot be opened, or is no regular file.
    """
    head = _first_bytes(path)
    if not head:
        return Kind.EMPTY
    if head.startswith(ZIP_SIGNATURE):
        return Kind.TORCH_ZIP if _may_be_torch(path) else Kind.OTHER_ZIP
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return Kind.LFS_POINTER
    if head.startswith(b"GGUF"):
        return Kind.GGUF
    if head[8:9] == b"{" and not _is_text(head[:8]):
        return Kind.SAFETENSORS
    if head.startswith(_PICKLE_PROTOCOLS):
        return Kind.PICKLE
    if not _is_text(head):
        return Kind.UNKNOWN
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return Kind.HTML if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body")) else Kind.TEXT


def refusal(path: Path, kind: Kind) -> CheckpointError:
    """The error for `path`, whose kind is none of `WEIGHTS`."""
    if kind is not Kind.UNKNOWN:
        return CheckpointError(path, kind.value)
    head = _first_bytes(path)[:16]
    return CheckpointError(path, f"{kind.value}: it begins with {head!r}; it may be damaged or encrypted")


def fault_of_name(name: str, kind: Kind) -> str:
    """One line on a file of a directory, for a list of what is wrong there."""
    return f"{quoted(name)} {kind.value}"


def _first_bytes(path: Path) -> bytes:
    with open_regular(path) as file:
        try:
            return file.read(_HEAD_BYTES)
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror}") from error


def _may_be_torch(path: Path) -> bool:
    """Whether a zip holds torch's pickle, or is too damaged to tell (its reader then names the damage)."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(is_data_pickle(name) for name in archive.namelist())
    except ZIP_ERRORS:
        return True


def is_data_pickle(entry: str) -> bool:
    """Whether `entry` is named as torch names the pickle of a zip file: `<any one folder>/data.pkl`."""
    return entry.endswith("/data.pkl") and entry.count("/") == 1


def _is_text(head: bytes) -> bool:
    try:
        # Not final: the cut after the first bytes may fall inside a character.
        text = codecs.getincrementaldecoder("utf-8")().decode(head, final=False)
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character in "\t\r\n\f\ufeff" for character in text)
