"""What the server needs of an engine. `wkvm_jax.engine.engine.Engine` has it; so has the tests' stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from wkvm_jax.engine.request import Request, SamplingParams
from wkvm_jax.store.records import Record


class TextTokenizer(Protocol):
    """Text to ids and back."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to a text that has already begun."""
        ...


class ModelConfig(Protocol):
    """A model's sizes."""

    @property
    def vocab_size(self) -> int: ...


class ServedModel(Protocol):
    """The model that an engine runs."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> TextTokenizer | None: ...

    @property
    def config(self) -> ModelConfig: ...


class EngineLimits(Protocol):
    """An engine's settings, as far as requests can run into them."""

    @property
    def max_rows(self) -> int: ...

    @property
    def max_prompt_tokens(self) -> int: ...

    @property
    def max_tokens_limit(self) -> int: ...


class SlotCount(Protocol):
    """Slots that there are, and those that are free or could be freed at once."""

    @property
    def total(self) -> int: ...

    @property
    def free(self) -> int: ...


class States(Protocol):
    """Kept states by handle; `wkvm_jax.engine.states.StateStore` says what each call does."""

    def get(self, handle: str, /) -> Record:
        """The record of `handle`; `UnknownHandleError` if there is none."""
        ...

    def list(self, *, name: str | None = None, tag: str | None = None) -> Sequence[Record]:
        """Records in order of creation."""
        ...

    def lineage(self, handle: str, /) -> tuple[Sequence[Record], Sequence[tuple[str, str]]]:
        """What a state came from, and (parent, child) edges."""
        ...

    def fork(self, handle: str, name: str, n: int, /) -> Record | Sequence[Record]:
        """Further names for a state."""
        ...

    def pin(self, handle: str, pinned: bool, /) -> Record:
        """Protects a state from deletion, or ends that."""
        ...

    def tag(self, handle: str, tags: Sequence[str], /) -> Record:
        """Replaces a state's tags."""
        ...

    def delete(self, handle: str, /) -> None:
        """Forgets a state."""
        ...


class ServedEngine(Protocol):
    """An engine, as the server sees it.

    `submit`, `submit_choices`, `states`, `close` and `Request.cancel` may wait for a lock that the
    engine's thread holds while it dispatches, so the server never calls them on the event loop.
    """

    @property
    def model(self) -> ServedModel: ...

    @property
    def config(self) -> EngineLimits: ...

    @property
    def states(self) -> States: ...

    @property
    def alive(self) -> bool: ...

    def slots(self) -> SlotCount:
        """Counts that are read without waiting."""
        ...

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        state: str | None = None,
        save_as: str | None = None,
        params: SamplingParams | None = None,
    ) -> Request:
        """Queues a prompt; what is wrong with it is raised here."""
        ...

    def submit_choices(
        self, prompt: str | Sequence[int], n: int, *, state: str | None = None, params: SamplingParams
    ) -> list[Request]:
        """Queues `n` choices for one prompt."""
        ...

    def close(self, timeout_s: float | None = None) -> None:
        """Cancels what runs and ends the engine."""
        ...
