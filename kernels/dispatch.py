"""Which implementation of the kernels runs: decided once, before anything is compiled."""

from __future__ import annotations

from typing import Literal, Protocol, cast, runtime_checkable

import jax

from wkvm_jax.errors import KernelUnavailableError

Kernels = Literal["xla", "ampere", "hopper", "ampere_interpreted", "hopper_interpreted"]
"""`xla` runs anywhere. `ampere` are Pallas Mosaic GPU kernels for NVIDIA GPUs of compute capability 8.0 and
newer; `hopper` adds those that need Hopper's matrix and copy instructions (9.0). Interpreted, they run on a
CPU, for tests at tiny shapes; on several simulated devices only Ampere's do, since JAX's interpreter has one
table of barriers for all devices, and Hopper's kernels wait at barriers for their copies."""

KERNELS: tuple[Kernels, ...] = ("xla", "ampere", "hopper", "ampere_interpreted", "hopper_interpreted")
_LEAST_CAPABILITY = 8.0
_HOPPER = 9.0


@runtime_checkable
class Device(Protocol):
    """As much of a `jax.Device` as the choice looks at."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...


class _Gpu(Device, Protocol):
    """A device of platform "gpu" also has this."""

    @property
    def compute_capability(self) -> str: ...


def choose_kernels(
    requested: str = "auto", device: Device | None = None, *, misfit: str | None = None
) -> Kernels:
    """The implementation to use on a device.

    Args:
        requested: one of `KERNELS`, or "auto": the fastest that runs there.
        device: by default the first of JAX's default backend.
        misfit: why a model's shapes do not fit the Pallas kernels, if they do not.

    Raises:
        KernelUnavailableError: there is no such implementation, or it cannot run on the device; the message
            says why. Nothing is ever replaced silently.
    """
    device = device or jax.devices()[0]
    for kernels in KERNELS:
        if kernels == requested:
            obstacle = _obstacle(kernels, device, misfit)
            if obstacle is not None:
                raise KernelUnavailableError(requested, obstacle)
            return kernels
    if requested != "auto":
        raise KernelUnavailableError(requested, f"no such choice; there are auto, {', '.join(KERNELS)}")
    best: tuple[Kernels, ...] = ("hopper", "ampere")
    return next((kernels for kernels in best if _obstacle(kernels, device, misfit) is None), "xla")


def for_hopper(kernels: Kernels) -> bool:
    """Whether these may use what only Hopper has."""
    return kernels in ("hopper", "hopper_interpreted")


def interpreted(kernels: Kernels) -> bool:
    """Whether these run on a CPU, in JAX's interpreter."""
    return kernels in ("ampere_interpreted", "hopper_interpreted")


def _obstacle(kernels: Kernels, device: Device, misfit: str | None) -> str | None:
    """Why kernels cannot run a model on a device."""
    if kernels == "xla":
        return None
    if misfit is not None:
        return misfit
    if interpreted(kernels):
        return None
    if device.platform not in ("gpu", "cuda"):
        return f"they need an NVIDIA GPU, and this is a {device.platform} ({device.device_kind})"
    try:
        capability = float(cast(_Gpu, device).compute_capability)
    except ValueError:  # an AMD GPU's is a name, such as gfx942
        return f"they need an NVIDIA GPU, and this is {device.device_kind}"
    if kernels == "hopper" and capability != _HOPPER:
        return f"they need compute capability 9.0, and {device.device_kind} has {capability}"
    if capability < _LEAST_CAPABILITY:
        return f"they need compute capability 8.0 or newer, and {device.device_kind} has {capability}"
    return None
