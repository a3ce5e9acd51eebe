"""What runs on the device, below scheduler and engine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.engines import Plain, assert_near, model_named, prompt_of
from wkvm_jax.engine.request import Request, SamplingParams
from wkvm_jax.engine.scheduler import Rectangle, Row
from wkvm_jax.engine.sequence import Origin, Sequence
from wkvm_jax.engine.step import ADMIT_ROWS, COPY_ROWS, HISTORY_CHUNK, Device, Scores, Sizes
from wkvm_jax.engine.submission import new_lane
from wkvm_jax.models.model import Model
from wkvm_jax.sampling import IN_PROMPT, Sampled
from wkvm_jax.state import INITIAL_SLOT, TRASH_SLOT

NUM_SLOTS, NUM_LANES, PAGES_PER_ROW = 26, 13, 64
NUM_PAGES = 1 + 20 * PAGES_PER_ROW
_devices: dict[str, Device] = {}


@pytest.fixture
def device(model: Model) -> Device:
    """A fresh arena; steps that an earlier test compiled stay."""
    spec = model.state_spec
    if model.name not in _devices:
        pages = (NUM_PAGES, PAGES_PER_ROW) if spec.paged else (0, 0)
        _devices[model.name] = Device(model, Sizes(NUM_SLOTS, pages[0], NUM_LANES, pages[1]))
    _devices[model.name].reset()
    return _devices[model.name]


def sequence_of(device: Device, tokens: list[int], number: int, **fields: object) -> Sequence:
    """A sequence with a lane, and pages of its own where there are any."""
    params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **fields})
    sequence = Sequence(Request("r", lambda: None), params, list(tokens), Origin(INITIAL_SLOT))
    sequence.lane = 1 + number
    if device.sizes.pages_per_row:
        first = 1 + number * PAGES_PER_ROW
        sequence.pages = list(range(first, first + PAGES_PER_ROW))
    return sequence


def read_prompt(device: Device, sequence: Sequence, slot: int, width: int = 16) -> Scores:
    """Consumes all but the last token in one rectangle."""
    length = len(sequence.tokens) - 1
    row = Row(sequence, 0, length, INITIAL_SLOT, slot, (0, 0))
    result = device.run(Rectangle((row,), (0,), 1, width))
    assert isinstance(result, Scores)
    return result


def step(device: Device, rows: list[Row], num_rows: int) -> Sampled:
    result = device.run(Rectangle(tuple(rows), tuple(range(len(rows))), num_rows, 1))
    assert isinstance(result, Sampled)
    return result


def test_a_fresh_device_holds_initial_states(device: Device, plain: Plain) -> None:
    for slot in (INITIAL_SLOT, TRASH_SLOT, NUM_SLOTS - 1):
        state = device.load(slot, [])
        for name, leaf in plain.fresh().leaves.items():
            np.testing.assert_array_equal(state.leaves[name], leaf)
        assert state.num_tokens.tolist() == [0] and state.num_pages == 0
    assert np.asarray(device.lanes.done).all()


def test_a_state_is_stored_in_its_slot_and_pages_alone(device: Device, plain: Plain) -> None:
    _, state = plain.after(prompt_of(10))
    pages = [9, 4, 77] if device.sizes.num_pages else []
    device.store(5, pages, state)
    plain.assert_state(device.load(5, pages), prompt_of(10))
    for slot in (INITIAL_SLOT, TRASH_SLOT, 4, 6):
        assert device.load(slot, []).num_tokens.tolist() == [0]
    for page in (0, 3, 5, 8, 10) if pages else ():
        assert not np.asarray(device.load(4, [page]).pools["pages"]).any()


def test_a_prompt_then_steps(device: Device, plain: Plain) -> None:
    prompts = [prompt_of(length, length) for length in (2, 9, 15, 16, 17)]
    sequences = [sequence_of(device, prompt, number) for number, prompt in enumerate(prompts)]
    device.set_lanes([new_lane(sequence, device.model) for sequence in sequences])
    for number, sequence in enumerate(sequences):
        read_prompt(device, sequence, 2 + number)
    output: list[list[int]] = [[] for _ in prompts]
    for turn in range(8):
        rows = [
            Row(sequence, len(sequence.tokens) - 1 + turn, 1, 2 + number, 2 + number, (0, 0))
            for number, sequence in enumerate(sequences)
        ]
        sampled = step(device, rows, 8)
        assert np.asarray(sampled.live).tolist() == [True] * 5 + [False] * 3
        assert np.asarray(sampled.exhausted)[:5].tolist() == [turn == 7] * 5
        for row, token_id in zip(output, np.asarray(sampled.token).tolist(), strict=False):
            row.append(token_id)
    for prompt, row in zip(prompts, output, strict=True):
        plain.assert_greedy(prompt, row)


def test_rows_that_are_done_leave_everything_as_it_was(device: Device) -> None:
    sequence = sequence_of(device, [5, 6], 0, max_tokens=1)
    device.set_lanes([new_lane(sequence, device.model)])
    read_prompt(device, sequence, 7)
    row = Row(sequence, 1, 1, 7, 7, (0, 0))
    assert np.asarray(step(device, [row], 1).exhausted).tolist() == [True]
    pages = sequence.pages[:1]
    before, lanes = device.load(7, pages), np.asarray(device.lanes.token).tolist()
    assert np.asarray(step(device, [row], 1).live).tolist() == [False]
    after = device.load(7, pages)
    for name, leaf in before.leaves.items():
        np.testing.assert_array_equal(after.leaves[name], leaf)
    assert after.num_tokens.tolist() == [2] and np.asarray(device.lanes.token).tolist() == lanes
    for name, pool in before.pools.items():
        np.testing.assert_array_equal(after.pools[name], pool)


def test_rows_may_move_to_other_slots_many_at_once(device: Device, plain: Plain) -> None:
    count = NUM_LANES - 1
    assert count > COPY_ROWS and count > ADMIT_ROWS
    sequences = [sequence_of(device, prompt_of(12, number), number) for number in range(count)]
    device.set_lanes([new_lane(sequence, device.model) for sequence in sequences])
    for number, sequence in enumerate(sequences):
        read_prompt(device, sequence, 2 + number)
    rows = [
        Row(sequence, 11, 1, 2 + number, 2 + (number + count) % (2 * count), (0, 0))
        for number, sequence in enumerate(sequences)
    ]
    sampled = step(device, rows, 16)
    for number, sequence in enumerate(sequences):
        plain.assert_greedy(sequence.tokens, [np.asarray(sampled.token).tolist()[number]])
        plain.assert_state(device.load(2 + number, sequence.pages[:3]), sequence.tokens[:-1])
        plain.assert_state(device.load(2 + count + number, sequence.pages[:3]), sequence.tokens)


def test_shared_pages_are_copied_before_they_are_written(device: Device, plain: Plain) -> None:
    if not device.sizes.num_pages:
        pytest.skip("this family has no pages")
    prompt = prompt_of(11)
    parent = sequence_of(device, prompt, 0)
    read_prompt(device, parent, 2)
    children = [sequence_of(device, [7 + number], 1 + number) for number in range(10)]
    rows = []
    for number, child in enumerate(children):
        child.origin = Origin(2, tuple(parent.pages[:3]), 10)
        own, child.pages = child.pages, [*parent.pages[:2], *child.pages[:-2]]
        rows.append(Row(child, 0, 1, 2, 3 + number, (parent.pages[2], own[0])))
    device.set_lanes([new_lane(child, device.model) for child in children])
    step(device, rows, 16)
    for number, child in enumerate(children):
        plain.assert_state(device.load(3 + number, child.pages[:3]), [*prompt[:-1], 7 + number])
    plain.assert_state(device.load(2, parent.pages[:3]), prompt[:-1])


def test_scores_are_made_when_asked_for(device: Device, plain: Plain) -> None:
    prompt = prompt_of(14)
    silent = read_prompt(device, sequence_of(device, prompt, 0), 2)
    assert not np.asarray(silent.logprob).any()
    scores = read_prompt(device, sequence_of(device, prompt, 1, prompt_logprobs=True), 3)
    expected = plain.log_probs(prompt, 1)
    assert_near(scores.logprob[0, :13], expected[np.arange(13), prompt[1:]])
    assert_near(scores.top_logprobs[0, :13, 0], expected.max(axis=-1))


def test_history_marks_prompts_of_any_length(device: Device) -> None:
    device.add_history(3, [4, 5, 4])
    device.add_history(3, [9] * HISTORY_CHUNK + [11])
    device.add_history(4, [])
    words = np.asarray(device.lanes.history)
    assert np.flatnonzero(words[3]).tolist() == [4, 5, 9, 11] and set(words[3][[4, 5, 9, 11]]) == {IN_PROMPT}
    assert not words[[1, 2, 4]].any()


def test_a_new_lane_forgets_the_last_ones_history(device: Device) -> None:
    device.add_history(1, [4, 5])
    device.set_lanes([new_lane(sequence_of(device, [5, 6], 0), device.model)])
    assert not np.asarray(device.lanes.history)[1].any()
    assert np.asarray(device.lanes.done).tolist() == [True, False, *[True] * (NUM_LANES - 2)]


def test_costs_are_known_once_measured() -> None:
    device = Device(model_named("rwkv7"), Sizes(4, 0, 3, 0))
    assert device.cost_s(1, 1) is None
    progress: list[tuple[int, int]] = []
    device.compile([(1, 1), (1, 4)], progress=lambda done, total: progress.append((done, total)))
    total = progress[-1][1]
    assert progress == [(done, total) for done in range(1, total + 1)]
    device.compile([(1, 1)], progress=lambda done, total: pytest.fail("it was compiled again"))
    device.calibrate([(1, 1), (1, 4)])
    for shape in ((1, 1), (1, 4)):
        cost_s = device.cost_s(*shape)
        assert cost_s is not None and 0 < cost_s < 60
