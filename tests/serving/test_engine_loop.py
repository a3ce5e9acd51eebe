from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest
from starlette.requests import ClientDisconnect

from tests.serving.fake_engine import FakeEngine
from tests.serving.live import LiveServer, wait_until
from wkvm_jax.engine.request import Output, Request, Token
from wkvm_jax.errors import EngineClosedError, StepFailedError
from wkvm_jax.serving import engine_loop
from wkvm_jax.serving.engine_loop import EngineLoop, RequestGroup, UnreadStreamError


class Puppet:
    """A request whose tokens the test pushes."""

    def __init__(self) -> None:
        self.num_cancels = 0
        self.request = Request("puppet", self._cancel)

    def push(self, num_tokens: int) -> None:
        self.request._push([Token(token_id, "a") for token_id in range(num_tokens)], None)

    def end(self, reason: str = "length", error: str | None = None) -> None:
        self.request._push([], Output((), "", None, None, reason, None, 0, 0, error))

    def _cancel(self) -> None:
        self.num_cancels += 1
        if not self.request.finished:
            self.end("cancelled")


def on_thread(function: Callable[[], object]) -> None:
    """Calls a function as the engine's thread would."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_many_tokens_make_one_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        wake_ups = []
        schedule = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda f: (wake_ups.append(f), schedule(f)))
        group, puppets = EngineLoop().open(), [Puppet() for _ in range(8)]
        for puppet in puppets:
            group.add(puppet.request)
        await asyncio.sleep(0)
        wake_ups.clear()
        on_thread(lambda: [puppet.push(1) for _ in range(100) for puppet in puppets])
        on_thread(lambda: [puppet.end() for puppet in puppets])
        updates = [update async for news in group.updates() for update in news]
        assert len(wake_ups) == 1
        assert [update.index for update in updates] == list(range(8))
        assert all(len(update.tokens) == 100 and update.output is not None for update in updates)

    asyncio.run(run())


def test_updates_come_in_order_and_once() -> None:
    async def run() -> None:
        group, puppet = EngineLoop().open(), Puppet()
        group.add(puppet.request)

        def play() -> None:
            for _ in range(50):
                puppet.push(3)
            puppet.end()

        thread = threading.Thread(target=play)
        thread.start()
        updates = [update async for news in group.updates() for update in news]
        thread.join()
        assert [t.token_id for update in updates for t in update.tokens] == [0, 1, 2] * 50
        assert [update.output is not None for update in updates] == [False] * (len(updates) - 1) + [True]

    asyncio.run(run())


def test_request_that_comes_after_the_end_is_cancelled() -> None:
    async def run() -> None:
        owner = EngineLoop()
        group, early, late = owner.open(), Puppet(), Puppet()
        group.add(early.request)
        owner.close_group(group)
        group.add(late.request)
        while not early.num_cancels:
            await asyncio.sleep(0.001)
        assert (early.num_cancels, late.num_cancels) == (1, 1)
        assert owner.num_open == 0

    asyncio.run(run())


def test_finished_requests_are_not_cancelled() -> None:
    async def run() -> None:
        owner, puppet = EngineLoop(), Puppet()
        group = owner.open()
        group.add(puppet.request)
        puppet.end()
        owner.close_group(group)
        await asyncio.sleep(0.02)
        assert puppet.num_cancels == 0

    asyncio.run(run())


def test_reader_that_falls_behind_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "MAX_UNREAD_TOKENS", 10)

    async def run() -> None:
        group, puppet = EngineLoop().open(), Puppet()
        group.add(puppet.request)
        updates = group.updates()
        puppet.push(10)
        assert len((await anext(updates))[0].tokens) == 10
        puppet.push(11)
        await asyncio.sleep(0.05)
        assert puppet.num_cancels == 1
        (last,) = await anext(updates)
        assert len(last.tokens) == 11 and last.output is not None
        with pytest.raises(UnreadStreamError):
            group.raise_unless_complete(last.output)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("reason", "error"), [("disconnected", ClientDisconnect), ("shutdown", EngineClosedError)]
)
def test_what_a_cancelled_request_died_of(reason: engine_loop.EndReason, error: type[Exception]) -> None:
    async def run() -> None:
        group, puppet = EngineLoop().open(), Puppet()
        group.add(puppet.request)
        group.end(reason)
        group.end("closed")
        (update,) = [update async for news in group.updates() for update in news]
        assert update.output is not None
        with pytest.raises(error):
            group.raise_unless_complete(update.output)

    asyncio.run(run())


def test_failed_request_says_why() -> None:
    async def run() -> None:
        group, puppet = EngineLoop().open(), Puppet()
        group.add(puppet.request)
        puppet.end("error", "NaN")
        (update,) = [update async for news in group.updates() for update in news]
        assert update.output is not None
        with pytest.raises(StepFailedError, match="NaN"):
            group.raise_unless_complete(update.output)

    asyncio.run(run())


def test_engines_thread_survives_a_closed_loop() -> None:
    puppet = Puppet()

    async def run() -> RequestGroup:
        group = EngineLoop().open()
        group.add(puppet.request)
        return group

    asyncio.run(run())
    puppet.push(3)
    puppet.end()


def test_shut_down_refuses_and_cancels() -> None:
    async def run() -> None:
        owner, puppet = EngineLoop(), Puppet()
        owner.open().add(puppet.request)
        owner.shut_down()
        with pytest.raises(EngineClosedError):
            owner.open()
        while not puppet.num_cancels:
            await asyncio.sleep(0.001)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half_close", [False, True])
def test_disconnect_cancels_what_runs(
    live: LiveServer, engine: FakeEngine, stream: bool, half_close: bool
) -> None:
    engine.step_s = 0.01
    connection = live.connect(prompt=["a", "b"], n=2, stream=stream, max_tokens=30_000)
    wait_until(lambda: engine.slots().free == 60)
    if stream:
        assert b"200 OK" in connection.recv(1 << 16)
    num_steps = engine.num_steps
    if half_close:
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()
    wait_until(lambda: engine.slots().free == 64)
    assert engine.num_steps - num_steps <= 2, "slots are free by the second step"
    assert engine.num_cancelled == 4
    wait_until(lambda: live.num_open == 0)
    connection.close()
    assert live.complete(prompt="a").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_what_waits(live: LiveServer, engine: FakeEngine, stream: bool) -> None:
    engine.gate.clear()
    connections = [live.connect(prompt="a", stream=stream) for _ in range(40)]
    wait_until(lambda: engine.num_submitted == 40)
    for connection in connections:
        connection.close()
    wait_until(lambda: engine.num_cancelled == 40 and engine.slots().free == 64 and live.num_open == 0)


def test_disconnect_while_submitting_leaks_nothing(live: LiveServer, engine: FakeEngine) -> None:
    engine.gate.clear()
    engine.submit_s = 0.2
    live.connect(prompt=["a", "b", "c"], stream=True).close()
    live.connect(prompt=["a", "b", "c"]).close()
    wait_until(lambda: engine.num_submitted == 6 and engine.num_cancelled == 6 and live.num_open == 0)


def test_unfinished_body_is_dropped(live: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", live.port)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
    wait_until(lambda: live.num_open == 0)
    assert live.complete(prompt="a").status_code == 200
