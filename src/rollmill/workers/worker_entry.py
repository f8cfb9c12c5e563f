"""Entry points of workers: each builds a replica's context from its job, and runs the replica."""

import contextlib
import importlib
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.broker.scope import ScopedBroker
from rollmill.channels.protocols import Wire
from rollmill.channels.shm.wire import MemoryWire
from rollmill.channels.tcp.wire import TcpWire
from rollmill.core.errors import UnfitHost, UsageError
from rollmill.dataflow import Flow, Graph, flow, roles_of
from rollmill.processes.cluster.joining import find_ray, own_host
from rollmill.processes.control import Control
from rollmill.processes.events import FINAL
from rollmill.processes.jobs import Job
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compile_clock import CompileClock
from rollmill.programs.compiled import unroll_for
from rollmill.workers.loaded_code import tell_loaded
from rollmill.workers.protocol import Begin, Process, send, wait
from rollmill.workers.recorded_worker import answer_recordings
from rollmill.workers.replica import ReplicaContext, run, run_on_mesh
from rollmill.workers.replica.progress import ReplicaControl
from rollmill.workers.run_spec import RunSpec, WorkerSettings, read_settings

MODULE = __name__

OpenWire = Callable[[Callable[[], bool], int], Wire]
"""`(should_stop, restart) -> wire`."""


class _Shared(NamedTuple):
    """The values that threads of this process use without building them again."""

    graph: Graph
    flow: Flow
    broker: LocalBroker


_shared: dict[str, _Shared] = {}


@contextlib.contextmanager
def share(graph: Graph, flows: Flow, broker: LocalBroker) -> Iterator[str]:
    """Lets workers that are threads use these values; yields the name for `WorkerSettings.shared`."""
    name = secrets.token_hex(8)
    _shared[name] = _Shared(graph, flows, broker)
    try:
        yield name
    finally:
        del _shared[name]


def work_in_thread(job: Job, control: Control) -> None:
    """A worker that is a thread of the coordinator's process."""
    settings = read_settings(job.settings)
    graph, flows, broker = _shared[settings.shared]
    run_replica(job, control, settings.run, graph, flows, _memory_wire(broker))


def work_in_process(job: Job, control: Control) -> None:
    """A worker that is a process of the coordinator's host."""
    settings = read_settings(job.settings)
    graph = _build(settings.run, control)
    tell_loaded(control, settings.run)
    with contextlib.closing(RemoteBroker(settings.broker, settings.token)) as broker:
        run_replica(job, control, settings.run, graph, flow(graph), _memory_wire(broker))


def work_on_cluster(job: Job, control: Control) -> None:
    """A worker that may be on another host than its coordinator."""
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

        run_replica(job, control, settings.run, graph, flow(graph), open_wire)
        for wire in wires:
            wire.finish()


def work_on_mesh(job: Job, control: Control) -> None:
    """A worker that is one of the processes of a mesh."""
    settings: WorkerSettings = read_settings(job.settings)
    spec = settings.run
    _prepare(spec, control)
    tell_loaded(control, spec)
    processes = spec.read_plan().partition.groups[0].replicas
    with contextlib.closing(RemoteBroker(settings.broker, settings.token)) as broker:
        run_on_mesh(
            spec,
            control,
            graph=lambda: _graph_of(spec),
            rank=job.replica,
            processes=processes,
            instances=settings.instances,
            open_wire=lambda restart: MemoryWire(ScopedBroker(broker, str(restart))),
        )


def run_replica(job: Job, control: Control, spec: RunSpec, graph: Graph, flows: Flow, open_wire: OpenWire) -> None:
    """Waits until the coordinator lets it begin, and runs one replica of a group.

    Args:
        job: names the group and the replica.
        control: the line to the coordinator.
        spec: specification of the run.
        graph: graph of the run.
        flows: of this graph.
        open_wire: opens the channels' transport, once it is known which restart this is.
    """
    send(control, Process(os.getpid()))
    begin = wait(control, Begin)
    replica_control = ReplicaControl(control, start_seconds=spec.start_seconds)
    with CompileClock() as compile_clock:
        run(
            ReplicaContext(
                graph=graph,
                flow=flows,
                role=roles_of(graph, spec.read_plan().partition)[job.group],
                replica=job.replica,
                wire=open_wire(replica_control.stopping, begin.restart),
                control=replica_control,
                key=jax.random.key(np.uint32(spec.seed)),
                seed=spec.seed,
                first=begin.first,
                restored=begin.arrays,
                attempt=begin.attempt,
                generation=begin.generation,
                opens=begin.opens,
                unroll=spec.unroll or unroll_for(jax.default_backend()),
                checksums=spec.checksums,
                compile_clock=compile_clock,
                max_failures=spec.max_failures,
            )
        )


def _memory_wire(broker: LocalBroker | RemoteBroker) -> OpenWire:
    return lambda should_stop, restart: MemoryWire(ScopedBroker(broker, str(restart)), abandon=should_stop)


def _build(spec: RunSpec, control: Control, *, host: str = "") -> Graph:
    """Builds the graph.

    Raises:
        UnfitHost: it cannot be built on this host, whoever tries again.
    """
    _prepare(spec, control)
    try:
        return _graph_of(spec)
    except FINAL:
        raise
    except (UsageError, ImportError) as error:
        where = f"on {host}: " if host else ""
        raise UnfitHost(f"{where}{error}") from error


def _prepare(spec: RunSpec, control: Control) -> None:
    answer_recordings(control)
    control.at("building the algorithm", expect=spec.start_seconds)
    enable_compilation_cache()


def _graph_of(spec: RunSpec) -> Graph:
    module, _, name = spec.graph_factory.partition(":")
    factory: Any = getattr(importlib.import_module(module), name)
    return factory(spec.graph, spec.imports)
