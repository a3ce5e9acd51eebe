"""`GET /health`: whether the engine takes requests, and how full it is."""

from __future__ import annotations

from wkvm_jax.errors import EngineClosedError
from wkvm_jax.serving.interface import ServedEngine
from wkvm_jax.serving.protocol import Health, SlotsInfo


def health(engine: ServedEngine) -> Health:
    """The engine's slots. Slots that stay taken after all requests have ended would be a leak.

    Raises:
        EngineClosedError: it takes no requests any more.
    """
    if not engine.alive:
        raise EngineClosedError("the engine has ended and takes no requests; restart the server")
    slots = engine.slots()
    return Health(status="ok", slots=SlotsInfo(total=slots.total, free=slots.free))
