"""Replay memory (Lin, 1992): a ring of the newest steps of each environment, and minibatches drawn from the
rings.

Rings are part of the training state, and belong to the group that computes gradients. Minibatches are drawn inside
the logical shards of the environments, each with its own key, so that any placement that keeps shards whole draws
the same transitions.

Each observation is stored once: the slot of a step holds the observation its action was chosen for, and the next
slot holds the following one. Only a truncated episode takes one slot more, for the final observation that
bootstrapping needs.

Shape letters: `T` steps, `E` environments of this replica, `C` steps stored per environment, `S` shards, `W`
environments of a shard, `N` samples of this replica's part of a minibatch, `B` samples of one shard.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key as KeyArray, PyTree

from rollmill.core.types import FINAL_MASK, Action, Key, Observation
from rollmill.dataflow.collecting import start_one, step_one
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

RUNNING, TERMINATED, TRUNCATED = 0, 1, 2

MAX_ROWS = 2**29
"""Maximum number of rows in a ring, and of steps of an environment before learning begins. Numbers of steps and
slots are reduced long before they overflow, and stay above this bound."""

FALL_BACK_AT = 3 * MAX_ROWS
"""Numbers of steps and slots at or above this value are reduced (`_fall`) before the next steps are stored."""


class View(NamedTuple):
    """Inputs of the policy at one stored step: the observation, and the action mask if there is one."""

    observation: Observation
    action_mask: PyTree[Bool[Array, "..."]]


class Outcome(NamedTuple):
    """Results of one stored step besides its observation: action, reward and flags."""

    action: Action
    reward: Float[Array, ""]
    end: Int[Array, ""]
    """`RUNNING`, or how the step ended its episode."""
    slot: Int[Array, ""]
    """Number of the slot that holds the observation."""


class ReplayRing(eqx.Module):
    """The newest steps of ONE environment, in a replay memory.

    Slots and steps are counted from the start of training, and number `n` is stored in row `n % C`. Before the
    counts overflow, a multiple of `C` is subtracted, so rows stay in place.
    """

    views: Rows
    """Observations and action masks. Slot `n` is row `n % C`."""
    outcomes: Rows
    """Other results of each step. Step `n` is row `n % C`."""
    slots: Int[Array, "*E"]
    """Count of slots written so far, less a multiple of `C` in long runs."""
    steps: Int[Array, "*E"]
    """Count of steps stored so far, less a multiple of `C` in long runs, as is `oldest`."""
    oldest: Int[Array, "*E"]
    """Oldest step with a view that is not overwritten."""
    priorities: Priorities | None
    """Priorities by step, or None for uniform sampling."""


class Transitions(NamedTuple):
    """Transitions drawn from a replay memory, with leaves `[N, ...]`."""

    observation: Observation
    action_mask: PyTree[Bool[Array, "..."]]
    action: Action
    reward: Float[Array, "..."]
    """Discounted sum of up to `n_step` rewards."""
    discount: Float[Array, "..."]
    """Factor of the next observation's value, which is 0 after a termination."""
    next_observation: Observation
    next_action_mask: PyTree[Bool[Array, "..."]]
    """Legal actions of the next observation, including the final observation of a truncated episode."""
    weight: Float[Array, "..."]
    """Importance weight of a prioritised draw, or 1."""
    key: KeyArray[Array, "..."]
    """Random key of the sample, for gradients that sample actions."""


class Replay(NamedTuple):
    """Experience store of single steps, with a ring for each environment. It draws transitions uniformly."""

    capacity: int
    """Number of slots for each environment. A step takes one slot, and the end of a truncated episode one more."""
    minibatch_size: int
    """Number of transitions in a minibatch, over all environments."""
    learning_starts: int
    """Number of environment steps that are stored before learning begins."""
    gamma: float | Callable[[Learner], Float[Array, ""]]
    """Discount factor of returns over several steps, or a function that reads it from the learner."""
    n_step: int = 1
    """Maximum number of steps of a transition's return."""
    convert: Callable[[Step], Step] = lambda step: step
    """Converts steps before they are stored. It supports any leading axes, and returns a reward without axes of
    its own."""

    def steps_before_learning(self, loops: Loops, /) -> int:
        """Returns the number of environment steps after which learning begins.

        The newest step of each environment cannot be drawn yet.
        """
        return max(self.learning_starts, self.minibatch_size + loops.num_envs, 2 * loops.num_envs)

    def empty(self, graph: Graph, index: Int[Array, " E"], /) -> ReplayRing:
        """Returns empty rings for the environments with the given global indices."""
        view, outcome = self._structs(graph)
        rows = lambda struct: jax.tree.map(
            lambda leaf: jnp.zeros((self.capacity, *leaf.shape[1:]), leaf.dtype),
            jax.eval_shape(to_rows, jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), struct)),
        )
        zero = jnp.int32(0)
        return _for_each(index, ReplayRing(rows(view), rows(outcome), zero, zero, zero, None))

    def add(self, graph: Graph, rings: ReplayRing, trajectory: Trajectory, /) -> ReplayRing:
        """Returns the rings after adding a rollout of the same environments."""
        return store(rings, self.convert(trajectory.steps))

    def is_ready(self, rings: ReplayRing, loops: Loops, /) -> Bool[Array, ""]:
        """Returns whether the rings hold enough steps to begin learning."""
        # Counts the steps of ONE environment, because the sum over environments may exceed 32 bits.
        return rings.steps[0] >= -(-self.steps_before_learning(loops) // loops.num_envs)

    def sample(
        self, graph: Graph, rings: ReplayRing, learner: Learner, key: Key, index: Int[Array, " E"], /
    ) -> Sample:
        """Draws this replica's part of a minibatch. Each ring must hold at least two steps."""
        return self.sample_with(_draw_uniformly, graph, rings, learner, key, index)

    def sample_with(
        self, draw: Draw, graph: Graph, rings: ReplayRing, learner: Learner, key: Key, index: Int[Array, " E"]
    ) -> Sample:
        """Draws a minibatch of `Transitions` that begin with the stored steps chosen by `draw`."""
        width = graph.loops.num_envs // graph.loops.num_shards
        shards = index[::width] // width
        keys = jax.vmap(lambda shard: jax.random.split(jax.random.fold_in(key, shard)))(shards)
        choice_keys, sample_keys = keys[:, 0], keys[:, 1]
        count = self.minibatch_size // graph.loops.num_shards
        by_shard = jax.tree.map(lambda leaf: leaf.reshape(len(shards), width, *leaf.shape[1:]), rings)
        environment, step, weight = jax.vmap(partial(draw, count=count))(choice_keys, by_shard)
        environment += jnp.arange(len(shards), dtype=jnp.int32)[:, None] * width
        environment, step = environment.reshape(-1), step.reshape(-1)
        sample_keys = jax.vmap(partial(jax.random.split, num=count))(sample_keys).reshape(-1)
        gamma = jnp.float32(self.gamma(learner) if callable(self.gamma) else self.gamma)
        transitions = self._transitions(graph, rings, gamma, environment, step, weight.reshape(-1), sample_keys)
        return Sample(Batch(transitions), RingRows(environment, step % self.capacity))

    def update(self, graph: Graph, rings: ReplayRing, learner: Learner, sample: Sample, /) -> ReplayRing:
        """Returns the rings unchanged, because transitions are drawn uniformly."""
        return rings

    def mutable_part(self, rings: ReplayRing, /) -> tuple[()]:
        """Returns the part of the rings that `update` changes, which the loop over minibatches carries."""
        return ()

    def with_mutable_part(self, rings: ReplayRing, mutable: tuple[()], /) -> ReplayRing:
        """Returns the rings with `mutable` as the part that `update` changes."""
        return rings

    def fill_fraction(self, rings: ReplayRing, /) -> Float[Array, ""]:
        """Returns the mean fraction of the rings' capacity that is in use."""
        return jnp.mean((rings.steps - rings.oldest).astype(jnp.float32)) / self.capacity

    def _structs(self, graph: Graph) -> tuple[View, Outcome]:
        """Returns the stored shapes of ONE step."""
        index, key = jnp.int32(0), jax.random.key(0)

        def first_step() -> tuple[View, Outcome]:
            now = start_one(graph, key, index)
            _, step = step_one(graph, graph.weights(graph.start_learner(key)), now, key, 0)
            step, zero = self.convert(step), jnp.int32(0)
            return View(step.observation, step.action_mask), Outcome(step.action, step.reward, zero, zero)

        return jax.eval_shape(first_step)

    def _transitions(
        self,
        graph: Graph,
        rings: ReplayRing,
        gamma: Float[Array, ""],
        environment: Int[Array, " N"],
        step: Int[Array, " N"],
        weight: Float[Array, " N"],
        key: KeyArray[Array, " N"],
    ) -> Transitions:
        """Builds the transitions that begin with these steps."""
        view_struct, outcome_struct = self._structs(graph)
        first = environment * self.capacity

        def take(rows: Rows, struct: PyTree, number: Int[Array, " N"]) -> PyTree:
            flat = jax.tree.map(lambda leaf: leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:]), rows)
            places = first + number % self.capacity
            return from_rows(jax.tree.map(lambda leaf: leaf[places], flat), struct)

        begin: Outcome = take(rings.outcomes, outcome_struct, step)
        last, reward, factor = begin, begin.reward, jnp.broadcast_to(gamma, len(step))
        newest = rings.steps[environment] - 1
        for n in range(1, self.n_step):
            following: Outcome = take(rings.outcomes, outcome_struct, step + n)
            # A return ends with its episode, and before the newest step, because the observation after it is not
            # stored yet.
            goes_on = (last.end == RUNNING) & (step + n < newest)
            reward += jnp.where(goes_on, factor * following.reward, 0)
            factor = jnp.where(goes_on, factor * gamma, factor)
            last = jax.tree.map(partial(_where, goes_on), following, last)
        now: View = take(rings.views, view_struct, begin.slot)
        after: View = take(rings.views, view_struct, last.slot + 1)
        return Transitions(
            observation=now.observation,
            action_mask=now.action_mask,
            action=begin.action,
            reward=reward,
            discount=jnp.where(last.end == TERMINATED, 0, factor),
            next_observation=after.observation,
            next_action_mask=after.action_mask,
            weight=weight,
            key=key,
        )


class PrioritisedReplay(NamedTuple):
    """Experience store that draws transitions in proportion to their errors (Schaul et al., ICLR 2016)."""

    store: Replay
    priority_exponent: float
    """Transitions are drawn in proportion to their errors to this power."""
    weight_exponent: float
    """Exponent of the importance weights that correct for prioritised draws."""
    errors: Callable[[Learner, Batch], Float[Array, " N"]]
    """Computes the error of each transition in a minibatch, with the learner before the update."""

    @property
    def capacity(self) -> int:
        """Maximum number of steps that are stored for each environment."""
        return self.store.capacity

    def steps_before_learning(self, loops: Loops, /) -> int:
        """Returns the number of environment steps after which learning begins."""
        return self.store.steps_before_learning(loops)

    def empty(self, graph: Graph, index: Int[Array, " E"], /) -> ReplayRing:
        """Returns empty rings for the environments with the given global indices."""
        priorities = _for_each(index, empty_priorities(self.capacity))
        return self.with_mutable_part(self.store.empty(graph, index), priorities)

    def add(self, graph: Graph, rings: ReplayRing, trajectory: Trajectory, /) -> ReplayRing:
        """Returns the rings after adding a rollout of the same environments.

        New steps get the highest priority of their shard.
        """
        before = _fall_back(rings, self.capacity)
        after = store(before, self.store.convert(trajectory.steps))
        num_steps, width = len(trajectory.steps.terminated), graph.loops.num_envs // graph.loops.num_shards
        return self.with_mutable_part(
            after, _with_new_steps(before, after, num_steps=num_steps, shard_width=width)
        )

    def is_ready(self, rings: ReplayRing, loops: Loops, /) -> Bool[Array, ""]:
        """Returns whether the rings hold enough steps to begin learning."""
        return self.store.is_ready(rings, loops)

    def sample(
        self, graph: Graph, rings: ReplayRing, learner: Learner, key: Key, index: Int[Array, " E"], /
    ) -> Sample:
        """Draws this replica's part of a minibatch. Each ring must hold at least two steps."""

        def draw(key: Key, shard: ReplayRing, *, count: int):
            assert shard.priorities is not None
            # The next observation of the newest step is not stored yet.
            drawable = shard.steps - 1 - shard.oldest
            environment, row, weight = draw_by_priority(
                key, shard.priorities, drawable, count=count, weight_exponent=self.weight_exponent
            )
            newest = shard.steps[environment] - 1
            return environment, newest - (newest - row) % self.capacity, weight

        return self.store.sample_with(draw, graph, rings, learner, key, index)

    def update(self, graph: Graph, rings: ReplayRing, learner: Learner, sample: Sample, /) -> ReplayRing:
        """Sets the priorities of a sample's transitions from their errors, after learning from the sample."""
        assert rings.priorities is not None
        values = (jnp.abs(self.errors(learner, sample.minibatch)) + SMALLEST_ERROR) ** self.priority_exponent
        is_drawn = sample.minibatch.samples.weight > 0
        environment = jnp.where(is_drawn, sample.location.environment, len(rings.steps))
        return self.with_mutable_part(
            rings, with_values(rings.priorities, environment, sample.location.row, values)
        )

    def mutable_part(self, rings: ReplayRing, /) -> Priorities | None:
        """Returns the part of the rings that `update` changes, which the loop over minibatches carries."""
        return rings.priorities

    def with_mutable_part(self, rings: ReplayRing, mutable: Priorities | None, /) -> ReplayRing:
        """Returns the rings with `mutable` as the part that `update` changes."""
        return eqx.tree_at(lambda ring: ring.priorities, rings, mutable, is_leaf=lambda leaf: leaf is None)

    def fill_fraction(self, rings: ReplayRing, /) -> Float[Array, ""]:
        """Returns the mean fraction of the rings' capacity that is in use."""
        return self.store.fill_fraction(rings)


def store(rings: ReplayRing, steps: Step) -> ReplayRing:
    """Adds the steps `[T, E, ...]` of a rollout to the replay rings. Priorities do not change.

    With action masks, `info` holds the masks of final states.
    """
    num_steps, num_envs = steps.reward.shape
    capacity = rings.outcomes.words.shape[1]
    rings = _fall_back(rings, capacity)
    by_env = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), steps)
    # The final observation of a truncated episode takes an additional slot after the step.
    extra = (by_env.truncated & ~by_env.terminated).astype(jnp.int32)
    before = jnp.cumsum(extra, axis=1) - extra
    slot = rings.slots[:, None] + jnp.arange(num_steps)[None] + before
    step = rings.steps[:, None] + jnp.arange(num_steps)[None]
    end = jnp.where(by_env.terminated, TERMINATED, jnp.where(by_env.truncated, TRUNCATED, RUNNING))
    outcome = Outcome(by_env.action, by_env.reward, end.astype(jnp.int32), slot)
    view = View(by_env.observation, by_env.action_mask)
    final_mask = by_env.info[FINAL_MASK] if jax.tree.leaves(by_env.action_mask) else by_env.action_mask
    final = View(by_env.final_observation, final_mask)
    after = ReplayRing(
        views=_write_rows(
            rings.views,
            jax.tree.map(lambda *rows: jnp.concatenate(rows), _flat_rows(view), _flat_rows(final)),
            jnp.stack([slot % capacity, jnp.where(extra > 0, (slot + 1) % capacity, capacity)]),
        ),
        outcomes=_write_rows(rings.outcomes, _flat_rows(outcome), (step % capacity)[None]),
        slots=rings.slots + num_steps + extra.sum(axis=1),
        steps=rings.steps + num_steps,
        oldest=rings.oldest,
        priorities=rings.priorities,
    )
    oldest = jax.vmap(partial(_oldest_intact, num_steps=num_steps))(after)
    return eqx.tree_at(lambda ring: ring.oldest, after, oldest)


# --- parts --------------------------------------------------------------------------------------------


def _flat_rows(tree: PyTree[Array]) -> Rows:
    """Converts samples with leaves `[E, T, ...]` to rows, one environment after the other."""
    return to_rows(jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree))


def _write_rows(into: Rows, rows: Rows, places: Int[Array, "N E T"]) -> Rows:
    """Writes `N * E * T` rows into `[E, C, ...]` at places of each environment. Ignores places equal to `C`.

    A single row is written twice. XLA would turn a scatter of one row into the update of a slice, recompute it
    wherever it is used, and copy the whole table each time.
    """
    num_envs, capacity = into.words.shape[:2]
    first = jnp.arange(num_envs, dtype=jnp.int32)[None, :, None] * capacity
    flat = jnp.where(places < capacity, first + places, num_envs * capacity).reshape(-1)
    times = 2 if len(flat) == 1 else 1

    def write(table: Array, new: Array) -> Array:
        together = table.reshape(num_envs * capacity, *table.shape[2:])
        new = jnp.tile(new, (times, *[1] * (new.ndim - 1)))
        return together.at[jnp.tile(flat, times)].set(new, mode="drop").reshape(table.shape)

    return jax.tree.map(write, into, rows)


def _fall(capacity: int) -> int:
    """Returns the number subtracted from counts: a multiple of the capacity, and at least twice as large."""
    return 2 * MAX_ROWS // capacity * capacity


def _fall_back(rings: ReplayRing, capacity: int) -> ReplayRing:
    """Returns the rings with counts reduced if they would overflow during the next rollout."""
    fall = lambda number: jnp.where(number >= FALL_BACK_AT, _fall(capacity), 0)
    steps, slots = fall(rings.steps), fall(rings.slots)
    numbers = lambda ring: (ring.slots, ring.steps, ring.oldest)
    fallen = rings.slots - slots, rings.steps - steps, rings.oldest - steps
    return eqx.tree_at(numbers, rings, fallen)


def _oldest_intact(ring: ReplayRing, num_steps: int) -> Int[Array, ""]:
    """Returns the oldest step of ONE ring with a view that is still stored, after `num_steps` more steps."""
    capacity = ring.outcomes.words.shape[0]
    # Each new step took at most two slots.
    candidates = ring.oldest + jnp.arange(2 * num_steps)
    age = ring.slots - _slots(ring.outcomes)[candidates % capacity]
    age = jnp.where(age < 0, age + _fall(capacity), age)  # the slot was written before the counts were reduced
    is_lost = (candidates < ring.steps - capacity) | (age > capacity)
    return ring.oldest + jnp.sum(is_lost & (candidates < ring.steps), dtype=jnp.int32)


def _slots(outcomes: Rows) -> Int[Array, "..."]:
    """Returns the slot of each outcome, which is the last word of its row."""
    return jax.lax.bitcast_convert_type(outcomes.words[..., -1], jnp.int32)


def _with_new_steps(before: ReplayRing, after: ReplayRing, *, num_steps: int, shard_width: int) -> Priorities:
    """Gives each step that can be drawn now the highest priority of its shard."""
    assert before.priorities is not None
    num_envs, capacity = after.outcomes.words.shape[:2]
    highest = jnp.repeat(before.priorities.highest.reshape(-1, shard_width).max(axis=1), shard_width)[:, None]
    # The newest step can only be drawn after the next rollout, which stores the next observation.
    drawable = before.steps[:, None] - 1 + jnp.arange(num_steps)[None]
    newest = after.steps[:, None] - 1
    lost = before.oldest[:, None] + jnp.arange(2 * num_steps)[None]
    # the row has not been overwritten by a new step
    is_gone = (lost < after.oldest[:, None]) & (lost > newest - capacity)
    step = jnp.concatenate([drawable, newest, lost], axis=1)
    is_set = jnp.concatenate([drawable >= after.oldest[:, None], jnp.ones_like(newest, bool), is_gone], axis=1)
    values = jnp.concatenate(
        [jnp.broadcast_to(highest, drawable.shape), jnp.zeros((num_envs, 1 + lost.shape[1]))], 1
    )
    environment = jnp.where(is_set, jnp.arange(num_envs, dtype=jnp.int32)[:, None], num_envs)
    return with_values(before.priorities, environment.reshape(-1), step.reshape(-1) % capacity, values.reshape(-1))


def _for_each(index: Int[Array, " E"], one: PyTree[Array]) -> PyTree[Array]:
    """Repeats one environment's contents for several."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(index), *leaf.shape)), one)


def _draw_uniformly(
    key: Key, rings: ReplayRing, *, count: int
) -> tuple[Int[Array, " B"], Int[Array, " B"], Float[Array, " B"]]:
    """Chooses each stored transition of one shard with equal probability. See `experience.Draw`."""
    # The newest step of each environment is left out, because the next observation is not stored yet.
    environment, place = draw_equally(key, rings.steps - 1 - rings.oldest, count=count)
    step = rings.oldest[environment] + place
    return environment, step, jnp.ones(count, jnp.float32)


def _where(condition: Bool[Array, " N"], chosen: Array, other: Array) -> Array:
    return jnp.where(condition.reshape(-1, *[1] * (chosen.ndim - 1)), chosen, other)
