"""Experience stores of whole sequences, for learners with a memory (Kapturowski et al., "R2D2", ICLR 2019).

A store keeps the newest rollouts of each environment. A sequence consists of one or several consecutive rollouts,
and begins with any rollout, so that sequences of several rollouts overlap. Each step is stored once. The store
also keeps the policy's memory before the first step of each rollout, so that a learner can begin where the policy
began. If an episode ends within a sequence, the learner resets its memory after that step.

Shape letters: `T` steps of a rollout, `L` rollouts of a sequence, `E` environments of this replica, `C` rollouts
stored per environment, `S` shards, `W` environments of a shard, `N` sequences of this replica's part of a
minibatch, `B` sequences of one shard.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key as KeyArray, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.types import FINAL_MASK, Key, Memory, Observation
from rollmill.dataflow.collecting import collect, start_collector
from rollmill.dataflow.experience import Draw, RingRows, draw_equally
from rollmill.dataflow.graph import Batch, Graph, Learner, Loops, Sample, Step, Trajectory
from rollmill.dataflow.packing import Rows, from_rows, to_rows
from rollmill.dataflow.priorities import (
    SMALLEST_ERROR,
    Priorities,
    draw_by_priority,
    empty_priorities,
    with_values,
)

SEQUENCE_KEYS = 2**32 - 1
"""Number of the key from which the keys of sequences are made. Draws use small numbers."""


class Sequence(NamedTuple):
    """Consecutive steps of one environment. In a minibatch, leaves have a leading axis `[N, ...]`."""

    steps: Step
    """Leaves `[L * T, ...]`. `extras`, `final_memory` and `info` are left out, except for the legal actions after
    each step (`info[FINAL_MASK]`)."""
    start_memory: Memory
    """The policy's memory before the first step."""
    observation: Observation
    """The observation after the last step."""
    weight: Float[Array, "..."]
    """Importance weight of a prioritised draw, or 1."""
    key: KeyArray[Array, "..."]
    """Random key of the sequence, for gradients that sample actions."""


class StoredRollout(NamedTuple):
    """One rollout of one environment, as it is stored."""

    steps: Step
    """The steps of the rollout, with leaves `[T, ...]`."""
    start_memory: Memory
    """The policy's memory before the first step."""
    observation: Observation
    """The observation after the last step."""


class SequenceRing(eqx.Module):
    """The newest rollouts of ONE environment. Rollout `n` is stored in row `n % C`."""

    rows: Rows
    """Rollouts, as rows of 32-bit words."""
    count: Int[Array, "*E"]
    """Number of rollouts that are stored, at most `C`."""
    newest: Int[Array, "*E"]
    """Row of the newest rollout."""
    priorities: Priorities | None
    """Priorities of the sequences by the row of their first rollout, or None for uniform draws."""


class SequenceReplay(NamedTuple):
    """Experience store that keeps the newest rollouts of each environment, and draws their sequences uniformly."""

    rollouts: int
    """Number of rollouts that are kept for each environment."""
    num_steps: int
    """Number of steps in a rollout."""
    minibatch_size: int
    """Number of sequences in a minibatch, over all environments. It must be a multiple of the number of shards."""
    learning_starts: int
    """Number of environment steps that are stored before learning begins."""
    length: int = 1
    """Number of consecutive rollouts in a sequence."""

    @property
    def capacity(self) -> int:
        """Maximum number of steps that are stored for each environment."""
        return self.rollouts * self.num_steps

    def steps_before_learning(self, loops: Loops, /) -> int:
        """Returns the number of environment steps after which learning begins."""
        return min(max(self.learning_starts, self.length * loops.batch_size), self.capacity * loops.num_envs)

    def empty(self, graph: Graph, index: Int[Array, " E"], /) -> SequenceRing:
        """Returns empty rings of rollouts for the environments with the given global indices.

        Raises:
            UsageError: the sizes do not fit the graph.
        """
        self._check(graph.loops)
        one = jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), rollout_struct(graph))
        rows = jax.eval_shape(to_rows, one)
        of_each = lambda leaf: jnp.zeros((len(index), self.rollouts, *leaf.shape[1:]), leaf.dtype)
        count = jnp.zeros(len(index), jnp.int32)
        return SequenceRing(jax.tree.map(of_each, rows), count, count - 1, None)

    def add(self, graph: Graph, ring: SequenceRing, trajectory: Trajectory, /) -> SequenceRing:
        """Returns the rings after adding a rollout of the same environments."""
        newest = (ring.newest + 1) % self.rollouts
        each = jnp.arange(len(newest))
        write = lambda table, new: table.at[each, newest].set(new)
        rows = jax.tree.map(write, ring.rows, to_rows(_by_environment(trajectory)))
        return SequenceRing(rows, jnp.minimum(ring.count + 1, self.rollouts), newest, ring.priorities)

    def is_ready(self, ring: SequenceRing, loops: Loops, /) -> Bool[Array, ""]:
        """Returns whether the rings hold enough rollouts to begin learning."""
        return ring.count[0] >= -(-self.steps_before_learning(loops) // loops.batch_size)

    def sample(
        self, graph: Graph, ring: SequenceRing, learner: Learner, key: Key, index: Int[Array, " E"], /
    ) -> Sample:
        """Draws this replica's part of a minibatch of `Sequence`s. Each ring must hold at least one sequence."""
        return self.sample_with(self._draw_uniformly, graph, ring, key, index)

    def sample_with(
        self, draw: Draw, graph: Graph, ring: SequenceRing, key: Key, index: Int[Array, " E"]
    ) -> Sample:
        """Draws a minibatch of the sequences whose first rollouts are in the rows chosen by `draw`."""
        width = graph.loops.num_envs // graph.loops.num_shards
        shards = index[::width] // width
        keys = jax.vmap(partial(jax.random.fold_in, key))(shards)
        count = self.minibatch_size // graph.loops.num_shards
        by_shard = jax.tree.map(lambda leaf: leaf.reshape(len(shards), width, *leaf.shape[1:]), ring)
        environment, row, weight = jax.vmap(partial(draw, count=count))(keys, by_shard)
        environment += jnp.arange(len(shards), dtype=jnp.int32)[:, None] * width
        environment, row = environment.reshape(-1), row.reshape(-1)
        sequence_keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, SEQUENCE_KEYS), count))(
            keys
        ).reshape(-1)
        sequences = self._sequences(graph, ring, environment, row, weight.reshape(-1), sequence_keys)
        return Sample(Batch(sequences), RingRows(environment, row))

    def update(self, graph: Graph, ring: SequenceRing, learner: Learner, sample: Sample, /) -> SequenceRing:
        """Returns the rings unchanged, because sequences are drawn uniformly."""
        return ring

    def mutable_part(self, ring: SequenceRing, /) -> tuple[()]:
        """Returns the part of the rings that `update` changes, which the loop over minibatches carries."""
        return ()

    def with_mutable_part(self, ring: SequenceRing, mutable: tuple[()], /) -> SequenceRing:
        """Returns the rings with `mutable` as the part that `update` changes."""
        return ring

    def fill_fraction(self, ring: SequenceRing, /) -> Float[Array, ""]:
        """Returns the mean fraction of the rings' capacity that is in use."""
        return jnp.mean(ring.count.astype(jnp.float32)) / self.rollouts

    def num_sequences(self, ring: SequenceRing) -> Int[Array, " E"]:
        """Returns the number of sequences that each ring holds."""
        return jnp.maximum(ring.count - self.length + 1, 0)

    def _draw_uniformly(
        self, key: Key, ring: SequenceRing, *, count: int
    ) -> tuple[Int[Array, " B"], Int[Array, " B"], Float[Array, " B"]]:
        """Chooses each sequence of one shard with equal probability. See `experience.Draw`."""
        environment, number = draw_equally(key, self.num_sequences(ring), count=count)
        oldest = ring.newest - ring.count + 1
        return environment, (oldest[environment] + number) % self.rollouts, jnp.ones(count, jnp.float32)

    def _sequences(
        self,
        graph: Graph,
        ring: SequenceRing,
        environment: Int[Array, " N"],
        row: Int[Array, " N"],
        weight: Float[Array, " N"],
        key: KeyArray[Array, " N"],
    ) -> Sequence:
        """Joins the rollouts of the sequences that begin in these rows."""
        following = (row[:, None] + jnp.arange(self.length)[None]) % self.rollouts
        places = (environment[:, None] * self.rollouts + following).reshape(-1)
        flat = jax.tree.map(lambda leaf: leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:]), ring.rows)
        taken: StoredRollout = from_rows(jax.tree.map(lambda leaf: leaf[places], flat), rollout_struct(graph))
        joined = lambda leaf: leaf.reshape(len(row), self.length * self.num_steps, *leaf.shape[2:])
        return Sequence(
            jax.tree.map(joined, taken.steps),
            jax.tree.map(lambda leaf: leaf[:: self.length], taken.start_memory),
            jax.tree.map(lambda leaf: leaf[self.length - 1 :: self.length], taken.observation),
            weight,
            key,
        )

    def _check(self, loops: Loops) -> None:
        if self.num_steps != loops.num_steps:
            raise UsageError(
                f"num_steps={self.num_steps} of the store must equal num_steps={loops.num_steps} of the rollouts."
            )
        if self.rollouts < self.length:
            raise UsageError(
                f"the store keeps rollouts={self.rollouts} of each environment, but a sequence has "
                f"length={self.length} rollouts. hint: use rollouts={self.length} or more."
            )
        if self.minibatch_size % loops.num_shards:
            raise UsageError(
                f"minibatch_size={self.minibatch_size} of the store must be divisible by "
                f"num_shards={loops.num_shards}. hint: use "
                f"minibatch_size={-(-self.minibatch_size // loops.num_shards) * loops.num_shards}."
            )


class PrioritisedSequences(NamedTuple):
    """Experience store that draws sequences in proportion to their errors.

    A new sequence gets the highest priority of its shard.
    """

    store: SequenceReplay
    priority_exponent: float
    """Sequences are drawn in proportion to their errors to this power."""
    weight_exponent: float
    """Exponent of the importance weights that correct for prioritised draws."""
    errors: Callable[[Learner, Batch], Float[Array, " N"]]
    """Computes the error of each sequence in a minibatch, with the learner before the update."""

    @property
    def capacity(self) -> int:
        """Maximum number of steps that are stored for each environment."""
        return self.store.capacity

    def steps_before_learning(self, loops: Loops, /) -> int:
        """Returns the number of environment steps after which learning begins."""
        return self.store.steps_before_learning(loops)

    def empty(self, graph: Graph, index: Int[Array, " E"], /) -> SequenceRing:
        """Returns empty rings for the environments with the given global indices."""
        one = empty_priorities(self.store.rollouts)
        priorities = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(index), *leaf.shape)), one)
        return self.with_mutable_part(self.store.empty(graph, index), priorities)

    def add(self, graph: Graph, ring: SequenceRing, trajectory: Trajectory, /) -> SequenceRing:
        """Returns the rings after adding a rollout of the same environments."""
        assert ring.priorities is not None
        after, length = self.store.add(graph, ring, trajectory), self.store.length
        width = graph.loops.num_envs // graph.loops.num_shards
        highest = jnp.repeat(ring.priorities.highest.reshape(-1, width).max(axis=1), width)
        each = jnp.arange(len(highest), dtype=jnp.int32)
        # The sequence that ends with the new rollout can be drawn now.
        environment = jnp.where(after.count >= length, each, len(each))
        row, value = (after.newest - length + 1) % self.store.rollouts, highest
        if length > 1:
            # Sequences that begin with the new rollout are not complete yet.
            environment, row = jnp.concatenate([environment, each]), jnp.concatenate([row, after.newest])
            value = jnp.concatenate([value, jnp.zeros_like(highest)])
        return self.with_mutable_part(after, with_values(ring.priorities, environment, row, value))

    def is_ready(self, ring: SequenceRing, loops: Loops, /) -> Bool[Array, ""]:
        """Returns whether the rings hold enough rollouts to begin learning."""
        return self.store.is_ready(ring, loops)

    def sample(
        self, graph: Graph, ring: SequenceRing, learner: Learner, key: Key, index: Int[Array, " E"], /
    ) -> Sample:
        """Draws this replica's part of a minibatch. Each ring must hold at least one sequence."""

        def draw(key: Key, shard: SequenceRing, *, count: int):
            assert shard.priorities is not None
            drawable = self.store.num_sequences(shard)
            return draw_by_priority(
                key, shard.priorities, drawable, count=count, weight_exponent=self.weight_exponent
            )

        return self.store.sample_with(draw, graph, ring, key, index)

    def update(self, graph: Graph, ring: SequenceRing, learner: Learner, sample: Sample, /) -> SequenceRing:
        """Sets the priorities of a sample's sequences from their errors, after learning from the sample."""
        assert ring.priorities is not None
        values = (self.errors(learner, sample.minibatch) + SMALLEST_ERROR) ** self.priority_exponent
        is_drawn = sample.minibatch.samples.weight > 0
        environment = jnp.where(is_drawn, sample.location.environment, len(ring.count))
        return self.with_mutable_part(ring, with_values(ring.priorities, environment, sample.location.row, values))

    def mutable_part(self, ring: SequenceRing, /) -> Priorities | None:
        """Returns the part of the rings that `update` changes, which the loop over minibatches carries."""
        return ring.priorities

    def with_mutable_part(self, ring: SequenceRing, mutable: Priorities | None, /) -> SequenceRing:
        """Returns the rings with `mutable` as the part that `update` changes."""
        return eqx.tree_at(lambda ring: ring.priorities, ring, mutable, is_leaf=lambda leaf: leaf is None)

    def fill_fraction(self, ring: SequenceRing, /) -> Float[Array, ""]:
        """Returns the mean fraction of the rings' capacity that is in use."""
        return self.store.fill_fraction(ring)


def _by_environment(trajectory: Trajectory) -> StoredRollout:
    """Returns the rollout of each environment, with leaves `[E, ...]`."""
    steps = trajectory.steps
    legal = {name: steps.info[name] for name in (FINAL_MASK,) if name in steps.info}
    by_env = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), steps._replace(extras=(), final_memory=(), info=legal))
    return StoredRollout(by_env, trajectory.start_memory, trajectory.observation)


def rollout_struct(graph: Graph) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shapes of ONE rollout."""

    def rollout() -> StoredRollout:
        key, index = jax.random.key(0), jnp.arange(1, dtype=jnp.int32)
        weights = graph.weights(graph.start_learner(key))
        _, trajectory = collect(graph, weights, start_collector(graph, key, index), key)
        return jax.tree.map(lambda leaf: leaf[0], _by_environment(trajectory))

    return jax.eval_shape(rollout)
