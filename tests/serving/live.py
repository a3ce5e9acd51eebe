"""A server in a thread, as clients see it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx

from wkvm_jax.serving.app import create_app
from wkvm_jax.serving.interface import ServedEngine
from wkvm_jax.serving.run import Server


class LiveServer:
    """A running server and a client of it.

    Attributes:
        server: the server itself.
        loop: its event loop.
        url: where it listens.
        client: an `httpx` client with that base.
    """

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop, client: httpx.Client) -> None:
        self.server = server
        self.loop = loop
        self.url = server.url
        self.port = int(server.url.rpartition(":")[2])
        self.client = client

    def complete(self, **fields: object) -> httpx.Response:
        """The answer to a completion with these fields."""
        return self.client.post("/v1/completions", json=fields)

    def stream(self, **fields: object) -> list[dict[str, object]]:
        """The events of a streamed completion, without the `[DONE]` that must end them."""
        response = self.complete(stream=True, **fields)
        assert response.status_code == 200, response.text
        return events_of(response)

    def connect(self, path: str = "/v1/completions", /, **fields: object) -> socket.socket:
        """A connection on which a body was posted and nothing was read."""
        body = json.dumps(fields).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
            + body
        )
        return connection

    @property
    def num_open(self) -> int:
        """Calls that the server is answering."""
        return self.server._engine_loop.num_open


def events_of(response: httpx.Response) -> list[dict[str, object]]:
    """A stream's events, checked for form."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for something that another thread will bring about."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.002)


def error_of(response: httpx.Response) -> dict[str, object]:
    """An answer's error object, checked for form."""
    assert response.headers["content-type"] == "application/json"
    content = response.json()
    assert set(content) == {"error"}
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert content["error"]["message"] and isinstance(content["error"]["type"], str)
    error: dict[str, object] = content["error"]
    return error


@contextlib.contextmanager
def serving(engine: ServedEngine, **options: int | str | None) -> Iterator[LiveServer]:
    """Serves an engine on a free port; stops, and closes the engine, at the end."""
    started = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def announce(_: str) -> None:
        loops.append(asyncio.get_running_loop())
        started.set()

    server = Server(create_app(engine, **options), "127.0.0.1", 0, announce)
    thread = threading.Thread(target=server.run_until_stopped, name="server", daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        with httpx.Client(base_url=server.url, timeout=20, limits=httpx.Limits(max_connections=64)) as client:
            yield LiveServer(server, loops[0], client)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
