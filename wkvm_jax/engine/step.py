"""What runs on the device: the arena, the lanes, and the compiled steps that donate them.

Everything that changes the arena is here and runs on the engine's thread. Each shape is compiled once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from wkvm_jax.engine.placement import Placement
from wkvm_jax.engine.scheduler import Rectangle, Row
from wkvm_jax.models.model import SCORE_CHUNK, Model
from wkvm_jax.sampling import (
    IN_PROMPT,
    PADDING_LANE,
    LaneParams,
    Lanes,
    Sampled,
    allocate_lanes,
    idle_fields,
    sample,
    seed_key,
    top_log_probs,
)
from wkvm_jax.state import (
    FILLER_PAGE,
    INITIAL_SLOT,
    TRASH_SLOT,
    Batch,
    State,
    StateSpec,
    copy_pages,
    copy_slots,
)
from wkvm_jax.types import Params, from_host

ADMIT_ROWS = 8
"""Lanes set in one dispatch."""
HISTORY_CHUNK = 1024
"""Token ids that one dispatch adds to a lane's history."""
COPY_ROWS = 8
"""Slots or pages copied in one dispatch."""

STEP, LIKELIEST_STEP = "step", "likeliest step"
Shape = tuple[int, int]
"""Rows and tokens of a bucket."""


class StepRows(flax.struct.PyTreeNode):
    """The host's part of a sampling step, one transfer; the tokens lie in the lanes.

    Attributes:
        table: of each row its lane, read slot and write slot, then its page table.
    """

    table: Int32[Array, "b columns"]

    @property
    def lane_ids(self) -> Int32[Array, " b"]:
        return self.table[:, 0]

    @property
    def read_slots(self) -> Int32[Array, " b"]:
        return self.table[:, 1]

    @property
    def write_slots(self) -> Int32[Array, " b"]:
        return self.table[:, 2]

    @property
    def page_table(self) -> Int32[Array, "b p"]:
        return self.table[:, 3:]


class PromptRows(flax.struct.PyTreeNode):
    """The host's part of a wide step. `targets` are the tokens that follow, for scoring."""

    batch: Batch
    targets: Int32[Array, "b t"]
    wants_scores: Bool[Array, ""]


class Scores(flax.struct.PyTreeNode):
    """What a wide step found out.

    Attributes:
        invalid: the row's hidden states hold NaN or infinity.
        logprob, top_ids, top_logprobs: of the tokens that follow, and of the likeliest in their places;
            zeros if unwanted.
    """

    invalid: Bool[Array, " b"]
    logprob: Float32[Array, "b t"]
    top_ids: Int32[Array, "b t top"]
    top_logprobs: Float32[Array, "b t top"]


class NewLanes(flax.struct.PyTreeNode):
    """Lanes to set: what requests asked for, and the token that each consumes first."""

    lane_ids: Int32[Array, " k"]
    token: Int32[Array, " k"]
    seed: UInt32[Array, "k 2"]
    choice: Int32[Array, " k"]
    params: LaneParams


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that the compiled steps share: of one data shard, the reserved ids included."""

    num_slots: int
    num_pages: int
    num_lanes: int
    pages_per_row: int


def sampling_step(
    params: Params, arena: State, lanes: Lanes, rows: StepRows, *, model: Model,
    only_likeliest: bool, model_axis: str | None = None,
) -> tuple[State, Lanes, Sampled]:  # fmt: skip
    """One token for every row: consume the lane's token, sample the next.

    Rows that are done consume nothing and write to the trash slot.
    """
    live = ~lanes.done[rows.lane_ids]
    batch = Batch(
        tokens=lanes.token[rows.lane_ids][:, None],
        lengths=live.astype(jnp.int32),
        read_slots=rows.read_slots,
        write_slots=jnp.where(live, rows.write_slots, TRASH_SLOT),
        page_table=rows.page_table,
    )
    positions = arena.num_tokens[rows.read_slots] + 1
    forward, head = model.functions(model_axis)
    hidden, arena = forward(params, batch, arena)
    logits = head(params, hidden[:, 0])
    sampled, lanes = sample(logits, lanes, rows.lane_ids, positions, only_likeliest=only_likeliest)
    return arena, lanes, sampled


def prompt_step(
    params: Params, arena: State, rows: PromptRows, *, model: Model, model_axis: str | None = None
) -> tuple[State, Scores]:
    """Consumes part of a prompt, and scores it if asked to."""
    forward, head = model.functions(model_axis)
    hidden, arena = forward(params, rows.batch, arena)
    num_rows, width, channels = hidden.shape
    block = min(width, SCORE_CHUNK)
    counted = jnp.arange(width) < rows.batch.lengths[:, None]
    invalid = jnp.any(counted & ~jnp.all(jnp.isfinite(hidden), axis=-1), axis=-1)

    def one_block(inputs: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        return top_log_probs(head(params, inputs[0]), inputs[1])

    def scored() -> tuple[Array, Array, Array]:
        flat = (hidden.reshape(-1, block, channels), rows.targets.reshape(-1, block))
        logprob, ids, values = jax.lax.map(one_block, flat)
        shape = (num_rows, width)
        return logprob.reshape(shape), ids.reshape(*shape, -1), values.reshape(*shape, -1)

    absent = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(scored))
    return arena, Scores(invalid, *jax.lax.cond(rows.wants_scores, scored, lambda: absent))


def set_lanes(lanes: Lanes, new: NewLanes) -> Lanes:
    """The table with new requests in their lanes; rows that name `PADDING_LANE` leave it idle."""
    padding = new.lane_ids == PADDING_LANE
    params = new.params.replace(key=seed_key(new.seed, new.choice))
    at = new.lane_ids
    return Lanes(
        token=lanes.token.at[at].set(new.token),
        done=lanes.done.at[at].set(padding),
        params=jax.tree.map(lambda old, fresh: old.at[at].set(fresh), lanes.params, params),
        history=lanes.history.at[at].set(0),
    )


def add_history(lanes: Lanes, lane_id: Int32[Array, ""], token_ids: Int32[Array, " ids"]) -> Lanes:
    """The table after marking ids as part of a lane's prompt; ids of -1 are fillers."""
    ids = jnp.where(token_ids < 0, lanes.history.shape[1], token_ids)
    return lanes.replace(history=lanes.history.at[lane_id, ids].max(IN_PROMPT, mode="drop"))


def read_slot(arena: State, slot: Int32[Array, ""]) -> State:
    """A copy of one slot's leaves, as a batch of one without pools."""

    def one(leaf: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(leaf, slot, keepdims=True)

    return State(jax.tree.map(one, arena.leaves), {}, one(arena.num_tokens))


def write_slot(arena: State, slot: Int32[Array, ""], value: State) -> State:
    """The arena with one slot's leaves replaced; the reverse of `read_slot`."""

    def one(leaf: Array, row: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(leaf, row[0].astype(leaf.dtype), slot, 0)

    return arena.replace(
        leaves=jax.tree.map(one, arena.leaves, value.leaves),
        num_tokens=one(arena.num_tokens, value.num_tokens),
    )


def read_page(arena: State, page: Int32[Array, ""]) -> dict[str, Array]:
    """A copy of one page of every pool."""
    return {name: jax.lax.dynamic_index_in_dim(pool, page) for name, pool in arena.pools.items()}


def write_page(arena: State, page: Int32[Array, ""], value: dict[str, Array]) -> State:
    """The arena with one page of every pool replaced; the reverse of `read_page`."""
    pools = {
        name: jax.lax.dynamic_update_index_in_dim(pool, value[name][0].astype(pool.dtype), page, 0)
        for name, pool in arena.pools.items()
    }
    return arena.replace(pools=pools)


@dataclasses.dataclass(frozen=True)
class OnShard:
    """The functions above as one data shard runs them, with ids that count over all shards."""

    sizes: Sizes
    placement: Placement
    spec: StateSpec

    def set_lanes(self, lanes: Lanes, new: NewLanes) -> Lanes:
        lane_ids = self.placement.local(new.lane_ids, self.sizes.num_lanes, PADDING_LANE)
        return set_lanes(lanes, new.replace(lane_ids=lane_ids))

    def add_history(self, lanes: Lanes, lane_id: Array, token_ids: Array) -> Lanes:
        lane_id = self.placement.local(lane_id, self.sizes.num_lanes, PADDING_LANE)
        return add_history(lanes, lane_id, jnp.where(lane_id == PADDING_LANE, -1, token_ids))

    def copy_slots(self, arena: State, copies: Array) -> State:
        return copy_slots(arena, self.spec, self._slot(copies))

    def copy_pages(self, arena: State, copies: Array) -> State:
        return copy_pages(arena, self._page(copies))

    def read_slot(self, arena: State, slot: Array) -> State:
        return self.placement.from_owner(read_slot(arena, self._slot(slot)), slot, self.sizes.num_slots)

    def write_slot(self, arena: State, slot: Array, value: State) -> State:
        return write_slot(arena, self._slot(slot), value)

    def read_page(self, arena: State, page: Array) -> dict[str, Array]:
        return self.placement.from_owner(read_page(arena, self._page(page)), page, self.sizes.num_pages)

    def write_page(self, arena: State, page: Array, value: dict[str, Array]) -> State:
        return write_page(arena, self._page(page), value)

    def _slot(self, slots: Array) -> Array:
        return self.placement.local(slots, self.sizes.num_slots, TRASH_SLOT)

    def _page(self, pages: Array) -> Array:
        return self.placement.local(pages, self.sizes.num_pages, FILLER_PAGE)


class Device:
    """The arena, the lanes and the compiled steps of one model.

    Not thread-safe: the engine's thread alone calls it, except `compile`, which may run beforehand.

    Args:
        model: what to run.
        sizes: of each data shard's arena and lanes; the reserved slots, page and lane are counted in.
        mesh: devices to spread over; None is JAX's default device.

    Raises:
        MeshError: the model cannot be spread over the mesh.
    """

    def __init__(self, model: Model, sizes: Sizes, mesh: Mesh | None = None) -> None:
        self.model = model
        self.sizes = sizes
        self._placement = Placement(model, mesh)
        self.params = self._placement.place_params(model.params)
        self._compiled: dict[tuple[str, Shape], jax.stages.Compiled] = {}
        self._cost_s: dict[Shape, float] = {}
        self._used: set[Shape] = set()
        self._sent_rows: dict[int, tuple[np.ndarray, StepRows]] = {}
        self.reset()

    def reset(self) -> None:
        """A fresh arena and fresh lanes; all that they held is gone."""
        sizes, model, shards = self.sizes, self.model, self.num_data_shards

        def allocate() -> tuple[State, Lanes]:
            arena = model.state_spec.allocate(shards * sizes.num_slots, shards * sizes.num_pages)
            return arena, allocate_lanes(shards * sizes.num_lanes, model.config.vocab_size)

        # One program, where leaf by leaf would compile one a shape.
        self.arena, self.lanes = self._placement.allocated(allocate)

    @property
    def num_data_shards(self) -> int:
        """Shards that each have slots, pages, lanes and rows of their own."""
        return self._placement.num_data_shards

    def set_params(self, params: Params) -> None:
        """Other weights of the same shapes, from the next dispatch on."""
        self.params = self._placement.place_params(params)

    # Compilation ----------------------------------------------------------------------------------

    def compile(
        self,
        shapes: Sequence[Shape],
        *,
        with_states: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compiles these buckets, two at a time.

        Args:
            shapes: rows and tokens of each.
            with_states: also what moves states, pages and histories.
            progress: called with the programs done and the programs there are.
        """
        jobs = [("prompt", shape) for shape in shapes if shape[1] > 1]
        jobs += [(name, shape) for name in self._step_names for shape in shapes if shape[1] == 1]
        names = ["set_lanes"]
        if with_states:
            names += ["add_history", "read_slot", "write_slot"]
        if not all(leaf.rewritten for leaf in self.model.state_spec.slot_leaves.values()):
            names.append("copy_slots")
        if self.model.state_spec.paged:
            names += ["copy_pages", "read_page", "write_page"]
        jobs += [(name, (0, 0)) for name in names]
        # The widest first: two workers then end at about the same time.
        jobs = sorted((job for job in jobs if job not in self._compiled), key=lambda job: -max(job[1]))
        with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
            for done, compiled in enumerate(pool.map(self._lowered_and_compiled, jobs)):
                self._compiled[jobs[done]] = compiled
                if progress is not None:
                    progress(done + 1, len(jobs))

    def calibrate(self, shapes: Sequence[Shape]) -> None:
        """Measures each bucket on padded rows, so that prompts can be cut to fit beside sampling rows."""
        for shape in shapes:
            self._cost_s[shape] = min(self._timed(shape) for _ in range(3))

    def cost_s(self, num_rows: int, num_tokens: int) -> float | None:
        """Measured seconds of a bucket; None before it has been measured."""
        return self._cost_s.get((num_rows, num_tokens))

    @property
    def _step_names(self) -> tuple[str, ...]:
        """A GPU has a step of its own for rows that take the most likely token; a CPU gains nothing by it."""
        return (STEP,) if self.model.kernels == "xla" else (STEP, LIKELIEST_STEP)

    def _get(self, name: str, shape: Shape = (0, 0)) -> jax.stages.Compiled:
        job = (name, shape)
        if job not in self._compiled:
            self._compiled[job] = self._lowered_and_compiled(job)
        return self._compiled[job]

    def _lowered_and_compiled(self, job: tuple[str, Shape]) -> jax.stages.Compiled:
        name, shape = job
        function, donated, arguments = self._signature(name, shape)
        abstract = jax.tree.map(self._placement.abstract, arguments)
        return jax.jit(function, donate_argnums=donated).lower(*abstract).compile()

    def _signature(
        self, name: str, shape: Shape
    ) -> tuple[Callable[..., object], tuple[int, ...], tuple[object, ...]]:
        """A function, which arguments it donates, and arguments of the right shapes."""
        placement = self._placement
        everywhere, rows = PartitionSpec(), placement.rows_specs
        params, arena = placement.param_specs, placement.arena_specs
        index, pairs = np.int32(0), np.zeros((COPY_ROWS, 2), np.int32)
        on_shard = OnShard(self.sizes, placement, self.model.state_spec)
        if name in (STEP, LIKELIEST_STEP):
            step = partial(
                sampling_step,
                model=self.model,
                only_likeliest=name == LIKELIEST_STEP,
                model_axis=placement.model_axis,
            )
            spread = placement.spread(step, (params, arena, rows, rows), (arena, rows, rows))
            return spread, (1, 2), (self.params, self.arena, self.lanes, self.step_rows((), (), shape[0]))
        if name == "prompt":
            consume = partial(prompt_step, model=self.model, model_axis=placement.model_axis)
            host_rows = self._prompt_rows((), (), shape)
            host_specs = jax.tree.map(lambda x: rows if x.ndim else everywhere, host_rows)
            spread = placement.spread(consume, (params, arena, host_specs), (arena, rows))
            return spread, (1,), (self.params, self.arena, host_rows)
        if name == "set_lanes":
            spread = placement.spread(on_shard.set_lanes, (rows, everywhere), rows)
            return spread, (0,), (self.lanes, self._new_lanes())
        if name == "add_history":
            spread = placement.spread(on_shard.add_history, (rows, everywhere, everywhere), rows)
            return spread, (0,), (self.lanes, index, np.zeros(HISTORY_CHUNK, np.int32))
        if name in ("copy_slots", "copy_pages"):
            copy = on_shard.copy_slots if name == "copy_slots" else on_shard.copy_pages
            return placement.spread(copy, (arena, everywhere), arena), (0,), (self.arena, pairs)
        is_slot = name in ("read_slot", "write_slot")
        one = placement.one_state_specs if is_slot else placement.page_specs
        if name in ("read_slot", "read_page"):
            read = on_shard.read_slot if is_slot else on_shard.read_page
            return placement.spread(read, (arena, everywhere), one), (), (self.arena, index)
        write = on_shard.write_slot if is_slot else on_shard.write_page
        value = _as_batch_of_one(self.arena) if is_slot else _abstract_tree(self.arena.pools)
        return placement.spread(write, (arena, everywhere, one), arena), (0,), (self.arena, index, value)

    def _timed(self, shape: Shape) -> float:
        jax.block_until_ready(self.arena)
        started = time.perf_counter()
        if shape[1] == 1:
            result: object = self.run_step(self.step_rows((), (), shape[0]), shape)
        else:
            result = self.run_prompt(self._prompt_rows((), (), shape), shape)
        jax.block_until_ready((result, self.arena))
        return time.perf_counter() - started

    # Running --------------------------------------------------------------------------------------

    def run(self, rectangle: Rectangle) -> Sampled | Scores:
        """Dispatches a rectangle and returns its result, which is not waited for."""
        self._move_shared(rectangle)
        shape = (rectangle.num_rows, rectangle.num_tokens)
        # The first use may compile; the second is timed, and so waited for.
        measure = shape in self._used and shape not in self._cost_s
        self._used.add(shape)
        started = time.perf_counter()
        if measure:
            jax.block_until_ready(self.arena)
            started = time.perf_counter()
        if rectangle.num_tokens == 1:
            rows = self.step_rows(rectangle.rows, rectangle.places, shape[0])
            only_likeliest = all(row.sequence.params.takes_likeliest for row in rectangle.rows)
            result: Sampled | Scores = self.run_step(rows, shape, only_likeliest=only_likeliest)
        else:
            prompt_rows = self._prompt_rows(rectangle.rows, rectangle.places, shape)
            result = self.run_prompt(prompt_rows, shape)
        if measure:
            jax.block_until_ready((result, self.arena))
            self._cost_s[shape] = time.perf_counter() - started
        return result

    def run_step(self, rows: StepRows, shape: Shape, *, only_likeliest: bool = False) -> Sampled:
        """Dispatches a sampling step; whether all rows are known to take the most likely token is a hint."""
        step = self._get(self._step_names[-1] if only_likeliest else STEP, shape)
        self.arena, self.lanes, sampled = step(self.params, self.arena, self.lanes, rows)
        return sampled

    def run_prompt(self, rows: PromptRows, shape: Shape) -> Scores:
        step = self._get("prompt", shape)
        self.arena, scores = step(self.params, self.arena, rows)
        return scores

    def _move_shared(self, rectangle: Rectangle) -> None:
        """Copies what rows share and are about to write in part: rings and last pages."""
        pages = [row.page_copy for row in rectangle.rows if row.page_copy[1]]
        for pairs in _padded_pairs(pages, 0):
            self.arena = self._get("copy_pages")(self.arena, pairs)
        if all(leaf.rewritten for leaf in self.model.state_spec.slot_leaves.values()):
            return
        moves = [(row.read_slot, row.write_slot) for row in rectangle.rows if row.read_slot != row.write_slot]
        for pairs in _padded_pairs(moves, TRASH_SLOT):
            self.arena = self._get("copy_slots")(self.arena, pairs)

    def step_rows(self, rows: Sequence[Row], places: Sequence[int], num_rows: int) -> StepRows:
        """A sampling step's rows, on the device; places without a row are padding.

        Each shard counts its own ids. Rows that stay in their slots are the same from step to step, and are
        not sent again then.
        """
        table = np.zeros((num_rows, 3 + self.sizes.pages_per_row), np.int32)
        table[:, 0] = PADDING_LANE
        for place, row in zip(places, rows, strict=True):
            assert row.sequence.lane is not None
            table[place, 0] = row.sequence.lane % self.sizes.num_lanes
        table[:, 1], table[:, 2] = self._slots(rows, places, num_rows)
        table[:, 3:] = self._page_table(rows, places, num_rows)
        sent = self._sent_rows.get(num_rows)
        if sent is None or not np.array_equal(sent[0], table):
            sent = (table, StepRows(self._placement.place_rows(table)))
            self._sent_rows[num_rows] = sent
        return sent[1]

    def _prompt_rows(self, rows: Sequence[Row], places: Sequence[int], shape: Shape) -> PromptRows:
        num_rows, _ = shape
        tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        lengths = np.zeros(num_rows, np.int32)
        for place, row in zip(places, rows, strict=True):
            sequence, end = row.sequence, row.first + row.length
            tokens[place, : row.length] = sequence.tokens[row.first : end]
            targets[place, : row.length] = sequence.tokens[row.first + 1 : end + 1]
            lengths[place] = row.length
        wants_scores = np.array(any(row.sequence.params.prompt_logprobs for row in rows))
        read_slots, write_slots = self._slots(rows, places, num_rows)
        batch = Batch(
            tokens=from_host(tokens),
            lengths=from_host(lengths),
            read_slots=from_host(read_slots),
            write_slots=from_host(write_slots),
            page_table=from_host(self._page_table(rows, places, num_rows)),
        )
        return PromptRows(batch, from_host(targets), from_host(wants_scores))

    def _slots(
        self, rows: Sequence[Row], places: Sequence[int], num_rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        read_slots = np.full(num_rows, INITIAL_SLOT, np.int32)
        write_slots = np.full(num_rows, TRASH_SLOT, np.int32)
        for place, row in zip(places, rows, strict=True):
            read_slots[place] = row.read_slot % self.sizes.num_slots
            write_slots[place] = row.write_slot % self.sizes.num_slots
        return read_slots, write_slots

    def _page_table(self, rows: Sequence[Row], places: Sequence[int], num_rows: int) -> np.ndarray:
        table = np.zeros((num_rows, self.sizes.pages_per_row), np.int32)
        if self.sizes.pages_per_row:
            for place, row in zip(places, rows, strict=True):
                pages = np.asarray(row.sequence.pages, np.int32)
                table[place, : len(pages)] = pages % self.sizes.num_pages
        return table

    # Lanes ----------------------------------------------------------------------------------------

    def set_lanes(self, new: Sequence[NewLanes]) -> None:
        """Sets single lanes, a few to a dispatch."""
        for first in range(0, len(new), ADMIT_ROWS):
            some = list(new[first : first + ADMIT_ROWS])
            some += [self._new_lane()] * (ADMIT_ROWS - len(some))
            stacked = jax.tree.map(lambda *leaves: np.concatenate(leaves), *some)
            self.lanes = self._get("set_lanes")(self.lanes, stacked)

    def add_history(self, lane: int, token_ids: Sequence[int]) -> None:
        """Marks tokens as seen in a lane's prompt."""
        for first in range(0, len(token_ids), HISTORY_CHUNK):
            ids = np.full(HISTORY_CHUNK, -1, np.int32)
            some = token_ids[first : first + HISTORY_CHUNK]
            ids[: len(some)] = some
            self.lanes = self._get("add_history")(self.lanes, np.int32(lane), ids)

    def _new_lane(self) -> NewLanes:
        zero = from_host(np.zeros(1, np.int32))
        idle = LaneParams(**{name: from_host(field) for name, field in idle_fields(1).items()})
        return NewLanes(zero, zero, from_host(np.zeros((1, 2), np.uint32)), zero, idle)

    def _new_lanes(self) -> NewLanes:
        new: NewLanes = jax.tree.map(lambda leaf: np.repeat(leaf, ADMIT_ROWS, axis=0), self._new_lane())
        return new

    # States ---------------------------------------------------------------------------------------

    def load(self, slot: int, pages: Sequence[int]) -> State:
        """A copy of one state, as a batch of one with its pages in order."""
        state = self._placement.taken_off(self._get("read_slot")(self.arena, np.int32(slot)))
        read = [self._get("read_page")(self.arena, np.int32(page)) for page in pages]
        # Joined on the host: on the device, each number of pages would compile.
        pools = {
            name: np.concatenate([np.empty((0, *pool.shape[1:]), pool.dtype), *(page[name] for page in read)])
            for name, pool in self.arena.pools.items()
        }
        return state.replace(pools=jax.device_put(pools))

    def store(self, slot: int, pages: Sequence[int], state: State) -> None:
        """Writes a batch of one into a slot and its pages."""
        leaves = self._placement.place_everywhere(state.replace(pools={}))
        self.arena = self._get("write_slot")(self.arena, np.int32(slot), leaves)
        pools = {name: np.asarray(pool) for name, pool in state.pools.items()}
        for index, page in enumerate(pages):
            value = {name: pool[index : index + 1] for name, pool in pools.items()}
            self.arena = self._get("write_page")(self.arena, np.int32(page), value)


def _padded_pairs(pairs: Sequence[tuple[int, int]], filler: int) -> list[np.ndarray]:
    result = []
    for first in range(0, len(pairs), COPY_ROWS):
        some = np.full((COPY_ROWS, 2), filler, np.int32)
        chunk = pairs[first : first + COPY_ROWS]
        some[: len(chunk)] = chunk
        result.append(some)
    return result


def _as_batch_of_one(arena: State) -> State:
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), arena)
    return one.replace(pools={})


def _abstract_tree(pools: dict[str, Array]) -> dict[str, np.ndarray]:
    return {name: np.empty((1, *pool.shape[1:]), pool.dtype) for name, pool in pools.items()}
