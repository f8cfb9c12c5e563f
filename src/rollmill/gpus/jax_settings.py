"""Checks the JAX settings of this process, and sets the dtype promotion that other packages rely on."""

import contextlib
import os
from collections.abc import Iterator

import jax

from rollmill.core.errors import UsageError
from rollmill.gpus.device_errors import known_device_error
from rollmill.gpus.memory_limit import limited_gpu_memory


def check_jax() -> None:
    """Checks the JAX precision and platform, and starts the JAX backend.

    Raises a `UsageError` if 64-bit mode is enabled, or if the platform is not available.
    """
    if jax.config.values["jax_enable_x64"]:
        raise UsageError(
            "JAX is set to 64 bits (JAX_ENABLE_X64, or jax_enable_x64), but Rollmill trains in 32 bits. hint: "
            "unset JAX_ENABLE_X64, or call jax.config.update('jax_enable_x64', False)."
        )
    check_platform()


def check_platform() -> None:
    """Starts the JAX backend, and limits it to a share of the free GPU memory.

    Raises a `UsageError` if JAX is configured for a platform that is not available, and a `DeviceMemoryError` if a
    GPU has too little free memory.
    """
    try:
        with limited_gpu_memory():
            jax.default_backend()
    except RuntimeError as error:
        if (known := known_device_error(error, starting=True)) is not None:
            raise known from error
        chosen = jax.config.values["jax_platforms"]
        name = "JAX_PLATFORMS" if chosen == os.environ.get("JAX_PLATFORMS") else "jax_platforms"
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"JAX cannot start with {name}={chosen}: {reason} hint: unset {name}, or set it to cpu. For NVIDIA "
            "GPUs, install the JAX CUDA packages with `pip install -e '.[cuda]'`, and check for free memory "
            "with nvidia-smi."
        ) from error


def check_compiled() -> None:
    """Raises a `UsageError` if JAX_DISABLE_JIT is set, since JAX would then interpret every operation."""
    if jax.config.values["jax_disable_jit"]:
        raise UsageError(
            "JAX_DISABLE_JIT is set, so each operation would run separately, and training would be thousands of "
            "times slower. hint: unset it. To find the line of an error, use rollmill.check_environment or "
            "`rollmill doctor RUN`."
        )


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Context manager that sets the standard JAX promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
