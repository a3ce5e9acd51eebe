from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.engines import CONFIG, model_named, prompt_of
from wkvm_jax.engine.request import MAX_STOP_IDS, Request, SamplingParams
from wkvm_jax.engine.sequence import Origin, Sequence
from wkvm_jax.engine.submission import Start, encoded, new_lane, prepared_group, stop_ids
from wkvm_jax.errors import RequestError
from wkvm_jax.models.model import Model
from wkvm_jax.sampling import seed_key
from wkvm_jax.state import INITIAL_SLOT
from wkvm_jax.store.records import TokenHistory

START = Start(Origin(5, (2, 3), 7), pending=70, handle="a@1", history=TokenHistory((*range(7), 70)))


@pytest.fixture(scope="module")
def bytes_model() -> Model:
    return model_named("rwkv7")


@pytest.fixture(scope="module")
def mute_model(bytes_model: Model) -> Model:
    return dataclasses.replace(bytes_model, tokenizer=None)


def sequences(
    model: Model, prompt: list[int], start: Start, n: int = 1, save_as: str | None = None, **fields: object
) -> tuple[Sequence, ...]:
    requests = [Request(f"r{index}", lambda: None) for index in range(n)]
    return prepared_group(model, CONFIG, prompt, save_as, SamplingParams(**fields)).sequences(requests, start)


# Prompts ------------------------------------------------------------------------------------------


def test_text_and_ids(bytes_model: Model) -> None:
    assert encoded(bytes_model, "h\u00e9") == (0x68, 0xC3, 0xA9)
    assert encoded(bytes_model, "") == () == encoded(bytes_model, [])
    assert encoded(bytes_model, [0, 255]) == encoded(bytes_model, (0, 255)) == (0, 255)


@pytest.mark.parametrize("prompt", [[256], [-1], [3, True], "\udfff"])
def test_prompts_that_cannot_be(bytes_model: Model, prompt: str | list[int]) -> None:
    with pytest.raises(RequestError) as caught:
        encoded(bytes_model, prompt)
    assert caught.value.param == "prompt"


def test_without_a_tokenizer_prompts_are_ids_and_ends_are_ids(mute_model: Model) -> None:
    assert encoded(mute_model, [1, 2]) == (1, 2)
    with pytest.raises(RequestError, match="no tokenizer") as caught:
        encoded(mute_model, "text")
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="stop_token_ids") as caught:
        sequences(mute_model, [1], Start(), stop="x")
    assert caught.value.param == "stop"
    (sequence,) = sequences(mute_model, [1], Start())
    assert sequence.text is not None and sequence.text.text is None


def test_stop_ids_are_the_callers_and_the_tokenizers(bytes_model: Model, mute_model: Model) -> None:
    assert stop_ids(bytes_model, SamplingParams(stop_token_ids=[9, 0, 9])) == (9, 0)
    assert stop_ids(bytes_model, SamplingParams(stop_token_ids=[9])) == (9, 0)
    assert stop_ids(bytes_model, SamplingParams(ignore_eos=True)) == ()
    assert stop_ids(mute_model, SamplingParams()) == ()


def test_the_tokenizers_own_ids_count_towards_the_most(bytes_model: Model) -> None:
    own = range(1, MAX_STOP_IDS + 1)
    assert sequences(bytes_model, [1], Start(), stop_token_ids=own, ignore_eos=True)
    with pytest.raises(RequestError) as caught:
        sequences(bytes_model, [1], Start(), stop_token_ids=own)
    assert caught.value.param == "stop_token_ids"


# Sequences ----------------------------------------------------------------------------------------


def test_a_fresh_conversation(bytes_model: Model) -> None:
    (sequence,) = sequences(bytes_model, [1, 2, 3], Start(), max_tokens=4, save_as="a", stop="x")
    assert sequence.tokens == [1, 2, 3] and sequence.origin == Origin(INITIAL_SLOT)
    assert sequence.keeps_state and sequence.stops_late and not sequence.continues
    assert sequence.num_prompt_tokens == 3 and sequence.num_cached_tokens == 0
    assert sequence.history == () and sequence.parent is None and sequence.choice == 0


def test_a_continued_conversation_consumes_the_pending_token_first(bytes_model: Model) -> None:
    (sequence,) = sequences(bytes_model, [1, 2], START, repetition_penalty=1.1)
    assert sequence.tokens == [70, 1, 2] and sequence.origin == START.origin
    assert sequence.continues and sequence.origin_handle == "a@1" and sequence.parent_history is START.history
    assert sequence.num_prompt_tokens == 2 and sequence.num_cached_tokens == 7
    assert sequence.history == tuple(range(7))
    (sequence,) = sequences(bytes_model, [], START)
    assert sequence.tokens == [70] and sequence.history == ()


def test_choices_share_all_but_the_last_token(bytes_model: Model) -> None:
    prefix, *choices = sequences(bytes_model, [1, 2, 3], START, n=3, frequency_penalty=0.5, max_tokens=5)
    assert prefix.is_prefix and prefix.tokens == [70, 1, 2, 3] and prefix.params.max_tokens == 0
    for number, choice in enumerate(choices):
        assert choice.parent is prefix and choice.choice == number and choice.tokens == [3]
        assert choice.prefix_tokens == (70, 1, 2) and choice.origin.num_tokens == 7 + 3
        assert choice.history == (*range(7), 70, 1, 2) and choice.num_prompt_tokens == 3
        assert choice.max_length == 7 + 3 + 5 and choice.scores is prefix.scores


def test_choices_that_sample_nothing_read_their_prompt_alone(bytes_model: Model) -> None:
    group = sequences(bytes_model, [1, 2, 3], START, n=3, max_tokens=0)
    assert [sequence.tokens for sequence in group] == [[70, 1, 2, 3]] * 3
    assert all(sequence.parent is None and not sequence.is_prefix for sequence in group)


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_to_consume(bytes_model: Model, n: int) -> None:
    for start in (Start(), Start(Origin(5, (), 3), None, "put@1", TokenHistory(()))):
        with pytest.raises(RequestError) as caught:
            sequences(bytes_model, [], start, n=n)
        assert caught.value.param == "prompt"


def test_a_start_knows_what_its_state_has_consumed() -> None:
    assert START.consumed_ids() == tuple(range(7))
    assert Start().consumed_ids() == ()
    assert Start(Origin(5, (), 3), None, "put@1", TokenHistory(())).consumed_ids() == ()


def test_a_character_that_a_continued_state_began_is_finished(bytes_model: Model) -> None:
    cat = "\u732b".encode()
    start = Start(Origin(5, (), 2), cat[1], "a@1", TokenHistory((ord("x"), cat[0], cat[1])))
    for sequence in (*sequences(bytes_model, [], start), sequences(bytes_model, [], start, n=2)[1]):
        assert sequence.text is not None and sequence.text.add(cat[2], armed=True) == "\u732b"


# Lanes --------------------------------------------------------------------------------------------


def test_a_lane_holds_what_was_asked_for(bytes_model: Model) -> None:
    params = SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={3: 1.5, 9: -2.0},
        seed=(1 << 40) + 3,
        stop_token_ids=[8],
        logprobs=0,
    )
    (sequence,) = prepared_group(bytes_model, CONFIG, [1, 2], None, params).sequences(
        [Request("r", lambda: None)], Start()
    )
    sequence.lane = 4
    lane = new_lane(sequence, bytes_model)
    assert (lane.lane_ids.tolist(), lane.token.tolist(), lane.choice.tolist()) == ([4], [2], [0])
    assert lane.seed.tolist() == [[1 << 8, 3]]
    fields = {
        "remaining": 7,
        "min_remaining": 2,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition": 1.1,
        "presence": 0.2,
        "frequency": 0.3,
        "wants_logprobs": True,
    }
    for name, value in fields.items():
        assert getattr(lane.params, name).tolist() == [pytest.approx(value)], name
    assert lane.params.stop_ids[0, :3].tolist() == [8, 0, -1]
    assert lane.params.bias_ids[0, :3].tolist() == [3, 9, -1]
    assert lane.params.bias_values[0, :3].tolist() == [1.5, -2.0, 0.0]


@pytest.mark.parametrize("seed", [0, -1, -(1 << 63), (1 << 64) - 1])
def test_every_seed_is_a_key_of_its_own(bytes_model: Model, seed: int) -> None:
    def key(seed: int) -> list[int]:
        (sequence,) = sequences(bytes_model, prompt_of(2), Start(), seed=seed)
        sequence.lane = 1
        lane = new_lane(sequence, bytes_model)
        return np.asarray(seed_key(jnp.array(lane.seed), jnp.array(lane.choice))).tolist()

    assert key(seed) == key(seed) != key(1)
