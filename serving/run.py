"""Running the application: a socket, limits on clients, and an orderly end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from wkvm_jax.serving.engine_loop import EngineLoop
from wkvm_jax.serving.interface import ServedEngine

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

_MAX_CONNECTIONS = 2048
_BACKLOG = 1024
_MAX_HEAD_BYTES = 64 << 10
_KEEP_ALIVE_S = 15
_GRACE_S = 10
_ENGINE_CLOSE_S = 30.0


class Server(uvicorn.Server):
    """A server of one application, which ends its engine's requests before it waits for its clients.

    Args:
        app: made by `create_app`.
        host: address or name to listen on.
        port: 0 takes any that is free; `url` tells which.
        announce: called with `url` once clients can connect.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, app: FastAPI, host: str, port: int, announce: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                # The parser whose limits are set below, whatever else is installed.
                http="h11",
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
                ws="none",
                lifespan="off",
                limit_concurrency=_MAX_CONNECTIONS,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_level="warning",
            )
        )
        self._engine: ServedEngine = app.state.engine
        self._engine_loop: EngineLoop = app.state.engine_loop
        self._announce = announce
        self._socket = _listen(host, port)
        bound_port = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{bound_port}" if ":" in host else f"http://{host}:{bound_port}"

    def run_until_stopped(self) -> None:
        """Serves until a signal, or `should_exit`, ends it."""
        self.run([self._socket])

    def close_socket(self) -> None:
        """Gives the port back, if the server is not to run after all."""
        self._socket.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce(self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more calls, ends those that run with an error to their clients, and closes the engine."""
        self._engine_loop.shut_down()
        await super().shutdown(sockets)
        await asyncio.to_thread(self._engine.close, _ENGINE_CLOSE_S)


def serve(app: FastAPI, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT) -> None:
    """Serves `app` until SIGINT or SIGTERM, then cancels what runs and closes the engine.

    Prints the address when clients can connect. Only this machine can reach the default host.

    Raises:
        OSError: the address cannot be listened on.
    """
    server = Server(app, host, port, lambda url: print(f"Serving on {url}", flush=True))
    try:
        server.run_until_stopped()
    except KeyboardInterrupt:
        # uvicorn raises the signal again once it has shut down in order.
        return


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
