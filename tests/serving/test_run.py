from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.live import serving, wait_until
from wkvm_jax.serving.app import create_app
from wkvm_jax.serving.run import Server

ROOT = Path(__file__).parents[2]
PROGRAM = """
from tests.serving.fake_engine import FakeEngine
from wkvm_jax.serving.app import create_app
from wkvm_jax.serving.run import serve
engine = FakeEngine(step_s=0.01)
try:
    serve(create_app(engine), port=0)
finally:
    print("alive", engine.alive, flush=True)
"""


def test_port_0_takes_a_free_port() -> None:
    with serving(FakeEngine()) as server:
        assert server.port > 0 and server.url == f"http://127.0.0.1:{server.port}"


def test_address_in_use_is_an_error() -> None:
    engine = FakeEngine()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        Server(create_app(engine), "127.0.0.1", taken.getsockname()[1], print)
    engine.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_ipv6_address_stands_in_brackets() -> None:
    engine = FakeEngine()
    try:
        server = Server(create_app(engine), "::1", 0, print)
    except OSError:
        pytest.skip("no IPv6 loopback here")
    assert server.url.startswith("http://[::1]:")
    server.close_socket()
    engine.close()


def test_shutdown_ends_streams_with_an_error_and_closes_the_engine() -> None:
    engine = FakeEngine(step_s=0.01)
    contents: list[str] = []
    statuses: list[int] = []

    def stream(url: str) -> None:
        call = {"prompt": "a", "stream": True, "max_tokens": 30_000}
        contents.append(httpx.post(f"{url}/v1/completions", json=call, timeout=20).text)

    def block(url: str) -> None:
        statuses.append(
            httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 9_999}).status_code
        )

    with serving(engine) as server:
        threads = [threading.Thread(target=work, args=(server.url,)) for work in (stream, stream, block)]
        for thread in threads:
            thread.start()
        wait_until(lambda: engine.num_submitted == 3)
    for thread in threads:
        thread.join(10)
    assert len(contents) == 2 and statuses == [503]
    for content in contents:
        assert '"code":"unavailable"' in content and content.endswith("data: [DONE]\n\n")
    assert not engine.alive and engine.num_cancelled == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_process_in_order(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    assert process.stdout is not None
    url = process.stdout.readline().removeprefix("Serving on ").strip()
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 30_000}
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(number)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    rest, _ = process.communicate(timeout=20)
    assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGTERM)
    assert number == signal.SIGTERM or rest == "alive False\n"
