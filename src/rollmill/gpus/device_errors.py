"""Translates JAX errors about devices: too little memory, or a lost device."""

import sys
from collections.abc import Sequence

from rollmill.core.errors import DeviceLostError, DeviceMemoryError, RollmillError, first_line
from rollmill.gpus.claims import ask_gpu_memory
from rollmill.gpus.memory import HINT, GpuMemory

MEMORY = ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "out of memory", "STATUS_ALLOC_FAILED")
"""Phrases that identify error messages about too little memory."""
HANDLES = (
    "solverDnCreate",
    "cuSolver internal error",
    "CUSOLVER_STATUS_NOT_INITIALIZED",
    "CUSOLVER_STATUS_INTERNAL_ERROR",
    "cublasCreate",
    "cublasLtCreate",
    "cublas handle",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "cudnnCreate",
    "cudnn handle",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "DNN library",
    "Failed to get configs",
    "CUFFT_ALLOC_FAILED",
    "CUFFT_INTERNAL_ERROR",
)
"""Phrases in messages of CUDA libraries that could not start, usually because memory is lacking."""
HANDLE_BYTES = 2 * 2**30
"""Free bytes of a GPU with which CUDA libraries can start. If more are free, an error has another cause."""
LOST = "CUDA_ERROR_"
"""Common beginning of the names of CUDA driver errors after which no program can run any more."""


def known_device_error(
    error: BaseException, *, what: str = "the device does not have enough memory", starting: bool = False
) -> RollmillError | None:
    """Translates a JAX error about a device, or returns None for any other error.

    If memory is lacking, the message begins with `what`. Set `starting` while the JAX backend starts, because JAX
    then raises built-in Python errors.
    """
    if not (starting or _is_of_jax(error)):
        return None
    text, line = str(error), first_line(error)
    if any(sign in text for sign in MEMORY):
        return DeviceMemoryError(_memory_message(what, line, ask_gpu_memory()))
    if any(sign.lower() in text.lower() for sign in HANDLES):
        memory = ask_gpu_memory()
        if not memory or any(each.free < HANDLE_BYTES for each in memory):
            return DeviceMemoryError(_memory_message(what, line, memory))
    if LOST in text:
        return DeviceLostError(
            f"a GPU failed: {line}. hint: resume from the newest checkpoint with `rollmill resume`."
        )
    return None


def _memory_message(what: str, line: str, memory: Sequence[GpuMemory]) -> str:
    told = " ".join(f"{each}." for each in memory)
    return f"{what} ({line})" + (f" {told} {HINT}" if told else "")


def _is_of_jax(error: BaseException) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(error, jax.errors.JaxRuntimeError)
