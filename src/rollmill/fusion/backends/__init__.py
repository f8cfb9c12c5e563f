"""Kernel backends, each for one kind of device.

`triton` generates Triton source for NVIDIA GPUs, and `cpu` generates machine code through LLVM. They compile the
same programs of `fusion.kernels`.
"""

from typing import Any

from rollmill.core.errors import UsageError
from rollmill.core.machine import Numerics
from rollmill.fusion.backends.base import Backend


def backend_for(device: Any, numerics: Numerics) -> Backend:
    """Returns the kernel backend for a device, importing it first.

    `numerics` is the precision of matrix products on GPUs. CPU kernels always use float32.

    Raises:
        UsageError: no backend supports the device.
    """
    if device.platform == "gpu":
        from rollmill.fusion.backends.triton.launches import triton_backend

        return triton_backend(numerics)
    if device.platform == "cpu":
        from rollmill.fusion.backends.cpu.launches import cpu_backend

        return cpu_backend()
    raise UsageError(f"there are no kernels for {device.platform}, only for gpu and cpu.")
