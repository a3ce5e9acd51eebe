from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.live import LiveServer, error_of, serving, wait_until
from wkvm_jax.serving import body

LIMIT = 20_000


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """A server that takes little at a time."""
    with serving(FakeEngine(), max_body_bytes=LIMIT) as server:
        yield server


def padded(num_bytes: int) -> bytes:
    """A valid body of exactly this length."""
    content = json.dumps({"prompt": "a"}).encode()
    return content + b" " * (num_bytes - len(content))


def chunked(content: bytes, size: int = 1000) -> Iterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    content = bytearray()
    while piece := connection.recv(1 << 16):
        content += piece
    return bytes(content)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_limit_is_exact(small: LiveServer, is_chunked: bool) -> None:
    def post(num_bytes: int) -> httpx.Response:
        content = padded(num_bytes)
        return small.client.post("/v1/completions", content=chunked(content) if is_chunked else content)

    assert post(LIMIT).status_code == 200
    response = post(LIMIT + 1)
    assert response.status_code == 413
    assert error_of(response)["code"] == "too_large" and response.headers["connection"] == "close"
    assert post(10 * LIMIT).status_code == 413
    assert post(100).status_code == 200


@pytest.mark.parametrize("declared", [b"99999999999", b"9" * 19, b"9" * 20])
def test_declared_length_is_refused_unread(small: LiveServer, declared: bytes) -> None:
    with socket.create_connection(("127.0.0.1", small.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %s\r\n\r\n"
            % declared
        )
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413") and b"100 Continue" not in answer


def test_endless_body_is_cut_off(small: LiveServer) -> None:
    started_s = time.monotonic()
    num_sent = 0
    with socket.create_connection(("127.0.0.1", small.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while time.monotonic() - started_s < 10:
                connection.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
                num_sent += 1000
        except OSError:
            pass
    assert num_sent < 20_000_000, "the server went on reading"
    wait_until(lambda: not small.server.server_state.tasks)


def test_late_body_is_408(small: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.1)
    with socket.create_connection(("127.0.0.1", small.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer


def test_continue_is_sent_to_who_asks(small: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", small.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
            b"Expect: 100-continue\r\nContent-Length: 50\r\n\r\n"
        )
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100")
        connection.sendall(padded(50))
        assert read_all(connection).startswith(b"HTTP/1.1 200")
