"""The collecting half of an iteration, in the group that holds the policy.

With the environment in the same group a rollout is one compiled program. Otherwise it is a loop on the host
that sends actions and waits for answers, in as many lanes as there are groups of environments: while the
environments of one lane are stepped, the policy decides for another.

Shape letters: `T` steps, `E` environments of this replica.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rollmill.core.types import Key
from rollmill.dataflow import (
    COLLECT,
    Collector,
    Graph,
    Step,
    Trajectory,
    Turn,
    Weights,
    collect,
    cut,
    iteration_key,
    step_all,
)
from rollmill.execution.groups.pieces import Pieces
from rollmill.execution.groups.stepping import Lane

Collects = Callable[[Weights, int], Trajectory]
"""`(weights, iteration) -> trajectory` `[T, E, ...]`."""


class CompiledCollecting:
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


class LaneCollecting:
    """The policy here, environments at the ends of lanes; a lane's collector holds its environments' part."""

    def __init__(self, graph: Graph, key: Key, lanes: Sequence[Lane], collectors: Sequence[Collector]) -> None:
        """`graph` is one whose environment is elsewhere; all lanes are equally wide."""
        self._graph, self._key, self._lanes = graph, key, lanes
        self._collectors = list(collectors)
        self._last: list[Turn | None] = [None] * len(lanes)
        self._step: Pieces | None = None

    @property
    def collector(self) -> Collector:
        """Of all lanes together."""
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *self._collectors)

    def __call__(self, weights: Weights, iteration: int) -> Trajectory:
        """One rollout."""
        key = iteration_key(self._key, iteration, COLLECT)
        start = [collector.memory for collector in self._collectors]
        stores: list[Any] = [None] * len(self._lanes)
        walks = [self._decide(n, weights, key, 0, iteration) for n in range(len(self._lanes))]
        steps = self._graph.loops.num_steps
        for t in range(steps):
            for n in range(len(self._lanes)):
                step = self._follow(n, walks[n])
                if t + 1 < steps:
                    walks[n] = self._decide(n, weights, key, t + 1, iteration)
                stores[n] = _store(stores[n], step, t, steps)
        return _joined(stores, start, self._collectors)

    def _decide(self, lane: int, weights: Weights, key: Key, t: int, iteration: int):
        """The policy decides for one lane; its actions leave."""
        arguments = (weights, self._collectors[lane], key, np.int32(t))
        if self._step is None:
            self._step = Pieces(cut(partial(step_all, self._graph), *arguments))
        walking = self._step.walk(*arguments)
        _, request = next(walking)
        self._lanes[lane].send(request, iteration)
        return walking

    def _follow(self, lane: int, walking: Any) -> Step:
        """The answer arrives; the step is complete."""
        turn, restarted = self._lanes[lane].receive()
        if restarted:
            turn = cut_short(turn, self._collectors[lane], self._last[lane])
        self._last[lane] = turn
        try:
            walking.send(turn)
        except StopIteration as end:
            self._collectors[lane], step = end.value
            return step
        raise AssertionError("a step of the policy has one crossing, to the environment")


def cut_short(turn: Turn, before: Collector, last: Turn | None) -> Turn:
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


def _store(store: PyTree[np.ndarray] | None, step: Step, t: int, steps: int) -> PyTree[np.ndarray]:
    if store is None:
        store = jax.tree.map(lambda leaf: np.empty((steps, *np.shape(leaf)), leaf.dtype), step)
    for place, leaf in zip(jax.tree.leaves(store), jax.tree.leaves(step), strict=True):
        place[t] = leaf
    return store


def _joined(stores: Sequence[Step], start: Sequence[Any], after: Sequence[Collector]) -> Trajectory:
    if len(stores) == 1:
        return Trajectory(stores[0], start[0], after[0].observation, after[0].memory)
    along = lambda axis: lambda *leaves: np.concatenate(leaves, axis=axis)
    return Trajectory(
        jax.tree.map(along(1), *stores),
        jax.tree.map(along(0), *start),
        jax.tree.map(along(0), *[collector.observation for collector in after]),
        jax.tree.map(along(0), *[collector.memory for collector in after]),
    )


def opened(graph: Graph, index: np.ndarray, opening: Any) -> Collector:
    """The policy's part of the collector of environments that have just been opened elsewhere."""
    memory = jax.vmap(lambda _: graph.start_memory())(jnp.zeros(len(index)))
    return Collector(jnp.asarray(index), opening.action_mask, opening.observation, opening.action_mask, memory)
