"""The engine's thread and an event loop, side by side.

News travels from the engine's thread to the loop through a `Mailbox`, which wakes the loop at most once
for all that has come since it last looked: one step of 256 rows costs one wake-up. Calls on the engine can
wait for its lock, so they are made on threads of their own. The loop itself never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from wkvm_jax.engine.request import Output, Request, Token
from wkvm_jax.errors import EngineClosedError, StepFailedError, WkvmError

MAX_UNREAD_TOKENS = 8192
"""Tokens that may wait for a reader before its request is cancelled."""

EndReason = Literal["disconnected", "unread", "shutdown", "closed"]

_NUM_THREADS = 4


class UnreadStreamError(WkvmError):
    """A client did not read its stream, which was cancelled."""


@dataclasses.dataclass(frozen=True)
class Update:
    """What is new about one request: tokens, and the outcome if it ended with them."""

    index: int
    tokens: list[Token]
    output: Output | None


class Mailbox:
    """Brings the news of many requests to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._news: set[tuple[RequestGroup, int]] = set()
        self._is_scheduled = False

    def post(self, group: RequestGroup, index: int) -> None:
        """Notes that a group's request has something new. Called on the engine's thread."""
        with self._lock:
            self._news.add((group, index))
            if self._is_scheduled:
                return
            self._is_scheduled = True
        # A loop that was closed under its requests has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            news, self._news = self._news, set()
            self._is_scheduled = False
        for group, index in news:
            group.note(index)


class RequestGroup:
    """The requests behind one HTTP call, which end together.

    All of it belongs to the event loop but `add`, which is called on the thread that submits.
    """

    def __init__(self, mailbox: Mailbox, cancel_later: Callable[[Callable[[], None]], None]) -> None:
        self._mailbox = mailbox
        self._cancel_later = cancel_later
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._num_taken: list[int] = []
        self._changed: set[int] = set()
        self._wake = asyncio.Event()
        self._has_reader = False
        self._ended_by: EndReason | None = None

    def add(self, request: Request) -> None:
        """Takes charge of a request; one that comes after the end is cancelled."""
        with self._lock:
            index = len(self._requests)
            self._requests.append(request)
            self._num_taken.append(0)
            came_too_late = self._ended_by is not None
        if came_too_late:
            request.cancel()
        request.listen(partial(self._mailbox.post, self, index))

    def note(self, index: int) -> None:
        """A request has something new."""
        self._changed.add(index)
        self._wake.set()
        num_unread = self._requests[index].num_tokens - self._num_taken[index]
        # Nobody can read yet while further prompts of the same call are being submitted.
        if self._has_reader and num_unread > MAX_UNREAD_TOKENS:
            self.end("unread")

    def end(self, reason: EndReason) -> None:
        """Cancels what still runs; the first reason counts."""
        with self._lock:
            if self._ended_by is not None:
                return
            self._ended_by = reason
            running = [request for request in self._requests if not request.finished]
        if running:
            self._cancel_later(lambda: _cancel_all(running))

    async def updates(self) -> AsyncIterator[list[Update]]:
        """What is new, again and again, until every request has ended. At most one update a request."""
        self._has_reader = True
        running = set(range(len(self._requests)))
        while running:
            await self._wake.wait()
            self._wake.clear()
            changed, self._changed = self._changed, set()
            news = []
            for index in sorted(changed & running):
                tokens, output = self._requests[index].take()
                self._num_taken[index] += len(tokens)
                if output is not None:
                    running.discard(index)
                if tokens or output is not None:
                    news.append(Update(index, tokens, output))
            if news:
                yield news

    def raise_unless_complete(self, output: Output) -> None:
        """Raises what a request that neither stopped nor reached its length died of."""
        if output.finish_reason == "error":
            raise StepFailedError(output.error or "the request failed")
        if output.finish_reason == "cancelled":
            if self._ended_by == "disconnected":
                raise ClientDisconnect
            if self._ended_by == "unread":
                raise UnreadStreamError(
                    f"more than {MAX_UNREAD_TOKENS} tokens waited to be read; the rest is lost"
                )
            raise EngineClosedError("the server is shutting down; the request was cancelled")


def _cancel_all(requests: list[Request]) -> None:
    for request in requests:
        request.cancel()


class EngineLoop:
    """Opens groups of requests, makes the calls that may wait, and ends everything at shutdown."""

    def __init__(self) -> None:
        self._mailbox: Mailbox | None = None
        self._groups: set[RequestGroup] = set()
        self._is_closed = False
        self._callers = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="wkvm-call")
        # Apart from the others, since a cancel must not queue behind the tokenizing of long prompts.
        self._canceller = ThreadPoolExecutor(1, thread_name_prefix="wkvm-cancel")

    async def call[Result](self, function: Callable[[], Result]) -> Result:
        """Runs a function that may wait or take long on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._callers, function)

    def open(self) -> RequestGroup:
        """A group for requests to come. Whoever opens it closes it.

        Raises:
            EngineClosedError: the server is shutting down.
        """
        if self._is_closed:
            raise EngineClosedError("the server is shutting down")
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        group = RequestGroup(self._mailbox, self._cancel_later)
        self._groups.add(group)
        return group

    def close_group(self, group: RequestGroup) -> None:
        """Ends a group and forgets it."""
        group.end("closed")
        self._groups.discard(group)

    @property
    def num_open(self) -> int:
        """Calls that are being answered."""
        return len(self._groups)

    def shut_down(self) -> None:
        """Refuses new calls and cancels those that run; their clients get an error."""
        self._is_closed = True
        for group in self._groups:
            group.end("shutdown")

    def _cancel_later(self, cancel: Callable[[], None]) -> None:
        self._canceller.submit(cancel)


@contextlib.asynccontextmanager
async def ending_on_disconnect(receive: Receive, group: RequestGroup) -> AsyncIterator[None]:
    """Ends the group as soon as its client is gone, whatever the block is waiting for."""
    watcher = asyncio.create_task(_watch(receive, group))
    try:
        yield
    finally:
        watcher.cancel()


async def _watch(receive: Receive, group: RequestGroup) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    group.end("disconnected")
