"""The measurement of kernels runs, on tiny shapes and interpreted, and reports what it says."""

from __future__ import annotations

import json

import pytest

from experiments import bench_kernels
from wkvm_jax.kernels.products import workloads as product_workloads
from wkvm_jax.kernels.rwkv7 import workloads as decode_workloads


@pytest.fixture(autouse=True)
def quick_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "copy_bytes_per_s", lambda: 1e12)


def test_every_tiny_shape_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main(["--tiny", "--rounds", "1", "--rows", "8", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kernel"] for line in lines] == [group.name for group in product_workloads.TINY]
    for line, group in zip(lines, product_workloads.TINY, strict=True):
        assert line["floor_us"] == pytest.approx(group.weight_bytes / 1e6)
        assert line["times_floor"] == pytest.approx(line["us"] / line["floor_us"])


def test_the_table_says_what_it_was_measured_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main(["--tiny", "--rounds", "1", "--rows", "3"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert "hopper_interpreted kernels on" in head and "1.00 TB/s" in head
    assert len(rows) == 1 and rows[0].startswith("rwkv7 time mix")
    assert bench_kernels.main(["--tiny", "--rounds", "1", "--rows", "2"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    assert row.startswith("rwkv7 time mix, 130 tokens")


def test_the_largest_arena_needs_more_than_32_bits() -> None:
    workload = decode_workloads.PUBLISHED[-1]
    size = 1
    for length in workload.arena_shape:
        size *= length
    assert size > 2**31
