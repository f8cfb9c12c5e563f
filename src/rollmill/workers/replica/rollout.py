"""Collects rollouts in a replica that holds the policy.

If the environments are in the same group, a rollout is one compiled program. Otherwise, it is a loop on the host
that sends actions and waits for replies, over one link per replica of the environment group. While the
environments of one link are stepped, the policy chooses actions for another link.

Shape letters: `T` steps, `E` environments of this replica.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rollmill.core.operations import operation_scope
from rollmill.core.types import Key
from rollmill.dataflow import (
    COLLECT,
    Collector,
    Graph,
    StepReply,
    Trajectory,
    Weights,
    divide_at_crossings,
    is_large,
    iteration_key,
    step_all,
)
from rollmill.programs.compiler_options import program_options
from rollmill.programs.kernels import Collect
from rollmill.workers.replica.env_client import EnvLink
from rollmill.workers.replica.pieces import CompiledPieces

ALIGNMENT = 64
"""Alignment in bytes that NumPy arrays need so that the CPU backend of JAX uses them without a copy."""


class CompiledRollout:
    """Collects rollouts with policy and environments in one compiled program."""

    def __init__(self, graph: Graph, key: Key, collector: Collector, collect: Collect) -> None:
        self.collector = collector
        self._key = key
        self._collect = jax.jit(partial(_collect, graph, collect), compiler_options=program_options())

    def __call__(self, weights: Weights, iteration: int) -> Trajectory:
        """Collects one rollout."""
        self.collector, trajectory = self._collect(weights, self.collector, self._key, np.int32(iteration))
        return trajectory


def _collect(graph: Graph, collect: Collect, weights: Weights, collector: Collector, key: Key, iteration: Any):
    with operation_scope("collect"):
        return collect(graph, weights, collector, iteration_key(key, iteration, COLLECT))


def _step(graph: Graph, *arguments: PyTree):
    with operation_scope("collect"):
        return step_all(graph, *arguments)


class RemoteEnvsRollout:
    """Collects rollouts in a loop on the host, from environments behind links. Each link has its own collector.

    Weights and collectors are kept as lists of leaves, because flattening modules in every step would take longer
    than choosing actions.
    """

    def __init__(self, graph: Graph, key: Key, links: Sequence[EnvLink], collectors: Sequence[Collector]) -> None:
        """`graph` has a remote environment. All links must have the same number of environments."""
        self._graph, self._links = graph, links
        self._key = jax.jit(partial(iteration_key, key, use=COLLECT))
        self._collectors = [jax.tree.leaves(collector) for collector in collectors]
        self._structure = jax.tree.structure(collectors[0])
        self._last: list[StepReply | None] = [None] * len(links)
        self._step: tuple[CompiledPieces, Any] | None = None

    @property
    def collector(self) -> Collector:
        """The collectors of all links, concatenated."""
        if len(self._collectors) == 1:  # a single collector can stay on the device
            return jax.tree.unflatten(self._structure, self._collectors[0])
        joined = [np.concatenate(leaves) for leaves in zip(*self._collectors, strict=True)]
        return jax.tree.unflatten(self._structure, joined)

    def __call__(self, weights: Weights, iteration: int) -> Trajectory:
        """Collects one rollout."""
        key, before = self._key(iteration=np.int32(iteration)), self.collector
        if self._step is None:
            self._step = self._compile(weights, key)
        pieces, structure = self._step
        leaves = jax.device_put(jax.tree.leaves(weights))  # transferred once, instead of at every step
        decide = lambda n, t: self._decide(n, pieces, [*leaves, *self._collectors[n], key, np.int32(t)], iteration)
        walks = [decide(n, 0) for n in range(len(self._links))]
        rollout = _Rollout(self._graph.loops.num_steps, len(self._links))
        for t in range(rollout.num_steps):
            for n in range(len(self._links)):
                rollout.store(t, n, self._follow(n, walks[n]))
                if t + 1 < rollout.num_steps:
                    walks[n] = decide(n, t + 1)
        after = self.collector
        return Trajectory(
            jax.tree.unflatten(structure, rollout.taken_over()), before.memory, after.observation, after.memory
        )

    def _compile(self, weights: Weights, key: Key) -> tuple[CompiledPieces, Any]:
        """Compiles a step of one link. Also returns the structure of its results besides the collector."""
        program = divide_at_crossings(
            partial(_step, self._graph), weights, self._link_collector(0), key, np.int32(0)
        )
        return CompiledPieces(program), program.result_tree.children()[1]

    def _decide(self, link: int, pieces: CompiledPieces, leaves: Sequence[Any], iteration: int):
        """Decides for the environments of one link, and sends the actions."""
        walking = pieces.walk_leaves(leaves)
        _, request = next(walking)
        self._links[link].send(request, iteration)
        return walking

    def _follow(self, link: int, walking: Any) -> list[Any]:
        """Receives the reply, which completes the step. Returns its leaves, `[E, ...]`."""
        reply, restarted = self._links[link].receive()
        if restarted:
            reply = truncate_lost(reply, self._link_collector(link), self._last[link])
        self._last[link] = reply
        try:
            walking.send(reply)
        except StopIteration as end:
            count = self._structure.num_leaves
            self._collectors[link] = end.value[:count]
            return end.value[count:]
        raise AssertionError("a step of the policy has one crossing, to the environment")

    def _link_collector(self, link: int) -> Collector:
        return jax.tree.unflatten(self._structure, self._collectors[link])


class _Rollout:
    """The steps of all links, `[T, E, ...]`, stored in the order of their arrival."""

    def __init__(self, num_steps: int, num_links: int) -> None:
        self.num_steps, self._num_links = num_steps, num_links
        self.leaves: list[np.ndarray] = []

    def store(self, t: int, link: int, step: Sequence[Any]) -> None:
        """Stores the step of one link, with leaves `[E, ...]`, in its columns."""
        arrays = [np.asarray(leaf) for leaf in step]
        if not self.leaves:
            self.leaves = [self._empty(array) for array in arrays]
        for leaf, array in zip(self.leaves, arrays, strict=True):
            width = len(array)
            leaf[t, link * width : (link + 1) * width] = array

    def taken_over(self) -> list[Any]:
        """Returns all leaves. On a CPU the large ones become JAX arrays in the same memory, without a copy."""
        if jax.default_backend() != "cpu":
            return self.leaves
        return [jax.device_put(leaf) if _is_large_of_one(leaf, axes=2) else leaf for leaf in self.leaves]

    def _empty(self, array: np.ndarray) -> np.ndarray:
        shape = self.num_steps, self._num_links * len(array), *array.shape[1:]
        return (_allocate_aligned if _is_large_of_one(array, axes=1) else np.empty)(shape, array.dtype)


def _is_large_of_one(array: np.ndarray, *, axes: int) -> bool:
    """Returns whether one element is large, without the leading axes."""
    return is_large(jax.ShapeDtypeStruct(array.shape[axes:], array.dtype))


def _allocate_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an uninitialised array that begins at a multiple of `ALIGNMENT` bytes."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def truncate_lost(reply: StepReply, before: Collector, last: StepReply | None) -> StepReply:
    """Returns the reply for environments that were lost: their episodes are truncated at the last observation."""
    info = reply.info
    # keeps returns and lengths of running episodes, and resets both for episodes that had just ended
    if last is not None:
        done = np.asarray(last.terminated) | np.asarray(last.truncated)
        info = {name: jax.tree.map(partial(_unless, done), last.info[name]) for name in reply.info}
    return reply._replace(
        reward=jax.tree.map(np.zeros_like, reply.reward),
        terminated=np.zeros_like(reply.terminated),
        truncated=np.ones_like(reply.truncated),
        info={**info, "final_observation": jax.tree.map(np.asarray, before.observation)},
    )


def _unless(done: np.ndarray, leaf: Any) -> np.ndarray:
    leaf = np.asarray(leaf)
    return np.where(done.reshape(-1, *[1] * (leaf.ndim - 1)), np.zeros_like(leaf), leaf)


def collector_from_reset(graph: Graph, index: np.ndarray, opening: Any) -> Collector:
    """Creates the policy's part of a collector, for remote environments that have just been reset.

    The only part of the environment state that it contains is the action mask (`RemoteEnvironment`).
    """
    memory = jax.vmap(lambda _: graph.start_memory())(jnp.zeros(len(index)))
    opening = jax.tree.map(jnp.asarray, opening)
    return Collector(jnp.asarray(index), opening.action_mask, opening.observation, opening.action_mask, memory)


def collector_from_checkpoint(collector: Collector, positions: np.ndarray) -> Collector:
    """Creates the policy's part of a collector, for remote environments that are resumed from a checkpoint."""
    part = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[positions]), collector)
    return replace(part, environment=part.action_mask)
