"""With `deterministic=True`, tokens and log-probabilities are equal bit for bit in any company."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from tests.engine.engines import DETERMINISTIC, outputs, prompt_of, wait_until
from wkvm_jax.config import DETERMINISTIC_CHUNK
from wkvm_jax.engine.engine import Engine
from wkvm_jax.engine.request import Output, Request, SamplingParams

LENGTHS = (1, 2, 3, 17, 40, 63, 64, 65, 66, 100, 127, 128, 129, 130, 150, 190, 5)
assert len(LENGTHS) == 17 and DETERMINISTIC_CHUNK == 64


@dataclasses.dataclass(frozen=True)
class Job:
    """One request of a test, greedy or drawn."""

    number: int

    @property
    def prompt(self) -> list[int]:
        return prompt_of(LENGTHS[self.number], self.number)

    @property
    def params(self) -> SamplingParams:
        drawn = self.number % 2
        return SamplingParams(
            max_tokens=6 + self.number % 5,
            ignore_eos=True,
            temperature=0.9 * drawn,
            top_p=0.9 if self.number % 3 else 1.0,
            seed=self.number,
            repetition_penalty=1.2 if self.number % 4 == 3 else 1.0,
            logprobs=2,
        )

    def submit(self, engine: Engine) -> Request:
        return engine.submit(self.prompt, params=self.params)


JOBS = [Job(number) for number in range(17)]


def run(engine: Engine, jobs: Sequence[Job]) -> dict[int, Output]:
    requests = [job.submit(engine) for job in jobs]
    return {job.number: output for job, output in zip(jobs, outputs(requests), strict=True)}


_alone: dict[str, dict[int, Output]] = {}


@pytest.fixture
def alone(family: str, deterministic_engine: Engine) -> dict[int, Output]:
    """What each job gives when nothing else runs."""
    if family not in _alone:
        _alone[family] = {
            number: one for job in JOBS for number, one in run(deterministic_engine, [job]).items()
        }
    return _alone[family]


def test_one_shape_for_decoding_and_one_for_prompts() -> None:
    assert DETERMINISTIC.decode_buckets == (32,) and DETERMINISTIC.prefill_buckets == (DETERMINISTIC_CHUNK,)


def test_alone_again(deterministic_engine: Engine, alone: dict[int, Output]) -> None:
    assert run(deterministic_engine, JOBS[:1]) == {0: alone[0]}
    assert run(deterministic_engine, JOBS[7:8]) == {7: alone[7]}


@pytest.mark.parametrize("seed", range(3))
def test_among_three(deterministic_engine: Engine, alone: dict[int, Output], seed: int) -> None:
    jobs = random.Random(seed).sample(JOBS, k=17)
    for first in range(0, 17, 3):
        some = jobs[first : first + 3]
        assert run(deterministic_engine, some) == {job.number: alone[job.number] for job in some}


@pytest.mark.parametrize("seed", range(4))
def test_among_seventeen_in_any_order_of_arrival(
    deterministic_engine: Engine, alone: dict[int, Output], seed: int
) -> None:
    jobs = random.Random(100 + seed).sample(JOBS, k=17)
    assert run(deterministic_engine, jobs) == alone


def test_joining_others_that_run(deterministic_engine: Engine, alone: dict[int, Output]) -> None:
    engine = deterministic_engine
    company = [engine.submit(prompt_of(9, seed), max_tokens=200, ignore_eos=True) for seed in range(5)]
    requests = []
    for job in JOBS:
        requests.append(job.submit(engine))
        wait_until(lambda latest=requests[-1]: latest.num_tokens > 0)
    assert dict(enumerate(outputs(requests))) == alone
    for request in company:
        request.cancel()


def test_more_than_there_are_rows(deterministic_engine: Engine, alone: dict[int, Output]) -> None:
    jobs = JOBS * 3
    results = outputs([job.submit(deterministic_engine) for job in jobs])
    assert results == [alone[job.number] for job in jobs]


@pytest.mark.parametrize("number", [3, 7, 11, 15])
def test_after_a_fork(deterministic_engine: Engine, alone: dict[int, Output], number: int) -> None:
    engine, job = deterministic_engine, JOBS[number]
    engine.states.create("parent", job.prompt)
    children = engine.states.fork("parent", "child", n=4)
    assert isinstance(children, list)
    handles = ["parent", *map(str, children), str(children[-1])]
    requests = [engine.submit([], state=handle, params=job.params) for handle in handles]
    others = [other.submit(engine) for other in JOBS[:6]]
    for output in outputs(requests):
        assert (output.token_ids, output.logprobs) == (alone[number].token_ids, alone[number].logprobs)
    assert dict(enumerate(outputs(others))) == {other: alone[other] for other in range(6)}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_after_a_snapshot(deterministic_engine: Engine, alone: dict[int, Output], temperature: float) -> None:
    engine, prompt = deterministic_engine, prompt_of(70, 5)
    params = SamplingParams(max_tokens=80, ignore_eos=True, temperature=temperature, seed=9, logprobs=1)
    whole = engine.submit(prompt, params=params).result(30)
    request = engine.submit(prompt, params=params)
    records = []
    for wanted in (1, 30, 50):
        wait_until(lambda wanted=wanted: request.num_tokens >= wanted)
        records.append(engine.states.snapshot(request, "photo"))
    continued = [
        engine.submit(
            [],
            state=record.handle,
            params=dataclasses.replace(params, max_tokens=len(prompt) + 80 - record.num_tokens),
        )
        for record in records
        if record.num_tokens < len(prompt) + 80
    ]
    others = [other.submit(engine) for other in JOBS[:6]]
    assert request.result(30) == whole and whole.logprobs is not None
    for output in outputs(continued):
        assert output.token_ids == whole.token_ids[-len(output.token_ids) :]
        assert output.logprobs == whole.logprobs[-len(output.token_ids) :]
    assert dict(enumerate(outputs(others))) == {other: alone[other] for other in range(6)}


def test_choices(deterministic_engine: Engine, alone: dict[int, Output]) -> None:
    engine, job = deterministic_engine, JOBS[9]
    few = outputs(engine.submit_choices(job.prompt, 2, params=job.params))
    company = [other.submit(engine) for other in JOBS[:4]]
    many = outputs(engine.submit_choices(job.prompt, 7, params=job.params))
    outputs(company)
    assert few[0] == alone[9] and many[:2] == few
    assert len({output.token_ids for output in many}) == 7


def test_a_resume_continues_what_was_kept(deterministic_engine: Engine) -> None:
    engine, prompt = deterministic_engine, prompt_of(100, 6)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=3, logprobs=0)
    whole = engine.submit(prompt, params=params).result(30)
    for first in (1, 2, 17):
        start = engine.submit(prompt, save_as="part", params=dataclasses.replace(params, max_tokens=first))
        handle = start.result(30).handle
        rest = engine.submit([], state=handle, params=dataclasses.replace(params, max_tokens=40 - first))
        assert start.result().token_ids + rest.result(30).token_ids == whole.token_ids
        assert whole.logprobs is not None and rest.result().logprobs == whole.logprobs[first:]
