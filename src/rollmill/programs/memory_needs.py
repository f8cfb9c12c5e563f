"""Reserves the GPU memory of a run, before compilation and again once XLA knows the exact size."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from rollmill.dataflow import Graph, State, collect
from rollmill.gpus.claims import claim_memory
from rollmill.gpus.share import takes_as_needed
from rollmill.programs.compiled import CompiledProgram, reuses_memory, state_bytes, state_shapes


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
    return int(states + _bytes_of(trajectory) * len(seeds) / devices)


def claims_memory(devices: Sequence[Any]) -> bool:
    """Returns whether memory on these devices is allocated on demand, so that other programs may take it first."""
    return devices[0].platform == "gpu" and takes_as_needed()


def _idle_bytes(device: Any) -> int:
    """Returns the bytes of a device that this process holds but does not use, such as memory of timed kernels."""
    stats = device.memory_stats() or {}
    return max(0, stats.get("pool_bytes", 0) - stats.get("bytes_in_use", 0))


def _trajectory(graph: Graph, state: State) -> Any:
    return collect(graph, graph.weights(state.learner), state.collector, state.key)[1]


def _bytes_of(tree: PyTree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _sizes(graph: Graph) -> str:
    return f"a training with num_envs x num_steps = {graph.loops.num_envs} x {graph.loops.num_steps}"
