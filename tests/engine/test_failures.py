"""What fails stays where it happened: in one request, in one dispatch, or with a clear end."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import pytest

from tests.engine.engines import (
    CONFIG,
    Plain,
    greedy_params,
    outputs,
    prompt_of,
    running,
    start,
    wait_until,
)
from wkvm_jax.engine import engine as engine_module
from wkvm_jax.engine.engine import Engine
from wkvm_jax.engine.request import Output
from wkvm_jax.engine.scheduler import Rectangle
from wkvm_jax.errors import (
    CapacityError,
    EngineClosedError,
    NoFreeSlotError,
    RequestError,
    UnknownHandleError,
    UnknownRequestError,
    WkvmError,
)
from wkvm_jax.models.model import Model
from wkvm_jax.state import NUM_RESERVED_PAGES, NUM_RESERVED_SLOTS, State

POISON = 199
"""A token id whose embedding holds NaN in poisoned weights."""
CLEAN = {"max_tokens": 12, "ignore_eos": True, "logit_bias": {POISON: -1e4}}
LONG = {"max_tokens": 200, "ignore_eos": True}
Run = Callable[[Rectangle], object]


def clean_prompt(length: int, seed: int = 0) -> list[int]:
    return [token_id for token_id in prompt_of(2 * length + 9, seed) if token_id != POISON][:length]


# NaN ----------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned_engine(deterministic_engine: Engine, model: Model) -> Iterator[Engine]:
    params: Mapping[str, object] = model.params
    embedding = params["embedding"]
    assert isinstance(embedding, jax.Array)
    deterministic_engine.set_params({**params, "embedding": embedding.at[POISON].set(jnp.nan)})
    yield deterministic_engine
    deterministic_engine.set_params(model.params)


@pytest.mark.parametrize("place", ["last", "first", "beyond one chunk"])
def test_a_row_that_is_not_finite_ends_alone(poisoned_engine: Engine, place: str) -> None:
    engine = poisoned_engine
    prompts = [clean_prompt(5 + 11 * seed, seed) for seed in range(6)]
    poisoned = {
        "last": [*clean_prompt(9), POISON],
        "first": [POISON, *clean_prompt(9)],
        "beyond one chunk": [*clean_prompt(70), POISON, *clean_prompt(70)],
    }[place]
    expected = outputs([engine.submit(prompt, logprobs=1, **CLEAN) for prompt in prompts])
    requests = [engine.submit(prompt, logprobs=1, **CLEAN) for prompt in prompts]
    bad = [engine.submit(poisoned, logprobs=1, **CLEAN) for _ in range(3)]
    assert outputs(requests) == expected
    for output in outputs(bad):
        assert output.finish_reason == "error" and output.token_ids == ()
        assert output.error is not None and "not finite" in output.error
    after = outputs([engine.submit(prompt, logprobs=1, **CLEAN) for prompt in prompts])
    assert after == expected, "slots that NaN has been in are clean for the next"


def test_a_row_may_turn_bad_while_it_generates(poisoned_engine: Engine) -> None:
    params = {**CLEAN, "logit_bias": {POISON: 1e4}}
    output = poisoned_engine.submit(clean_prompt(5), **params).result(30)
    assert output.finish_reason == "error" and output.token_ids == (POISON,)


def test_a_bad_row_keeps_no_state(poisoned_engine: Engine) -> None:
    output = poisoned_engine.submit([*clean_prompt(5), POISON], save_as="bad", **CLEAN).result(30)
    assert output.finish_reason == "error" and output.handle is None and not poisoned_engine.states.list()


def test_a_prompt_that_is_not_finite_makes_no_state(poisoned_engine: Engine) -> None:
    with pytest.raises(WkvmError, match="not finite"):
        poisoned_engine.states.create("bad", [*clean_prompt(70), POISON, *clean_prompt(5)])
    assert not poisoned_engine.states.list()


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_prompt_whose_scores_are_not_finite_ends_as_an_error(
    poisoned_engine: Engine, max_tokens: int
) -> None:
    prompt = [*clean_prompt(80), POISON, *clean_prompt(80)]
    params = {**CLEAN, "max_tokens": max_tokens, "prompt_logprobs": True}
    output = poisoned_engine.submit(prompt, **params).result(30)
    assert output.finish_reason == "error" and output.error is not None and "not finite" in output.error
    assert output.prompt_logprobs is not None
    assert all(one.logprob is None or one.logprob < 0 for one in output.prompt_logprobs)


@pytest.mark.parametrize("scored", [False, True])
def test_bad_choices_end_together(poisoned_engine: Engine, scored: bool) -> None:
    params = greedy_params(4, prompt_logprobs=scored)
    choices = poisoned_engine.submit_choices([POISON, *clean_prompt(150)], 3, params=params)
    assert {output.finish_reason for output in outputs(choices)} == {"error"}


def test_what_lies_in_free_slots_does_not_matter(engine: Engine, plain: Plain) -> None:
    prompts = [prompt_of(length, length) for length in (1, 2, 5, 16, 17, 40)]
    engine.states.create("kept", prompt_of(9))
    engine.call(lambda: poison_free_places(engine))
    for prompt, output in zip(prompts, engine.generate(prompts, max_tokens=9, ignore_eos=True), strict=True):
        plain.assert_greedy(prompt, output.token_ids)
    output = engine.submit([7, 8], state="kept", save_as="more", max_tokens=9, ignore_eos=True).result(30)
    plain.assert_greedy([*prompt_of(9), 7, 8], output.token_ids)
    assert output.handle is not None
    plain.assert_state(engine.states.load(output.handle), [*prompt_of(9), 7, 8, *output.token_ids[:-1]])
    for choice in outputs(engine.submit_choices(prompts[-1], 4, params=greedy_params(5))):
        plain.assert_greedy(prompts[-1], choice.token_ids)


def poison_free_places(engine: Engine) -> None:
    """Fills every slot and page that nobody holds with NaN, those for discarded writes too."""
    slots, pages = engine.pools
    free_slots, free_pages = slots.acquire(slots.num_free), pages.acquire(pages.num_free)
    spec = engine.model.state_spec
    page_ids = [*range(NUM_RESERVED_PAGES), *free_pages] if spec.paged else []
    poison = jax.tree.map(
        lambda leaf: jnp.full_like(leaf, jnp.nan if jnp.issubdtype(leaf.dtype, jnp.inexact) else 77),
        spec.allocate(1, len(page_ids)),
    )
    for slot in (*range(1, NUM_RESERVED_SLOTS), *free_slots):
        engine.device.store(slot, [], poison)
    engine.device.store(free_slots[0], page_ids, poison)
    for slot in free_slots:
        slots.release(slot)
    for page in free_pages:
        pages.release(page)


# Dispatches ---------------------------------------------------------------------------------------


def fail_once(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    *,
    after: int = 0,
    when: Callable[[Rectangle], bool] | None = None,
) -> None:
    """Makes one dispatch fail and take the arena with it, as a failed step that was donated it does."""
    run, seen = engine.device.run, 0

    def failing(rectangle: Rectangle) -> object:
        nonlocal seen
        result = run(rectangle)
        if when is None or when(rectangle):
            seen += 1
            if seen == after + 1:
                lose(engine.device.arena)
                raise RuntimeError("the device said no")
        return result

    monkeypatch.setattr(engine.device, "run", failing)


def lose(arena: State) -> None:
    for leaf in jax.tree.leaves(arena):
        leaf.delete()


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_failed_dispatch_ends_what_ran_and_no_more(
    engine: Engine, plain: Plain, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    lost = str(engine.states.create("kept", "x y z"))
    engine.states.pin("kept")
    fail_once(engine, monkeypatch, after=after)
    with engine.lock:
        requests = [engine.submit(prompt_of(20, seed), **LONG) for seed in range(4)]
        requests += engine.submit_choices(prompt_of(20), 3, params=greedy_params(200))
        requests.append(engine.submit([5], state="kept", save_as="end", stop="\0never", **LONG))
    for output in outputs(requests):
        assert output.finish_reason == "error" and output.handle is None
        assert output.error is not None and "the device said no" in output.error
    assert engine.alive and engine.states.list() == []
    assert engine.slots().free == CONFIG.num_slots
    for handle in ("kept", lost):
        with pytest.raises(UnknownHandleError, match=r"lost.*the device said no"):
            engine.submit("more", state=handle)
    output = engine.submit(prompt_of(20), save_as="kept", max_tokens=9, ignore_eos=True).result(30)
    plain.assert_greedy(prompt_of(20), output.token_ids)
    assert str(engine.states.get("kept")) == output.handle != lost
    with pytest.raises(UnknownHandleError, match="lost"):
        engine.states.load(lost)


def test_what_waits_for_a_fresh_start_has_lost_nothing(
    engine: Engine, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.states.create("kept", prompt_of(9))
    fail_once(engine, monkeypatch, after=2)
    with engine.lock:
        first = [engine.submit(prompt_of(5), **LONG) for _ in range(CONFIG.max_rows)]
        waiting = [engine.submit(prompt_of(20), max_tokens=5, ignore_eos=True)]
        waiting += engine.submit_choices(prompt_of(20), 3, params=greedy_params(5))
        continuing = [engine.submit([3], state="kept", **LONG)]
        continuing += engine.submit_choices([3], 2, state="kept", params=greedy_params(5))
    assert {output.finish_reason for output in outputs([*first, *continuing])} == {"error"}
    for output in outputs(waiting):
        assert output.finish_reason == "length"
        plain.assert_greedy(prompt_of(20), output.token_ids)


@pytest.mark.parametrize("kind", ["prompt", "step"])
def test_either_kind_of_dispatch_may_fail(
    engine: Engine, plain: Plain, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    fail_once(engine, monkeypatch, when=lambda rectangle: (rectangle.num_tokens == 1) == (kind == "step"))
    assert engine.submit(prompt_of(20), **LONG).result(30).finish_reason == "error"
    plain.assert_greedy(
        prompt_of(20), engine.generate([prompt_of(20)], max_tokens=9, ignore_eos=True)[0].token_ids
    )


def fail_a_fetch(monkeypatch: pytest.MonkeyPatch, when: Callable[[], bool]) -> list[str]:
    """Makes the host find a failed dispatch when it reads the result, as it does on a GPU."""
    fetch, failed = engine_module.fetch, []

    def failing(rectangle: Rectangle, result: object) -> object:
        if not failed and when():
            failed.append("failed")
            raise RuntimeError("the result was never made")
        return fetch(rectangle, result)

    monkeypatch.setattr(engine_module, "fetch", failing)
    return failed


def test_a_failure_found_late(engine: Engine, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    first = engine.submit(prompt_of(20), **LONG)
    fail_a_fetch(monkeypatch, lambda: first.num_tokens > 5)
    output = first.result(30)
    assert output.finish_reason == "error" and len(output.token_ids) > 5
    (output,) = engine.generate([prompt_of(20)], max_tokens=9, ignore_eos=True)
    plain.assert_greedy(prompt_of(20), output.token_ids)


def test_a_failure_found_by_a_call(model: Model, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot waits for what is in flight; that this failed does not end the engine."""
    with running(model) as engine:
        request = engine.submit(prompt_of(20), **LONG)
        wait_until(lambda: request.num_tokens > 2)
        failed = fail_a_fetch(monkeypatch, lambda: bool(engine._commands))
        while not failed and not request.finished:
            try:
                engine.states.snapshot(request, "photo")
            except (UnknownRequestError, NoFreeSlotError):
                continue
        assert request.result(30).finish_reason == ("error" if failed else "length")
        (output,) = engine.generate([prompt_of(20)], max_tokens=9, ignore_eos=True)
        plain.assert_greedy(prompt_of(20), output.token_ids)


# The end ------------------------------------------------------------------------------------------


def test_a_device_that_cannot_be_reset_ends_the_engine(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        raise RuntimeError("the device is gone")

    engine = start(model)
    engine.states.create("kept", "x y z")
    requests = [engine.submit(prompt_of(20, seed), **LONG) for seed in range(12)]
    read: list[int] = []
    reader = threading.Thread(target=lambda: read.extend(token.token_id for token in requests[0]))
    reader.start()
    wait_until(lambda: requests[0].num_tokens > 0)
    monkeypatch.setattr(engine.device, "reset", never)
    fail_once(engine, monkeypatch)
    for output in outputs(requests):
        assert output.finish_reason == "error" and output.error is not None
    reader.join(10)
    assert not reader.is_alive() and tuple(read) == requests[0].result(1).token_ids
    wait_until(lambda: not engine.alive)
    for call in (
        lambda: engine.submit("late"),
        lambda: engine.generate(["late"]),
        lambda: engine.submit_choices("late", 2, params=greedy_params(1)),
        lambda: engine.states.create("late", "x"),
        lambda: engine.states.snapshot(requests[0], "late"),
        lambda: engine.states.put("late", model.init_state(1, max_length=4)),
        lambda: engine.set_params(model.params),
        lambda: engine.warm_up(),
    ):
        with pytest.raises(EngineClosedError, match="the device is gone"):
            call()
    requests[0].cancel()
    engine.close(10)


def test_calls_that_wait_hear_of_the_end(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, over = start(model), threading.Event()
    state, errors = model.init_state(1, max_length=4), []

    def put() -> None:
        try:
            while not over.is_set():
                engine.states.delete(str(engine.states.put("again", state)))
        except WkvmError as error:
            errors.append(error)

    threads = [threading.Thread(target=put) for _ in range(4)]
    for thread in threads:
        thread.start()
    monkeypatch.setattr(engine.device, "reset", lambda: 1 / 0)
    fail_once(engine, monkeypatch)
    try:
        # That they keep calling does not keep the engine from its steps.
        assert engine.submit("x", **LONG).result(30).finish_reason == "error"
        for thread in threads:
            thread.join(10)
    finally:
        over.set()
        engine.close(10)
    assert len(errors) == 4
    assert {type(error) for error in errors} <= {EngineClosedError, UnknownHandleError}


# Bad input ----------------------------------------------------------------------------------------

BAD: list[tuple[str, object, dict[str, object]]] = [
    ("prompt", "", {}),
    ("prompt", [], {}),
    ("prompt", [0, 256], {}),
    ("prompt", [-1], {}),
    ("prompt", [True, 2], {}),
    ("prompt", "lone \ud800 surrogate", {}),
    ("prompt", [1] * (CONFIG.max_prompt_tokens + 1), {}),
    ("temperature", "x", {"temperature": -1.0}),
    ("temperature", "x", {"temperature": math.nan}),
    ("top_p", "x", {"top_p": 1.5}),
    ("max_tokens", "x", {"max_tokens": 1 << 40}),
    ("max_tokens", "x", {"max_tokens": CONFIG.max_tokens_limit + 1}),
    ("max_tokens", "x", {"max_tokens": True}),
    ("min_tokens", "x", {"max_tokens": 2, "min_tokens": 3}),
    ("stop", "x", {"stop": ["a"] * 2000}),
    ("stop", "x", {"stop": ""}),
    ("stop_token_ids", "x", {"stop_token_ids": [256]}),
    ("stop_token_ids", "x", {"stop_token_ids": list(range(1, 65))}),
    ("logit_bias", "x", {"logit_bias": {256: 1.0}}),
    ("n", "x", {"n": 2}),
    ("max_token", "x", {"max_token": 3}),
    ("params", "x", {"params": greedy_params(1), "temperature": 1.0}),
    ("save_as", "x", {"save_as": "a/b"}),
    ("state", "x", {"state": "a@b"}),
]


@pytest.mark.parametrize(
    ("param", "prompt", "fields"), BAD, ids=[f"{param}-{n}" for n, (param, *_) in enumerate(BAD)]
)
def test_bad_input_is_refused_by_name(
    engine: Engine, param: str, prompt: str | list[int], fields: dict[str, object]
) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit(prompt, **fields)
    assert caught.value.param == param
    with engine.lock:
        assert engine.scheduler.idle and engine.slots().free == CONFIG.num_slots


def test_one_bad_prompt_of_many_runs_none(engine: Engine) -> None:
    with pytest.raises(RequestError):
        engine.generate(["good", "also good", ""], **LONG)
    wait_until(lambda: engine.slots().free == CONFIG.num_slots)


def test_defined_results_at_the_edges(engine: Engine) -> None:
    def generated(**fields: object) -> Output:
        return engine.submit("edge", **{"max_tokens": 5, "ignore_eos": True, **fields}).result(30)

    greedy = generated()
    assert generated(temperature=2.0, top_p=0.0).token_ids == greedy.token_ids
    assert generated(temperature=1e-30, seed=4).token_ids == greedy.token_ids
    assert generated(top_k=1 << 30).token_ids == greedy.token_ids
    assert generated(seed=(1 << 64) - 1).token_ids == greedy.token_ids
    assert generated(stop=[f"never {index}" for index in range(1000)]).token_ids == greedy.token_ids
    assert generated(max_tokens=0, min_tokens=0).token_ids == ()


def test_a_conversation_that_is_too_long_is_refused(engine: Engine, plain: Plain) -> None:
    if not engine.model.state_spec.paged:
        assert engine.submit(prompt_of(600), max_tokens=1).result(30).finish_reason != "error"
        return
    length = CONFIG.tokens_per_slot
    for prompt_length, max_tokens in (
        (length + 2, 0),
        (length, 2),
        (1, length + 1),
        (5, CONFIG.max_tokens_limit),
    ):
        with pytest.raises(CapacityError, match=str(length)) as caught:
            engine.submit(prompt_of(prompt_length), max_tokens=max_tokens)
        assert caught.value.param == "max_tokens"
    output = engine.submit(prompt_of(length - 19), max_tokens=20, ignore_eos=True).result(30)
    plain.assert_greedy(prompt_of(length - 19), output.token_ids)


def test_too_many_that_wait(model: Model) -> None:
    with running(model, max_waiting=3) as engine:
        with engine.lock:
            requests = [engine.submit("wait", **LONG) for _ in range(3)]
            with pytest.raises(NoFreeSlotError, match="3 requests are waiting already"):
                engine.submit("one more")
        for request in requests:
            request.cancel()
