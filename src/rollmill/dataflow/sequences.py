"""Experience store of whole sequences, for learners with a memory (Kapturowski et al., "R2D2", ICLR 2019).

Each rollout of an environment is one sequence. The store also holds the policy's memory before the first step of
the sequence, so that a learner can begin where the policy began. If an episode ends within a sequence, the learner
resets its memory after that step.

Shape letters: `T` steps of a sequence, `E` environments held here, `C` sequences kept of each, `S` shards, `W`
environments of a shard, `N` sequences of a minibatch held here, `B` sequences of one shard.
"""

import math
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.types import Key, Memory, Observation
from rollmill.dataflow.collecting import collect, start_collector
from rollmill.dataflow.experience import draw_equally
from rollmill.dataflow.graph import Batch, Graph, Learner, Loops, Sample, Step, Trajectory
from rollmill.dataflow.packing import Rows, from_rows, to_rows


class Sequence(NamedTuple):
    """One rollout of one environment. In a minibatch, leaves have a leading axis `[N, ...]`."""

    steps: Step
    """Leaves `[T, ...]`. `extras` and `info` are left out."""
    start_memory: Memory
    """The policy's memory before the first step."""
    observation: Observation
    """The observation after the last step."""


class SequenceRing(eqx.Module):
    """The newest sequences of ONE environment. Sequence `n` is stored in row `n % C`."""

    rows: Rows
    """Sequences, as rows of 32-bit words."""
    count: Int[Array, "*E"]
    """Number of sequences that are stored, at most `C`."""
    newest: Int[Array, "*E"]
    """Row of the newest sequence."""


class SequenceReplay(NamedTuple):
    """Experience store that keeps the newest rollouts of each environment, and draws them uniformly."""

    sequences: int
    """Number of sequences that are kept for each environment."""
    num_steps: int
    """Number of steps in a sequence, which is a whole rollout."""
    minibatch_size: int
    """Number of sequences in a minibatch, over all environments. It must be a multiple of the number of shards."""
    learning_starts: int
    """Number of environment steps that are stored before learning begins."""

    @property
    def capacity(self) -> int:
        """Number of environment steps kept for each environment."""
        return self.sequences * self.num_steps

    def steps_before_learning(self, loops: Loops, /) -> int:
        """Returns the number of environment steps after which learning begins."""
        return min(max(self.learning_starts, loops.batch_size), self.capacity * loops.num_envs)

    def empty(self, graph: Graph, index: Int[Array, " E"], /) -> SequenceRing:
        """Returns empty rings of sequences for the environments with the given global indices.

        Raises:
            UsageError: the sizes do not fit the graph.
        """
        self._check(graph.loops)
        one = jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), _struct(graph))
        rows = jax.eval_shape(to_rows, one)
        of_each = lambda leaf: jnp.zeros((len(index), self.sequences, *leaf.shape[1:]), leaf.dtype)
        count = jnp.zeros(len(index), jnp.int32)
        return SequenceRing(jax.tree.map(of_each, rows), count, count - 1)

    def add(self, graph: Graph, ring: SequenceRing, trajectory: Trajectory, /) -> SequenceRing:
        """Returns the rings after adding a rollout of the same environments as one sequence each."""
        newest = (ring.newest + 1) % self.sequences
        each = jnp.arange(len(newest))
        write = lambda table, new: table.at[each, newest].set(new)
        rows = jax.tree.map(write, ring.rows, to_rows(_by_environment(trajectory)))
        return SequenceRing(rows, jnp.minimum(ring.count + 1, self.sequences), newest)

    def is_ready(self, ring: SequenceRing, loops: Loops, /) -> Bool[Array, ""]:
        """Returns whether the rings hold enough sequences to begin learning."""
        return ring.count[0] >= -(-self.steps_before_learning(loops) // loops.batch_size)

    def sample(
        self, graph: Graph, ring: SequenceRing, learner: Learner, key: Key, index: Int[Array, " E"], /
    ) -> Sample:
        """Draws the part of one minibatch that belongs to the environments held here. The minibatch's samples are
        `Sequence`s.
        """
        width = graph.loops.num_envs // graph.loops.num_shards
        shards = index[::width] // width
        keys = jax.vmap(partial(jax.random.fold_in, key))(shards)
        count = self.minibatch_size // graph.loops.num_shards
        draw = partial(draw_equally, count=count)
        environment, row = jax.vmap(draw)(keys, ring.count.reshape(len(shards), width))
        environment += jnp.arange(len(shards), dtype=jnp.int32)[:, None] * width
        places = (environment * self.sequences + row).reshape(-1)
        flat = jax.tree.map(lambda leaf: leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:]), ring.rows)
        return Sample(Batch(from_rows(jax.tree.map(lambda leaf: leaf[places], flat), _struct(graph))))

    def update(self, graph: Graph, ring: SequenceRing, learner: Learner, sample: Sample, /) -> SequenceRing:
        """Returns the rings unchanged, because sequences are drawn uniformly."""
        return ring

    def mutable(self, ring: SequenceRing, /) -> tuple[()]:
        """Returns the part of the rings that `update` changes, which is all that the loop over minibatches
        carries.
        """
        return ()

    def with_mutable(self, ring: SequenceRing, mutable: tuple[()], /) -> SequenceRing:
        """Returns the rings with the part that `update` changes replaced."""
        return ring

    def fill(self, ring: SequenceRing, /) -> Float[Array, ""]:
        """Returns the mean fraction of the rings' capacity that is in use."""
        return jnp.mean(ring.count.astype(jnp.float32)) / self.sequences

    def _check(self, loops: Loops) -> None:
        if self.num_steps != loops.num_steps:
            raise UsageError(
                f"num_steps={self.num_steps} of the store must equal that of the rollouts, {loops.num_steps}."
            )
        if self.minibatch_size % loops.num_shards:
            raise UsageError(
                f"minibatch_size={self.minibatch_size} of the store must be divisible by "
                f"num_shards={loops.num_shards}. hint: "
                f"minibatch_size={-(-self.minibatch_size // loops.num_shards) * loops.num_shards}."
            )


def _by_environment(trajectory: Trajectory) -> Sequence:
    """Returns the rollout as a `Sequence` of each environment, with leaves `[E, ...]`."""
    steps = trajectory.steps._replace(extras=(), info={})
    by_env = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), steps)
    return Sequence(by_env, trajectory.start_memory, trajectory.observation)


def _struct(graph: Graph) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shapes of ONE sequence."""

    def rollout() -> Sequence:
        key, index = jax.random.key(0), jnp.arange(1, dtype=jnp.int32)
        weights = graph.weights(graph.start_learner(key))
        _, trajectory = collect(graph, weights, start_collector(graph, key, index), key)
        return jax.tree.map(lambda leaf: leaf[0], _by_environment(trajectory))

    return jax.eval_shape(rollout)
