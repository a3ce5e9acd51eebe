"""`/v1/states`: kept states by name, listed, made, changed, forked and deleted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from wkvm_jax.engine.request import Output, SamplingParams
from wkvm_jax.errors import NoFreeSlotError, RequestError, StepFailedError
from wkvm_jax.serving.body import read_body
from wkvm_jax.serving.engine_loop import EngineLoop, ending_on_disconnect
from wkvm_jax.serving.interface import ServedEngine
from wkvm_jax.serving.openapi import body_of, error_answers
from wkvm_jax.serving.protocol import (
    ForkAnswer,
    ForkRequest,
    Lineage,
    NewStateRequest,
    StateChange,
    StateList,
    StateView,
    parse,
)
from wkvm_jax.store.records import Record, Tier

MAX_STATES = 100_000
"""Kept states of a server: forks take no slot, but each has a record."""
MAX_PAGE, DEFAULT_PAGE = 1_000, 100


def states_router(engine: ServedEngine, engine_loop: EngineLoop, max_body_bytes: int) -> APIRouter:
    """The calls under `/v1/states`."""
    router, states, call = APIRouter(prefix="/v1/states", tags=["states"]), engine.states, engine_loop.call

    @router.get("", summary="List states", responses=error_answers(400, 503))
    async def list_states(
        name: Annotated[str | None, Query(description="Only versions of this name.")] = None,
        tag: Annotated[str | None, Query(description="Only states with this tag.")] = None,
        tier: Annotated[Tier | None, Query(description="Only states that lie there.")] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
        after: Annotated[str | None, Query(description="A page's `next`: begin behind it.")] = None,
    ) -> StateList:
        records = await call(partial(states.list, name=name, tag=tag))
        return _page([record for record in records if tier in (None, record.tier)], limit, after)

    @router.post(
        "", status_code=201, summary="Read a prompt and keep the state",
        responses=error_answers(400, 408, 413, 429, 500, 503), openapi_extra=body_of("NewStateRequest"),
    )  # fmt: skip
    async def create_state(request: Request) -> StateView:
        body = await read_body(request, max_body_bytes)
        group = engine_loop.open()

        def submit() -> None:
            new = parse(body, NewStateRequest)
            _check_room(engine, 1)
            params = SamplingParams(max_tokens=0)
            group.add(engine.submit(new.checked_prompt(), save_as=new.name, params=params))

        try:
            await call(submit)
            output: Output | None = None
            async with ending_on_disconnect(request.receive, group):
                async for updates in group.updates():
                    output = updates[-1].output
            assert output is not None
            group.raise_unless_complete(output)
            if output.handle is None:
                raise StepFailedError(output.error or "the state was not kept")
            return StateView.of(await call(partial(states.get, output.handle)))
        finally:
            engine_loop.close_group(group)

    @router.get("/{handle}", summary="Describe a state", responses=error_answers(400, 404))
    async def get_state(handle: str) -> StateView:
        return StateView.of(await call(partial(states.get, handle)))

    @router.patch(
        "/{handle}", summary="Change a state's tags, or pin it",
        responses=error_answers(400, 404, 413), openapi_extra=body_of("StateChange"),
    )  # fmt: skip
    async def change_state(handle: str, request: Request) -> StateView:
        change = parse(await read_body(request, max_body_bytes), StateChange)

        def apply() -> Record:
            # Both are found under one handle, even if a newer version comes between.
            record = states.get(handle)
            if change.tags is not None:
                record = states.tag(record.handle, change.tags)
            if change.pinned is not None:
                record = states.pin(record.handle, change.pinned)
            return record

        return StateView.of(await call(apply))

    @router.delete(
        "/{handle}", status_code=204, summary="Delete a state; requests and forks of it go on",
        responses=error_answers(400, 404, 409),
    )  # fmt: skip
    async def delete_state(handle: str) -> Response:
        await call(partial(states.delete, handle))
        return Response(status_code=204)

    @router.post(
        "/{handle}/fork", status_code=201, summary="Give a state further names; nothing is copied",
        responses=error_answers(400, 404, 413, 429), openapi_extra=body_of("ForkRequest"),
    )  # fmt: skip
    async def fork_state(handle: str, request: Request) -> ForkAnswer:
        fork = parse(await read_body(request, max_body_bytes), ForkRequest)

        def apply() -> Sequence[Record]:
            _check_room(engine, fork.n)
            made = states.fork(handle, fork.name, fork.n)
            return made if isinstance(made, Sequence) else [made]

        handles = [record.handle for record in await call(apply)]
        return ForkAnswer(handle=handles[0], handles=handles)

    @router.get("/{handle}/lineage", summary="What a state came from", responses=error_answers(400, 404))
    async def get_lineage(handle: str) -> Lineage:
        nodes, edges = await call(partial(states.lineage, handle))
        return Lineage(nodes=[StateView.of(node) for node in nodes], edges=list(edges))

    return router


def _check_room(engine: ServedEngine, num_new: int) -> None:
    """Refuses states beyond what a server keeps records of."""
    num_kept = len(engine.states.list())
    if num_kept + num_new > MAX_STATES:
        raise NoFreeSlotError(
            f"{num_kept} states are kept, and {num_new} more would pass this server's limit of {MAX_STATES}; "
            "delete some"
        )


def _page(records: Sequence[Record], limit: int, after: str | None) -> StateList:
    handles = [record.handle for record in records]
    if after is not None and after not in handles:
        raise RequestError("after", f"{after!r} is not among these states (any more); begin without it")
    start = 0 if after is None else handles.index(after) + 1
    page = records[start : start + limit]
    more = start + limit < len(records)
    return StateList(data=[StateView.of(record) for record in page], next=page[-1].handle if more else None)
