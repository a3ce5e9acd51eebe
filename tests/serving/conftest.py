"""Servers with a made-up engine behind them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.live import LiveServer, serving


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """An engine of this test's own."""
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def live(engine: FakeEngine) -> Iterator[LiveServer]:
    """A server of `engine`, for tests that pause or break it."""
    with serving(engine) as server:
        yield server


@pytest.fixture(scope="module")
def shared_live() -> Iterator[LiveServer]:
    """A server whose engine no test disturbs."""
    with serving(FakeEngine()) as server:
        yield server
