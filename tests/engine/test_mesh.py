"""An engine over a mesh of 8 simulated devices does what one on a single device does."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.engine.engines import CONFIG, model_named, start
from wkvm_jax.engine.placement import Placement
from wkvm_jax.errors import MeshError

ROOT = Path(__file__).parent.parent.parent
SHAPES = {"rwkv7": [[8, 1], [4], [2, 4]], "toy": [[2, 1]]}
"""Sizes of the axes data and model, or of model alone."""


def output_of(program: str, name: str, shapes: list[list[int]]) -> dict[str, object]:
    """What one of the programs beside this file says of 8 simulated devices."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", f"tests.engine.{program}", name, json.dumps(shapes)]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    result: dict[str, object] = json.loads(run.stdout.splitlines()[-1])
    return result


@functools.cache
def told(name: str) -> dict[str, dict[str, object]]:
    return output_of("mesh_program", name, [*SHAPES[name], [5]])


@pytest.mark.parametrize(("name", "shape"), [(name, s) for name, shapes in SHAPES.items() for s in shapes])
def test_the_same_tokens_as_on_one_device(name: str, shape: list[int]) -> None:
    alone, spread = told(name)["none"], told(name)[str(shape)]
    assert spread["tokens"] == alone["tokens"]
    assert spread["leaves"] == pytest.approx(alone["leaves"], rel=1e-5)
    assert spread["lost"] == alone["lost"] == 0


def test_kernels_give_the_same_tokens_as_on_one_device() -> None:
    """Ampere's: JAX's interpreter has one table of barriers for all devices, so that kernels which wait for
    bulk copies, as Hopper's do, cannot be interpreted on several at once."""
    alone, spread = output_of("mesh_kernels_program", "float32", [[2, 2]]).values()
    assert all(len(tokens) == 2 for tokens in alone) and spread == alone


def test_a_mesh_that_does_not_divide_the_model_is_refused() -> None:
    refusal = "5 devices cannot share the 96 heads or channels of blocks.0.channel_mix.key"
    assert refusal in str(told("rwkv7")["[5]"])
    assert told("toy")["[5]"] == "toy models cannot be split over 'model' yet"


def test_axes_of_other_names_are_refused() -> None:
    with pytest.raises(MeshError, match=r"the mesh has axes \['batch'\]; name its axes 'data' and 'model'"):
        Placement(model_named("rwkv7"), jax.make_mesh((1,), ("batch",)))


def test_a_mesh_of_one_device_is_like_none() -> None:
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    with start(model_named("rwkv7"), CONFIG, mesh=mesh) as spread, start(model_named("rwkv7")) as alone:
        outputs = [engine.generate([[1, 2, 3]], max_tokens=5, ignore_eos=True) for engine in (spread, alone)]
    assert outputs[0][0].token_ids == outputs[1][0].token_ids
