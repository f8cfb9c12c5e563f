"""Chooses the plan of a run: from a plan file, or from a distribution policy and its counts."""

from collections.abc import Sequence
from typing import Any

from rollmill.core.errors import UsageError
from rollmill.core.membership import HOSTS, read_membership
from rollmill.dataflow import Graph, Partition, flow
from rollmill.planning.distribution import distributions_with, find_distribution
from rollmill.planning.placement import COUNTS, ActorDevice, Counts, PlacementOptions
from rollmill.planning.plan import Place, Plan, PlanSettings, read_plan


def choose_plan(graph: Graph, options: PlacementOptions) -> Plan:
    """Returns the plan that the placement options describe for a graph.

    The plan has no settings, because settings are options of the run (see `settings_of`). Raises a `UsageError` if
    the plan does not fit the graph or the options.
    """
    if options.plan is not None:
        default = PlacementOptions()
        for name in ("distribution", "place", *COUNTS):
            if getattr(options, name) != getattr(default, name):
                raise UsageError(
                    f"{name}={getattr(options, name)} has no effect with plan={options.plan}, which determines "
                    "where each group runs. hint: leave one of them out."
                )
        plan = read_plan(options.plan)
        _check_settings(plan, graph, options)
        plan = plan.placement if options.cluster is None else Plan(plan.partition, _place_on(options.cluster))
    else:
        partition = _partition(graph, options)
        one_program = len(partition.groups) == 1 and graph.host is None
        by_default: Place = "program" if one_program else "processes"
        elsewhere = by_default if options.cluster is None else _place_on(options.cluster)
        plan = Plan(partition, options.place or elsewhere)
    if plan.place == "program" and graph.host is not None:
        plan = Plan(plan.partition, "processes")
    plan.check(graph.loops)
    _check(plan, graph, options)
    return plan


def _place_on(cluster: str) -> Place:
    return "mesh" if cluster == HOSTS else "ray"


def place_custom(plan: Plan, options: PlacementOptions, custom: Sequence[str], *, saved: bool = False) -> Plan:
    """Adapts a plan to a graph with unregistered parts (`custom`), which worker processes cannot rebuild.

    If the options allow it, the run uses threads of this process, unless the plan belongs to a resumed run
    (`saved`). Raises a `UsageError` with the names of the parts if the options require other processes.
    """
    if not custom or plan.place in ("program", "threads"):
        return plan
    fixed = saved or options.place == "processes" or options.plan is not None
    if plan.place == "processes" and not fixed:
        return Plan(plan.partition, "threads")
    raise UsageError(
        f"this algorithm has its own {' and '.join(custom)}, created in Python, which other processes cannot "
        f"create, but place={plan.place} has several processes. hint: use place='threads', which stays in this "
        "process, or register these parts (rollmill.register, register_network, register_algorithm) in a module "
        "that the program imports."
    )


def settings_of(options: PlacementOptions) -> PlanSettings:
    """Returns the settings from the plan file that the options name, or empty settings if they name none.

    Raises a `UsageError` if the file holds no plan.
    """
    plan = None if options.plan is None else read_plan(options.plan)
    return PlanSettings() if plan is None or plan.settings is None else plan.settings


def _check_settings(plan: Plan, graph: Graph, options: PlacementOptions) -> None:
    if plan.settings is None:
        return
    envs = plan.settings.num_envs
    if envs is not None and envs != graph.loops.num_envs:
        raise UsageError(
            f"the plan {options.plan} was chosen for num_envs={envs}, but the algorithm has "
            f"num_envs={graph.loops.num_envs}. hint: give num_envs={envs}, or search for another plan."
        )


def uses_workers(options: PlacementOptions) -> bool:
    """Returns whether a run with these options has workers, as far as is known before its graph is built."""
    one_program = options.distribution == "gpu-only" and options.plan is None
    return options.place not in (None, "program") or options.cluster is not None or not one_program


def _partition(graph: Graph, options: PlacementOptions) -> Partition:
    """Returns the distribution policy's partition."""
    given: dict[str, Any] = {
        name: getattr(options, name) for name in COUNTS if getattr(options, name) not in (None, False)
    }
    if options.cluster == HOSTS:
        given = {"learners": read_membership().count} | given
    on_ray = options.place == "ray" or options.cluster not in (None, HOSTS)
    by_default: ActorDevice = "cpu" if on_ray or graph.host is not None else "gpu"
    counts = Counts(**dict[str, Any](actors_on=by_default) | given)
    partition = find_distribution(options.distribution)(counts)
    for name in given:
        if name not in counts.used:
            used = ", ".join(count for count in COUNTS if count in counts.used) or "no counts"
            raise UsageError(
                f"{name}={given[name]} has no effect, because the distribution policy {options.distribution} "
                f"uses {used}. hint: leave it out, or choose a distribution policy that uses {name}: "
                f"{', '.join(distributions_with(name))}."
            )
    return partition


def _without_statistics(graph: Graph) -> str:
    """Returns a way to train a graph if only gradients reach the learner."""
    config = graph.settings["config"]
    used = [name for name in ("normalize_observations", "normalize_rewards") if config.get(name)]
    if used:
        return f"turn off {' and '.join(used)}, or leave asynchronous out"
    return "leave asynchronous out, or choose another distribution policy, such as single-learner-coarse"


def _drifting(graph: Graph, partition: Partition) -> frozenset[int]:
    """Returns the leaves of the learner that asynchronous workers would each write for themselves."""
    flows = flow(graph)
    return flows.with_metrics_only().prepared_leaves if partition.sends_only_gradients else flows.prepared_leaves


def _check(plan: Plan, graph: Graph, options: PlacementOptions) -> None:
    if options.cluster == HOSTS and len(plan.partition.groups) != 1:
        raise UsageError(
            f"cluster={HOSTS} trains on a mesh, whose processes all run the same program, but "
            f"{plan.partition.name} has {len(plan.partition.groups)} groups. hint: use distribution=gpu-only, "
            "or cluster=auto for Ray."
        )
    by_ray = plan.place == "ray" or options.cluster not in (None, HOSTS)
    if options.host is not None and not by_ray:
        raise UsageError(
            f"host={options.host} has no effect with place={plan.place}, because only workers placed by Ray "
            "connect to it. hint: leave it out, or give cluster=ray."
        )
    if plan.place == "program":
        return
    partition = plan.partition
    if partition.are_separate("gradients", "update") and not partition.synchronous and _drifting(graph, partition):
        raise UsageError(
            f"asynchronous {partition.name} sends only gradients to the update, so the counts and averages that "
            f"{graph.settings['algorithm']} updates while it prepares a batch would diverge. hint: "
            f"{_without_statistics(graph)}."
        )
    _check_rollouts(partition, graph)
    _check_learning_apart(partition, graph)
    if options.devices not in (0, 1):
        raise UsageError(
            f"devices={options.devices} applies to a single program. hint: with place={plan.place}, give "
            f"learners={options.devices}."
        )
    if plan.place == "mesh" and graph.host is not None:
        raise UsageError(
            "place=mesh needs environments written in JAX, but these run on the host. hint: use place=processes."
        )


def _check_rollouts(partition: Partition, graph: Graph) -> None:
    """Raises a `UsageError` if the algorithm cannot learn from the rollouts of asynchronous actors."""
    if graph.replay is not None and not partition.holder("gradients").synchronous:
        raise UsageError(
            f"asynchronous {partition.name} would keep part of the replay memory of "
            f"{graph.settings['algorithm']} in each actor, but checkpoints do not include asynchronous actors. "
            "hint: leave asynchronous out, or choose another distribution policy, such as single-learner-coarse."
        )
    if graph.settings.get("config", {}).get("pool_size") and not partition.holder("policy").synchronous:
        raise UsageError(
            f"asynchronous {partition.name} would learn from rollouts of earlier opponents as if the newest "
            "weights had acted. hint: leave asynchronous or pool_size out."
        )


def _check_learning_apart(partition: Partition, graph: Graph) -> None:
    """Raises a `UsageError` if the group of the update lacks values that the learning rate depends on."""
    if not partition.are_separate("gradients", "update"):
        return
    if graph.adapt is not None:
        raise UsageError(
            f"{partition.name} sends gradients to the update but not the metrics that desired_kl needs to adapt "
            "the learning rate. hint: leave desired_kl out, or choose another distribution policy, such as "
            "single-learner-coarse."
        )
    ends_early = graph.keep_learning is not None and graph.end_iteration is not None
    if not partition.synchronous and ends_early:
        raise UsageError(
            f"asynchronous {partition.name} applies gradients as they arrive, so an iteration that ends early, "
            "as with target_kl, would delay the schedule of the learning rate. hint: leave asynchronous or "
            "target_kl out, or use a constant learning rate."
        )
