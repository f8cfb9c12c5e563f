"""Checks that the options of a run fit its plan, and configures JAX accordingly."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from rollmill.core.errors import UsageError
from rollmill.core.machine import leave_device_memory
from rollmill.core.membership import HOSTS
from rollmill.dataflow import Graph
from rollmill.envs import is_on_host
from rollmill.gpus.memory_limit import choose_fraction
from rollmill.planning import choose
from rollmill.planning.choose import place_custom, settings_of, uses_workers
from rollmill.planning.placement import COUNTS
from rollmill.planning.plan import Place, Plan, read_plan
from rollmill.programs.devices import take_devices
from rollmill.record.display import Display
from rollmill.runs.options import WORKER_LIMITS, RunOptions


def prepare_devices(options: RunOptions, *, environment: str = "", plan: Plan | None = None) -> None:
    """Configures JAX before its backend starts: the number of CPU devices and the preallocation of GPU memory.

    If workers train, this process leaves the memory of accelerators to them. Pass the id of the environment and
    the plan if they are already known. Raises a `UsageError` if the options name a plan file that contains no
    plan, or an impossible share of a GPU's memory.
    """
    if plan is None and options.plan is not None and options.cluster is None:
        plan = read_plan(options.plan)
        if plan.settings is not None and plan.settings.devices is not None:
            options = replace(options, devices=plan.settings.devices)
    if is_on_host(environment) or (uses_workers(options) if plan is None else plan.place != "program"):
        leave_device_memory()
        return
    if options.memory_fraction is not None:
        choose_fraction(options.memory_fraction)
    replicas = options.learners or 1 if plan is None else plan.partition.groups[0].replicas
    take_devices(max(options.devices, replicas) if options.devices else 0)


def with_settings(options: RunOptions) -> RunOptions:
    """Returns the options of a run, completed with the settings of the plan file that they name.

    Raises a `UsageError` if the file contains no plan, or if an option contradicts the plan.
    """
    default, settings = RunOptions(), settings_of(options)
    found = {name: getattr(settings, name) for name in ("devices", "fusion")}
    chosen = {name: value for name, value in found.items() if value is not None}
    for name, value in chosen.items():
        given = getattr(options, name)
        if given not in (value, getattr(default, name)):
            raise UsageError(
                f"{name}={given} contradicts plan={options.plan}, which has {name}={value}. hint: leave it out, "
                "or edit the plan."
            )
    return replace(options, **chosen)


def choose_plan(graph: Graph, options: RunOptions) -> Plan:
    """Returns the plan of a run: from a plan file, or from a distribution policy with its counts.

    Raises a `UsageError` if the plan does not fit the graph or the options.
    """
    plan = choose.choose_plan(graph, options)
    if not options.checkpoint_environments and graph.replay is not None:
        raise UsageError(
            "checkpoint_environments=False is not supported with a replay memory, because its newest step needs "
            "the next observation of its environment. hint: leave it out."
        )
    _check(plan, graph, options)
    return plan


def place_parts(
    plan: Plan, options: RunOptions, custom: Sequence[str], display: Display, *, saved: bool = False
) -> Plan:
    """Moves a plan's groups into this process if the graph has `custom` parts that others cannot create.

    Changes are shown to the user. `saved` means that the plan comes from the resumed run. Raises a `UsageError`
    that names the `custom` parts if the options ask for other processes. See `place_custom`.
    """
    placed = place_custom(plan, options, custom, saved=saved)
    if placed.place != plan.place:
        display.note(
            "note: training runs in threads of this process, because other processes cannot create "
            f"{' and '.join(custom)}"
        )
    return placed


def refuse_unread(plan: Plan, options: RunOptions) -> None:
    """Raises a `UsageError` if an option of a new run has no effect under its plan.

    A resumed run may keep such options from before.
    """
    default = RunOptions()
    for name in WORKER_LIMITS if plan.place == "program" else ():
        if getattr(options, name) != getattr(default, name):
            raise UsageError(
                f"{name}={getattr(options, name)} has no effect with place=program, which has no workers. hint: "
                "leave it out."
            )
    _check_actors_on(options)
    on_this_host = plan.place in ("processes", "mesh") and options.cluster is None
    if options.gpu_sharing != default.gpu_sharing and not on_this_host:
        where = f"place={plan.place}" if options.cluster is None else f"cluster={options.cluster}"
        raise UsageError(
            f"gpu_sharing={options.gpu_sharing} has no effect with {where}, because it applies to worker "
            "processes on this host. hint: leave it out, or give place=processes or place=mesh."
        )
    if options.memory_fraction is not None:
        if plan.place != "program":
            raise UsageError(
                f"memory_fraction={options.memory_fraction:g} has no effect with place={plan.place}, whose "
                "workers divide the free memory. hint: leave it out, or give place=program."
            )
        choose_fraction(options.memory_fraction)
    if options.reduction != default.reduction and not _reads_reduction(plan, options):
        raise UsageError(
            f"reduction={options.reduction} has no effect here: place=mesh supports all reductions, but a single "
            "program on several GPUs with one seed supports only flat and one-shot. hint: leave it out, or give "
            "place=mesh."
        )
    if options.fusion == "off" and options.numerics != default.numerics:
        raise UsageError(
            f"numerics={options.numerics} has no effect with fusion=off, because it applies to kernels. hint: "
            "leave one of them out."
        )


def _check_actors_on(options: RunOptions) -> None:
    if options.actors_on == "gpu" and jax.default_backend() == "cpu":
        raise UsageError(
            "actors_on=gpu needs a GPU, but this run computes on CPUs. hint: leave it out, or install JAX with "
            "support for GPUs."
        )


def _reads_reduction(plan: Plan, options: RunOptions) -> bool:
    """Returns whether the run uses the requested all-reduce."""
    if plan.place != "program":
        return plan.place == "mesh"
    several = options.devices != 1 or plan.partition.groups[0].replicas > 1
    return several and options.num_seeds == 1 and options.reduction in ("flat", "one-shot")


def _ways_out(graph: Graph, options: RunOptions, *places: Place) -> str:
    """Formats the given places that the other options allow, or else the policy `gpu-only`, followed by `or`.

    The result is empty if the options allow none of them.
    """
    possible = [f"place={place}" for place in places if _is_accepted(graph, options, place)]
    default = RunOptions()
    alone = {"distribution": "gpu-only"} | {name: getattr(default, name) for name in COUNTS}
    if not possible and _is_accepted(graph, options, places[0], **alone):
        given = [f"--{name.replace('_', '-')}" for name in COUNTS if getattr(options, name)]
        possible = [f"distribution=gpu-only{' without ' * bool(given)}{', '.join(given)}"]
    return f"use {' or '.join(possible)}, or " if possible else ""


def _is_accepted(graph: Graph, options: RunOptions, place: Place, **changes: Any) -> bool:
    try:
        changed = replace(options, place=place, **changes)
        plan = choose.choose_plan(graph, changed)
        refuse_unread(plan, changed)
    except UsageError:
        return False
    return plan.place == place and not options.checksums


def _check(plan: Plan, graph: Graph, options: RunOptions) -> None:
    if options.checksums and plan.place in ("program", "mesh"):
        raise UsageError(
            f"checksums has no effect with place={plan.place}, because groups exchange no messages. hint: leave "
            "it out."
        )
    if plan.place == "program":
        return
    if len(options.seeds) > 1:
        raise UsageError(
            f"num_seeds={options.num_seeds} needs a single program, but place={plan.place} has several "
            f"programs. hint: {_ways_out(graph, options, 'program')}start a run for each seed."
        )
    if options.fusion in ("rollout", "full"):
        if graph.host is not None:
            raise UsageError(
                f"fusion={options.fusion} is not supported for environments that Python steps on the host. hint: "
                "leave fusion out."
            )
        if options.fusion == "rollout" and plan.partition.holder("environment") != plan.partition.holder("policy"):
            raise UsageError(
                "fusion=rollout needs environment and policy in the same group, but "
                f"distribution={plan.partition.name} separates them. hint: "
                f"{_ways_out(graph, options, 'program', 'mesh')}leave fusion out."
            )
    if plan.place == "ray" or options.cluster not in (None, HOSTS):
        from rollmill.processes.cluster.joining import check_cluster

        check_cluster(options.cluster or "ray")
