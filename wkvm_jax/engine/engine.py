"""The engine: one thread that admits, steps and reports, and the calls that other threads make on it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import TypeVar

from jax.sharding import Mesh

from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.outcome import Outcomes, fetch
from wkvm_jax.engine.placement import Placement
from wkvm_jax.engine.request import Output, Request, SamplingParams
from wkvm_jax.engine.scheduler import Rectangle, Scheduler, StateShape
from wkvm_jax.engine.sequence import Origin, Sequence
from wkvm_jax.engine.slots import RefPool
from wkvm_jax.engine.states import StateStore
from wkvm_jax.engine.step import Device, NewLanes, Sizes
from wkvm_jax.engine.submission import new_lane, prepared_group
from wkvm_jax.errors import (
    EngineClosedError,
    MeshError,
    NoFreeSlotError,
    RequestError,
    StateMismatchError,
    StepFailedError,
)
from wkvm_jax.models.model import Model
from wkvm_jax.sampling import NUM_RESERVED_LANES
from wkvm_jax.state import INITIAL_SLOT, NUM_RESERVED_PAGES, NUM_RESERVED_SLOTS
from wkvm_jax.store.records import RecordStore
from wkvm_jax.types import Params

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SlotCount:
    """Slots that requests and states may take, and how many of them are free now."""

    total: int
    free: int


class Engine:
    """Runs many conversations at once on one arena of states.

    `generate` and `submit` may be called from any thread. One thread of the engine's own does the rest:
    each turn it dispatches a step and then reads the results of the step before, so the device never
    waits for the host.

    Args:
        model: what to run.
        config: sizes and limits.
        records: where states' records are kept.
        mesh: devices to spread over; None is JAX's default device.

    Raises:
        MeshError: the model cannot be spread over the mesh.
    """

    def __init__(
        self, model: Model, config: EngineConfig, records: RecordStore, mesh: Mesh | None = None
    ) -> None:
        self.model = model
        self.config = config
        spec = model.state_spec
        pages_per_row = spec.pages_for(config.tokens_per_slot)
        shards = Placement(model, mesh).num_data_shards
        if config.max_rows % shards:
            raise MeshError(
                f"{shards} data shards cannot share {config.max_rows} rows: choose a power of two"
            )
        num_slots = -(-config.num_slots // shards)
        num_pages = num_slots * pages_per_row if config.num_pages is None else -(-config.num_pages // shards)
        sizes = Sizes(
            num_slots=num_slots + NUM_RESERVED_SLOTS,
            num_pages=num_pages + NUM_RESERVED_PAGES if spec.paged else 0,
            num_lanes=config.max_rows // shards + NUM_RESERVED_LANES,
            pages_per_row=pages_per_row,
        )
        self._slots = RefPool("slot", sizes.num_slots, NUM_RESERVED_SLOTS, shards)
        self._pages = RefPool("page", sizes.num_pages, NUM_RESERVED_PAGES, shards)
        self._lanes = RefPool("row", sizes.num_lanes, NUM_RESERVED_LANES, shards)
        self._device = Device(model, sizes, mesh)
        shape = StateShape(spec.alternates, spec.page_size, pages_per_row * spec.page_size)
        self._scheduler = Scheduler(config, shape, self._slots, self._pages, self._lanes, self._device.cost_s)
        self._in_flight: deque[tuple[Rectangle, object]] = deque()
        self._commands: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._cancelled: deque[str] = deque()
        self._ids = itertools.count(1)
        self._id_prefix = secrets.token_hex(4)
        self._live: dict[str, Sequence] = {}
        self._closed = False
        self._fault: str | None = None
        # Guards everything above. The engine's thread lets go of it while it waits for the device.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self.states = StateStore(self, records)
        self._outcomes = Outcomes(self._finish, self._keep)
        self._thread = threading.Thread(target=self._run, name="wkvm-engine", daemon=True)
        self._thread.start()

    # Calls from any thread ------------------------------------------------------------------------

    def generate(
        self, prompts: str | Seq[str | Seq[int]], *, params: SamplingParams | None = None, **sampling: object
    ) -> list[Output]:
        """Completes each prompt and returns the outcomes in order.

        Args:
            prompts: texts, or lists of token ids; a single text counts as one prompt.
            params: how to sample; or give the fields of `SamplingParams` as keywords.

        Raises:
            RequestError: a prompt or parameter is invalid; nothing runs then.
        """
        chosen = _sampling_params(params, sampling)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        requests: list[Request] = []
        try:
            for prompt in texts:
                requests.append(self.submit(prompt, params=chosen))
            return [request.result() for request in requests]
        except BaseException:
            for request in requests:
                request.cancel()
            raise

    def submit(
        self,
        prompt: str | Seq[int],
        *,
        state: str | None = None,
        save_as: str | None = None,
        params: SamplingParams | None = None,
        **sampling: object,
    ) -> Request:
        """Queues a prompt and returns at once; iterate over the request for its tokens.

        Args:
            prompt: text, or token ids. Nothing is prepended. It may be empty if `state` has a token
                pending.
            state: handle of a state to continue from; that state stays as it is.
            save_as: name under which the final state is kept.
            params: how to sample; or give the fields of `SamplingParams` as keywords.

        Raises:
            RequestError: what is invalid, its `param` naming the argument.
            UnknownHandleError: there is no such state.
            CapacityError: the engine could never hold the request.
        """
        chosen = _sampling_params(params, sampling)
        return self._submit(prompt, 1, state, save_as, chosen)[0]

    def submit_choices(
        self, prompt: str | Seq[int], n: int, *, state: str | None = None, params: SamplingParams
    ) -> list[Request]:
        """Queues `n` choices for one prompt, which is read once; choice i draws with `fold_in(seed, i)`."""
        if not 1 <= n <= self.config.max_rows:
            raise RequestError("n", f"{n=} must be from 1 to {self.config.max_rows}, the rows of this engine")
        return self._submit(prompt, n, state, None, params)

    def slots(self) -> SlotCount:
        """How many slots there are and how many are free."""
        return SlotCount(self._slots.num_usable * self._slots.num_shards, self._slots.num_free)

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return not self._closed and self._fault is None

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles and measures every shape, so that nothing compiles while requests run.

        Args:
            progress: called with the shapes done and the shapes there are.
        """
        shards = self._device.num_data_shards
        rows = [(size, 1) for size in self.config.decode_buckets if size >= shards]
        chunks = [(shards, size) for size in self.config.prefill_buckets]
        self._device.compile(rows + chunks, with_states=True, progress=progress)
        self.call(lambda: self._device.calibrate(rows + chunks))

    def compile(
        self, shapes: Seq[tuple[int, int]], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compiles only these shapes, (rows, tokens), two at a time; others compile at first use."""
        self._device.compile(shapes, progress=progress)

    def set_params(self, params: Params) -> None:
        """Replaces the weights with others of the same shapes; nothing is compiled again.

        The model's fingerprint changes, and states made before can no longer be continued.

        Raises:
            ValueError: the shapes or dtypes differ.
        """
        import jax

        params = self.model.laid_out(params)
        old = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), self._device.params)
        new = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
        if old != new:
            raise ValueError("set_params needs the same tree of arrays, with the same shapes and dtypes")

        def replace() -> None:
            self.model = dataclasses.replace(self.model, params=params)
            self._device.set_params(params)

        self.call(replace)

    def close(self, timeout_s: float | None = None) -> None:
        """Cancels what runs and ends the engine's thread. States on the device are gone then."""
        with self._lock:
            self._closed = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What `states` needs ----------------------------------------------------------------------------

    @property
    def lock(self) -> threading.RLock:
        """Guards slots, pages, sequences and records."""
        return self._lock

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs a function on the engine's thread, when no result is outstanding, and returns its result."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("this call waits for the engine's thread, which is busy with this listener")
        future: Future[object] = Future()
        with self._lock:
            self._check_alive()
            self._commands.append((function, future))
            self._wake.notify_all()
        return future.result()  # type: ignore[return-value]

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @property
    def device(self) -> Device:
        return self._device

    @property
    def pools(self) -> tuple[RefPool, RefPool]:
        """Slots and pages."""
        return self._slots, self._pages

    def sequence_of(self, request: Request) -> Sequence | None:
        """The running sequence of a request; None once it has ended."""
        return self._live.get(request.id)

    @property
    def num_keeping(self) -> int:
        """Requests under way whose final state will be kept."""
        return sum(sequence.keeps_state for sequence in self._live.values())

    # Submission -------------------------------------------------------------------------------------

    def _submit(
        self,
        prompt: str | Seq[int],
        n: int,
        state: str | None,
        save_as: str | None,
        params: SamplingParams,
    ) -> list[Request]:
        self._check_alive()
        requests = [self._new_request() for _ in range(n)]
        prepared = prepared_group(self.model, self.config, prompt, save_as, params)
        with self._lock:
            self._check_alive()
            if self._scheduler.num_waiting + n > self.config.max_waiting:
                raise NoFreeSlotError(
                    f"{self.config.max_waiting} requests are waiting already; try again later"
                )
            start = self.states.start_of(state)
            if save_as is not None:
                self.states.check_room()
            group = prepared.sequences(requests, start)
            self._scheduler.check_fits(group)
            for sequence in group:
                if sequence.parent is None:
                    self._scheduler.retain(start.origin)
                if sequence.request is not None:
                    self._live[sequence.request.id] = sequence
            self._scheduler.submit(group)
            self._wake.notify_all()
        return requests

    def _new_request(self) -> Request:
        request_id = f"{self._id_prefix}-{next(self._ids)}"
        return Request(request_id, lambda: self._cancel(request_id))

    def _cancel(self, request_id: str) -> None:
        self._cancelled.append(request_id)
        # Waiting for the lock could take several steps where steps are short; the next turn looks anyway.
        if self._lock.acquire(blocking=False):
            try:
                self._end_cancelled()
            finally:
                self._lock.release()

    def _end_cancelled(self) -> None:
        while self._cancelled:
            sequence = self._live.get(self._cancelled.popleft())
            if sequence is not None:
                self._outcomes.end(sequence, "cancelled")

    def _check_alive(self) -> None:
        if self._fault is not None:
            raise EngineClosedError(f"the engine has failed: {self._fault}")
        if self._closed:
            raise EngineClosedError("the engine is closed")

    # The engine's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            logger.exception("the engine cannot go on")
            self._fault = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._end_all(self._fault)

    def _turn(self) -> bool:
        """One round: commands, a dispatch, and the results of the dispatch before. False at the end."""
        with self._lock:
            self._wake.wait_for(self._has_work)
            if self._closed:
                return False
        try:
            if self._commands:
                self._collect(len(self._in_flight))
            with self._lock:
                self._end_cancelled()
                if not self._in_flight:
                    self._run_commands()
                dispatched = self._dispatch()
            self._collect(len(self._in_flight) - dispatched)
            with self._lock:
                self._end_stuck()
        except Exception as error:
            with self._lock:
                self._recover(error)
        return True

    def _has_work(self) -> bool:
        return bool(self._closed or self._commands or self._in_flight or not self._scheduler.idle)

    def _run_commands(self) -> None:
        while self._commands:
            function, future = self._commands.popleft()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def _dispatch(self) -> int:
        """Admits and dispatches what comes next; returns how many dispatches that were."""
        admitted = self._scheduler.admit()
        lanes: list[NewLanes] = [new_lane(s, self.model) for s in admitted if s.lane is not None]
        self._device.set_lanes(lanes)
        for sequence in admitted:
            if sequence.lane is not None and sequence.params.penalises:
                self._device.add_history(sequence.lane, [*sequence.history, *sequence.tokens])
        rectangles = self._scheduler.plan()
        for rectangle in rectangles:
            self._in_flight.append((rectangle, self._device.run(rectangle)))
        for sequence in admitted:
            if sequence.params.max_tokens == 0 and sequence.num_prompt == 1 and not sequence.is_prefix:
                self._outcomes.end_without_output(sequence)
        return len(rectangles)

    def _collect(self, count: int) -> None:
        """Waits for the oldest dispatches and hands out their results."""
        for _ in range(count):
            rectangle, result = self._in_flight.popleft()
            fetched = fetch(rectangle, result)
            with self._lock:
                self._outcomes.report(rectangle, fetched)

    def _end_stuck(self) -> None:
        while group := self._scheduler.stuck():
            need = self._scheduler.need(group)
            message = (
                f"the request needs {need}, and kept states hold too many of this engine's "
                f"{self._slots.num_usable} slots for it ever to start; delete some"
            )
            for sequence in group:
                if sequence.parent is None:
                    self._scheduler.release(sequence.origin)
                sequence.finished = True
                self._outcomes.end(sequence, "error", message)

    def _recover(self, error: Exception) -> None:
        """After a failed dispatch: the arena may be gone, so everything on it is."""
        logger.exception(
            "a step failed; running requests end as errors and the arena is rebuilt", exc_info=error
        )
        self._in_flight.clear()
        message = f"a step failed on the device: {type(error).__name__}: {error}"
        for sequence in self._scheduler.sequences():
            # What only waits for a fresh start has lost nothing.
            if sequence.slots or sequence.origin.slot != INITIAL_SLOT:
                self._outcomes.end(sequence, "error", message)
        self.states.lose_all(StepFailedError(message))
        self._device.reset()

    def _end_all(self, fault: str | None) -> None:
        message = f"the engine has failed: {fault}" if fault else None
        for sequence in self._scheduler.sequences():
            self._outcomes.end(sequence, "error" if fault else "cancelled", message)
        for _, future in self._commands:
            future.set_exception(EngineClosedError(message or "the engine is closed"))
        self._commands.clear()
        self._closed = True

    def _finish(self, sequence: Sequence, output: Output) -> None:
        self._scheduler.finish(sequence)
        if sequence.request is not None:
            self._live.pop(sequence.request.id, None)

    def _keep(self, sequence: Sequence, slot: int) -> str:
        """Keeps a sequence's final state, which lies in `slot`, under the name that was asked for."""
        num_tokens = sequence.origin.num_tokens + len(sequence.tokens) - 1
        state: Origin = self._scheduler.state_of(sequence, slot, num_tokens)
        self._scheduler.retain(state)
        try:
            return self.states.keep_final(sequence, state).handle
        except (RequestError, StateMismatchError):
            self._scheduler.release(state)
            raise


def _sampling_params(params: SamplingParams | None, sampling: dict[str, object]) -> SamplingParams:
    if params is not None and sampling:
        raise RequestError("params", f"give either params or {', '.join(sorted(sampling))}, not both")
    if params is not None:
        return params
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    unknown = sorted(set(sampling) - known)
    if unknown:
        raise RequestError(
            unknown[0], f"unknown sampling parameter {unknown[0]!r}; known: {', '.join(sorted(known))}"
        )
    return SamplingParams(**sampling)  # type: ignore[arg-type]
