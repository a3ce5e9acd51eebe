"""The engine's settings. This module alone reads the environment."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from wkvm_jax.errors import RequestError

DETERMINISTIC_CHUNK = 64
DEFAULT_PREFILL_CHUNKS = (8, 16, 64, 256, 1024)
MAX_BUCKETS = 24


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Everything that shapes an engine; fixed once it has started.

    Attributes:
        num_slots: states that the arena holds beside the two it reserves.
        num_pages: pages of each pool, for families with paged leaves; None gives each slot
            `tokens_per_slot` tokens.
        tokens_per_slot: see `num_pages`; also the longest conversation of a paged family.
        max_rows: requests that run at once, a power of two.
        prefill_chunks: widths of prefill rectangles, ascending.
        deterministic: one decode and one prefill shape, so that tokens do not depend on company.
        max_prompt_tokens: longer prompts are refused.
        max_tokens_limit: larger `max_tokens` are refused.
        max_waiting: requests that may wait for room; more are refused.
    """

    num_slots: int = 64
    num_pages: int | None = None
    tokens_per_slot: int = 2048
    max_rows: int = 32
    prefill_chunks: tuple[int, ...] = DEFAULT_PREFILL_CHUNKS
    deterministic: bool = False
    max_prompt_tokens: int = 1 << 20
    max_tokens_limit: int = 1 << 20
    max_waiting: int = 65_536

    def __post_init__(self) -> None:
        counts = {
            "num_slots": self.num_slots,
            "tokens_per_slot": self.tokens_per_slot,
            "max_prompt_tokens": self.max_prompt_tokens,
            "max_tokens_limit": self.max_tokens_limit,
            "max_waiting": self.max_waiting,
        }
        for name, value in counts.items():
            if value < 1:
                raise RequestError(name, f"{name}={value} must be at least 1")
        if self.max_rows < 1 or self.max_rows & (self.max_rows - 1):
            raise RequestError("max_rows", f"{self.max_rows=} must be a power of two")
        if list(self.prefill_chunks) != sorted(set(self.prefill_chunks)) or not self.prefill_chunks:
            raise RequestError("prefill_chunks", f"{self.prefill_chunks=} must ascend")
        if self.prefill_chunks[0] < 2:
            raise RequestError("prefill_chunks", f"{self.prefill_chunks=} must be wider than one token")
        if len(self.decode_buckets) + len(self.prefill_buckets) > MAX_BUCKETS:
            raise RequestError("prefill_chunks", f"more than {MAX_BUCKETS} shapes to compile")

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Row counts of one-token rectangles."""
        if self.deterministic:
            return (self.max_rows,)
        return tuple(1 << power for power in range(self.max_rows.bit_length()))

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Token counts of one-row rectangles."""
        return (DETERMINISTIC_CHUNK,) if self.deterministic else self.prefill_chunks


def compilation_cache_directory() -> Path | None:
    """Where compiled steps are kept: `WKVM_CACHE_DIR`, by default `~/.cache/wkvm_jax`; empty is nowhere."""
    value = os.environ.get("WKVM_CACHE_DIR")
    if value is not None:
        return Path(value) if value else None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "wkvm_jax"
