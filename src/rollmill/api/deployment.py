"""Where a training runs: from options to a plan, and from a plan to workers.

Workers build the graph again from what a run's configuration says of it; threads share the one that is here.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from rollmill.api.options import PlacementOptions, RunOptions
from rollmill.api.specification import import_modules, rebuild_graph
from rollmill.channels import (
    BrokerServer,
    LocalBroker,
    MemoryWire,
    RemoteBroker,
    ScopedBroker,
    TcpWire,
    Wire,
    new_token,
)
from rollmill.core.errors import UsageError
from rollmill.core.machine import usable_cores, visible_gpus
from rollmill.dataflow import Flow, Graph, Partition, State, flow
from rollmill.envs import is_on_host
from rollmill.execution import enable_compilation_cache, take_devices
from rollmill.execution.cluster import RayLauncher, check_cluster, demands_of, find_ray, joined, own_host
from rollmill.execution.coordination.coordinator import Coordinator, Saved, host_blank
from rollmill.execution.coordination.jobs import jobs_of
from rollmill.execution.processes import Control, Job, Supervision, Supervisor, ThreadSupervisor
from rollmill.execution.replica import run_on_mesh, run_replica
from rollmill.planning import COUNTS, Place, Plan, RecordedCounts, find_distribution, read_plan
from rollmill.record import Display, RunDirectory

PATIENCE = ("hang_seconds", "start_seconds", "max_failures")
"""Fields of `RunOptions` that say what workers may do before they are replaced, or end the run."""

PLACED_SECONDS = 900.0
"""How long a worker on a cluster may take until its function is called: nodes may have to be started first."""


def prepare_devices(options: RunOptions, *, environment: str = "", plan: Plan | None = None) -> None:
    """What has to be said before anything starts JAX: how many CPU devices there are, and who takes the memory.

    Where workers train, this process leaves the accelerators' memory to them.

    Args:
        options: where to train.
        environment: its id, where it is known.
        plan: what is known already instead of the options.
    """
    if is_on_host(environment) or (_has_workers(options) if plan is None else plan.place != "program"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return
    replicas = options.learners or 1 if plan is None else plan.partition.groups[0].replicas
    take_devices(max(options.devices, replicas) if options.devices else 0)


def _has_workers(options: RunOptions) -> bool:
    whole = options.distribution == "gpu-only" and options.plan is None
    return options.place not in (None, "program") or options.cluster is not None or not whole


class _Held(NamedTuple):
    """What threads of this process share."""

    graph: Graph
    flow: Flow
    broker: LocalBroker


_held: dict[str, _Held] = {}


def choose_plan(graph: Graph, options: RunOptions, *, custom: Sequence[str] = ()) -> Plan:
    """The plan of these options: a file's, or the distribution policy's with its counts.

    Args:
        graph: what to train.
        options: where.
        custom: parts of the graph that only this process has, as `describe` names them; it is then trained in
            this process, where the options leave the choice.

    Raises:
        UsageError: if it does not fit the graph or the options.
    """
    if options.plan is not None:
        _refuse_beside_plan(options)
        plan = read_plan(options.plan)
        plan = plan if options.cluster is None else Plan(plan.partition, "ray")
    else:
        partition = _partition(options)
        whole = len(partition.groups) == 1 and graph.host is None
        alone = "program" if whole else _apart(custom)
        plan = Plan(partition, options.place or (alone if options.cluster is None else "ray"))
    if plan.place == "program" and graph.host is not None:
        plan = Plan(plan.partition, _apart(custom))
    plan.check(graph.loops)
    _refuse_without_effect(plan, options)
    _check(plan, graph, options, custom)
    return plan


def _partition(options: RunOptions) -> Partition:
    """The distribution policy's partition, for the counts that it has groups for.

    Raises:
        UsageError: a count was given for which it has none.
    """
    given = {name: getattr(options, name) for name in COUNTS if getattr(options, name) not in (None, False)}
    counts = RecordedCounts(**given)
    counts.read.clear()
    partition = find_distribution(options.distribution)(counts)
    for name in given:
        if name not in counts.read:
            used = ", ".join(count for count in COUNTS if count in counts.read) or "no count"
            raise UsageError(
                f"{name}={given[name]} has no effect: the distribution policy {options.distribution} has no such "
                f"groups (it reads {used}). hint: leave it out, or choose another policy of `rollmill plan`."
            )
    return partition


def _refuse_beside_plan(options: RunOptions) -> None:
    """A plan's file says all that these options say."""
    default = PlacementOptions()
    for name in ("distribution", "place", *COUNTS):
        if getattr(options, name) != getattr(default, name):
            raise UsageError(
                f"{name}={getattr(options, name)} has no effect beside plan={options.plan}, which says where each "
                "group runs. hint: leave one of the two out."
            )


def _refuse_without_effect(plan: Plan, options: RunOptions) -> None:
    """Options that are read in other places alone."""
    if options.host is not None and plan.place != "ray":
        raise UsageError(
            f"host={options.host} has no effect with place={plan.place}: only workers that Ray places connect to "
            "it. hint: leave it out, or give cluster=ray."
        )
    if options.checksums and plan.place in ("program", "mesh"):
        raise UsageError(
            f"checksums has no effect with place={plan.place}: nothing is sent between groups. hint: leave it out."
        )


def refuse_unread(plan: Plan, options: RunOptions) -> None:
    """Refuses options of a new run that nothing reads; a run that goes on elsewhere may keep those that it had.

    Raises:
        UsageError: naming the option.
    """
    default = RunOptions()
    for name in PATIENCE if plan.place == "program" else ():
        if getattr(options, name) != getattr(default, name):
            raise UsageError(
                f"{name}={getattr(options, name)} has no effect with place=program: there are no workers to wait "
                "for or to replace. hint: leave it out."
            )
    if options.fusion == "off" and options.numerics != default.numerics:
        raise UsageError(
            f"numerics={options.numerics} has no effect with fusion=off: it is of kernels. hint: leave one of the "
            "two out."
        )


def _apart(custom: Sequence[str]) -> Place:
    """Where several programs run by default."""
    return "threads" if custom else "processes"


def _check(plan: Plan, graph: Graph, options: RunOptions, custom: Sequence[str]) -> None:
    if plan.place == "program":
        return
    partition = plan.partition
    if partition.apart("gradients", "update") and not partition.synchronous and flow(graph).prepared:
        raise UsageError(
            f"{partition.name}, asynchronous, sends gradients to the update and nothing else, so running "
            "statistics of its workers would drift apart; leave out normalize_observations and "
            "normalize_rewards, or let it be synchronous."
        )
    if len(options.seeds) > 1:
        raise UsageError(
            f"num_seeds={options.num_seeds} trains several seeds in one program, and place={plan.place} has "
            "several programs; use place=program, or start a run for each seed."
        )
    if options.devices not in (0, 1):
        raise UsageError(
            f"devices={options.devices} share one program; with place={plan.place} say learners={options.devices}."
        )
    _check_place(plan, graph, options)
    refuse_custom(plan, custom)


def refuse_custom(plan: Plan, custom: Sequence[str]) -> None:
    """Refuses to let other processes build a graph of whose parts they know the names alone.

    Raises:
        UsageError: naming the parts.
    """
    if plan.place not in ("program", "threads") and custom:
        raise UsageError(
            f"this algorithm has its own {' and '.join(custom)}, made in Python, which other processes cannot "
            f"build, and place={plan.place} has several. hint: place='threads' stays in this process; or let a "
            "module register what is its own (rollmill.register, register_network, register_algorithm) and pass "
            "imports=[module]."
        )


def _check_place(plan: Plan, graph: Graph, options: RunOptions) -> None:
    if options.fusion in ("rollout", "full"):
        if graph.host is not None:
            raise UsageError(
                f"fusion={options.fusion}: these environments are stepped by Python on the host and cannot be "
                "part of a kernel; leave fusion out."
            )
        raise UsageError(
            f"fusion={options.fusion} makes kernels of one program's parts, and place={plan.place} has several "
            "programs; use place=program, or leave fusion out."
        )
    if plan.place == "mesh" and graph.host is not None:
        raise UsageError("place=mesh steps environments in JAX, and these live on the host; use place=processes.")
    if plan.place == "ray":
        check_cluster(options.cluster or "ray")


@contextlib.contextmanager
def deployed(
    graph: Graph,
    plan: Plan,
    run: RunDirectory,
    options: RunOptions,
    *,
    described: dict[str, Any],
    imports: Sequence[str],
    begin_with: tuple[int, State] | None,
    display: Display,
) -> Iterator[tuple[Coordinator, State]]:
    """The workers of a plan, with a coordinator; and a state at the beginning.

    Args:
        graph: what to train.
        plan: where.
        run: gets the workers' log lines.
        options: how.
        described: what `describe` says of the graph, from which workers build it.
        imports: modules that workers import first.
        begin_with: iterations that came before, and the state after them; None at the beginning.
        display: shows the workers' log lines.
    """
    settings: dict[str, Any] = {
        "seed": options.seed,
        "unroll": options.unroll,
        "checksums": options.checksums,
        "plan": plan.to_json(),
        "platform": jax.default_backend(),
        "start_seconds": options.start_seconds,
        "max_failures": options.max_failures,
    }
    given = {"graph": described, "imports": list(imports)}
    flows = flow(graph)
    blank = host_blank(graph, flows.state, jax.random.key(options.seed))
    begin = Saved(*begin_with) if begin_with else Saved(0, blank)
    with (
        contextlib.closing(LocalBroker()) as broker,
        _workers(broker, graph, flows, plan, run, options, settings, given, display) as workers,
    ):
        coordinator = Coordinator(
            graph,
            plan.partition,
            workers,
            begin_with=begin,
            blank=blank,
            restored=begin_with is not None,
            mesh=plan.place == "mesh",
            max_failures=options.max_failures,
            hang_seconds=options.hang_seconds,
        )
        yield coordinator, blank


@contextlib.contextmanager
def _workers(
    broker: LocalBroker,
    graph: Graph,
    flows: Flow,
    plan: Plan,
    run: RunDirectory,
    options: RunOptions,
    settings: dict[str, Any],
    given: dict[str, Any],
    display: Display,
) -> Iterator[Supervision]:
    if plan.place == "threads":
        name = secrets.token_hex(8)
        _held[name] = _Held(graph, flows, broker)
        jobs = jobs_of(
            plan.partition, "rollmill.api.deployment:work_in_thread", {**settings, "held": name}, processes=False
        )
        with contextlib.closing(ThreadSupervisor(jobs, hang_seconds=options.hang_seconds)) as workers:
            try:
                yield workers
            finally:
                del _held[name]
        return
    token = new_token()
    told = {**given, "token": token}
    if plan.place == "ray":
        with _workers_on_cluster(broker, plan, run, options, settings | told, display) as workers:
            yield workers
        return
    on_mesh = plan.place == "mesh"
    entry = "work_on_mesh" if on_mesh else "work_in_process"
    with contextlib.closing(BrokerServer(broker, token)) as server:
        jobs = jobs_of(
            plan.partition,
            f"rollmill.api.deployment:{entry}",
            {**settings, **told, "broker": server.address},
            cores=None if on_mesh else usable_cores(),
            gpus=[] if on_mesh else visible_gpus(),
        )
        supervisor = Supervisor(
            jobs,
            hang_seconds=options.hang_seconds,
            start_seconds=options.start_seconds,
            display=display.note,
            log_folder=run.folder.inner("workers"),
        )
        with contextlib.closing(supervisor) as workers:
            yield workers


@contextlib.contextmanager
def _workers_on_cluster(
    broker: LocalBroker,
    plan: Plan,
    run: RunDirectory,
    options: RunOptions,
    settings: dict[str, Any],
    display: Display,
) -> Iterator[Supervision]:
    count, name = len(list(plan.partition.replicas)), options.cluster or "ray"
    with (
        joined(name, workers=count, host=options.host) as cluster,
        contextlib.closing(BrokerServer(broker, settings["token"], host=cluster.host)) as server,
    ):
        told = {"broker": server.tcp_address, "host": cluster.host}
        jobs = jobs_of(plan.partition, "rollmill.api.deployment:work_on_cluster", settings | told)
        demands = demands_of(plan.partition, cluster.ray.cluster_resources())
        with (
            RayLauncher(cluster, demands=demands, run=run.root.name, show=display.note) as launcher,
            Supervisor(
                jobs,
                launcher=launcher,
                address=f"tcp:{cluster.host}:0",
                hang_seconds=options.hang_seconds,
                start_seconds=max(options.start_seconds, PLACED_SECONDS),
                display=display.note,
                log_folder=run.folder.inner("workers"),
            ) as workers,
        ):
            yield workers


def work_in_thread(job: Job, control: Control) -> None:
    """A worker that is a thread of the coordinator's process."""
    held = _held[job.settings["held"]]
    _work(job, control, held.graph, held.flow, lambda stop, epoch: _wire(held.broker, stop, epoch))


def work_in_process(job: Job, control: Control) -> None:
    """A worker that is a process of its own."""
    graph, broker = _rebuild(job, control)
    with contextlib.closing(broker):
        _work(job, control, graph, flow(graph), lambda stop, epoch: _wire(broker, stop, epoch))


def work_on_cluster(job: Job, control: Control) -> None:
    """A worker that may be on another host than its coordinator."""
    graph, broker = _rebuild(job, control)
    token, host, wires = job.settings["token"], own_host(find_ray(), job.settings["host"]), []

    def wire(stop: Callable[[], bool], epoch: int) -> Wire:
        wires.append(TcpWire(ScopedBroker(broker, str(epoch)), token, host=host, abandon=stop))
        return wires[-1]

    with contextlib.closing(broker):
        _work(job, control, graph, flow(graph), wire)
        for opened in wires:
            opened.finish()


def _rebuild(job: Job, control: Control) -> tuple[Graph, RemoteBroker]:
    settings = job.settings
    control.at("building the algorithm", expect=settings["start_seconds"])
    enable_compilation_cache()
    import_modules(settings["imports"])
    graph = rebuild_graph(settings["graph"], imported=settings["imports"])
    return graph, RemoteBroker(settings["broker"], settings["token"])


def work_on_mesh(job: Job, control: Control) -> None:
    """A worker that is one of the processes of a mesh."""
    settings = job.settings
    control.at("building the algorithm", expect=settings["start_seconds"])
    enable_compilation_cache()
    import_modules(settings["imports"])
    replicas = Plan.from_json(settings["plan"]).partition.groups[0].replicas
    run_on_mesh(
        job,
        control,
        graph=lambda: rebuild_graph(settings["graph"], imported=settings["imports"]),
        processes=replicas,
    )


def _wire(broker: Any, stop: Callable[[], bool], epoch: int) -> Wire:
    return MemoryWire(ScopedBroker(broker, str(epoch)), abandon=stop)


def _work(job: Job, control: Control, graph: Graph, flows: Flow, wire: Callable[..., Wire]) -> None:
    partition = Plan.from_json(job.settings["plan"]).partition
    run_replica(job, control, graph=graph, flow=flows, partition=partition, wire=wire)
