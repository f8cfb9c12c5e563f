"""Computes the operations of a profiled run, and divides kernels that belong to several operations."""

from collections.abc import Iterator, Sequence

import jax

from rollmill.core.errors import first_line
from rollmill.fusion import CannotFuse, backend_for
from rollmill.profiler.kernel_parts import rollout_parts
from rollmill.profiler.library_kernels import measure_library_shares
from rollmill.profiling.breakdown import working_processes
from rollmill.profiling.classes import ROLLOUT_KERNEL_PATH
from rollmill.profiling.correction import EventCosts
from rollmill.profiling.results import UNNAMED, OperationTime
from rollmill.profiling.summary import ProcessWindows, divide, operations
from rollmill.programs.compiled import CompiledProgram
from rollmill.training.training import PreparedTraining

MAX_UNNAMED = 0.01
"""Share of the device time above which library kernels are divided among operations."""


def operations_of(
    prepared: PreparedTraining,
    processes: Sequence[ProcessWindows],
    costs: EventCosts,
    iteration: float,
    notes: list[str],
) -> list[OperationTime]:
    """Returns the operations of a run, with library kernels and rollout kernels divided among the operations that
    they compute.

    With workers, the coordinating process only waits, and is left out. `iteration` is the duration of an iteration
    without the profiler, in seconds. Sentences about approximate figures are appended to `notes`.
    """
    found = operations(working_processes(processes), costs, iteration)
    if prepared.program is None:
        notes += _not_divided(found)
        return found
    found = _with_libraries_divided(found, prepared, prepared.program, notes)
    return _with_rollouts_divided(found, prepared, prepared.program, notes)


def _not_divided(found: Sequence[OperationTime]) -> Iterator[str]:
    """Returns sentences about kernels that are divided among operations only if this process computes."""
    if _has_unnamed_kernels(found):
        yield f"Library kernels are divided only in a single program. In workers they appear as `{UNNAMED}`."
    if any(operation.path == ROLLOUT_KERNEL_PATH for operation in found):
        yield "A rollout kernel is divided into policy and environment only in a single program."


def _has_unnamed_kernels(found: Sequence[OperationTime]) -> bool:
    unnamed = sum(operation.device for operation in found if operation.path[0] == UNNAMED)
    whole = sum(operation.device for operation in found)
    return jax.default_backend() != "cpu" and unnamed > MAX_UNNAMED * whole


def _with_libraries_divided(
    found: list[OperationTime], prepared: PreparedTraining, program: CompiledProgram, notes: list[str]
) -> list[OperationTime]:
    if not _has_unnamed_kernels(found):
        return found
    try:
        shares = measure_library_shares(prepared, program)
    except jax.errors.JaxRuntimeError as error:
        notes.append(f"Library kernels are not divided among operations: {first_line(error)}")
        return found
    for kernel, parts in shares.items():
        found = divide(found, kernel, parts)
    notes.append("Library kernels are divided as in a program that starts each instruction separately.")
    return found


def _with_rollouts_divided(
    found: list[OperationTime], prepared: PreparedTraining, program: CompiledProgram, notes: list[str]
) -> list[OperationTime]:
    launch, graph, devices = (program.launches or {}).get("rollouts"), prepared.algorithm, program.devices
    if launch is None or all(operation.path != ROLLOUT_KERNEL_PATH for operation in found):
        return found
    backend = backend_for(devices[0], prepared.options.numerics)
    try:
        parts = rollout_parts(graph, backend, tuple(launch), graph.loops.num_envs // len(devices))
    except (CannotFuse, jax.errors.JaxRuntimeError) as error:
        notes.append(f"The rollout kernel is not divided into policy and environment: {first_line(error)}")
        return found
    notes.append("The parts of a rollout kernel are estimates, from timing kernels that lack one of them.")
    shares = {("collect", "environment"): parts.environment, ("collect", "policy"): parts.policy}
    return divide(found, ROLLOUT_KERNEL_PATH, {**shares, ROLLOUT_KERNEL_PATH: parts.rest})
