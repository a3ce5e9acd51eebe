"""`engine.states`: named states on the device, and what can be done with them.

A handle is a reference on a slot (and pages) that nobody writes again, so forking and snapshotting copy
nothing. Until a durable store is attached, states live as long as the engine and each holds its slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, overload

import jax
import jax.numpy as jnp
import numpy as np

from wkvm_jax.engine.request import Request
from wkvm_jax.engine.sequence import Origin, Sequence
from wkvm_jax.engine.submission import Start
from wkvm_jax.errors import (
    NoFreeSlotError,
    RequestError,
    StateMismatchError,
    UnknownHandleError,
    UnknownRequestError,
    WkvmError,
)
from wkvm_jax.state import INITIAL_SLOT, State, StateSpec
from wkvm_jax.store.records import NewRecord, Record, RecordStore, TokenHistory, checked_name

if TYPE_CHECKING:
    from wkvm_jax.engine.engine import Engine

SLOTS_FOR_REQUESTS = 2
"""Slots that kept states leave alone: what one request can need that keeps its own."""


class StateStore:
    """Named states. Every method may be called from any thread.

    Handles are `name@version`; a bare `name` means its newest version. Methods raise
    `UnknownHandleError` for a handle that is not there.
    """

    def __init__(self, engine: Engine, records: RecordStore) -> None:
        self._engine = engine
        self._records = records
        self._places: dict[str, Origin] = {}
        self._lost: dict[str, str] = {}

    # Asking -----------------------------------------------------------------------------------------

    def list(self, *, name: str | None = None, tag: str | None = None) -> Seq[Record]:
        """Records in order of creation, perhaps only those of one name or with one tag."""
        with self._engine.lock:
            return self._records.list(name=name, tag=tag)

    def get(self, handle: str) -> Record:
        """The record of a state."""
        with self._engine.lock:
            return self._record(handle)

    def lineage(self, handle: str) -> tuple[Seq[Record], Seq[tuple[str, str]]]:
        """The states that this one came from, itself included, and (parent, child) edges between them."""
        with self._engine.lock:
            return self._records.lineage(self._record(handle).handle)

    def token_ids(self, handle: str) -> Seq[int]:
        """Every token of the state's conversation, the pending one included."""
        with self._engine.lock:
            return self._records.history(self._record(handle).handle).all_ids()

    # Making -----------------------------------------------------------------------------------------

    def create(self, name: str, prompt: str | Seq[int], *, state: str | None = None) -> Record:
        """Reads a prompt, perhaps on top of another state, and keeps what became of it. Waits for it."""
        checked_name(name)
        request = self._engine.submit(prompt, state=state, save_as=name, max_tokens=0)
        output = request.result()
        if output.handle is None:
            raise WkvmError(f"the state {name!r} was not made: {output.error or output.finish_reason}")
        return self.get(output.handle)

    def snapshot(self, request: Request, name: str) -> Record:
        """Keeps the present state of a running request, which goes on undisturbed.

        Raises:
            UnknownRequestError: the request has ended, or has not started.
            NoFreeSlotError: no slot is free for the request to go on in.
        """
        checked_name(name)
        return self._engine.call(lambda: self._snapshot(request, name))

    @overload
    def fork(self, handle: str, name: str) -> Record: ...

    @overload
    def fork(self, handle: str, name: str, n: int) -> Record | Seq[Record]: ...

    def fork(self, handle: str, name: str, n: int = 1) -> Record | Seq[Record]:
        """One or more further names for a state. No state is copied, however large `n` is.

        Returns:
            A record, or for `n` above 1 a list of records with successive versions of `name`.
        """
        checked_name(name)
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise RequestError("n", f"{n=} must be a positive integer")
        with self._engine.lock:
            parent = self._record(handle)
            children = [self._fork_one(parent, name) for _ in range(n)]
        return children[0] if n == 1 else children

    def put(self, name: str, state: State) -> Record:
        """Keeps a state made by research code, a batch of one. Continuing it needs a non-empty prompt.

        Raises:
            StateMismatchError: its leaves do not fit this model, or hold NaN or infinity.
            NoFreeSlotError: no slot is free.
        """
        checked_name(name)
        _check_state(self._engine.model.state_spec, state)
        return self._engine.call(lambda: self._put(name, state))

    def load(self, handle: str, max_length: int | None = None) -> State:
        """A copy of a state for research code, a batch of one.

        Args:
            handle: which state.
            max_length: tokens it may grow to; matters for models with paged leaves.
        """
        with self._engine.lock:
            record = self._record(handle)
            place = self._places[record.handle]
            state = self._engine.device.load(place.slot, place.pages)
        spec = self._engine.model.state_spec
        missing = spec.pages_for(max_length or place.num_tokens) - len(place.pages)
        if missing <= 0:
            return state
        # On the host, so that nothing is compiled for each number of pages.
        room = {
            name: np.full((missing, *leaf.shape), leaf.initial, leaf.dtype)
            for name, leaf in spec.paged.items()
        }
        pools = {name: np.concatenate([pool, room[name]]) for name, pool in state.pools.items()}
        return state.replace(pools=jax.device_put(pools))

    # Changing ---------------------------------------------------------------------------------------

    def pin(self, handle: str, pinned: bool = True) -> Record:
        """Protects a state from deletion, or ends that."""
        with self._engine.lock:
            return self._records.update(self._record(handle).handle, pinned=pinned)

    def tag(self, handle: str, tags: Seq[str]) -> Record:
        """Replaces a state's tags."""
        with self._engine.lock:
            return self._records.update(self._record(handle).handle, tags=tags)

    def delete(self, handle: str) -> None:
        """Forgets a state. Requests that continue it, and states forked from it, are not disturbed.

        Raises:
            StatePinnedError: it is pinned.
        """
        with self._engine.lock:
            record = self._records.delete(self._record(handle).handle)
            self._engine.scheduler.release(self._places.pop(record.handle))

    # For the engine ---------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Sees to it that one more kept state leaves slots for requests. The engine's lock is held.

        Raises:
            NoFreeSlotError: it would not.
        """
        slots, _ = self._engine.pools
        kept = {place.slot for place in self._places.values()} - {INITIAL_SLOT}
        most = slots.num_shards * (slots.num_usable - min(SLOTS_FOR_REQUESTS, max(slots.num_usable - 1, 1)))
        if len(kept) + self._engine.num_keeping >= most:
            raise NoFreeSlotError(
                f"{len(kept)} kept states and {self._engine.num_keeping} to come take the {most} of this "
                f"engine's {slots.num_shards * slots.num_usable} slots that states may keep; "
                "delete some, or start a larger engine"
            )

    def start_of(self, handle: str | None) -> Start:
        """Where a request that continues `handle` begins. The engine's lock is held.

        Raises:
            StateMismatchError: the state belongs to other weights.
        """
        if handle is None:
            return Start()
        record = self._record(handle)
        fingerprint = self._engine.model.fingerprint
        if record.fingerprint != fingerprint:
            raise StateMismatchError(
                f"{record.handle} was made by the model {record.fingerprint}; this engine runs {fingerprint}"
            )
        history = self._records.history(record.handle)
        return Start(self._places[record.handle], record.pending_token, record.handle, history)

    def keep_final(self, sequence: Sequence, place: Origin) -> Record:
        """Files a finished sequence's state, whose slot and pages the caller has retained."""
        assert sequence.save_as is not None
        return self._file_sequence(
            sequence,
            place,
            sequence.save_as,
            "generate" if sequence.output_ids else "prefill",
            {"seed": sequence.params.seed, "temperature": sequence.params.temperature},
        )

    def lose_all(self, error: WkvmError) -> None:
        """Forgets every state after the arena was lost; whoever asks for one is told why."""
        for record in self._records.list():
            self._lost |= {record.name: str(error), record.handle: str(error)}
            self._records.update(record.handle, pinned=False)
            self._records.delete(record.handle)
            self._engine.scheduler.release(self._places.pop(record.handle))

    # Inside -----------------------------------------------------------------------------------------

    def _record(self, handle: str) -> Record:
        try:
            return self._records.get(handle)
        except UnknownHandleError as unknown:
            if handle in self._lost:
                raise UnknownHandleError(f"the state {handle!r} was lost: {self._lost[handle]}") from unknown
            raise

    def _snapshot(self, request: Request, name: str) -> Record:
        sequence = self._engine.sequence_of(request)
        reading = sequence is not None and (sequence.parent is not None or sequence.num_to_prefill > 0)
        if sequence is None or sequence.finished or not sequence.slots or reading:
            raise UnknownRequestError(
                f"request {request.id} is not generating: it has ended, waits, or still reads its prompt"
            )
        self.check_room()
        place = self._engine.scheduler.share(sequence)
        return self._file_sequence(sequence, place, name, "snapshot", {"request": request.id})

    def _fork_one(self, parent: Record, name: str) -> Record:
        place = self._places[parent.handle]
        self._engine.scheduler.retain(place)
        new = NewRecord(
            name=name,
            parents=(parent.handle,),
            operation="fork",
            params={},
            num_tokens=parent.num_tokens,
            pending_token=parent.pending_token,
            fingerprint=parent.fingerprint,
            dtype=parent.dtype,
            bytes=parent.bytes,
        )
        return self._file(new, TokenHistory((), self._records.history(parent.handle)), place)

    def _put(self, name: str, state: State) -> Record:
        self.check_room()
        slots, pages = self._engine.pools
        shard = slots.roomiest()
        (slot,) = slots.acquire(1, shard)
        num_tokens = int(np.asarray(state.num_tokens)[0])
        try:
            taken = pages.acquire(self._engine.model.state_spec.pages_for(num_tokens), shard)
        except WkvmError:
            slots.release(slot)
            raise
        self._engine.device.store(slot, taken, state)
        new = self._new_record(name, (), "put", {}, num_tokens, None)
        return self._file(new, TokenHistory(()), Origin(slot, tuple(taken), num_tokens))

    def _file_sequence(
        self, sequence: Sequence, place: Origin, name: str, operation: str, params: Mapping[str, object]
    ) -> Record:
        parents = (sequence.origin_handle,) if sequence.origin_handle else ()
        new = self._new_record(name, parents, operation, params, place.num_tokens + 1, sequence.tokens[-1])
        # A continued state's pending token stands in its history already.
        own = (*sequence.prefix_tokens, *sequence.tokens)[sequence.continues :]
        return self._file(new, TokenHistory(own, sequence.parent_history), place)

    def _new_record(
        self,
        name: str,
        parents: tuple[str, ...],
        operation: str,
        params: Mapping[str, object],
        num_tokens: int,
        pending_token: int | None,
    ) -> NewRecord:
        spec = self._engine.model.state_spec
        consumed = num_tokens - (pending_token is not None)
        dtypes = {str(np.dtype(leaf.dtype)) for leaf in spec.leaves.values() if leaf.kind == "recurrent"}
        return NewRecord(
            name=name,
            parents=parents,
            operation=operation,
            params=params,
            num_tokens=num_tokens,
            pending_token=pending_token,
            fingerprint=self._engine.model.fingerprint,
            dtype=", ".join(sorted(dtypes)) or "none",
            bytes=spec.slot_bytes + spec.pages_for(consumed) * spec.page_bytes,
        )

    def _file(self, new: NewRecord, history: TokenHistory, place: Origin) -> Record:
        record = self._records.add(new, history)
        self._places[record.handle] = place
        return record


def _check_state(spec: StateSpec, state: State) -> None:
    """Refuses what is no batch of one of these states, and what holds NaN or infinity."""
    want = _layout(jax.eval_shape(lambda: spec.allocate(1)))
    have = _layout(state)
    if want != have:
        raise StateMismatchError(f"the state has {have}; this model's have {want}")
    num_tokens = int(np.asarray(state.num_tokens)[0])
    if num_tokens < 0 or state.num_pages < spec.pages_for(num_tokens):
        raise StateMismatchError(f"the state has {num_tokens} tokens on {state.num_pages} pages")
    for name, leaf in {**state.leaves, **state.pools}.items():
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.isfinite(np.asarray(leaf)).all():
            raise StateMismatchError(f"the state's leaf {name!r} holds NaN or infinity")


def _layout(state: State) -> dict[str, str]:
    """Shape and dtype of each leaf, and of a page of each pool."""
    slots = {name: f"{leaf.dtype}{leaf.shape}" for name, leaf in state.leaves.items()}
    pages = {name: f"{pool.dtype}{pool.shape[1:]} a page" for name, pool in state.pools.items()}
    return slots | pages | {"num_tokens": f"{state.num_tokens.dtype}{state.num_tokens.shape}"}
