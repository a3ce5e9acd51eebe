"""Records and handles: the names of states and what is known of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from wkvm_jax.errors import RequestError

Tier = Literal["device", "host", "nvme"]

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclasses.dataclass(frozen=True)
class Record:
    """What is known of one state. Only `tier`, `durable`, `tags` and `pinned` ever change.

    Attributes:
        handle: `name@version`.
        parents: handles that it came from.
        operation: "prefill", "generate", "fork", "snapshot" or "put".
        params: the operation's parameters.
        num_tokens: tokens of the conversation, the pending one included.
        pending_token: the last token, which the state has not consumed; None after `put`.
        fingerprint: of the model.
        dtype: of the recurrent leaves.
        bytes: of the state's slot and pages.
        tier: where it lies.
        durable: whether it survives the process.
        created_s: seconds since the epoch.
    """

    handle: str
    name: str
    version: int
    parents: tuple[str, ...]
    operation: str
    params: Mapping[str, object]
    num_tokens: int
    pending_token: int | None
    fingerprint: str
    dtype: str
    bytes: int
    tier: Tier
    durable: bool
    tags: tuple[str, ...]
    pinned: bool
    created_s: float

    def __str__(self) -> str:
        return self.handle


@dataclasses.dataclass(frozen=True)
class TokenHistory:
    """A conversation's tokens as a chain of deltas, shared by all states that branch from it.

    It outlives the records that made it: deleting a parent takes nothing from its children.
    """

    token_ids: tuple[int, ...]
    parent: TokenHistory | None = None

    def all_ids(self) -> list[int]:
        """Every token from the start of the conversation."""
        parts: list[tuple[int, ...]] = []
        node: TokenHistory | None = self
        while node is not None:
            parts.append(node.token_ids)
            node = node.parent
        return [token_id for part in reversed(parts) for token_id in part]


@dataclasses.dataclass(frozen=True)
class NewRecord:
    """A record to be: everything but the version, which the store gives."""

    name: str
    parents: tuple[str, ...]
    operation: str
    params: Mapping[str, object]
    num_tokens: int
    pending_token: int | None
    fingerprint: str
    dtype: str
    bytes: int


class RecordStore(Protocol):
    """Keeps records and gives versions. Its callers see to mutual exclusion."""

    def add(self, new: NewRecord, history: TokenHistory) -> Record:
        """Files a record under the next version of its name."""
        ...

    def get(self, handle: str) -> Record:
        """The record of `name@version`, or of a name's newest version.

        Raises:
            UnknownHandleError: there is none.
        """
        ...

    def history(self, handle: str) -> TokenHistory:
        """The tokens of a state's conversation."""
        ...

    def list(self, *, name: str | None = None, tag: str | None = None) -> Sequence[Record]:
        """Records in order of creation, perhaps only those of one name or with one tag."""
        ...

    def update(self, handle: str, *, tags: Sequence[str] | None = None, pinned: bool | None = None) -> Record:
        """Changes what may change."""
        ...

    def delete(self, handle: str) -> Record:
        """Forgets a record and returns it.

        Raises:
            StatePinnedError: it is pinned.
        """
        ...

    def lineage(self, handle: str) -> tuple[Sequence[Record], Sequence[tuple[str, str]]]:
        """The records that a state came from, itself included, and (parent, child) edges between them."""
        ...


def checked_name(name: str, param: str = "name") -> str:
    """`name` if states may be called so.

    Raises:
        RequestError: it has other characters, or is too long; `param` says whose argument it was.
    """
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise RequestError(
            param,
            f"{name!r} is no state name: use 1 to 128 letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit",
        )
    return name


def parse_handle(handle: str) -> tuple[str, int | None]:
    """Name and version of a handle; the version is None for a bare name, which means the newest.

    Raises:
        RequestError: it is neither `name` nor `name@version`.
    """
    name, at, version = handle.partition("@")
    checked_name(name, "state")
    if not at:
        return name, None
    if not re.fullmatch(r"[1-9][0-9]{0,17}", version):
        raise RequestError(
            "state", f"{handle!r} is no handle: the version after '@' must be a positive number"
        )
    return name, int(version)
