"""What the compiler reports is read as it is written, and what is compiled has shapes that fit."""

from __future__ import annotations

import importlib.util
import json

import jax
import pytest

from experiments import compile_kernels
from experiments.compile_kernels import Compiled

REPORT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'token_shift_mosaic_gpu_kernel' for 'sm_89'
ptxas info    : Function properties for token_shift_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 92 registers, used 2 barriers, 1 bytes smem, 488 bytes cmem[0]
ptxas info    : Compiling entry function 'rwkv7_sum_up_mosaic_gpu_kernel' for 'sm_90a'
    56 bytes stack frame, 52 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 1 bytes smem
"""


def test_a_report_is_read() -> None:
    wanted = [Compiled("token_shift", "sm_89", 92, 0), Compiled("rwkv7_sum_up", "sm_90a", 255, 100)]
    assert compile_kernels.reported(REPORT + REPORT) == wanted
    assert compile_kernels.reported("") == []


@pytest.mark.parametrize(("kernels", "count"), [("ampere", 3), ("hopper", 14)])
def test_all_kernels_are_there_and_their_operands_fit(kernels: str, count: int) -> None:
    steps = list(compile_kernels.steps(kernels))
    assert len(steps) == count
    for step, operands in steps:
        assert jax.tree.leaves(jax.eval_shape(step, *operands))


def test_without_the_plugin_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        compile_kernels.main([])
    assert "pip install 'jax[cuda13]'" in capsys.readouterr().err


def test_kernels_compile_where_the_plugin_is(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs JAX's CUDA plugin, and no GPU")
    assert compile_kernels.main(["--arch", "8.9", "--json"]) == 0
    kernels = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == {"rwkv7_decode", "token_shift"}
    assert all(kernel["architecture"] == "sm_89" and kernel["registers"] <= 255 for kernel in kernels)
