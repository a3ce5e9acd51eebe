"""Records kept in memory; they end with the process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from wkvm_jax.errors import StatePinnedError, UnknownHandleError
from wkvm_jax.store.records import NewRecord, Record, TokenHistory, checked_name, parse_handle


class MemoryRecords:
    """A `RecordStore` of dictionaries. Versions of a name only grow, even past deletions."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._histories: dict[str, TokenHistory] = {}
        self._versions: dict[str, list[int]] = {}
        self._last_version: dict[str, int] = {}

    def add(self, new: NewRecord, history: TokenHistory) -> Record:
        name = checked_name(new.name)
        version = self._last_version.get(name, 0) + 1
        record = Record(
            handle=f"{name}@{version}",
            version=version,
            tier="device",
            durable=False,
            tags=(),
            pinned=False,
            created_s=time.time(),
            **{field.name: new.__dict__[field.name] for field in dataclasses.fields(new)},
        )
        self._last_version[name] = version
        self._versions.setdefault(name, []).append(version)
        self._records[record.handle] = record
        self._histories[record.handle] = history
        return record

    def get(self, handle: str) -> Record:
        name, version = parse_handle(handle)
        if version is None:
            versions = self._versions.get(name)
            if not versions:
                raise UnknownHandleError(f"no state is called {name!r}")
            version = versions[-1]
        record = self._records.get(f"{name}@{version}")
        if record is None:
            raise UnknownHandleError(f"there is no state {handle!r}")
        return record

    def history(self, handle: str) -> TokenHistory:
        return self._histories[self.get(handle).handle]

    def list(self, *, name: str | None = None, tag: str | None = None) -> Sequence[Record]:
        return [
            record
            for record in self._records.values()
            if name in (None, record.name) and (tag is None or tag in record.tags)
        ]

    def update(self, handle: str, *, tags: Sequence[str] | None = None, pinned: bool | None = None) -> Record:
        record = self.get(handle)
        record = dataclasses.replace(
            record,
            tags=record.tags if tags is None else tuple(tags),
            pinned=record.pinned if pinned is None else pinned,
        )
        self._records[record.handle] = record
        return record

    def delete(self, handle: str) -> Record:
        record = self.get(handle)
        if record.pinned:
            raise StatePinnedError(f"{record.handle} is pinned; unpin it before deleting it")
        del self._records[record.handle], self._histories[record.handle]
        self._versions[record.name].remove(record.version)
        return record

    def lineage(self, handle: str) -> tuple[Sequence[Record], Sequence[tuple[str, str]]]:
        nodes: dict[str, Record] = {}
        edges: list[tuple[str, str]] = []
        queue = [self.get(handle).handle]
        while queue:
            current = queue.pop()
            if current in nodes:
                continue
            nodes[current] = self._records[current]
            parents = [parent for parent in nodes[current].parents if parent in self._records]
            edges += [(parent, current) for parent in parents]
            queue += parents
        return list(nodes.values()), edges
