from __future__ import annotations

import dataclasses
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.engines import (
    CONFIG,
    LETTERS,
    ROUNDING,
    Plain,
    greedy_params,
    outputs,
    prompt_of,
    running,
    start,
    wait_until,
)
from wkvm_jax.engine.engine import Engine
from wkvm_jax.engine.request import Output, Request
from wkvm_jax.errors import EngineClosedError, RequestError
from wkvm_jax.models.model import Model

LONGEST = 70
BASE = prompt_of(LONGEST)
FREE = {"max_tokens": 12, "ignore_eos": True}


# Greedy -------------------------------------------------------------------------------------------


def test_text_in_text_out(engine: Engine, plain: Plain) -> None:
    (output,) = engine.generate("hello", max_tokens=12, ignore_eos=True)
    plain.assert_greedy(list(b"hello"), output.token_ids)
    assert output.text == bytes(output.token_ids).decode("utf-8", "replace")
    assert output.finish_reason == "length" and len(output.token_ids) == 12
    assert output.num_prompt_tokens == 5 and output.num_cached_tokens == 0
    assert output.logprobs is None and output.prompt_logprobs is None and output.handle is None


@pytest.mark.parametrize("lengths", [range(1, 24), range(24, 47), range(47, LONGEST + 1)], ids=str)
def test_prompts_of_every_length(engine: Engine, plain: Plain, lengths: range) -> None:
    for length in lengths:
        (output,) = engine.generate([BASE[:length]], max_tokens=3, ignore_eos=True)
        plain.assert_greedy(BASE[:length], output.token_ids)
        assert output.num_prompt_tokens == length


@pytest.mark.parametrize("seed", range(2))
def test_many_at_once_in_any_order(engine: Engine, plain: Plain, seed: int) -> None:
    prompts = [BASE[:length] for length in (1, 2, 3, 4, 5, 6, 15, 16, 17, 18, 33, 34, 49, 66)]
    random.Random(seed).shuffle(prompts)
    for prompt, output in zip(prompts, engine.generate(prompts, max_tokens=6, ignore_eos=True), strict=True):
        plain.assert_greedy(prompt, output.token_ids)


def test_two_hundred_small_requests(engine: Engine) -> None:
    alone = [engine.generate([prompt_of(3, seed)], **FREE)[0] for seed in range(5)]
    many = engine.generate([prompt_of(3, seed % 5) for seed in range(200)], **FREE)
    assert len(many) == 200 and all(output.finish_reason == "length" for output in many)
    same = sum(output.token_ids == alone[index % 5].token_ids for index, output in enumerate(many))
    assert same >= 190, "a tie within rounding may turn, but not often"


def test_threads_may_submit_at_once(engine: Engine, plain: Plain) -> None:
    results: dict[int, list[Output]] = {}

    def work(thread: int) -> None:
        prompts = [prompt_of(4 + turn, thread) for turn in range(6)]
        results[thread] = engine.generate(prompts, max_tokens=4, ignore_eos=True)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for thread in range(6):
        for turn, output in enumerate(results[thread]):
            plain.assert_greedy(prompt_of(4 + turn, thread), output.token_ids)


def test_nothing_to_do(engine: Engine) -> None:
    assert engine.generate([]) == []


# Streaming ----------------------------------------------------------------------------------------


def test_tokens_can_be_read_while_they_come(engine: Engine) -> None:
    request = engine.submit("stream", max_tokens=40, ignore_eos=True)
    tokens = list(request)
    output = request.result(1)
    assert tuple(token.token_id for token in tokens) == output.token_ids
    assert "".join(token.text for token in tokens) == output.text
    assert request.num_tokens == 40


def test_a_listener_hears_of_every_token(engine: Engine) -> None:
    request, heard, done = engine.submit("listen", **FREE), [], threading.Event()

    def listen() -> None:
        tokens, output = request.take()
        heard.extend(token.token_id for token in tokens)
        if output is not None:
            done.set()

    request.listen(listen)
    assert done.wait(30)
    assert tuple(heard) == request.result(1).token_ids


# Ends ---------------------------------------------------------------------------------------------


def test_no_tokens_only_read_the_prompt(engine: Engine) -> None:
    for length in (1, 2, 5, 40):
        (output,) = engine.generate([BASE[:length]], max_tokens=0)
        assert output.token_ids == () and output.text == "" and output.finish_reason == "length"
        assert output.num_prompt_tokens == length


def test_one_token(engine: Engine, plain: Plain) -> None:
    (output,) = engine.generate([BASE[:9]], max_tokens=1, ignore_eos=True)
    plain.assert_greedy(BASE[:9], output.token_ids)
    assert len(output.token_ids) == 1


def test_the_tokenizers_end_of_text_ends_the_output(engine: Engine) -> None:
    bias = {0: 1000.0}
    (output,) = engine.generate(["end"], max_tokens=9, logit_bias=bias)
    assert output.token_ids == (0,) and output.text == "" and output.finish_reason == "stop"
    (output,) = engine.generate(["end"], max_tokens=9, logit_bias=bias, ignore_eos=True)
    assert output.token_ids == (0,) * 9 and output.text == "\0" * 9 and output.finish_reason == "length"


def test_stop_ids_do_not_count_before_the_least_number_of_tokens(engine: Engine) -> None:
    params = {"max_tokens": 9, "logit_bias": {**LETTERS, ord("x"): 500.0}, "ignore_eos": True}
    (output,) = engine.generate(["go"], stop_token_ids=[ord("x")], min_tokens=4, **params)
    assert len(output.token_ids) == 5 and output.finish_reason == "stop"
    assert ord("x") not in output.token_ids[:4] and output.token_ids[4] == ord("x")
    assert output.text == bytes(output.token_ids[:4]).decode()


def test_stop_ids_beside_the_tokenizers_own(engine: Engine) -> None:
    free = engine.generate(["stop"], max_tokens=20, ignore_eos=True)[0].token_ids
    wanted = free[7]
    (output,) = engine.generate(["stop"], max_tokens=20, stop_token_ids=[wanted, 255], ignore_eos=True)
    assert output.token_ids == free[: free.index(wanted) + 1] and output.finish_reason == "stop"


@pytest.mark.parametrize("least", [0, 4, 6])
def test_stop_strings(engine: Engine, least: int) -> None:
    params = {"max_tokens": 16, "ignore_eos": True, "logit_bias": LETTERS}
    free = engine.generate(["text"], **params)[0].text
    assert free is not None
    stops = ["never", free[2:5], free[9:12]]
    end = next(end for end in range(least + 1, 17) if free[:end].endswith(tuple(stops[1:])))
    request = engine.submit("text", stop=stops, min_tokens=least, **params)
    streamed, output = "".join(token.text for token in request), request.result(1)
    assert output.text == streamed == free[: end - 3] and output.finish_reason == "stop"
    assert bytes(output.token_ids).decode() == free[:end]


def test_a_thousand_stop_strings(engine: Engine) -> None:
    params = {"max_tokens": 16, "ignore_eos": True, "logit_bias": LETTERS}
    free = engine.generate(["text"], **params)[0].text
    assert free is not None
    stops = [f"{free[:2]}{index}" for index in range(1000)]
    (output,) = engine.generate(["text"], stop=stops, **params)
    assert output.text == free and output.finish_reason == "length"
    (output,) = engine.generate(["text"], stop=[*stops, free[5]], **params)
    assert output.text == free[: free.index(free[5])] and output.finish_reason == "stop"


def test_a_stop_string_in_the_last_token(engine: Engine) -> None:
    params = {"ignore_eos": True, "logit_bias": LETTERS}
    free = engine.generate(["last"], max_tokens=8, **params)[0].text
    assert free is not None
    end = next(at for at in range(4, 8) if free[at] not in free[:at])
    (output,) = engine.generate(["last"], max_tokens=end + 1, stop=[free[end]], **params)
    assert output.finish_reason == "stop" and output.text == free[:end]


# Log-probabilities --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5, 17, 40])
def test_log_probabilities_are_the_models(engine: Engine, plain: Plain, length: int) -> None:
    prompt = BASE[:length]
    params = {"max_tokens": 5, "ignore_eos": True, "temperature": 1.5, "seed": length}
    (output,) = engine.generate([prompt], logprobs=3, prompt_logprobs=True, **params)
    tokens = [*prompt, *output.token_ids]
    expected = plain.log_probs(tokens, 1) if len(tokens) > 1 else np.empty((0, 256))
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert len(output.logprobs) == 5 and len(output.prompt_logprobs) == length
    first, *rest = (*output.prompt_logprobs, *output.logprobs)
    assert first.token_id == prompt[0] and first.logprob is None and first.top == ()
    for token_id, one, row in zip(tokens[1:], rest, expected, strict=True):
        assert one.token_id == token_id and one.logprob == pytest.approx(row[token_id], abs=ROUNDING)
        np.testing.assert_allclose([value for _, value in one.top], -np.sort(-row)[:3], atol=ROUNDING)
        np.testing.assert_allclose([row[other] for other, _ in one.top], -np.sort(-row)[:3], atol=ROUNDING)


def test_a_prompts_log_probabilities_are_its_score(engine: Engine, model: Model) -> None:
    state = model.init_state(1, max_length=CONFIG.tokens_per_slot)
    expected = model.score(jnp.array([BASE]), state)[0]
    (output,) = engine.generate([BASE], max_tokens=0, prompt_logprobs=True)
    assert output.prompt_logprobs is not None
    np.testing.assert_allclose(
        [one.logprob for one in output.prompt_logprobs[1:]], expected, rtol=0, atol=ROUNDING
    )


def test_penalties_and_bias_leave_log_probabilities_alone(engine: Engine, plain: Plain) -> None:
    (output,) = engine.generate(["bias"], logprobs=0, logit_bias={65: 500.0}, **FREE)
    assert output.token_ids == (65,) * 12 and output.logprobs is not None
    expected = plain.log_probs([*b"bias", *output.token_ids], 4)[:, 65]
    np.testing.assert_allclose([one.logprob for one in output.logprobs], expected, rtol=0, atol=ROUNDING)


# Sampling -----------------------------------------------------------------------------------------


def test_a_seed_fixes_the_output(engine: Engine) -> None:
    def drawn(seed: int) -> tuple[int, ...]:
        return engine.generate(["draw"], temperature=1.0, seed=seed, **FREE)[0].token_ids

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in (0, 1, 2, -1, 1 << 40)}) == 5


@pytest.mark.parametrize("filters", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_the_tightest_filters_are_greedy(engine: Engine, filters: dict[str, float]) -> None:
    (greedy,) = engine.generate(["filter"], **FREE)
    (output,) = engine.generate(["filter"], temperature=5.0, seed=3, **filters, **FREE)
    assert output.token_ids == greedy.token_ids


def penalised(
    logits: np.ndarray,
    seen: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> np.ndarray:
    """The usual definitions: repetition over prompt and output, the other two over the output."""
    result = logits.copy()
    for token_id in set(seen) | set(output):
        result[token_id] = (
            logits[token_id] / repetition if logits[token_id] > 0 else logits[token_id] * repetition
        )
    for token_id in set(output):
        result[token_id] -= presence + frequency * output.count(token_id)
    return result


@pytest.mark.parametrize(
    "penalties",
    [(1.7, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 0.8), (1.3, -0.5, 0.7), (0.6, 0.0, 0.0)],
    ids=str,
)
@pytest.mark.parametrize("continues", [False, True], ids=["fresh", "continued"])
def test_penalties(engine: Engine, plain: Plain, penalties: tuple[float, ...], continues: bool) -> None:
    prompt = [7, 8, 9, 7] if not continues else list(b"before and after")
    state = None
    if continues:
        state = str(engine.states.create("before", prompt[:-5]))
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    request = engine.submit(
        prompt[-5:] if continues else prompt, state=state, **dict(zip(names, penalties, strict=True)), **FREE
    )
    output: list[int] = []
    for token_id in request.result(30).token_ids:
        scores = penalised(plain.after([*prompt, *output])[0], prompt, output, *penalties)
        assert scores.max() - scores[token_id] < ROUNDING
        output.append(token_id)


def test_long_prompts_count_for_penalties(engine: Engine) -> None:
    (plain_output,) = engine.generate([BASE], max_tokens=1, ignore_eos=True)
    (token_id,) = plain_output.token_ids
    (output,) = engine.generate([[token_id, *BASE]], max_tokens=1, repetition_penalty=1000.0, ignore_eos=True)
    assert output.token_ids[0] not in {token_id, *BASE}


# Choices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5, 20])
def test_choices_draw_from_one_prompt(engine: Engine, length: int) -> None:
    params = greedy_params(8, temperature=1.0, seed=5, logprobs=1, prompt_logprobs=True)
    alone = engine.submit(BASE[:length], params=params).result(30)
    for n in range(1, CONFIG.max_rows + 1):
        choices = outputs(engine.submit_choices(BASE[:length], n, params=params))
        assert len({choice.token_ids for choice in choices}) == n
        assert choices[0].token_ids == alone.token_ids
        for choice in choices:
            assert choice.num_prompt_tokens == length and choice.finish_reason == "length"
            assert choice.prompt_logprobs is not None and alone.prompt_logprobs is not None
            assert [one.token_id for one in choice.prompt_logprobs] == BASE[:length]
            for one, other in zip(choice.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=ROUNDING)


def test_greedy_choices_are_equal(engine: Engine, plain: Plain) -> None:
    for choice in outputs(engine.submit_choices(BASE[:11], 5, params=greedy_params(6))):
        plain.assert_greedy(BASE[:11], choice.token_ids)


@pytest.mark.parametrize("length", [1, 9])
def test_choices_of_no_tokens_read_the_prompt(engine: Engine, length: int) -> None:
    params = greedy_params(0, prompt_logprobs=True)
    alone = engine.submit(BASE[:length], params=params).result(30)
    for choice in outputs(engine.submit_choices(BASE[:length], 3, params=params)):
        assert choice == alone


@pytest.mark.parametrize("n", [0, -1, CONFIG.max_rows + 1])
def test_a_number_of_choices_that_cannot_be(engine: Engine, n: int) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit_choices("x", n, params=greedy_params(1))
    assert caught.value.param == "n"


# Weights ------------------------------------------------------------------------------------------


def test_new_weights(model: Model) -> None:
    other = jax.tree.map(lambda leaf: leaf * 1.1, model.params)
    with running(model) as engine:
        before = engine.generate(["weights"], **FREE)[0].token_ids
        fingerprint = engine.model.fingerprint
        engine.set_params(other)
        after = engine.generate(["weights"], **FREE)[0].token_ids
        assert after != before and engine.model.fingerprint != fingerprint
        Plain(dataclasses.replace(model, params=other)).assert_greedy(list(b"weights"), after)
        engine.set_params(model.params)
        assert engine.generate(["weights"], **FREE)[0].token_ids == before
        assert engine.model.fingerprint == fingerprint


def test_weights_of_other_shapes_are_refused(engine: Engine, model: Model) -> None:
    for params in (
        {},
        jax.tree.map(lambda leaf: leaf[:1], model.params),
        {**model.params, "more": np.zeros(1)},
    ):
        with pytest.raises(ValueError, match="same shapes"):
            engine.set_params(params)
    assert engine.generate(["still"], max_tokens=1)[0].finish_reason != "error"


# The engine's life --------------------------------------------------------------------------------


def test_closing_cancels_what_runs_and_waits(model: Model) -> None:
    engine = start(model)
    requests = [engine.submit(BASE, max_tokens=180, ignore_eos=True) for _ in range(12)]
    wait_until(lambda: requests[0].num_tokens > 2)
    engine.close()
    for request in requests:
        assert request.result(1).finish_reason == "cancelled"
    assert list(requests[0]) and not engine.alive
    engine.close()


def test_a_closed_engine_says_so(model: Model) -> None:
    with start(model) as engine:
        pass
    for call in (
        lambda: engine.submit("late"),
        lambda: engine.generate(["late"]),
        lambda: engine.set_params(model.params),
        lambda: engine.warm_up(),
    ):
        with pytest.raises(EngineClosedError, match="closed"):
            call()


def test_requests_have_ids_of_their_own(engine: Engine) -> None:
    requests: list[Request] = [engine.submit("id", max_tokens=1) for _ in range(5)]
    assert len({request.id for request in requests}) == 5
    outputs(requests)


def test_it_says_whether_it_is_alive_and_how_many_slots_are_free(engine: Engine) -> None:
    assert engine.alive and engine.slots().total == CONFIG.num_slots == engine.slots().free
    request = engine.submit("count", max_tokens=200, ignore_eos=True)
    wait_until(lambda: request.num_tokens > 0)
    with engine.lock:
        assert request.finished or engine.slots().free == CONFIG.num_slots - 1
    request.result(30)
    assert engine.slots().free == CONFIG.num_slots
