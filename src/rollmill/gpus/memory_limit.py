"""Limits how much GPU memory this process may allocate, before the JAX backend starts.

By default, JAX allocates three quarters of each GPU at once, or nearly all remaining memory. A second process then
has no memory left, not even for the handles of CUDA libraries. Here, the free memory is queried first, and the
process may allocate most of it on demand. Environment variables set by the user take precedence.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

import jax

from rollmill.core.errors import DeviceMemoryError, UsageError
from rollmill.core.text import format_bytes
from rollmill.gpus.claims import ask_gpu_memory
from rollmill.gpus.devices import driver_is_there, jax_has_cuda
from rollmill.gpus.memory import HINT, GpuMemory

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
FRACTIONS = (FRACTION, "XLA_CLIENT_MEM_FRACTION")
"""Old and new name of the JAX variable for the memory fraction. JAX fails to start if both are set."""
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
JAX_FRACTION = 0.75
"""Share of GPU memory that JAX allocates by default."""
IN_USE = 0.92
"""Share of the free memory that a process may allocate. The rest is left to memory that CUDA allocates outside
JAX.
"""
MIN_FREE = 2**30
"""Minimum free bytes of a GPU for a process to start. On an H100, the CUDA context and library handles take about
600 MB before a run has any array.
"""

_chosen: float | None = None
_as_needed = False
_memory: tuple[GpuMemory, ...] = ()
"""Memory of the GPUs before the backend of JAX started."""


def choose_fraction(fraction: float) -> None:
    """Sets the fraction of each GPU's memory that JAX allocates when its backend starts.

    Raises a `UsageError` if the backend has already started, if there is no GPU, or if an environment variable
    sets another fraction.
    """
    global _chosen
    name = f"memory_fraction={fraction:g}"
    if not takes_gpus():
        raise UsageError(f"{name} has no effect, because JAX uses no NVIDIA GPU here. hint: leave it out.")
    for variable in FRACTIONS:
        if os.environ.get(variable) not in (None, f"{fraction:g}"):
            raise UsageError(f"{name} contradicts {variable}={os.environ[variable]}. hint: leave one of them out.")
    if backend_has_started() and _chosen != fraction:
        raise UsageError(
            f"{name} has no effect, because JAX has already started and allocated its memory. hint: set "
            f"{FRACTION}={fraction:g} in the environment of this program."
        )
    _chosen = fraction


@contextlib.contextmanager
def limited_gpu_memory() -> Iterator[None]:
    """Context manager that limits a starting JAX backend to the free GPU memory, unless the user has set a limit.

    Raises a `DeviceMemoryError` if too little memory is free. The error names the processes that hold it.
    """
    if backend_has_started() or not takes_gpus():
        yield
        return
    global _as_needed, _memory
    _memory = ask_gpu_memory()
    variables = memory_variables(_memory, os.environ, _chosen)
    os.environ.update(variables)
    _as_needed = os.environ.get(PREALLOCATE, "true").lower() in ("false", "0")
    try:
        yield
    finally:  # child processes decide for themselves
        for name in variables:
            os.environ.pop(name, None)


def memory_variables(
    memory: Sequence[GpuMemory], environment: Mapping[str, str], fraction: float | None = None
) -> dict[str, str]:
    """Returns environment variables with which JAX allocates free memory, or a `fraction` of each GPU's memory.

    Variables that the user has set are left out. `memory` describes the GPUs that JAX will use, and is empty if
    unknown. Raises a `DeviceMemoryError` if too little memory is free.
    """
    for each in memory:
        if each.free < MIN_FREE:
            needed = f"a program needs {format_bytes(MIN_FREE)} of GPU memory before it allocates any array"
            raise DeviceMemoryError(f"{needed}, and {each}. {HINT}")
    given = next((environment[name] for name in FRACTIONS if name in environment), None)
    if fraction is not None:
        check_fraction(f"memory_fraction={fraction:g}", fraction, memory)
        return {} if given is not None else {FRACTION: f"{fraction:g}"}
    if given is not None:
        if environment.get(PREALLOCATE, "true").lower() not in ("false", "0"):
            with contextlib.suppress(ValueError):
                name = next(name for name in FRACTIONS if name in environment)
                check_fraction(f"{name}={given}", float(given), memory)
        return {}
    if environment.get(PREALLOCATE, "false").lower() not in ("false", "0"):
        check_fraction(f"{PREALLOCATE}={environment[PREALLOCATE]}", JAX_FRACTION, memory)
        return {}
    variables = {} if {PREALLOCATE, ALLOCATOR} & set(environment) else {PREALLOCATE: "false"}
    if memory:
        variables[FRACTION] = f"{min(map(free_share, memory)):.4f}"
    return variables


def check_fraction(name: str, fraction: float, memory: Sequence[GpuMemory]) -> None:
    """Checks that a fraction of each GPU is free, in addition to the memory that every process needs to start.

    Otherwise, raises a `DeviceMemoryError` that names the processes that hold the memory. `name` is the option
    that the message mentions.
    """
    for each in memory:
        if fraction * each.total > each.free - MIN_FREE / 2:
            fits = max(0.0, free_share(each))
            raise DeviceMemoryError(
                f"{name} allocates {format_bytes(int(fraction * each.total))} at once, but {each}. hint: "
                f"{fits:.2f} would fit. Without this option, memory is allocated on demand."
            )


def free_share(memory: GpuMemory) -> float:
    """Returns the largest share of a GPU's total memory that a process may take, given its free memory."""
    return min(IN_USE * memory.free, memory.free - MIN_FREE / 2) / memory.total


def takes_gpus() -> bool:
    """Returns whether the JAX backend will use NVIDIA GPUs, as far as this is known before it starts."""
    first = (jax.config.values["jax_platforms"] or "").split(",")[0].strip() or "cuda"
    return first in ("cuda", "gpu") and driver_is_there() and jax_has_cuda()


def takes_as_needed() -> bool:
    """Returns whether this process allocates GPU memory on demand. Valid once the JAX backend has started."""
    return _as_needed


def memory_notes() -> list[str]:
    """Returns a note for each GPU that other processes were using when the JAX backend started."""
    return [
        f"{each}; free memory is allocated on demand" if _as_needed else str(each)
        for each in _memory
        if each.total - each.free > MIN_FREE
    ]


def backend_has_started() -> bool:
    """Returns whether the JAX backend has started, and therefore already has its memory."""
    from jax._src import xla_bridge  # JAX has no public function for this

    return xla_bridge.backends_are_initialized()
