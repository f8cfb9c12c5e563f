"""Rollouts and trainings of MAPPO and IPPO, for tests."""

from typing import NamedTuple

import equinox as eqx
import jax
from losses_by_hand import assert_close, disturbed_network, two_rollouts

from rollmill.algorithms.agents import AgentPolicy
from rollmill.algorithms.multi_agent import AgentLearner
from rollmill.dataflow import Batch, Graph, State, Trajectory
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead


class AgentRollout(NamedTuple):
    """A second rollout, with what came before and after it."""

    graph: Graph
    policy: AgentPolicy
    before: State
    trajectory: Trajectory
    learner: AgentLearner
    batch: Batch


def collect_rollout(graph):
    """A second rollout, by weights far from the start."""
    louder = lambda learner: eqx.tree_at(
        lambda whole: whole.weights.networks, learner, disturbed_network(learner.weights.networks)
    )
    rolled = two_rollouts(graph, jax.random.key(3), learns=louder, acts=louder)
    return AgentRollout(graph, graph.prepare.args[0], *rolled)


def run(graph, *, devices=1):
    """The learner at the end of a training, and the metrics of its iterations."""
    program = lower(graph, devices=jax.devices()[:devices])
    state, rows = program.start(), []
    for window in dispatch_ahead(program, state, first=0, until=graph.loops.iterations):
        state = window.after
        rows += window.metrics
    return jax.device_get(state.learner), rows


def check_two_devices(graph):
    """Asserts that a training on two devices gives the numbers of one."""
    (one, rows_one), (two, rows_two) = (run(graph, devices=n) for n in (1, 2))
    assert_close(two, one, rtol=1e-4, atol=1e-5)
    for alone, together in zip(rows_one, rows_two, strict=True):
        assert_close(together, alone, rtol=1e-3, atol=1e-4)
