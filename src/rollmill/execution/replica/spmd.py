"""All four fragments in several processes: one program on a mesh of all their devices (`jax.distributed`).

Means are taken inside the compiled program, by NCCL between GPUs and by Gloo between CPUs. Processes compute in
step: where one is lost, all begin again.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from rollmill.dataflow import Graph, State
from rollmill.execution.coordination.start_up import CompileClock
from rollmill.execution.processes import Control, Job, WorkerMessage
from rollmill.execution.program.compiled import CompiledProgram, lower
from rollmill.execution.program.dispatch import Window, dispatch_ahead
from rollmill.execution.replica.snapshot_requests import SnapshotRequests
from rollmill.execution.replica.stop import StopParticipant
from rollmill.record import from_host, to_host

STRIDE = 8
"""Checkpoints lie at multiples of it, because iterations are dispatched ahead of the host."""


def run_on_mesh(job: Job, control: Control, *, graph: Callable[[], Graph], processes: int) -> None:
    """One process's part of a training; its first call to JAX has to be this one.

    Args:
        job: whose replica is the process's number, and whose `settings` have the seed of the training.
        control: the line to the coordinator.
        graph: builds that of the training, which may use JAX.
        processes: how many there are.
    """
    control.send("process", {"pid": os.getpid()})
    begin = control.wait("begin")
    start_seconds = float(job.settings["start_seconds"])
    control.at("joining the other processes", expect=start_seconds)
    _join(job, begin, processes)
    control.at("compiling", expect=3 * start_seconds)  # kernels may be tuned
    with CompileClock() as compiling:
        built = graph()
        program = lower(built, seeds=(job.settings["seed"],), devices=_devices(), unroll=job.settings["unroll"])
        state = program.start() if not begin.arrays else _placed(program, begin)
    control.send("started", compiling.report(time.monotonic()))
    control.at("training", expect=start_seconds)
    _train(job, control, program, state, int(begin.fields["first"]), built.loops.iterations)


def _train(job: Job, control: Control, program: CompiledProgram, state: State, first: int, last: int) -> None:
    orders, ending = SnapshotRequests(control), StopParticipant(control, begun=first, planned=last)
    for window in dispatch_ahead(program, state, first=first, until=last, stride=STRIDE, admit=ending.admit):
        control.at("training")
        _tell(job, control, window)
        first, state = window.last, window.after
        if orders.wants(first):
            _send_state(job, control, first, state)
            orders.answered()
    _send_state(job, control, first, state)


def _join(job: Job, begin: WorkerMessage, processes: int) -> None:
    cpu = job.settings["platform"] == "cpu"
    if cpu:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        begin.fields["meet"],
        num_processes=processes,
        process_id=job.replica,
        local_device_ids=None if cpu else [job.replica],
    )


def _devices() -> Sequence[Any]:
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def _placed(program: CompiledProgram, begin: WorkerMessage) -> State:
    """The state of a checkpoint, each process its part."""
    host = from_host(begin.arrays, jax.tree.map(_plain, program.state))

    def place(leaf: Any, sharding: Any) -> Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            value = np.asarray(leaf)
            return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
        data = np.asarray(jax.random.key_data(leaf))
        whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec))
        placed = jax.make_array_from_callback(data.shape, whole, lambda index: data[index])
        return jax.jit(partial(jax.random.wrap_key_data, impl=jax.random.key_impl(leaf)), out_shardings=sharding)(
            placed
        )

    return jax.tree.map(place, host, program.shardings)


def _plain(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype)


def _tell(job: Job, control: Control, window: Window) -> None:
    if job.replica == 0:
        rows = [{name: float(value) for name, value in row.items()} for row in window.metrics]
        control.send("rows", {"first": window.first, "rows": rows})


def _send_state(job: Job, control: Control, iteration: int, state: State) -> None:
    """The collector of this process's devices; the learner, which all hold, from the first process."""
    mine = {"collector": jax.tree.map(_local, state.collector)}
    if job.replica == 0:
        mine["learner"] = jax.tree.map(lambda leaf: leaf.addressable_data(0), state.learner)
    lowest = int(np.asarray(mine["collector"].index)[0])
    control.send("snapshot", {"iteration": iteration, "lowest": lowest}, to_host(mine))


def _local(leaf: Array) -> PyTree:
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards]) if len(shards) > 1 else shards[0].data
