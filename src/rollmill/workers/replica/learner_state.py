"""The learner of a replica that computes gradients, kept between iterations, and the stages that use it."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, PyTree

from rollmill.dataflow import Learner, Trajectory, Weights, empty_experience
from rollmill.dataflow.lost_environments import end_running_episodes
from rollmill.programs.kernels import KernelChoice
from rollmill.programs.states import begin_learner
from rollmill.workers.replica.context import IterationState, ReplicaContext, StageRun, lag_metrics
from rollmill.workers.replica.layouts import ring_shapes
from rollmill.workers.replica.learner import CompiledLearner, CutLearner
from rollmill.workers.replica.remote import MeanOverReplicas, ParameterClient
from rollmill.workers.replica.snapshots import learner_part, restored_learner, restored_rings, rings_part
from rollmill.workers.reports import Row


class LearnerState:
    """A learner, and the program that updates it. A parameter server may provide its parameters."""

    def __init__(self, context: ReplicaContext, kernels: KernelChoice) -> None:
        self._context, graph = context, context.graph
        restored = restored_learner(context)
        self.tree: Learner = begin_learner(graph, context.key) if restored is None else restored
        self._rings = _experience(context)
        self._parameters = ParameterClient(context) if context.role.has_channel("parameters") else None
        self._learn = self._program(kernels)

    @property
    def weights(self) -> Weights:
        """The weights that the policy needs from the learner."""
        return self._context.graph.weights(self.tree)

    def fetch(self, iteration: int) -> None:
        """Fetches from the parameter server the parameters with which an iteration begins."""
        assert self._parameters is not None
        self.tree = self._parameters.begin(self.tree, iteration)

    def learn(
        self, trajectory: Trajectory, iteration: int, *, lost: Bool[np.ndarray, " E"] | None = None
    ) -> Row | None:
        """Learns from a trajectory for one iteration. Returns the metrics, or None if they are sent with the
        gradients.

        `lost` marks environments whose episodes do not continue in this trajectory.
        """
        self._context.control.work("learning")
        if lost is not None:
            end = partial(end_running_episodes, self._context.graph)
            self._rings = jax.jit(end, donate_argnums=0)(self._rings, lost)  # a second memory may not fit
        self.tree, self._rings, row = self._learn(self.tree, self._rings, trajectory, iteration)
        if self._parameters is not None and not self._context.group.synchronous:
            self._parameters.end(row)  # the parameter server reports the metrics
            return None
        return row

    def part(self) -> dict[str, np.ndarray]:
        """Returns the arrays that this replica contributes to a snapshot."""
        return learner_part(self._context, self.tree) | rings_part(self._context, self._rings)

    def _program(self, kernels: KernelChoice) -> CompiledLearner | CutLearner:
        context = self._context
        reduces = context.role.has_channel("mean")
        if self._parameters is None and not reduces:
            return CompiledLearner(context.graph, context.key, context.index, kernels.gradients.function)
        return CutLearner(
            context.graph,
            context.flow,
            context.key,
            context.index,
            kernels.gradients.function,
            reduce=MeanOverReplicas(context) if reduces else None,
            update=self._parameters,
            skip=None if self._parameters is None else self._parameters.skip,
        )


def _experience(context: ReplicaContext) -> PyTree[Any]:
    """Returns the experience with which a replica begins. Episodes of environments that begin anew are ended."""
    graph, rings = context.graph, restored_rings(context, ring_shapes(context.flow, len(context.index)))
    if rings is None:
        return jax.jit(partial(empty_experience, graph))(context.index)
    if context.begin.resets_environments:
        return jax.jit(partial(end_running_episodes, graph))(rings)
    return rings


class FetchParameters(StageRun):
    """Stage that fetches from the parameter server the parameters with which an iteration begins."""

    def __init__(self, learner: LearnerState) -> None:
        self._learner = learner

    def run(self, state: IterationState) -> IterationState:
        """Replaces the learner's parameters by the parameters of the server."""
        self._learner.fetch(state.iteration)
        return state


class Learn(StageRun):
    """Stage that learns from the trajectory of the iteration."""

    def __init__(self, context: ReplicaContext, learner: LearnerState) -> None:
        self._learner, loops = learner, context.graph.loops
        self._updates = loops.epochs * loops.num_minibatches

    def run(self, state: IterationState) -> IterationState:
        """Learns from the trajectory, and adds the metrics to the results of the iteration."""
        assert state.trajectory is not None
        row = self._learner.learn(state.trajectory, state.iteration, lost=state.lost)
        if row is not None and state.lags is not None:
            row = {**row, **lag_metrics(lag * self._updates for lag in state.lags)}
        return state._replace(metrics=row)

    def part(self) -> dict[str, np.ndarray]:
        """Returns the leaves of the learner and the replay memory that this replica owns, for a snapshot."""
        return self._learner.part()
