"""Checks that the options of a run fit its plan, and prepares JAX for it."""

import os

from rollmill import planning
from rollmill.api.options import WORKER_LIMITS, RunOptions
from rollmill.core.errors import UsageError
from rollmill.dataflow import Graph
from rollmill.envs import is_on_host
from rollmill.execution import take_devices
from rollmill.execution.cluster import check_cluster
from rollmill.planning import Plan, uses_workers


def prepare_devices(options: RunOptions, *, environment: str = "", plan: Plan | None = None) -> None:
    """Sets what has to be set before anything starts JAX: the number of CPU devices, and who takes the memory.

    Where workers train, this process leaves the accelerators' memory to them.

    Args:
        options: where to train.
        environment: its id, where it is known.
        plan: the plan, where it is known already.
    """
    if is_on_host(environment) or (uses_workers(options) if plan is None else plan.place != "program"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return
    replicas = options.learners or 1 if plan is None else plan.partition.groups[0].replicas
    take_devices(max(options.devices, replicas) if options.devices else 0)


def choose_plan(graph: Graph, options: RunOptions) -> Plan:
    """The plan of these options: a file's, or the distribution policy's with its counts.

    Raises:
        UsageError: if it does not fit the graph or the options.
    """
    plan = planning.choose_plan(graph, options)
    _check(plan, graph, options)
    return plan


def refuse_unread(plan: Plan, options: RunOptions) -> None:
    """Refuses options of a new run that nothing reads; a resumed run may keep those that it had.

    Raises:
        UsageError: naming the option.
    """
    default = RunOptions()
    for name in WORKER_LIMITS if plan.place == "program" else ():
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


def _check(plan: Plan, graph: Graph, options: RunOptions) -> None:
    if options.checksums and plan.place in ("program", "mesh"):
        raise UsageError(
            f"checksums has no effect with place={plan.place}: nothing is sent between groups. hint: leave it out."
        )
    if plan.place == "program":
        return
    if len(options.seeds) > 1:
        raise UsageError(
            f"num_seeds={options.num_seeds} trains several seeds in one program, and place={plan.place} has "
            "several programs; use place=program, or start a run for each seed."
        )
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
    if plan.place == "ray":
        check_cluster(options.cluster or "ray")
