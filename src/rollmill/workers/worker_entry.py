"""Entry points of workers. Each builds the context of a replica from the worker's job, and runs the replica."""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.broker.scope import ScopedBroker
from rollmill.channels.shm.wire import MemoryWire
from rollmill.channels.tcp.wire import TcpWire
from rollmill.channels.wire import Wire
from rollmill.core.errors import UnfitHost, UsageError
from rollmill.core.membership import own_address
from rollmill.dataflow import Flow, Graph, flow, graph_roles
from rollmill.processes.cluster.joining import find_ray, own_host
from rollmill.processes.control import Control
from rollmill.processes.events import FINAL
from rollmill.processes.jobs import Job
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compile_clock import CompileClock
from rollmill.workers.loaded_code import tell_loaded
from rollmill.workers.protocol import Begin, Process, send, wait
from rollmill.workers.recorded_worker import answer_recordings
from rollmill.workers.replica.context import ReplicaContext
from rollmill.workers.replica.loop import run
from rollmill.workers.replica.mesh import RendezvousPort, join_mesh
from rollmill.workers.replica.progress import ReplicaControl
from rollmill.workers.run_spec import RunSpec, read_settings

MODULE = __name__

OpenWire = Callable[[Callable[[], bool], int], Wire]
"""Function `(should_stop, restart) -> wire` that opens the wire of a worker."""


class _Shared(NamedTuple):
    """The values that threads of this process share."""

    graph: Graph
    flow: Flow
    broker: LocalBroker


_shared: dict[str, _Shared] = {}


@contextlib.contextmanager
def share_with_threads(graph: Graph, flows: Flow, broker: LocalBroker) -> Iterator[str]:
    """Context manager that shares a graph, its flow and the broker with workers that are threads.

    Yields the key for `WorkerSettings.shared`.
    """
    name = secrets.token_hex(8)
    _shared[name] = _Shared(graph, flows, broker)
    try:
        yield name
    finally:
        del _shared[name]


def work_in_thread(job: Job, control: Control) -> None:
    """Runs a worker as a thread of the coordinator's process."""
    settings = read_settings(job.settings)
    graph, flows, broker = _shared[settings.shared]
    _run_replica(job, control, settings.run, lambda _: graph, _memory_wire(broker), flows)


def work_in_process(job: Job, control: Control) -> None:
    """Runs a worker as a process on the coordinator's host."""
    settings = read_settings(job.settings)
    graph = _build(settings.run, control)
    tell_loaded(control, settings.run)
    with contextlib.closing(RemoteBroker(settings.broker, settings.token)) as broker:
        _run_replica(job, control, settings.run, lambda _: graph, _memory_wire(broker), flow(graph))


def work_on_cluster(job: Job, control: Control) -> None:
    """Runs a worker that may be on another host than its coordinator."""
    settings = read_settings(job.settings)
    host = own_host(find_ray(), settings.host)
    graph = _build(settings.run, control, host=host)
    tell_loaded(control, settings.run, graph)
    with contextlib.closing(RemoteBroker(settings.broker, settings.token)) as broker:
        wires: list[TcpWire] = []

        def open_wire(should_stop: Callable[[], bool], restart: int) -> Wire:
            wires.append(
                TcpWire(ScopedBroker(broker, str(restart)), settings.token, host=host, abandon=should_stop)
            )
            return wires[-1]

        _run_replica(job, control, settings.run, lambda _: graph, open_wire, flow(graph))
        for wire in wires:
            wire.finish()


def work_on_mesh(job: Job, control: Control) -> None:
    """Runs a worker as one process of a mesh, on one or several hosts."""
    settings = read_settings(job.settings)
    host = own_address(settings.host) if settings.host else ""
    spec = settings.run
    _prepare(spec, control)
    tell_loaded(control, spec)

    meeting = None if job.replica else RendezvousPort(host)

    def build(begin: Begin) -> Graph:
        control.at("joining the other processes", expect=spec.tolerances.start_seconds)
        join_mesh(spec, begin, job.replica, host=host)
        if meeting is not None:
            meeting.close()
        control.at("compiling", expect=3 * spec.tolerances.start_seconds)
        return spec.graph.build()

    with contextlib.closing(RemoteBroker(settings.broker, settings.token)) as broker:

        def open_wire(should_stop: Callable[[], bool], restart: int) -> Wire:
            # Means are computed in a callback of the compiled program, which cannot be interrupted.
            scoped = ScopedBroker(broker, str(restart))
            return TcpWire(scoped, settings.token, host=host) if host else MemoryWire(scoped)

        address = "" if meeting is None else meeting.address
        _run_replica(job, control, spec, build, open_wire, meet_at=address)


def _run_replica(
    job: Job,
    control: Control,
    spec: RunSpec,
    build: Callable[[Begin], Graph],
    open_wire: OpenWire,
    flows: Flow | None = None,
    *,
    meet_at: str = "",
) -> None:
    """Waits until the coordinator lets the replica begin, and runs it."""
    send(control, Process(os.getpid(), meet_at))
    begin = wait(control, Begin)
    replica_control = ReplicaControl(control, start_seconds=spec.tolerances.start_seconds)
    plan = spec.read_plan()
    with CompileClock() as compile_clock:
        graph = build(begin)
        context = ReplicaContext(
            spec,
            begin,
            graph,
            role=graph_roles(graph, plan.partition, mesh=plan.place == "mesh")[job.group],
            replica=job.replica,
            wire=open_wire(replica_control.stopping, begin.restart),
            control=replica_control,
            compile_clock=compile_clock,
            shared_flow=flows,
        )
        run(context)


def _memory_wire(broker: LocalBroker | RemoteBroker) -> OpenWire:
    return lambda should_stop, restart: MemoryWire(ScopedBroker(broker, str(restart)), abandon=should_stop)


def _build(spec: RunSpec, control: Control, *, host: str = "") -> Graph:
    """Builds the graph.

    Raises `UnfitHost` if this host cannot build it, so that another attempt would fail too.
    """
    _prepare(spec, control)
    try:
        return spec.graph.build()
    except FINAL:
        raise
    except (UsageError, ImportError) as error:
        where = f"on {host}: " if host else ""
        raise UnfitHost(f"{where}{error}") from error


def _prepare(spec: RunSpec, control: Control) -> None:
    answer_recordings(control)
    control.at("building the algorithm", expect=spec.tolerances.start_seconds)
    enable_compilation_cache()
