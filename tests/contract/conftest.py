"""Runs each test of the contract once for every family under test."""

from __future__ import annotations

import pytest

from tests.contract.harness import Harness
from tests.families import FAMILIES_UNDER_TEST

_HARNESSES = [Harness(under_test) for under_test in FAMILIES_UNDER_TEST]


@pytest.fixture(params=_HARNESSES, ids=lambda harness: harness.under_test.name, scope="session")
def harness(request: pytest.FixtureRequest) -> Harness:
    """A family under test."""
    result: Harness = request.param
    return result
