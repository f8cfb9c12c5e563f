"""Launches the workers of a plan, with the coordinator that drives them."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax

from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.broker.server import BrokerServer
from rollmill.channels.transport.handshake import new_token
from rollmill.core.errors import UsageError
from rollmill.core.machine import usable_cores
from rollmill.core.membership import HOSTS, Membership, own_address, read_membership
from rollmill.dataflow import Flow, Graph, State, flow
from rollmill.planning.plan import Plan
from rollmill.processes.cluster.capacity import Demand, autoscales, check_room, demands_of, living_nodes
from rollmill.processes.cluster.joining import LOOPBACK, Cluster, connect_to_ray
from rollmill.processes.cluster.launcher import RayLauncher
from rollmill.processes.cluster.modules import modules_to_send
from rollmill.processes.hosts.launcher import HostsLauncher
from rollmill.processes.jobs import Job
from rollmill.processes.launchers import Launcher
from rollmill.processes.supervision import Supervision
from rollmill.processes.supervisor import Supervisor
from rollmill.processes.threads import ThreadSupervisor
from rollmill.programs.cache import enable_compilation_cache
from rollmill.record.run_directory import RunDirectory
from rollmill.workers.coordination.coordinator import Coordinator
from rollmill.workers.coordination.jobs import jobs_of
from rollmill.workers.coordination.starts import initial_host_state
from rollmill.workers.loaded_code import LoadedCode
from rollmill.workers.reports import Saved
from rollmill.workers.run_spec import ClusterSettings, RunSpec, WorkerSettings
from rollmill.workers.worker_entry import MODULE, share_with_threads
from rollmill.workers.worker_gpus import gpus_of_workers

PLACED_SECONDS = 900.0
"""Maximum seconds for a worker on a cluster to start its function, since nodes may have to be added first."""


@contextlib.contextmanager
def launch(
    graph: Graph,
    spec: RunSpec,
    run: RunDirectory,
    *,
    begin_with: Saved | None,
    show: Callable[[str], None],
    fault_advice: str = "",
) -> Iterator[tuple[Coordinator, State]]:
    """Context manager that runs the broker and the workers of a run. Yields their coordinator and an initial
    state.
    """
    enable_compilation_cache()
    plan, flows = spec.read_plan(), flow(graph)
    if spec.cluster.address == HOSTS:
        member = _first_of(plan)
        spec = replace(spec, cluster=ClusterSettings(HOSTS, spec.cluster.host or own_address(member.first)))
    initial = initial_host_state(graph, flows.state, jax.random.key(spec.seed))
    with (
        contextlib.closing(LocalBroker()) as broker,
        _workers(broker, graph, flows, plan, spec, run, show) as workers,
    ):
        coordinator = Coordinator(
            graph,
            spec,
            workers,
            initial=initial,
            restored=begin_with,
            fault_advice=fault_advice,
            check_loaded=LoadedCode(spec, run).check,
        )
        yield coordinator, initial


def _workers(
    broker: LocalBroker,
    graph: Graph,
    flows: Flow,
    plan: Plan,
    spec: RunSpec,
    run: RunDirectory,
    show: Callable[[str], None],
) -> contextlib.AbstractContextManager[Supervision]:
    if plan.place == "threads":
        return _threads(broker, graph, flows, plan, spec)
    settings = WorkerSettings(spec, token=new_token())
    if plan.place == "ray" or spec.cluster.is_ray:
        return _on_cluster(broker, plan, settings, run, show)
    if spec.cluster.address == HOSTS:
        return _on_hosts(broker, plan, settings, run, show)
    return _processes(broker, plan, settings, run, show)


@contextlib.contextmanager
def _threads(broker: LocalBroker, graph: Graph, flows: Flow, plan: Plan, spec: RunSpec) -> Iterator[Supervision]:
    with share_with_threads(graph, flows, broker) as name:
        settings = WorkerSettings(spec, shared=name).to_json()
        jobs = jobs_of(plan.partition, f"{MODULE}:work_in_thread", settings, processes=False)
        with contextlib.closing(ThreadSupervisor(jobs, hang_seconds=spec.tolerances.hang_seconds)) as workers:
            yield workers


@contextlib.contextmanager
def _processes(
    broker: LocalBroker, plan: Plan, settings: WorkerSettings, run: RunDirectory, show: Callable[[str], None]
) -> Iterator[Supervision]:
    spec, on_mesh = settings.run, plan.place == "mesh"
    on_gpus = sum(group.replicas for group in plan.partition.groups if group.device != "cpu")
    on_gpus = on_gpus if spec.platform == "gpu" else 0
    with (
        gpus_of_workers(on_gpus, spec.gpus.sharing, mesh=on_mesh, reduction=spec.gpus.reduction) as gpus,
        contextlib.closing(BrokerServer(broker, settings.token)) as server,
    ):
        if gpus.note:
            show(gpus.note)
        divided = replace(spec.gpus, reduction=gpus.reduction, instances=gpus.instances)
        jobs = jobs_of(
            plan.partition,
            f"{MODULE}:{'work_on_mesh' if on_mesh else 'work_in_process'}",
            replace(settings, run=replace(spec, gpus=divided), broker=server.address).to_json(),
            cores=None if on_mesh else usable_cores(),
            gpus=gpus.environments,
        )
        with _supervisor(jobs, spec, run, show) as workers:
            yield workers


@contextlib.contextmanager
def _on_cluster(
    broker: LocalBroker, plan: Plan, settings: WorkerSettings, run: RunDirectory, show: Callable[[str], None]
) -> Iterator[Supervision]:
    spec, count = settings.run, len(list(plan.partition.replicas))
    with (
        connect_to_ray(spec.cluster.address or "ray", workers=count, host=spec.cluster.host, show=show) as cluster,
        contextlib.closing(BrokerServer(broker, settings.token, host=cluster.host)) as server,
    ):
        worker_settings = replace(settings, broker=server.tcp_address, host=cluster.host)
        jobs, demands = _place_by_ray(plan, worker_settings, cluster)
        if not autoscales(cluster.ray):
            check_room(plan.partition, demands, living_nodes(cluster.ray))
        with (
            RayLauncher(
                cluster,
                demands=demands,
                jobs=jobs,
                run=run.root.name,
                modules=modules_to_send(spec.graph.imports),
                show=show,
            ) as launcher,
            _supervisor(jobs, spec, run, show, launcher=launcher, host=cluster.host) as workers,
        ):
            yield workers


def _place_by_ray(
    plan: Plan, settings: WorkerSettings, cluster: Cluster
) -> tuple[Sequence[Job], Mapping[str, Demand]]:
    """Returns the jobs of workers on a cluster, and each group's demand.

    All processes of a mesh use this process's platform.
    """
    if plan.place != "mesh":
        jobs = jobs_of(plan.partition, f"{MODULE}:work_on_cluster", settings.to_json())
        return jobs, demands_of(plan.partition, cluster.ray.cluster_resources())
    on_gpus, (group,) = settings.run.platform == "gpu", plan.partition.groups
    variables = {} if on_gpus else {"JAX_PLATFORMS": "cpu"}
    jobs = jobs_of(plan.partition, f"{MODULE}:work_on_mesh", settings.to_json(), gpus=[variables] * group.replicas)
    return jobs, {group.name: Demand(gpus=float(on_gpus))}


def _first_of(plan: Plan) -> Membership:
    """Returns the rank of this process in a job."""
    member, replicas = read_membership(), plan.partition.groups[0].replicas
    if member.rank:
        raise UsageError(
            f"this process has rank {member.rank}, but only the process with rank 0 trains. hint: use the "
            "command `rollmill train`, in which processes with other ranks wait for work."
        )
    if member.count != replicas:
        raise UsageError(
            f"cluster={HOSTS}: the job has {member.count} processes, but the run has {replicas} replicas. hint: "
            f"start {replicas} processes, or resume with --learners {member.count}."
        )
    return member


@contextlib.contextmanager
def _on_hosts(
    broker: LocalBroker, plan: Plan, settings: WorkerSettings, run: RunDirectory, show: Callable[[str], None]
) -> Iterator[Supervision]:
    """Supervises a mesh of the processes that a batch system started."""
    spec, host = settings.run, settings.run.cluster.host or LOOPBACK
    with contextlib.closing(BrokerServer(broker, settings.token, host=host)) as server:
        worker_settings = replace(settings, broker=server.tcp_address, host=host)
        jobs = jobs_of(plan.partition, f"{MODULE}:work_on_mesh", worker_settings.to_json())
        with (
            HostsLauncher(read_membership(), show) as launcher,
            _supervisor(jobs, spec, run, show, launcher=launcher, host=host) as workers,
        ):
            yield workers


def _supervisor(
    jobs: Sequence[Job],
    spec: RunSpec,
    run: RunDirectory,
    show: Callable[[str], None],
    *,
    launcher: Launcher | None = None,
    host: str | None = None,
) -> Supervisor:
    """Returns the supervisor of workers on this host, or of workers that connect to the address `host`."""
    start_seconds = spec.tolerances.start_seconds
    return Supervisor(
        jobs,
        launcher=launcher,
        address="unix:" if host is None else f"tcp:{host}:0",
        hang_seconds=spec.tolerances.hang_seconds,
        start_seconds=start_seconds if host is None else max(start_seconds, PLACED_SECONDS),
        display=show,
        log_folder=run.folder.inner("workers"),
    )
