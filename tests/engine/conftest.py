"""Engines that tests share: one a family, checked after each test for what was left in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.engines import Plain
    from wkvm_jax.config import EngineConfig
    from wkvm_jax.engine.engine import Engine
    from wkvm_jax.models.model import Model

# JAX is imported by the fixtures that need it: slots and scheduler are tested without.


@pytest.fixture(scope="session", params=["toy", "rwkv7"])
def family(request: pytest.FixtureRequest) -> str:
    """The name of a family: one with rings and pages, and one whose states are rewritten whole."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def model(family: str) -> Model:
    from tests.engine.engines import model_named

    return model_named(family)


@pytest.fixture(scope="session")
def plain(family: str) -> Plain:
    from tests.engine.engines import plain_named

    return plain_named(family)


@pytest.fixture(scope="session")
def shared_engines() -> Iterator[dict[str, Engine]]:
    engines: dict[str, Engine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def engine(model: Model, shared_engines: dict[str, Engine]) -> Iterator[Engine]:
    """The family's engine, warm. No state is in it, and nothing may be left running."""
    from tests.engine.engines import CONFIG

    yield from _lent(shared_engines, model, CONFIG)


@pytest.fixture
def deterministic_engine(model: Model, shared_engines: dict[str, Engine]) -> Iterator[Engine]:
    """The same for an engine whose tokens do not depend on company."""
    from tests.engine.engines import DETERMINISTIC

    yield from _lent(shared_engines, model, DETERMINISTIC)


def _lent(engines: dict[str, Engine], model: Model, config: EngineConfig) -> Iterator[Engine]:
    from tests.engine.engines import assert_empty, start

    key = f"{model.name} {config}"
    if key not in engines:
        engines[key] = start(model, config)
        engines[key].warm_up()
    engine = engines.pop(key)
    yield engine
    try:
        assert_empty(engine)
    except BaseException:
        # The next test gets another one.
        engine.close()
        raise
    engines[key] = engine
