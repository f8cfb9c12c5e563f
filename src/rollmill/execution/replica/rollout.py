"""The collecting half of an iteration, in the group that holds the policy.

With the environment in the same group a rollout is one compiled program. Otherwise it is a loop on the host
that sends actions and waits for answers, in as many lanes as there are groups of environments: while the
environments of one lane are stepped, the policy decides for another.

Shape letters: `T` steps, `E` environments of this replica.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.core.types import Key
from rollmill.dataflow import (
    COLLECT,
    Collector,
    Graph,
    StepReply,
    Trajectory,
    Weights,
    collect,
    cut,
    iteration_key,
    step_all,
)
from rollmill.execution.replica.env_client import EnvLink
from rollmill.execution.replica.segments import CompiledSegments

Collects = Callable[[Weights, int], Trajectory]
"""`(weights, iteration) -> trajectory` `[T, E, ...]`."""


class CompiledRollout:
    """Policy and environment in one program."""

    def __init__(self, graph: Graph, key: Key, collector: Collector, *, unroll: int) -> None:
        self.collector = collector
        self._key = key
        self._collect = jax.jit(partial(_collect, graph, unroll))

    def __call__(self, weights: Weights, iteration: int) -> Trajectory:
        """One rollout."""
        self.collector, trajectory = self._collect(weights, self.collector, self._key, np.int32(iteration))
        return trajectory


def _collect(graph: Graph, unroll: int, weights: Weights, collector: Collector, key: Key, iteration: Any):
    return collect(graph, weights, collector, iteration_key(key, iteration, COLLECT), unroll=unroll)


class RemoteEnvsRollout:
    """The policy here, environments at the ends of lanes; a lane's collector holds its environments' part.

    Weights and collectors are kept as leaves: taking modules apart at every step would cost more than deciding.
    """

    def __init__(self, graph: Graph, key: Key, lanes: Sequence[EnvLink], collectors: Sequence[Collector]) -> None:
        """`graph` is one whose environment is elsewhere; all lanes are equally wide."""
        self._graph, self._lanes = graph, lanes
        self._key = jax.jit(partial(iteration_key, key, use=COLLECT))
        self._collectors = [jax.tree.leaves(collector) for collector in collectors]
        self._structure = jax.tree.structure(collectors[0])
        self._last: list[StepReply | None] = [None] * len(lanes)
        self._step: tuple[CompiledSegments, Any] | None = None

    @property
    def collector(self) -> Collector:
        """The collector of all links together."""
        joined = [np.concatenate(leaves) for leaves in zip(*self._collectors, strict=True)]
        return jax.tree.unflatten(self._structure, joined)

    def __call__(self, weights: Weights, iteration: int) -> Trajectory:
        """One rollout."""
        key, before = self._key(iteration=np.int32(iteration)), self.collector
        if self._step is None:
            self._step = self._compiled(weights, key)
        pieces, structure = self._step
        leaves = jax.device_put(jax.tree.leaves(weights))  # once, and not at every step
        decide = lambda n, t: self._decide(n, pieces, [*leaves, *self._collectors[n], key, np.int32(t)], iteration)
        walks = [decide(n, 0) for n in range(len(self._lanes))]
        rollout = _Rollout(self._graph.loops.num_steps, len(self._lanes))
        for t in range(rollout.num_steps):
            for n in range(len(self._lanes)):
                rollout.store(t, n, self._follow(n, walks[n]))
                if t + 1 < rollout.num_steps:
                    walks[n] = decide(n, t + 1)
        after = self.collector
        return Trajectory(
            jax.tree.unflatten(structure, rollout.leaves), before.memory, after.observation, after.memory
        )

    def _compiled(self, weights: Weights, key: Key) -> tuple[CompiledSegments, Any]:
        """A step of one lane, and the structure of what it returns beside the collector."""
        program = cut(partial(step_all, self._graph), weights, self._lane_collector(0), key, np.int32(0))
        return CompiledSegments(program), program.result.children()[1]

    def _decide(self, lane: int, pieces: CompiledSegments, leaves: Sequence[Any], iteration: int):
        """The policy decides for one lane; its actions leave."""
        walking = pieces.walk_leaves(leaves)
        _, request = next(walking)
        self._lanes[lane].send(request, iteration)
        return walking

    def _follow(self, lane: int, walking: Any) -> list[Any]:
        """The answer arrives; the step is complete. Returns its leaves, `[E, ...]`."""
        turn, restarted = self._lanes[lane].receive()
        if restarted:
            turn = cut_short(turn, self._lane_collector(lane), self._last[lane])
        self._last[lane] = turn
        try:
            walking.send(turn)
        except StopIteration as end:
            count = self._structure.num_leaves
            self._collectors[lane] = end.value[:count]
            return end.value[count:]
        raise AssertionError("a step of the policy has one crossing, to the environment")

    def _lane_collector(self, lane: int) -> Collector:
        return jax.tree.unflatten(self._structure, self._collectors[lane])


class _Rollout:
    """The steps of all lanes, `[T, E, ...]`, filled as they come."""

    def __init__(self, num_steps: int, num_lanes: int) -> None:
        self.num_steps, self._num_lanes = num_steps, num_lanes
        self.leaves: list[np.ndarray] = []

    def store(self, t: int, lane: int, step: Sequence[Any]) -> None:
        """Puts one lane's step, leaves `[E, ...]`, into its columns."""
        arrays = [np.asarray(leaf) for leaf in step]
        if not self.leaves:
            self.leaves = [self._empty(array) for array in arrays]
        for place, array in zip(self.leaves, arrays, strict=True):
            width = len(array)
            place[t, lane * width : (lane + 1) * width] = array

    def _empty(self, array: np.ndarray) -> np.ndarray:
        return np.empty((self.num_steps, self._num_lanes * len(array), *array.shape[1:]), array.dtype)


def cut_short(turn: StepReply, before: Collector, last: StepReply | None) -> StepReply:
    """The answer of environments that were lost: their episodes end, truncated, where they were seen last."""
    info = turn.info
    if last is not None:  # returns and lengths as they stood, or none where an episode had just ended
        done = np.asarray(last.terminated) | np.asarray(last.truncated)
        info = {name: jax.tree.map(partial(_unless, done), last.info[name]) for name in turn.info}
    return turn._replace(
        reward=jax.tree.map(np.zeros_like, turn.reward),
        terminated=np.zeros_like(turn.terminated),
        truncated=np.ones_like(turn.truncated),
        info={**info, "final_observation": jax.tree.map(np.asarray, before.observation)},
    )


def _unless(done: np.ndarray, leaf: Any) -> np.ndarray:
    leaf = np.asarray(leaf)
    return np.where(done.reshape(-1, *[1] * (leaf.ndim - 1)), np.zeros_like(leaf), leaf)


def opened(graph: Graph, index: np.ndarray, opening: Any) -> Collector:
    """The policy's part of the collector of environments that have just been opened elsewhere.

    It knows no state of theirs but what it may do: the action mask (`EnvironmentElsewhere`).
    """
    memory = jax.vmap(lambda _: graph.start_memory())(jnp.zeros(len(index)))
    opening = jax.tree.map(jnp.asarray, opening)
    return Collector(jnp.asarray(index), opening.action_mask, opening.observation, opening.action_mask, memory)


def reopened(collector: Collector, places: np.ndarray) -> Collector:
    """The same of environments that go on elsewhere: those at some places of a whole collector."""
    part = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[places]), collector)
    return replace(part, environment=part.action_mask)
