"""The learner of a replica that computes gradients, from iteration to iteration."""

from functools import partial

import jax
import numpy as np

from rollmill.dataflow import Learner, Trajectory, Weights, empty_experience, start_learner
from rollmill.workers.replica.context import ReplicaContext
from rollmill.workers.replica.lag import metrics_of
from rollmill.workers.replica.layouts import ring_shapes
from rollmill.workers.replica.learner import CompiledLearner, CutLearner
from rollmill.workers.replica.remote import MeanOverReplicas, ParameterClient
from rollmill.workers.replica.snapshots import learner_part, restored_learner, restored_rings, rings_part
from rollmill.workers.replica.work import StageRun, Work
from rollmill.workers.reports import Row


class HeldLearner:
    """A learner, and the program that learns with it; its parameters may be made by a parameter server."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context, graph = context, context.graph
        restored = restored_learner(context, context.flow.state.learner)
        self.tree: Learner = jax.jit(partial(start_learner, graph))(context.key) if restored is None else restored
        rings = restored_rings(context, ring_shapes(context.flow, len(context.index)))
        self._rings = jax.jit(partial(empty_experience, graph))(context.index) if rings is None else rings
        self._parameters = ParameterClient(context) if context.role.has_channel("parameters") else None
        self._learn = self._program()

    @property
    def weights(self) -> Weights:
        """The part of the learner that the policy needs."""
        return self._context.graph.weights(self.tree)

    def fetch(self, iteration: int) -> None:
        """Takes the parameters that an iteration begins with from the parameter server."""
        assert self._parameters is not None
        self.tree = self._parameters.begin(self.tree, iteration)

    def learn(self, trajectory: Trajectory, iteration: int) -> Row | None:
        """One iteration's learning; its metrics, but for those that travel with the gradients."""
        self._context.control.work("learning")
        self.tree, self._rings, row = self._learn(self.tree, self._rings, trajectory, iteration)
        if self._parameters is not None and not self._context.group.synchronous:
            self._parameters.end(row)  # the parameter server reports them
            return None
        return row

    def part(self) -> dict[str, np.ndarray]:
        """The arrays that this replica contributes to a snapshot."""
        return learner_part(self._context, self.tree) | rings_part(self._context, self._rings)

    def _program(self) -> CompiledLearner | CutLearner:
        context, graph = self._context, self._context.graph
        reduces = context.role.has_channel("mean")
        if self._parameters is None and not reduces:
            return CompiledLearner(graph, context.key, context.index)
        return CutLearner(
            graph,
            context.flow,
            context.key,
            context.index,
            reduce=MeanOverReplicas(context) if reduces else None,
            update=self._parameters,
            skip=None if self._parameters is None else self._parameters.skip,
        )


def fetch_stage(learner: HeldLearner) -> StageRun:
    """Makes the stage that takes the parameters which an iteration begins with."""

    def fetch(work: Work) -> Work:
        learner.fetch(work.iteration)
        return work

    return StageRun(fetch)


def learn_stage(context: ReplicaContext, learner: HeldLearner) -> StageRun:
    """Makes the stage that learns from the iteration's trajectory."""
    loops = context.graph.loops
    updates = loops.epochs * loops.num_minibatches

    def learn(work: Work) -> Work:
        assert work.trajectory is not None
        row = learner.learn(work.trajectory, work.iteration)
        if row is not None and work.lags is not None:
            row = {**row, **metrics_of([lag * updates for lag in work.lags])}
        return work._replace(metrics=row)

    return StageRun(learn, part=learner.part)
