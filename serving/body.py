"""Reading a request's body, no more of it than allowed and no longer than patience lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from wkvm_jax.serving.protocol import BodyError, BodyTimeoutError, BodyTooLargeError

BODY_TIMEOUT_S = 60.0
"""How long a body may take to arrive."""

_DRAIN_FACTOR = 2
_DRAIN_TIMEOUT_S = 1.0


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLargeError: it is longer than `max_bytes`; at most twice as much was looked at.
        BodyTimeoutError: it did not arrive within `BODY_TIMEOUT_S`.
        ClientDisconnect: the client went away before it was complete.
    """
    fault = BodyTooLargeError(f"the body is longer than this server's limit of {max_bytes} bytes")
    if _declared_bytes(request) > max_bytes:
        await _drain(request, max_bytes)
        raise fault
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in _chunks(request):
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    break
                chunks.append(chunk)
    except TimeoutError as error:
        raise BodyTimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    if num_bytes > max_bytes:
        chunks.clear()
        await _drain(request, max_bytes)
        raise fault
    return b"".join(chunks)


def _declared_bytes(request: Request) -> int:
    declared = request.headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdecimal()):
        raise BodyError("the Content-Length header is not a number")
    # Numbers of absurd length are too large without being read.
    return int(declared) if len(declared) < 20 else 1 << 63


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def _drain(request: Request, max_bytes: int) -> None:
    """Discards the rest of a body that is a little too long.

    Closing a connection while its client still sends would reset it, and many clients would see that
    instead of the answer. A client that asked to go on (`Expect: 100-continue`) has sent nothing yet.
    """
    if "expect" in request.headers:
        return
    num_bytes = 0
    try:
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            async for chunk in _chunks(request):
                num_bytes += len(chunk)
                if num_bytes > _DRAIN_FACTOR * max_bytes:
                    return
    except TimeoutError:
        return
