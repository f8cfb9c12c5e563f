"""A replica that computes whole iterations, as one process of a program on the devices of all processes (a mesh).

Gradients are averaged inside the compiled program: between GPUs by NCCL or a kernel of Rollmill, and between CPUs
by Gloo. Processes that share GPUs may average through host memory (`programs.reductions`). The processes compute
in lockstep, so if one is lost, all restart.
"""

import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import io_callback
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree

from rollmill.channels.layout import Layout
from rollmill.channels.protocols import Reduction
from rollmill.channels.wire import Wire
from rollmill.core.errors import UsageError
from rollmill.core.machine import visible_gpus
from rollmill.core.types import Key, is_key
from rollmill.dataflow import Graph, State, first_learning_iteration
from rollmill.fusion import backend_for
from rollmill.processes.cluster.joining import LOOPBACK
from rollmill.programs.all_reduce_choice import AllReduceChoice, choose_all_reduce
from rollmill.programs.compiled import CompiledProgram, lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.programs.meshes import mesh_of
from rollmill.programs.states import begin_learner
from rollmill.record.leaves import from_host
from rollmill.workers.protocol import STRIDE, Begin, IterationMetrics, KernelsChosen, MeshCompiled, send, wait
from rollmill.workers.replica.context import ReplicaContext, StartReport
from rollmill.workers.replica.requests import SnapshotRequests, StopParticipant
from rollmill.workers.replica.snapshots import send_part, state_part
from rollmill.workers.run_spec import RunSpec


class RendezvousPort:
    """A port on this host for the processes of a mesh, reserved until the first process listens on it.

    The socket that reserves the port never listens. It shares the port (SO_REUSEPORT) with other sockets of the
    same user that ask for this, as the service of `jax.distributed` does.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((host or LOOPBACK, 0))

    @property
    def address(self) -> str:
        """Address of the port, such as `127.0.0.1:40123`."""
        return "{}:{}".format(*self._socket.getsockname())

    def close(self) -> None:
        """Releases the reserved port."""
        self._socket.close()


class HostMean:
    """Function that averages vectors over processes through host memory. Compiled GPU programs call it.

    All processes compile the same program, which makes its calls in the same order everywhere, so vectors of the
    same length can share a channel. A CPU program may make two calls at once, and two processes could then wait
    for each other forever.
    """

    def __init__(self, wire: Wire, *, rank: int, size: int) -> None:
        self._open = partial(wire.reduction, rank=rank, size=size)
        self._channels: dict[str, Reduction] = {}

    def __call__(self, vector: Float[Array, " N"]) -> Float[Array, " N"]:
        """Returns the mean of a traced vector."""
        return io_callback(self._mean, jax.ShapeDtypeStruct(vector.shape, vector.dtype), vector)

    def _mean(self, vector: Any) -> np.ndarray:
        operand = np.asarray(vector)
        layout = Layout.of(operand)
        name = f"mean/{operand.dtype.name}/{operand.size}"
        if name not in self._channels:
            self._channels[name] = self._open(name, layout=layout)
        return self._channels[name].mean(operand)


def join_mesh(spec: RunSpec, begin: Begin, rank: int, *, host: str = "") -> None:
    """Connects this process to the other processes of its mesh. It must not have used JAX devices before.

    `host` is the address of this host, if the mesh has several hosts.
    """
    cpu = spec.platform == "cpu"
    if cpu:
        _connect_gloo_at(host or begin.rendezvous_address.rpartition(":")[0])
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        begin.rendezvous_address,
        num_processes=spec.read_plan().partition.groups[0].replicas,
        process_id=rank,
        local_device_ids=None if cpu else [0 if len(visible_gpus()) == 1 else rank],
        coordinator_bind_address=begin.rendezvous_address,
    )


def _connect_gloo_at(host: str) -> None:
    """Lets Gloo listen at this host's address, since its name may have none."""
    make = _jax.make_gloo_tcp_collectives
    if not isinstance(make, partial):
        _jax.make_gloo_tcp_collectives = partial(make, hostname=host)  # JAX has no option for the host's address


def run_on_mesh(context: ReplicaContext) -> None:
    """Runs this process's part of a mesh program from its first iteration to the last."""
    begin, control, graph = context.begin, context.control, context.graph
    control.at("compiling", expect=3 * context.spec.tolerances.start_seconds)
    mesh = mesh_of(_devices(), instances=context.spec.gpus.instances)
    host = HostMean(context.wire, rank=context.replica, size=context.group.replicas)
    means = choose_all_reduce(graph, mesh, begin.reduction or context.spec.gpus.reduction, host)
    program = _compile(context, mesh, means)
    if begin.arrays:
        plain = lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype)
        state = place_state(from_host(begin.arrays, jax.tree.map(plain, program.state)), program.shardings)
    else:
        state = begun(program, graph, context.key)
    _await_others(context)
    StartReport(context).send()
    control.at("training", expect=context.spec.tolerances.start_seconds)
    _train(context, program, state)


def _await_others(context: ReplicaContext) -> None:
    """Waits until all processes have compiled: Gloo gives up 30 s after the first of them begins a collective."""
    context.control.at("waiting for all to compile", expect=3 * context.spec.tolerances.start_seconds)
    zero = np.zeros(1, np.float32)
    barrier = context.wire.reduction(
        "compiled", rank=context.replica, size=context.group.replicas, layout=Layout.of(zero)
    )
    barrier.mean(zero)


def _compile(context: ReplicaContext, mesh: Mesh, means: AllReduceChoice) -> CompiledProgram:
    """Compiles the program of all processes. The first process times its kernels, and the others use the same."""
    spec, control, kernels = context.spec, context.control, context.spec.kernels
    compile_with = partial(
        lower,
        context.graph,
        seeds=(spec.seed,),
        unroll=spec.unroll,
        numerics=kernels.numerics,
        devices=_devices(),
        instances=mesh.shape["instance"],
        mean=means.mean,
    )
    if context.replica == 0:
        announce = lambda chosen: send(control, KernelsChosen(chosen.launches))
        program = compile_with(fusion=kernels.fusion, launches=context.begin.launches, announce=announce)
        send(control, MeshCompiled(program.launches, means.way, [*program.notes, *means.notes]))
        return program
    launches = wait(control, KernelsChosen).launches
    if launches is None:
        return compile_with()
    _check_device(launches["device"], spec)
    return compile_with(fusion=kernels.fusion, launches=launches)


def _check_device(first: str, spec: RunSpec) -> None:
    """Raises a `UsageError` if kernels timed by the first process are not for this process's device."""
    device = jax.local_devices()[0]
    if (mine := backend_for(device, spec.kernels.numerics).device_name(device)) != first:
        raise UsageError(
            f"fusion={spec.kernels.fusion}: the processes of a mesh have different devices, {first} and {mine}, "
            "but must all run the same kernels. hint: use fusion=off, or equal devices (CUDA_VISIBLE_DEVICES)."
        )


def _train(context: ReplicaContext, program: CompiledProgram, state: State) -> None:
    first, last = context.begin.first, context.graph.loops.iterations
    control, requests = context.control, SnapshotRequests(context.control)
    windows = dispatch_ahead(
        program,
        state,
        first=first,
        until=last,
        strides=(STRIDE,),
        slower_from=first_learning_iteration(context.graph),
        keeps=lambda iteration: program.sums_iterations or requests.pending() == iteration,
        admit=StopParticipant(control, begun=first, planned=last).admit,
    )
    for window in windows:
        control.at("training")
        if context.replica == 0:  # all processes have the same metrics, so one reports them
            rows = [{name: float(value) for name, value in row.items()} for row in window.metrics]
            send(control, IterationMetrics(window.first, rows))
        first, state = window.last, window.after
        if window.kept and requests.wants(first):  # a request that arrives too late is answered at the next window
            send_part(context, first, state_part(context, _local_part(state)))
            requests.answered()
    send_part(context, first, state_part(context, _local_part(state)))


def _devices() -> Sequence[Any]:
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def begun(program: CompiledProgram, graph: Graph, key: Key) -> State:
    """Creates the initial training state. Its learner is computed by the program that computes it for the first
    checkpoint, so that a run resumed from there has the same weights, bit for bit.
    """
    state = program.start()
    return replace(state, learner=place_state(begin_learner(graph, key), program.shardings.learner))


def place_state(whole: PyTree[Any], shardings: PyTree[Any]) -> PyTree[Array]:
    """Distributes a state that every process holds completely. Each process places the part of its own devices."""

    def place(leaf: Any, sharding: Any) -> Array:
        if not is_key(leaf.dtype):
            value = np.asarray(leaf)
            return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
        data = np.asarray(jax.random.key_data(leaf))
        of_bits = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec))
        bits = jax.make_array_from_callback(data.shape, of_bits, lambda index: data[index])
        wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(leaf))
        return jax.jit(wrap, out_shardings=sharding)(bits)

    return jax.tree.map(place, whole, shardings)


def _local_part(state: State) -> State:
    """Returns the state of this process's devices: its environments and replay memory, and the whole learner."""

    def joined(leaf: Array) -> Any:
        shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        parts = [np.asarray(shard.data) for shard in shards]
        return np.concatenate(parts) if len(parts) > 1 else shards[0].data

    return replace(
        state,
        collector=jax.tree.map(joined, state.collector),
        rings=jax.tree.map(joined, state.rings),
        learner=jax.tree.map(lambda leaf: leaf.addressable_data(0), state.learner),
    )
