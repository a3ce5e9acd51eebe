"""Cancelling, at every point of a request's life, gives back all that it held."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.engine.engines import (
    CONFIG,
    Plain,
    greedy_params,
    outputs,
    prefilling,
    prompt_of,
    wait_until,
)
from wkvm_jax.engine.engine import Engine
from wkvm_jax.engine.request import Output, Request
from wkvm_jax.engine.scheduler import Rectangle

LONG = {"max_tokens": 200, "ignore_eos": True}


class Dispatches:
    """Counts an engine's dispatches."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, run = 0, engine.device.run

        def counted(rectangle: Rectangle) -> object:
            self.count += 1
            return run(rectangle)

        monkeypatch.setattr(engine.device, "run", counted)


def assert_frees_by_the_second_dispatch(engine: Engine, dispatches: Dispatches, request: Request) -> Output:
    """Cancels the only request and watches when its slots come back."""
    before = dispatches.count
    request.cancel()
    wait_until(lambda: engine.slots().free == CONFIG.num_slots)
    assert dispatches.count - before <= 2
    output = request.result(1)
    assert output.finish_reason == "cancelled" and output.handle is None
    return output


@pytest.fixture
def dispatches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Dispatches:
    return Dispatches(engine, monkeypatch)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 10])
@pytest.mark.parametrize("fields", [{}, {"save_as": "kept", "stop": "\0never"}], ids=["plain", "kept"])
def test_while_it_generates(
    engine: Engine, dispatches: Dispatches, tokens: int, fields: dict[str, str]
) -> None:
    request = engine.submit(prompt_of(9), **fields, **LONG)
    wait_until(lambda: request.num_tokens >= tokens)
    output = assert_frees_by_the_second_dispatch(engine, dispatches, request)
    assert len(output.token_ids) >= tokens and len(list(request)) == len(output.token_ids)
    assert not engine.states.list()


def test_while_its_prompt_is_read(engine: Engine, dispatches: Dispatches) -> None:
    company = engine.submit("company", **LONG)
    request = engine.submit(prompt_of(250), max_tokens=4)
    wait_until(lambda: prefilling(engine, request))
    company.cancel()
    if not request.finished:
        assert assert_frees_by_the_second_dispatch(engine, dispatches, request).token_ids == ()


def test_while_it_waits(engine: Engine) -> None:
    with engine.lock:
        running = [engine.submit("run", **LONG) for _ in range(CONFIG.max_rows)]
        waiting = [engine.submit("wait", **LONG) for _ in range(5)]
        for request in waiting[:4]:
            request.cancel()
        assert all(request.result(0).finish_reason == "cancelled" for request in waiting[:4])
    assert waiting[4].result(30).finish_reason == "length"
    outputs(running)


def test_from_a_listener(engine: Engine, dispatches: Dispatches) -> None:
    request = engine.submit("listener", **LONG)
    request.listen(lambda: request.cancel() if request.num_tokens == 7 and not request.finished else None)
    output = request.result(30)
    assert output.finish_reason == "cancelled" and len(output.token_ids) == 7


def test_again_and_afterwards(engine: Engine) -> None:
    request = engine.submit("twice", **LONG)
    request.cancel()
    request.cancel()
    assert request.result(1).finish_reason == "cancelled"
    done = engine.submit("done", max_tokens=1)
    output = done.result(30)
    done.cancel()
    assert done.result(1) is output


@pytest.mark.parametrize("cancelled", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 9, 240])
def test_some_choices_of_a_prompt(engine: Engine, plain: Plain, cancelled: int, length: int) -> None:
    prompt = prompt_of(length)
    choices = engine.submit_choices(prompt, 3, params=greedy_params(5))
    for choice in choices[:cancelled]:
        choice.cancel()
    for output in outputs(choices)[cancelled:]:
        assert output.finish_reason == "length"
        plain.assert_greedy(prompt, output.token_ids)


def test_a_request_that_continues_a_deleted_state(engine: Engine) -> None:
    engine.states.create("gone", prompt_of(9))
    with engine.lock:
        requests = [engine.submit(prompt_of(3), state="gone", **LONG) for _ in range(12)]
        engine.states.delete("gone")
    wait_until(lambda: requests[0].num_tokens > 2)
    for request in requests:
        request.cancel()
    wait_until(lambda: engine.slots().free == CONFIG.num_slots)


@pytest.mark.parametrize("seed", range(3))
def test_at_any_moment(engine: Engine, plain: Plain, seed: int) -> None:
    """Those that are left are not disturbed by those that end beside them."""
    draw = random.Random(seed)
    engine.states.create("base", prompt_of(10))
    requests: list[tuple[Request, int, int]] = []
    for number in range(40):
        length = draw.choice([1, 2, 5, 9, 17, 40])
        request = engine.submit(
            prompt_of(length, number), state="base", max_tokens=draw.randint(1, 25), ignore_eos=True
        )
        requests.append((request, length, number))

    def cancel_some() -> None:
        for request, _, number in draw.sample(requests, len(requests)):
            if number % 3:
                time.sleep(draw.random() * 0.004)
                request.cancel()

    thread = threading.Thread(target=cancel_some)
    thread.start()
    for request, length, number in requests:
        output = request.result(60)
        assert output.finish_reason in (("cancelled", "length") if number % 3 else ("length",))
        plain.assert_greedy([*prompt_of(10), *prompt_of(length, number)], output.token_ids)
    thread.join()
