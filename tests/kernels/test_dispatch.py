"""Which kernels are chosen, and what is said of those that cannot run."""

from __future__ import annotations

import dataclasses

import jax
import pytest

import wkvm_jax
from tests.families import RWKV7_CONFIG, toy
from wkvm_jax.errors import KernelUnavailableError
from wkvm_jax.kernels.dispatch import choose_kernels
from wkvm_jax.models import rwkv7


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """As much of a device as the choice looks at."""

    platform: str
    device_kind: str
    compute_capability: str = ""


H200 = FakeDevice("gpu", "NVIDIA H200", "9.0")
RTX4090 = FakeDevice("gpu", "NVIDIA GeForce RTX 4090", "8.9")
B200 = FakeDevice("gpu", "NVIDIA B200", "10.0")
T4 = FakeDevice("gpu", "Tesla T4", "7.5")
MI300 = FakeDevice("gpu", "AMD Instinct MI300X", "gfx942")
CPU = FakeDevice("cpu", "cpu")


@pytest.mark.parametrize(
    ("device", "best"),
    [(H200, "hopper"), (RTX4090, "ampere"), (B200, "ampere"), (T4, "xla"), (MI300, "xla"), (CPU, "xla")],
)
def test_the_best_that_runs_is_chosen(device: FakeDevice, best: str) -> None:
    assert choose_kernels("auto", device) == best
    assert choose_kernels(best, device) == best
    assert choose_kernels("xla", device) == "xla"


@pytest.mark.parametrize(
    ("requested", "device", "reason"),
    [
        ("hopper", RTX4090, "compute capability 9.0, and NVIDIA GeForce RTX 4090 has 8.9"),
        ("hopper", B200, "compute capability 9.0, and NVIDIA B200 has 10.0"),
        ("ampere", T4, "8.0 or newer, and Tesla T4 has 7.5"),
        ("ampere", MI300, "an NVIDIA GPU, and this is AMD Instinct MI300X"),
        ("hopper", CPU, "an NVIDIA GPU, and this is a cpu"),
        ("fastest", CPU, "no such choice; there are auto, xla"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(requested: str, device: FakeDevice, reason: str) -> None:
    with pytest.raises(KernelUnavailableError, match=reason):
        choose_kernels(requested, device)


def test_a_model_that_does_not_fit_runs_on_xla_unless_kernels_are_asked_for() -> None:
    fault = rwkv7.kernel_misfit(RWKV7_CONFIG)
    assert fault is not None and "num_keys=16 and num_values=32" in fault
    assert choose_kernels("auto", H200, misfit=fault) == choose_kernels("xla", H200, misfit=fault) == "xla"
    with pytest.raises(
        KernelUnavailableError, match="heads must have a multiple of 64 keys and of 64 values"
    ):
        choose_kernels("hopper", H200, misfit=fault)
    assert toy.TOY.kernel_misfit(toy.Config()) == "this family has no kernels yet"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs a machine without GPU")
def test_loading_says_so_too() -> None:
    assert wkvm_jax.load("demo").kernels == "xla"
    with pytest.raises(KernelUnavailableError, match="kernels 'hopper': they need an NVIDIA GPU"):
        wkvm_jax.load("demo", kernels="hopper")
