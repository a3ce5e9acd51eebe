"""The generated dialogues: repeatable, well formed, weighted where the answers are, and split for good."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from experiments.demo_model import batches, cases, corpus, dialogues, facts, words
from experiments.demo_model.corpus import Work
from experiments.demo_model.dialogues import ANSWER, Plan, Prose

PHASE = batches.Phase(until=1.0, num_rows=3, length=1024, max_facts=8, max_filler_bytes=300, prose_share=0.3)


@pytest.fixture
def prose() -> Prose:
    line = b"The quick brown fox jumps over the lazy dog, and nobody sees it.\n"
    return Prose(
        [Work("a", "shakespeare", line * 200), Work("b", "bible", line[::-1].strip() + b"\n" + line * 200)]
    )


def test_batches_depend_on_seed_and_step_alone(prose: Prose) -> None:
    first = batches.make_batch(3, 7, PHASE, prose)
    again = batches.make_batch(3, 7, PHASE, prose)
    np.testing.assert_array_equal(first.text, again.text)
    np.testing.assert_array_equal(first.weights, again.weights)
    for seed, step in ((3, 8), (4, 7)):
        assert not np.array_equal(first.text, batches.make_batch(seed, step, PHASE, prose).text)


def test_rows_are_full_and_ascii(prose: Prose) -> None:
    batch = batches.make_batch(0, 0, PHASE, prose)
    assert batch.text.shape == batch.weights.shape == (3, 1025)
    assert batch.text.max() < 128
    assert (batch.weights > 0).mean() > 0.98


def test_answer_weights_cover_answers_and_nothing_else(prose: Prose) -> None:
    num_answers = 0
    for seed in range(40):
        document = dialogues.make_dialogue(random.Random(seed), Plan(4, 200, 2000), prose, "train")
        assert document is not None and len(document.text) == len(document.weights) <= 2000
        heavy = np.frombuffer(bytes(document.weights), np.uint8) == ANSWER
        edges = np.flatnonzero(np.diff(np.concatenate([[0], heavy.astype(int), [0]])))
        for start, end in edges.reshape(-1, 2):
            assert document.text[:start].endswith(b"\nBot: ")
            assert document.text[start:end].count(b"\n") == 1 and document.text[end - 1 : end] == b"\n"
            num_answers += 1
    assert num_answers > 100


def test_every_asked_answer_was_told_before(prose: Prose) -> None:
    for seed in range(40):
        case = cases.make_case(random.Random(seed), prose, "recall", 8, 500, 4)
        assert len(case.asks) == 4
        for question, answer in case.asks:
            assert re.fullmatch(rb"User: .+\nBot:", question) and re.fullmatch(rb" .+\n", answer)
            assert answer.strip().lower() in case.context.lower()


def test_filler_has_the_length_asked_for(prose: Prose) -> None:
    for num_bytes in (0, 1, 100, 1000, 4000):
        document = dialogues.Document()
        dialogues.add_filler(document, random.Random(num_bytes), prose, num_bytes, 0.5)
        assert num_bytes <= len(document) < num_bytes + 250


def test_corrected_and_unknown_cases(prose: Prose) -> None:
    corrected = cases.make_case(random.Random(0), prose, "corrected", 8, 100, 3)
    assert all(answer.strip() in corrected.context for _, answer in corrected.asks)
    unknown = cases.make_case(random.Random(0), prose, "unknown", 8, 100, 3)
    assert [answer for _, answer in unknown.asks] == [b" I do not know.\n"] * 3


def test_open_words_of_the_splits_never_meet() -> None:
    rng = random.Random(0)
    for make in (words.word, words.name, words.town, words.code, words.person):
        train = {make(rng, "train").lower() for _ in range(2000)}
        test = {make(rng, "test").lower() for _ in range(300)}
        assert not train & test
        assert all(words.split_of(item) == "test" for item in test)


def test_facts_of_a_dialogue_have_distinct_keys_and_questions() -> None:
    for seed in range(50):
        some = facts.make_facts(random.Random(seed), 20, "train")
        assert len({fact.key for fact in some}) == 20
        asked = [question for fact in some for question in set(fact.questions)]
        assert len(asked) == len(set(asked))


def test_correction_changes_the_answer() -> None:
    rng = random.Random(5)
    for fact in facts.make_facts(rng, 30, "train"):
        sentence, changed = fact.corrected(rng, "train")
        assert changed.answer != fact.answer and changed.answer.lower() in sentence.lower()
        assert changed.questions == fact.questions


def test_phases_follow_each_other() -> None:
    early, late = PHASE, batches.Phase(1.0, 1, 64, 1, 10, 0.5)
    phases = (batches.Phase(0.5, 3, 1024, 8, 300, 0.3), late)
    assert [batches.phase_at(phases, step, 10) is late for step in range(10)] == [False] * 5 + [True] * 5
    assert batches.phase_at((early,), 9, 10) is early


def test_held_out_works_are_whole_and_apart() -> None:
    works = [Work(name, "bible", b"x") for name in (*corpus.HELD_OUT, "kjv-01", "hamlet_gut")]
    train = {work.name for work in corpus.select(works, "train")}
    test = {work.name for work in corpus.select(works, "test")}
    assert train == {"kjv-01", "hamlet_gut"} and test == corpus.HELD_OUT


def test_a_missing_archive_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"shakespeare-0\.6"):
        corpus.load_works(tmp_path)
