from __future__ import annotations

import pytest

from wkvm_jax.engine.request import Request, SamplingParams
from wkvm_jax.engine.sequence import Origin, Sequence

ORIGIN = Origin(slot=5, pages=(2, 3), num_tokens=7)


def sequence(length: int = 4, max_tokens: int = 3, **fields: object) -> Sequence:
    request = Request("r", lambda: None)
    return Sequence(request, SamplingParams(max_tokens=max_tokens), list(range(length)), ORIGIN, **fields)


def test_a_sequence_ends_at_a_length_known_from_the_start() -> None:
    assert sequence(length=4, max_tokens=3).max_length == 7 + 3 + 3
    assert sequence(length=1, max_tokens=0).max_length == 7


@pytest.mark.parametrize("computed", range(6))
def test_the_last_prompt_token_is_left_to_the_first_sampling_step(computed: int) -> None:
    one = sequence(length=4)
    one.num_computed = computed
    assert one.num_to_prefill == max(3 - computed, 0)


def test_output_begins_after_the_prompt() -> None:
    one = sequence(length=2)
    assert one.output_ids == []
    one.tokens += [8, 9]
    assert one.num_prompt == 2 and one.output_ids == [8, 9]


def test_a_child_is_ready_when_its_parent_is_consumed() -> None:
    parent = Sequence(None, SamplingParams(max_tokens=0), [1, 2, 3], ORIGIN)
    child = sequence(length=1, parent=parent)
    assert parent.is_prefix and not child.is_prefix
    assert not child.ready
    parent.num_computed = 2
    assert child.ready and sequence().ready


def test_only_a_named_state_is_kept() -> None:
    assert sequence(save_as="a").keeps_state and not sequence().keeps_state


def test_spans_record_cuts_of_prefill_and_join_decode_steps() -> None:
    one = sequence(length=70)
    for length, kind in ((64, "prefill"), (5, "prefill"), (1, "decode"), (1, "decode"), (1, "decode")):
        one.add_span(length, kind)
        one.num_computed += length
    assert one.spans == [(7, 64, "prefill"), (71, 5, "prefill"), (76, 3, "decode")]


def test_sequences_are_told_apart_by_identity() -> None:
    one, other = sequence(), sequence()
    assert one != other and one in [other, one] and [other, one].index(one) == 1
