from __future__ import annotations

import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.live import LiveServer, error_of, wait_until
from wkvm_jax.errors import EngineClosedError
from wkvm_jax.serving.health import health


def test_slots_are_counted(live: LiveServer, engine: FakeEngine) -> None:
    assert live.client.get("/health").json() == {"status": "ok", "slots": {"total": 64, "free": 64}}
    engine.gate.clear()
    with live.connect(prompt="a", n=3):
        wait_until(lambda: engine.num_submitted == 3)
        assert live.client.get("/health").json()["slots"]["free"] == 61
    engine.gate.set()
    wait_until(lambda: live.client.get("/health").json()["slots"]["free"] == 64)


def test_dead_engine_is_503(live: LiveServer, engine: FakeEngine) -> None:
    engine.close()
    response = live.client.get("/health")
    assert response.status_code == 503
    assert error_of(response)["code"] == "unavailable"
    assert live.complete(prompt="a").status_code == 503


def test_health_of_a_closed_engine(engine: FakeEngine) -> None:
    engine.close()
    with pytest.raises(EngineClosedError):
        health(engine)
