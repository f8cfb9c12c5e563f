"""Backends: makers of kernels, each for a kind of device.

`triton` writes Triton's language for NVIDIA's GPUs, `cpu` machine code by LLVM. Both take the steps of `kernels`.
"""

from typing import Any

from rollmill.core.errors import UsageError
from rollmill.core.numerics import Numerics
from rollmill.fusion.backends.base import AnyLaunch, Backend, check_package
from rollmill.fusion.backends.cpu.launches import machine_code
from rollmill.fusion.backends.triton.launches import hopeless_on_gpu, triton_kernels

__all__ = ["AnyLaunch", "Backend", "backend_of", "check_package", "hopeless_on_gpu", "machine_code"]


def backend_of(device: Any, numerics: Numerics) -> Backend:
    """The backend of a device; `numerics` is for products on GPUs, those on CPUs are exact.

    Raises:
        UsageError: the device has no backend.
    """
    backends = {"gpu": lambda: triton_kernels(numerics), "cpu": machine_code}
    if device.platform not in backends:
        raise UsageError(f"there are kernels for gpu and cpu, not for {device.platform}.")
    return backends[device.platform]()
