"""Reserves the GPU memory of a run, and checks that its replay memory fits.

GPU memory is reserved before compilation, and again once XLA knows the exact size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rollmill.core.errors import UsageError
from rollmill.core.machine import device_memory, memory_bytes
from rollmill.core.text import format_bytes
from rollmill.dataflow import Graph, State, collect, empty_experience, tree_bytes
from rollmill.gpus.claims import claim_memory
from rollmill.gpus.memory_limit import takes_as_needed
from rollmill.programs.compiled import CompiledProgram
from rollmill.programs.states import reuses_memory, state_bytes, state_shapes

SHARE = 0.8
"""Share of a device's memory that the replay memory may take. The rest is left to programs and their arrays."""

ROOM_BYTES = 2**28
"""Bytes of a checkpoint message that are left to environments and the learner, beside the replay memory."""


class ReplaySize(NamedTuple):
    """Size of a replay memory in steps and bytes."""

    steps: int
    """Number of steps that the memory of one seed holds, over all environments."""
    total: int
    """Bytes of the memory, over all environments and seeds."""

    @property
    def of_a_step(self) -> float:
        """Bytes that one step of one seed takes."""
        return self.total / self.steps

    def __str__(self) -> str:
        return (
            f"replay memory: {self.steps:,} steps of {self.of_a_step:,.0f} bytes, {format_bytes(self.total)}, "
            "saved in each checkpoint"
        )


def claim_before_compiling(graph: Graph, *, seeds: Sequence[int], devices: Sequence[Any]) -> None:
    """Reserves the minimum memory of a run on each device: its states and the trajectory of an iteration.

    Raises a `DeviceMemoryError` if this memory is not free.
    """
    if claims_memory(devices):
        need = least_bytes(graph, seeds=seeds, devices=len(devices))
        claim_memory(need, what=f"{_sizes(graph)} needs", devices=len(devices))


def claim_compiled(graph: Graph, program: CompiledProgram) -> None:
    """Reserves the memory of a compiled training program: arguments, temporary arrays, and the next state.

    Raises a `DeviceMemoryError` if this memory is not free.
    """
    memory: Any = program.step.memory_analysis() if claims_memory(program.devices) else None
    if memory is not None:
        results = memory.output_size_in_bytes - (0 if program.copies_state else memory.alias_size_in_bytes)
        need = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
        need = max(0, need - _idle_bytes(program.devices[0]))
        claim_memory(need, what=f"{_sizes(graph)} needs", devices=len(program.devices))


def least_bytes(graph: Graph, *, seeds: Sequence[int], devices: int) -> int:
    """Returns the bytes of states and trajectory on each device. A state that is not donated counts twice."""
    state = state_shapes(graph, seeds)
    states = state_bytes(state, devices=devices) * (1 if reuses_memory(graph, state, devices=devices) else 2)
    one = state_shapes(graph, seeds[:1])
    trajectory = jax.eval_shape(lambda state: _trajectory(graph, state), one)
    return int(states + tree_bytes(trajectory) * len(seeds) / devices)


def claims_memory(devices: Sequence[Any]) -> bool:
    """Returns whether memory on these devices is allocated on demand, so that other programs may take it first."""
    return devices[0].platform == "gpu" and takes_as_needed()


def replay_size(graph: Graph, *, num_seeds: int = 1) -> ReplaySize | None:
    """Returns the size of a graph's replay memory, or None if it has none. Nothing is allocated."""
    if graph.replay is None:
        return None
    index = jax.ShapeDtypeStruct((graph.loops.num_envs,), jnp.int32)
    rings = jax.eval_shape(partial(empty_experience, graph), index)
    return ReplaySize(graph.replay.capacity * graph.loops.num_envs, tree_bytes(rings) * num_seeds)


def check_message_size(size: ReplaySize, *, place: str, replicas: int) -> None:
    """Checks that workers can send their parts of a replay memory, each in one message of a checkpoint.

    Raises a `UsageError` if a message would be too large. The error names its bytes and sizes that would fit.
    """
    parts = {"program": 0, "threads": 0, "mesh": 1}.get(place, replicas)
    if not parts:
        return
    from rollmill.processes.framing import LIMITS  # not needed by a run in one process

    limit = LIMITS.array_bytes - ROOM_BYTES
    if size.total / parts <= limit:
        return
    fits = int(size.steps * limit * parts / size.total)
    raise UsageError(
        f"the replay memory of {size.steps:,} steps takes {format_bytes(size.total)}, but workers with "
        f"place={place} save it in messages of at most {format_bytes(limit)}. hint: use buffer_size={fits}, "
        "which would fit, or place=program."
    )


def check_replay_size(size: ReplaySize, *, devices: Sequence[Any], replicas: int) -> None:
    """Checks that a replay memory, divided among replicas, fits into memory. Nothing is allocated.

    Raises a `UsageError` if it does not fit. The error names its bytes and sizes that would fit.
    """
    on_host = devices[0].platform == "cpu"
    # A checkpoint is a copy, which lies in the host's memory beside the replay memory of replicas on CPUs.
    needed = 2 * size.total if on_host else size.total / min(replicas, len(devices))
    limit = memory_bytes() if on_host else device_memory(devices[0])
    if limit is None or needed <= SHARE * limit:
        return
    fits = int(size.steps * SHARE * limit / needed)
    where = "this machine" if on_host else "each device"
    copies = ", and the same again while a checkpoint is written," if on_host else ""
    raise UsageError(
        (
            f"the replay memory of {size.steps:,} steps takes {format_bytes(size.total)}{copies} but {where} has "
            f"{format_bytes(limit)}. hint: buffer_size={fits} would fit"
        )
        + ("." if on_host else ", or more devices.")
    )


def _idle_bytes(device: Any) -> int:
    """Returns the bytes of a device that this process holds but does not use, such as memory of timed kernels."""
    stats = device.memory_stats() or {}
    return max(0, stats.get("pool_bytes", 0) - stats.get("bytes_in_use", 0))


def _trajectory(graph: Graph, state: State) -> Any:
    return collect(graph, graph.weights(state.learner), state.collector, state.key)[1]


def _sizes(graph: Graph) -> str:
    return f"a run with num_envs x num_steps = {graph.loops.num_envs} x {graph.loops.num_steps}"
