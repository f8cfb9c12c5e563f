"""Chooses the kernels of a replica. The first replica of a group chooses by timing, and the others use
its choice.
"""

from functools import partial

import jax

from rollmill.core.errors import CannotFuse, CheckpointError, UnfitHost, UsageError
from rollmill.dataflow import Graph, empty_experience, learn_from_trajectory
from rollmill.programs.compiled import unroll_for
from rollmill.programs.kernel_choice import choose_kernels
from rollmill.programs.kernels import (
    KernelChoice,
    Launches,
    device_name,
    kernel_parts,
    plain_kernels,
    sought_parts,
    without_kernels,
)
from rollmill.workers.protocol import KernelsChosen, send, wait
from rollmill.workers.replica.context import ReplicaContext
from rollmill.workers.replica.layouts import collector_shapes, trajectory_shapes


def replica_kernels(context: ReplicaContext) -> KernelChoice:
    """Chooses the kernels for this replica's rollouts and gradients. All replicas of a group get the same kernels.

    Raises `UnfitHost` if a requested kernel cannot be made on this host, or if the run has recorded a launch
    configuration that does not fit.
    """
    parts = kernel_parts(context.group)
    if not parts:
        # does not ask for a device, which replicas of Python environments do not need
        return plain_kernels(unroll=1)
    unroll = context.spec.unroll or unroll_for(jax.default_backend())
    if context.graph.host is not None or not {*sought_parts(context.spec.kernels.fusion)}.intersection(parts):
        return plain_kernels(unroll)
    context.control.at("choosing kernels", expect=3 * context.spec.tolerances.start_seconds)
    try:
        return _first_choice(context, unroll) if context.replica == 0 else _follow_choice(context, unroll)
    except (UsageError, CheckpointError) as error:
        raise UnfitHost(str(error)) from error


def _first_choice(context: ReplicaContext, unroll: int) -> KernelChoice:
    """Chooses kernels for the group, and sends the choice to the other replicas."""
    kernels = _find(context, unroll, context.begin.launches)
    try:
        _trace(context, kernels)
    except CannotFuse as reason:
        kernels = without_kernels(context.spec.kernels.fusion, unroll, reason)
    send(context.control, KernelsChosen(kernels.launches, kernels.notes))
    return kernels


def _follow_choice(context: ReplicaContext, unroll: int) -> KernelChoice:
    """Makes the kernels that the first replica has chosen."""
    begin, fusion, mine = context.begin, context.spec.kernels.fusion, device_name(jax.devices()[0])
    launches = begin.launches
    if launches is None or (launches.get("device") != mine and not begin.attempt):
        # The launches with which the run began may come from another machine. The first replica then chooses
        # again.
        context.control.at(
            "waiting for the kernels of the group", expect=3 * context.spec.tolerances.start_seconds
        )
        launches = wait(context.control, KernelsChosen).launches
    other = None if launches is None else launches.get("device")
    if launches is None or (other != mine and fusion == "auto"):
        return plain_kernels(unroll)
    if other != mine:
        raise UsageError(
            f"fusion={fusion}: the hosts of group {context.group.name} have different devices, {other} and "
            f"{mine}, but must all run the same kernels. hint: use fusion=off, or hosts with equal devices."
        )
    return _find(context, unroll, launches)


def _find(context: ReplicaContext, unroll: int, launches: Launches | None) -> KernelChoice:
    settings = context.spec.kernels
    return choose_kernels(
        _graph(context),
        fusion=settings.fusion,
        numerics=settings.numerics,
        unroll=unroll,
        devices=jax.devices()[:1],
        num_seeds=1,
        launches=launches,
        parts=kernel_parts(context.group),
        shares=context.group.replicas,
    )


def _graph(context: ReplicaContext) -> Graph:
    """Returns the graph that kernels are made of.

    A kernel's additions to rollout steps stay in the group: sent trajectories always have the shapes of the edge.
    """
    return context.graph if context.group.holds("gradients") else context.graph._replace(compute_values=None)


def _trace(context: ReplicaContext, kernels: KernelChoice) -> None:
    """Traces the parts that are kernels, with this replica's shapes."""
    graph, flow, width = context.graph, context.flow, len(context.index)
    trajectory = trajectory_shapes(flow, width)
    key, index = jax.random.key(0), jax.ShapeDtypeStruct((width,), context.index.dtype)
    if kernels.rollouts.fused:
        rollout = partial(kernels.rollouts.function, _graph(context))
        _, trajectory = jax.eval_shape(rollout, flow.weights, collector_shapes(flow, width), key)
    if kernels.gradients.fused:
        rings = jax.eval_shape(partial(empty_experience, graph), index)
        learn = partial(learn_from_trajectory, graph, make_minibatch_loop=kernels.gradients.function)
        jax.eval_shape(learn, flow.state.learner, rings, trajectory, key, index)
