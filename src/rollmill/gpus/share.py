"""Decides this process's share of GPU memory before the JAX backend takes any.

By default JAX allocates three quarters of each GPU at once, or nearly all remaining memory. A second process then
finds no memory even for the handles of CUDA libraries, which JAX does not allocate. Here free memory is queried
first, and a process may allocate most of it on demand. Environment variables set by the user take precedence.
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
"""JAX's old and new name. It refuses to start with both."""
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
JAX_FRACTION = 0.75
"""JAX's own share, where nobody chooses."""
IN_USE = 0.92
"""Part of the free memory that a process may take. The rest is for what CUDA keeps beside JAX's part."""
MIN_FREE = 2**30
"""Free bytes of a GPU without which no process starts there: its context and the handles of libraries take about
600 MB on an H100 before a training has any array."""

_chosen: float | None = None
_as_needed = False
_memory: tuple[GpuMemory, ...] = ()
"""Answer from before the start of JAX's backend."""


def choose_fraction(fraction: float) -> None:
    """Chooses the share of each GPU's memory to take when the JAX backend starts.

    Raises a `UsageError` if it comes too late, if there is no GPU, or if a variable says otherwise.
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
def asked_memory() -> Iterator[None]:
    """Limits a JAX backend that starts inside to the free memory of GPUs, unless the user has chosen.

    Raises a `DeviceMemoryError` if there is too little, and names the processes that hold it.
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
    finally:  # children decide for themselves
        for name in variables:
            os.environ.pop(name, None)


def memory_variables(
    memory: Sequence[GpuMemory], environment: Mapping[str, str], fraction: float | None = None
) -> dict[str, str]:
    """Returns environment variables with which JAX allocates the free memory, or a `fraction` of it, except
    variables set by the user.

    `memory` is the memory of the GPUs that JAX will use, empty if unknown. Raises a `DeviceMemoryError` if too
    little is free.
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

    Raises a `DeviceMemoryError` otherwise, which names the processes that hold the memory.
    """
    for each in memory:
        if fraction * each.total > each.free - MIN_FREE / 2:
            fits = max(0.0, free_share(each))
            raise DeviceMemoryError(
                f"{name} allocates {format_bytes(int(fraction * each.total))} at once, and {each}. hint: "
                f"{fits:.2f} would fit, and without this option memory is allocated on demand."
            )


def free_share(memory: GpuMemory) -> float:
    """Returns the largest share of a GPU's total memory that a process may take, given its free memory."""
    return min(IN_USE * memory.free, memory.free - MIN_FREE / 2) / memory.total


def takes_gpus() -> bool:
    """Returns whether the JAX backend will use NVIDIA GPUs, as far as known before it starts."""
    first = (jax.config.values["jax_platforms"] or "").split(",")[0].strip() or "cuda"
    return first in ("cuda", "gpu") and driver_is_there() and jax_has_cuda()


def takes_as_needed() -> bool:
    """Returns whether this process allocates GPU memory on demand. Known once the JAX backend has started."""
    return _as_needed


def memory_notes() -> list[str]:
    """Describes each GPU in use by other processes when the JAX backend started."""
    return [
        f"{each}; free memory is allocated on demand" if _as_needed else str(each)
        for each in _memory
        if each.total - each.free > MIN_FREE
    ]


def backend_has_started() -> bool:
    """Returns whether the JAX backend has started, and so has its memory."""
    from jax._src import xla_bridge  # JAX tells it nowhere else

    return xla_bridge.backends_are_initialized()
