"""Describes a profiled run for reports and advice."""

import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace

from rollmill.core.errors import UsageError
from rollmill.planning.plan import Plan
from rollmill.profiling.results import ProfiledSetup
from rollmill.programs.fused_kernels import possible_fusion
from rollmill.runs.options import RunOptions
from rollmill.training.placing import choose_plan
from rollmill.training.recorder import default_log_every
from rollmill.training.training import PreparedTraining

MAX_ACTORS = 8
"""Maximum number of actors that advice suggests."""


def setup_of(prepared: PreparedTraining, command: str) -> ProfiledSetup:
    """Describes a profiled run for reports and advice. An empty `command` stands for the command line of this
    process.
    """
    loops, described, options = prepared.algorithm.loops, prepared.config["graph"], prepared.options
    plan = prepared.spec.read_plan()
    return ProfiledSetup(
        algorithm=described["algorithm"],
        environment=described["environment"],
        command=command or shlex.join(sys.argv),
        placement=_placement(plan),
        fusion=options.fusion,
        num_envs=loops.num_envs,
        num_steps=loops.num_steps,
        env_steps=loops.batch_size * options.num_seeds,
        num_seeds=options.num_seeds,
        possible_fusion=_possible_fusion(prepared, plan),
        replicas=sum(group.replicas for group in plan.partition.groups),
        can_be_asynchronous=_can_be(prepared, replace(options, asynchronous=True)) and not options.asynchronous,
        possible_actors=tuple(_possible_actors(prepared)),
        log_every=options.log_every or default_log_every(prepared.algorithm),
        checkpoint_seconds=options.checkpoint_seconds if math.isfinite(options.checkpoint_seconds) else None,
        checkpoint_iterations=options.checkpoint_iterations,
    )


def _possible_fusion(prepared: PreparedTraining, plan: Plan) -> str:
    graph, options = prepared.algorithm, prepared.options
    if plan.place not in ("program", "mesh") or graph.host is not None or options.num_seeds > 1:
        return "off"
    if options.fusion == "full":  # the run was fused
        return "full"
    return possible_fusion(graph, options.numerics)


def _possible_actors(prepared: PreparedTraining) -> Iterator[int]:
    envs = prepared.algorithm.loops.num_envs
    for actors in range(2, min(MAX_ACTORS, envs) + 1):
        options = replace(prepared.options, distribution="single-learner-coarse", actors=actors)
        if envs % actors == 0 and _can_be(prepared, options):
            yield actors


def _can_be(prepared: PreparedTraining, options: RunOptions) -> bool:
    """Returns whether the training could be run with these options."""
    try:
        choose_plan(prepared.algorithm, options)
    except UsageError:
        return False
    return True


def _placement(plan: Plan) -> str:
    if plan.place == "program":
        replicas = plan.partition.groups[0].replicas
        return "one program" if replicas == 1 else f"one program on {replicas} devices"
    groups = ", ".join(f"{group.name} x {group.replicas}" for group in plan.partition.groups)
    return f"{groups} ({plan.place})"
