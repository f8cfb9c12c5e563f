"""All four fragments in several processes: one program on a mesh of all their devices (`jax.distributed`).

Means are taken inside the compiled program, by NCCL or a kernel of our own between GPUs and by Gloo between CPUs;
processes that share GPUs may take them through the host's memory (`programs.reductions`). Processes
compute in step: where one is lost, all begin again.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from rollmill.channels.protocols import Wire
from rollmill.core.errors import UsageError
from rollmill.core.machine import visible_gpus
from rollmill.dataflow import Graph, State, first_learning_iteration
from rollmill.fusion import backend_of
from rollmill.processes.control import Control
from rollmill.programs.compile_clock import CompileClock
from rollmill.programs.compiled import CompiledProgram, lower
from rollmill.programs.dispatch import Window, dispatch_ahead
from rollmill.programs.mean_choice import MeanChoice, choose_mean
from rollmill.programs.reductions import HostMean, mesh_of
from rollmill.record.leaves import from_host, to_host
from rollmill.workers.protocol import (
    Begin,
    IterationMetrics,
    KernelsChosen,
    MeshCompiled,
    Process,
    SnapshotPart,
    send,
    wait,
)
from rollmill.workers.replica.snapshot_requests import SnapshotRequests
from rollmill.workers.replica.stop import StopParticipant
from rollmill.workers.run_spec import RunSpec

STRIDE = 8
"""Checkpoints lie at multiples of it, because iterations are dispatched ahead of the host."""


def run_on_mesh(
    spec: RunSpec,
    control: Control,
    *,
    graph: Callable[[], Graph],
    rank: int,
    processes: int,
    instances: int,
    open_wire: Callable[[int], Wire],
) -> None:
    """One process's part of a training; its first call to JAX has to be this one.

    Args:
        spec: specification of the run.
        control: the line to the coordinator.
        graph: builds that of the training, which may use JAX.
        rank: the number of this process.
        processes: how many there are.
        instances: processes that share each GPU.
        open_wire: opens channels between the processes; takes the number of the restart.
    """
    send(control, Process(os.getpid()))
    begin = wait(control, Begin)
    start_seconds = spec.start_seconds
    control.at("joining the other processes", expect=start_seconds)
    _join(spec, begin, rank, processes)
    control.at("compiling", expect=3 * start_seconds)
    with CompileClock() as clock:
        built = graph()
        mesh = mesh_of(_devices(), instances=instances)
        host = HostMean(open_wire(begin.restart), rank=rank, size=processes)
        means = choose_mean(built, mesh, begin.reduction or spec.reduction, host)
        program = _compiled(built, spec, control, begin, rank, mesh, means)
        state = program.start() if not begin.arrays else _placed(program, begin)
    send(control, clock.report(time.monotonic()))
    control.at("training", expect=start_seconds)
    _train(rank, control, program, state, begin.first, built)


def _compiled(
    graph: Graph, spec: RunSpec, control: Control, begin: Begin, rank: int, mesh: Mesh, means: MeanChoice
) -> CompiledProgram:
    """The program of all processes. The first one chooses its kernels, by timing, and the others take the same."""
    on_mesh = {"devices": _devices(), "instances": mesh.shape["instance"], "mean": means.mean}
    compile_with = partial(lower, graph, seeds=(spec.seed,), unroll=spec.unroll, numerics=spec.numerics, **on_mesh)
    if rank == 0:
        announce = lambda kernels: send(control, KernelsChosen(kernels.launches))
        program = compile_with(fusion=spec.fusion, launches=begin.launches, announce=announce)
        send(control, MeshCompiled(program.launches, means.way, [*program.notes, *means.notes]))
        return program
    launches = wait(control, KernelsChosen).launches
    if launches is None:
        return compile_with()
    _check_device(launches["device"], spec)
    return compile_with(fusion=spec.fusion, launches=launches)


def _check_device(first: str, spec: RunSpec) -> None:
    """Whether kernels that were timed by the first process are for this one's device.

    Raises:
        UsageError: they are not.
    """
    device = jax.local_devices()[0]
    if (mine := backend_of(device, spec.numerics).device(device)) != first:
        raise UsageError(
            f"fusion={spec.fusion}: the processes of a mesh have different devices, {first} and {mine}, and all "
            "have to run the same kernels. hint: fusion=off, or devices of one kind (CUDA_VISIBLE_DEVICES)."
        )


def _train(rank: int, control: Control, program: CompiledProgram, state: State, first: int, graph: Graph) -> None:
    last = graph.loops.iterations
    requests, stop = SnapshotRequests(control), StopParticipant(control, begun=first, planned=last)
    windows = dispatch_ahead(
        program,
        state,
        first=first,
        until=last,
        strides=(STRIDE,),
        slower_from=first_learning_iteration(graph),
        keeps=lambda iteration: program.sums_iterations or requests.pending() == iteration,
        admit=stop.admit,
    )
    for window in windows:
        control.at("training")
        _send_metrics(rank, control, window)
        first, state = window.last, window.after
        if window.kept and requests.wants(first):  # a request that came too late is answered at the next window
            _send_state(rank, control, first, state)
            requests.answered()
    _send_state(rank, control, first, state)


def _join(spec: RunSpec, begin: Begin, rank: int, processes: int) -> None:
    cpu = spec.platform == "cpu"
    if cpu:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        begin.meeting_address,
        num_processes=processes,
        process_id=rank,
        local_device_ids=None if cpu else [0 if len(visible_gpus()) == 1 else rank],
        coordinator_bind_address=begin.meeting_address,
    )


def _devices() -> Sequence[Any]:
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def _placed(program: CompiledProgram, begin: Begin) -> State:
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


def _send_metrics(rank: int, control: Control, window: Window) -> None:
    if rank == 0:
        rows = [{name: float(value) for name, value in row.items()} for row in window.metrics]
        send(control, IterationMetrics(window.first, rows))


def _send_state(rank: int, control: Control, iteration: int, state: State) -> None:
    """The collector and replay memory of this process's devices; the learner, which all hold, from the first."""
    mine = {"collector": jax.tree.map(_local, state.collector), "rings": jax.tree.map(_local, state.rings)}
    if rank == 0:
        mine["learner"] = jax.tree.map(lambda leaf: leaf.addressable_data(0), state.learner)
    lowest = int(np.asarray(mine["collector"].index)[0])
    send(control, SnapshotPart(iteration, lowest, to_host(mine)))


def _local(leaf: Array) -> PyTree:
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards]) if len(shards) > 1 else shards[0].data
