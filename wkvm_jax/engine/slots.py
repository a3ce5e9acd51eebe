"""Ids with reference counts: the slots of an arena, the pages of its pools, the lanes of its table."""

from __future__ import annotations

from collections import deque

from wkvm_jax.errors import NoFreeSlotError


class RefPool:
    """Hands out ids and takes them back when nobody holds them.

    An id that was freed is handed out last, and its content is never read again: whoever gets it writes
    it whole first.

    Args:
        name: what the ids are, for errors ("slot").
        size: ids a shard, the reserved ones included.
        num_reserved: ids from each shard's first that are never handed out.
        num_shards: devices that each have ids of their own. Shard `i` has those from `i * size` on.
    """

    def __init__(self, name: str, size: int, num_reserved: int, num_shards: int = 1) -> None:
        self._name = name
        self._size = size
        self._num_usable = max(size - num_reserved, 0)
        self._free = [
            deque(range(shard * size + num_reserved, (shard + 1) * size)) for shard in range(num_shards)
        ]
        self._counts: dict[int, int] = {}

    @property
    def num_shards(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Ids that a shard hands out: what one request can have at most."""
        return self._num_usable

    @property
    def num_free(self) -> int:
        """Free ids of all shards."""
        return sum(map(len, self._free))

    def num_free_on(self, shard: int) -> int:
        return len(self._free[shard])

    def roomiest(self) -> int:
        """The shard with the most free ids."""
        return max(range(self.num_shards), key=self.num_free_on)

    def shard_of(self, identity: int) -> int:
        return identity // self._size

    def acquire(self, count: int, shard: int = 0) -> list[int]:
        """`count` ids of a shard with one reference each, or none at all.

        Raises:
            NoFreeSlotError: fewer are free.
        """
        free = self._free[shard]
        if count > len(free):
            raise NoFreeSlotError(
                f"{count} {self._name}s are needed and {len(free)} of {self._num_usable} are free; "
                f"delete a kept state or wait for a running request to end"
            )
        ids = [free.popleft() for _ in range(count)]
        for identity in ids:
            self._counts[identity] = 1
        return ids

    def retain(self, identity: int) -> None:
        """One more reference on an id in use; reserved ids need none and take none."""
        if identity in self._counts:
            self._counts[identity] += 1

    def release(self, identity: int) -> None:
        """One reference fewer; the last one frees the id."""
        count = self._counts.get(identity)
        if count is None:
            return
        if count == 1:
            del self._counts[identity]
            self._free[self.shard_of(identity)].append(identity)
        else:
            self._counts[identity] = count - 1

    def references(self, identity: int) -> int:
        """How many hold the id; 0 for a free or reserved one."""
        return self._counts.get(identity, 0)
