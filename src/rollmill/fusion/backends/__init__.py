"""Backends: makers of kernels, each for a kind of device.

`triton` writes Triton source for NVIDIA GPUs, `cpu` machine code by LLVM. Both take the steps of `kernels`.
"""

from typing import Any

from rollmill.core.errors import UsageError
from rollmill.core.machine import Numerics
from rollmill.fusion.backends.base import Backend


def backend_of(device: Any, numerics: Numerics) -> Backend:
    """Imports and returns the backend of a device. `numerics` is for products on GPUs, those on CPUs are exact.

    Raises:
        UsageError: the device has no backend.
    """
    if device.platform == "gpu":
        from rollmill.fusion.backends.triton.launches import triton_kernels

        return triton_kernels(numerics)
    if device.platform == "cpu":
        from rollmill.fusion.backends.cpu.launches import machine_code

        return machine_code()
    raise UsageError(f"there are no kernels for {device.platform}, only for gpu and cpu.")
