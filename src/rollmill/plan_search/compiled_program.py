"""Determines how much memory a compiled training program needs before it runs, and times its iterations."""

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from rollmill.core.machine import device_memory, memory_bytes, return_freed_memory
from rollmill.core.process_tree import descendants_of, resident_memory
from rollmill.dataflow import State, collect
from rollmill.programs.compiled import CompiledProgram
from rollmill.training.training import PreparedTraining

RUN_BYTES = 15_000_000
"""Approximate memory of a run besides its arrays, in bytes: files, logs, and threads."""
HELD_STATES = 5
"""Number of training states that a run holds in addition to the input of an iteration.

They are the states around windows of iterations whose metrics have not been written yet, the result of the next
iteration, and the state to which the run would return after a fault.
"""
TIMED_SECONDS = 0.3
"""Seconds for which iterations are repeated to time them. At least one iteration is timed."""


def describe_program(prepared: PreparedTraining) -> dict[str, Any] | None:
    """Describes the memory and identity of a run's program, as a JSON value. Returns None if workers train.

    `bytes` counts arguments, temporary arrays and states on one device. `process` counts other memory of this
    process, and `held` the memory already in use on a device with its own memory. Equal programs have an equal
    `identity`.
    """
    program = prepared.program
    if program is None:
        return None
    memory: Any = program.step.memory_analysis()
    needed = None
    if memory is not None:
        overwritten = 0 if program.copies_state else memory.alias_size_in_bytes
        results = HELD_STATES * (memory.output_size_in_bytes - overwritten)
        # Threads of a CPU take turns with iterations, and each keeps the temporary arrays that it has freed.
        temporary = memory.temp_size_in_bytes * (2 if program.devices[0].platform == "cpu" else 1)
        needed = memory.argument_size_in_bytes + temporary + results
    held, identity = memory_in_use(program.devices), _identity(prepared, program)
    return {"bytes": needed, "process": _own_memory(), "held": held, "identity": identity}


class MemoryNeed(NamedTuple):
    """Memory that a run in one program needs, in bytes."""

    device: int
    """Bytes that the run needs on each device."""
    devices: int
    process: int | None
    """Other bytes that the process holds. None if devices have their own memory, or if it is unknown."""
    limit: int | None
    """Bytes that JAX may allocate on one GPU, or the memory of the machine. None if unknown."""

    @property
    def total(self) -> int:
        """Bytes that the run needs in total, to compare with `limit`."""
        return self.device if self.process is None else self.process + self.device * self.devices


def memory_need(prepared: PreparedTraining) -> MemoryNeed | None:
    """Returns the memory that a run needs, according to its compiled program.

    CPU devices share the memory of the machine with the process. Returns None if workers train, or if XLA does not
    report the memory of the program.
    """
    compiled, program = describe_program(prepared), prepared.program
    if compiled is None or program is None or compiled["bytes"] is None:
        return None
    first, *others = sorted(jax.tree.leaves(program.shardings)[0].device_set, key=lambda device: device.id)
    if first.platform == "cpu":
        return MemoryNeed(compiled["bytes"], 1 + len(others), compiled["process"], memory_bytes())
    return MemoryNeed(compiled["bytes"], 1 + len(others), None, device_memory(first))


def iteration_seconds(prepared: PreparedTraining) -> float | None:
    """Measures the seconds of an iteration. Returns None if early iterations only fill a replay memory."""
    program = prepared.program
    if program is None or program.sums_iterations:
        return None

    def several(count: int, state: State) -> State:
        for _ in range(count):
            state, _ = program.advance(state, program.iterations_per_call)
        return state

    return _seconds_each(several, program.start()) / program.iterations_per_call


def stage_seconds(prepared: PreparedTraining) -> float | None:
    """Measures the seconds that an unfused rollout of all environments takes on one device. Returns None if
    workers train, or if the program has several seeds or sums iterations.
    """
    program, graph = prepared.program, prepared.algorithm
    if program is None or program.sums_iterations or len(prepared.options.seeds) > 1:
        return None
    state = program.start()
    collector, weights, key = state.collector, graph.weights(state.learner), state.key
    rollout = jax.jit(partial(collect, graph)).lower(weights, collector, key).compile()

    def several(count: int, now: Any) -> Any:
        for _ in range(count):
            now, _ = rollout(weights, now, key)
        return now

    return _seconds_each(several, collector)


def _seconds_each(several: Callable[[int, Any], Any], state: Any) -> float:
    """Returns the seconds of one call, by calls in a row."""
    state = jax.block_until_ready(several(1, state))
    began = time.perf_counter()
    state = jax.block_until_ready(several(1, state))
    once = max(time.perf_counter() - began, 1e-6)
    calls = round(TIMED_SECONDS / once)
    if calls < 1:
        return once
    began = time.perf_counter()
    jax.block_until_ready(several(calls, state))
    return (time.perf_counter() - began) / calls


def _identity(prepared: PreparedTraining, program: CompiledProgram) -> str:
    kernels = {part: (program.launches or {}).get(part) for part in ("rollouts", "gradients")}
    devices = jax.tree.leaves(program.shardings)[0].num_devices
    return json.dumps([devices, prepared.algorithm.loops.num_envs, kernels], sort_keys=True)


def most_memory(prepared: PreparedTraining) -> int:
    """Returns the peak of bytes in use on any device of the program, or 0 if they have no memory of their own."""
    return 0 if prepared.program is None else _of_fullest(prepared.program.devices, "peak_bytes_in_use")


def memory_in_use(devices: Sequence[Any]) -> int:
    """Returns the bytes in use on the fullest device, or 0 if devices do not have their own memory."""
    return _of_fullest(devices, "bytes_in_use")


def _of_fullest(devices: Sequence[Any], name: str) -> int:
    return max((device.memory_stats() or {}).get(name, 0) for device in devices)


def process_memory() -> int:
    """Returns the bytes used by this process and its descendants, or 0 if the system does not report it."""
    return_freed_memory()  # returns memory that the compiler has freed
    return resident_memory(descendants_of(os.getpid()))


def _own_memory() -> int | None:
    """Returns the bytes that this process will hold besides its arrays, or None if they are unknown."""
    held = process_memory()
    return held + RUN_BYTES if held else None
