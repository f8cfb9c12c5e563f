"""A replay memory (Lin, 1992): a ring of the newest steps of each environment, from which minibatches are drawn.

Rings are a part of the training state and lie where the environments' samples are learned from. Minibatches are
drawn inside the logical shards of the environments, with each shard's own key: any placement that keeps shards
whole draws the same transitions.

An observation is stored once: the slot of a step holds the observation that its action was chosen for, and the
next slot the one that followed. Only where an episode was truncated, so that its final observation is needed for
bootstrapping, the final observation takes a slot of its own.

Shape letters: `T` steps, `E` environments held here, `C` steps kept of each, `S` shards, `W` environments of a
shard, `N` samples of a minibatch held here, `B` those of one shard.
"""

import math
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree
from jaxtyping import Key as KeyArray

from rollmill.core.types import FINAL_MASK, Action, Key, Observation
from rollmill.dataflow.collecting import start_one, step_one
from rollmill.dataflow.graph import Batch, Graph, Learner, Loops, Replay, Step
from rollmill.dataflow.packing import Rows, from_rows, to_rows
from rollmill.dataflow.priorities import (
    SMALLEST_ERROR,
    Priorities,
    draw_by_priority,
    empty_priorities,
    with_values,
)

FILL = "replay/fill"
"""Metric: the mean share of the rings that is in use."""

RUNNING, TERMINATED, TRUNCATED = 0, 1, 2

MAX_ROWS = 2**29
"""Most rows of a ring, and most steps of an environment before learning begins: numbers of steps and slots fall
back long before they overflow, and stay above this one afterwards."""

FALL_BACK_AT = 3 * MAX_ROWS
"""Numbers that have reached this one fall back by `_fall` before the next steps are stored."""


class View(NamedTuple):
    """The policy's input of one step."""

    observation: Observation
    action_mask: PyTree[Bool[Array, "..."]]


class Outcome(NamedTuple):
    """The rest of one step."""

    action: Action
    reward: Float[Array, ""]
    end: Int[Array, ""]
    """`RUNNING`, or how the step ended its episode."""
    slot: Int[Array, ""]
    """The number of the slot that holds its view."""


class ReplayRing(eqx.Module):
    """The newest steps of ONE environment.

    Slots and steps are numbered from the beginning of the training; number `n` lies in row `n % C`. Before numbers
    would overflow they fall back by a multiple of `C`, which leaves every row where it is.
    """

    views: Rows
    """Observations and action masks, as rows of slots: that of a slot is `slot % C`."""
    outcomes: Rows
    """The other results of each step: row `step % C`."""
    slots: Int[Array, "*E"]
    """Slots written so far, until they fall back."""
    steps: Int[Array, "*E"]
    """Steps stored so far, until they fall back; `oldest` falls with them."""
    oldest: Int[Array, "*E"]
    """The oldest step whose view is not overwritten."""
    priorities: Priorities | None
    """Priorities by step; None where transitions are drawn uniformly."""


class Transitions(NamedTuple):
    """Transitions drawn from a replay memory; leaves `[N, ...]`."""

    observation: Observation
    action_mask: PyTree[Bool[Array, "..."]]
    action: Action
    reward: Float[Array, "..."]
    """Discounted sum of the rewards of up to `n_step` steps."""
    discount: Float[Array, "..."]
    """Factor of the next observation's value; 0 after a termination."""
    next_observation: Observation
    next_action_mask: PyTree[Bool[Array, "..."]]
    """Legal actions of the next observation, also where it is the final one of a truncated episode."""
    weight: Float[Array, "..."]
    """Importance weight of a prioritised draw; 1 for a uniform one."""
    key: KeyArray[Array, "..."]
    """A random key of the sample, for gradients that draw actions."""


class Drawn(NamedTuple):
    """A minibatch, and where it was drawn."""

    transitions: Transitions
    environment: Int[Array, " N"]
    """Place of the ring among those held here."""
    row: Int[Array, " N"]
    """Row of the step in that ring."""


def empty_rings(graph: Graph, index: Int[Array, " E"]) -> PyTree[Array]:
    """The rings of these environments before the first step; `()` for a graph without a replay memory."""
    if graph.replay is None:
        return ()
    capacity, (view, outcome) = graph.replay.capacity, _structs(graph)
    rows = lambda struct: jax.tree.map(
        lambda leaf: jnp.zeros((capacity, *leaf.shape[1:]), leaf.dtype),
        jax.eval_shape(to_rows, jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), struct)),
    )
    priorities = empty_priorities(capacity) if graph.replay.priority_exponent else None
    zero = jnp.int32(0)
    ring = ReplayRing(rows(view), rows(outcome), zero, zero, zero, priorities)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(index), *leaf.shape)), ring)


def store(rings: ReplayRing, steps: Step, *, shard_width: int) -> ReplayRing:
    """The rings with the steps `[T, E, ...]` of a rollout.

    Args:
        rings: rings of the environments held here.
        steps: of these environments; where there are action masks, their info has those of final states.
        shard_width: environments of a logical shard; new steps get the highest priority of their shard.
    """
    num_steps, num_envs = steps.reward.shape
    capacity = rings.outcomes.words.shape[1]
    rings = _fallen_back(rings, capacity)
    by_env = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), steps)
    # The final observation of a truncated episode takes the slot after the step's own.
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
        views=_written(
            rings.views,
            jax.tree.map(lambda *rows: jnp.concatenate(rows), _flat_rows(view), _flat_rows(final)),
            jnp.stack([slot % capacity, jnp.where(extra > 0, (slot + 1) % capacity, capacity)]),
        ),
        outcomes=_written(rings.outcomes, _flat_rows(outcome), (step % capacity)[None]),
        slots=rings.slots + num_steps + extra.sum(axis=1),
        steps=rings.steps + num_steps,
        oldest=rings.oldest,
        priorities=rings.priorities,
    )
    oldest = jax.vmap(partial(_oldest_intact, num_steps=num_steps))(after)
    after = eqx.tree_at(lambda ring: ring.oldest, after, oldest)
    if rings.priorities is None:
        return after
    priorities = _with_new_steps(rings, after, num_steps=num_steps, shard_width=shard_width)
    return with_priorities(after, priorities)


def is_filled(replay: Replay, rings: ReplayRing, loops: Loops) -> Bool[Array, ""]:
    """Whether enough steps are stored to begin learning; the same on every replica."""
    # Steps of ONE environment: those of all may be more than 32 bits count.
    return rings.steps[0] >= -(-first_learning(replay, loops) // loops.num_envs)


def first_learning(replay: Replay, loops: Loops) -> int:
    """Environment steps after which learning begins; the newest step of each environment cannot be drawn yet."""
    return max(replay.learning_starts, replay.minibatch_size + loops.num_envs, 2 * loops.num_envs)


def first_learning_iteration(graph: Graph) -> int:
    """Number of iterations before the first that learns; 0 without a replay memory."""
    return 0 if graph.replay is None else waiting_iterations(graph.replay, graph.loops)


def waiting_iterations(replay: Replay, loops: Loops) -> int:
    """Number of iterations that only fill the replay memory, before the first that learns."""
    return -(-first_learning(replay, loops) // loops.batch_size) - 1


def draw(graph: Graph, rings: ReplayRing, key: Key, index: Int[Array, " E"]) -> Drawn:
    """A minibatch of the transitions stored here.

    Args:
        graph: with a replay memory.
        rings: rings of the environments held here, with at least two steps each.
        key: random key of the minibatch; the shards' keys derive from it and from the shards' global numbers.
        index: global indices of these environments, whole shards of them.
    """
    assert graph.replay is not None
    replay, loops = graph.replay, graph.loops
    width = loops.num_envs // loops.num_shards
    shards = index[::width] // width
    keys = jax.vmap(lambda shard: jax.random.split(jax.random.fold_in(key, shard)))(shards)
    choice_keys, sample_keys = keys[:, 0], keys[:, 1]
    count = replay.minibatch_size // loops.num_shards
    by_shard = lambda leaf: leaf.reshape(len(shards), width, *leaf.shape[1:])
    counts = by_shard(rings.steps), by_shard(rings.oldest)
    if rings.priorities is None:
        environment, step = jax.vmap(partial(_draw_uniformly, count=count))(choice_keys, *counts)
        weight = jnp.ones((len(shards), count), jnp.float32)
    else:
        pick = partial(
            draw_by_priority, count=count, capacity=replay.capacity, weight_exponent=replay.weight_exponent
        )
        environment, step, weight = jax.vmap(pick)(choice_keys, jax.tree.map(by_shard, rings.priorities), *counts)
    environment += jnp.arange(len(shards), dtype=jnp.int32)[:, None] * width
    environment, step = environment.reshape(-1), step.reshape(-1)
    sample_keys = jax.vmap(partial(jax.random.split, num=count))(sample_keys).reshape(-1)
    transitions = _transitions(graph, rings, environment, step, weight.reshape(-1), sample_keys)
    return Drawn(transitions, environment, step % replay.capacity)


def with_priorities(rings: ReplayRing, priorities: Priorities | None) -> ReplayRing:
    """The rings with other priorities; None where there are none."""
    return eqx.tree_at(lambda ring: ring.priorities, rings, priorities, is_leaf=lambda leaf: leaf is None)


def fill(rings: ReplayRing) -> Float[Array, ""]:
    """The mean share of the rings that is in use."""
    return jnp.mean((rings.steps - rings.oldest).astype(jnp.float32)) / rings.outcomes.words.shape[1]


def with_errors(graph: Graph, learner: Learner, rings: ReplayRing, drawn: Drawn) -> ReplayRing:
    """The rings with the priorities that follow from a minibatch's errors; unchanged where draws are uniform."""
    replay = graph.replay
    if replay is None or replay.errors is None or rings.priorities is None:
        return rings
    errors = replay.errors(learner, Batch(drawn.transitions))
    values = (jnp.abs(errors) + SMALLEST_ERROR) ** replay.priority_exponent
    environment = jnp.where(drawn.transitions.weight > 0, drawn.environment, len(rings.steps))
    return with_priorities(rings, with_values(rings.priorities, environment, drawn.row, values))


# --- parts --------------------------------------------------------------------------------------------


def _structs(graph: Graph) -> tuple[View, Outcome]:
    """Shapes of what is stored of ONE step."""
    index, key = jnp.int32(0), jax.random.key(0)

    def first_step() -> tuple[View, Outcome]:
        now = start_one(graph, key, index)
        _, step = step_one(graph, graph.weights(graph.start_learner(key)), now, key, 0)
        zero = jnp.int32(0)
        return View(step.observation, step.action_mask), Outcome(step.action, step.reward, zero, zero)

    return jax.eval_shape(first_step)


def _flat_rows(tree: PyTree[Array]) -> Rows:
    """The rows of samples with leaves `[E, T, ...]`, of all environments one after the other."""
    return to_rows(jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree))


def _written(into: Rows, rows: Rows, places: Int[Array, "N E T"]) -> Rows:
    """Rows `[E, C, ...]` with `N * E * T` others at these places of each environment; places at `C` are left out.

    A single row is written twice, since XLA turns a scatter of one row into the update of a slice, computes that
    wherever it is used, and copies the whole table for it.
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
    """What numbers fall back by: a multiple of the capacity, and at least twice it."""
    return 2 * MAX_ROWS // capacity * capacity


def _fallen_back(rings: ReplayRing, capacity: int) -> ReplayRing:
    """The rings with numbers that leave room for the next steps."""
    fall = lambda number: jnp.where(number >= FALL_BACK_AT, _fall(capacity), 0)
    steps, slots = fall(rings.steps), fall(rings.slots)
    numbers = lambda ring: (ring.slots, ring.steps, ring.oldest)
    fallen = rings.slots - slots, rings.steps - steps, rings.oldest - steps
    return eqx.tree_at(numbers, rings, fallen)


def _oldest_intact(ring: ReplayRing, num_steps: int) -> Int[Array, ""]:
    """The oldest step of ONE ring, after `num_steps` more steps, whose view is still there."""
    capacity = ring.outcomes.words.shape[0]
    # Each of the new steps took at most two slots.
    candidates = ring.oldest + jnp.arange(2 * num_steps)
    age = ring.slots - _slots(ring.outcomes)[candidates % capacity]
    age = jnp.where(age < 0, age + _fall(capacity), age)  # of a slot that was numbered before they fell back
    is_lost = (candidates < ring.steps - capacity) | (age > capacity)
    return ring.oldest + jnp.sum(is_lost & (candidates < ring.steps), dtype=jnp.int32)


def _slots(outcomes: Rows) -> Int[Array, "..."]:
    """The slot of each outcome: the last word of its row."""
    return jax.lax.bitcast_convert_type(outcomes.words[..., -1], jnp.int32)


def _with_new_steps(before: ReplayRing, after: ReplayRing, *, num_steps: int, shard_width: int) -> Priorities:
    """The priorities after steps were stored: the highest of the shard for each that can be drawn now."""
    assert before.priorities is not None
    num_envs, capacity = after.outcomes.words.shape[:2]
    highest = jnp.repeat(before.priorities.highest.reshape(-1, shard_width).max(axis=1), shard_width)[:, None]
    # The newest step can be drawn when its next observation is stored, with the next rollout.
    drawable = before.steps[:, None] - 1 + jnp.arange(num_steps)[None]
    newest = after.steps[:, None] - 1
    lost = before.oldest[:, None] + jnp.arange(2 * num_steps)[None]
    is_gone = (lost < after.oldest[:, None]) & (lost > newest - capacity)  # and not overwritten already
    step = jnp.concatenate([drawable, newest, lost], axis=1)
    is_set = jnp.concatenate([drawable >= after.oldest[:, None], jnp.ones_like(newest, bool), is_gone], axis=1)
    values = jnp.concatenate(
        [jnp.broadcast_to(highest, drawable.shape), jnp.zeros((num_envs, 1 + lost.shape[1]))], 1
    )
    environment = jnp.where(is_set, jnp.arange(num_envs, dtype=jnp.int32)[:, None], num_envs)
    return with_values(before.priorities, environment.reshape(-1), step.reshape(-1) % capacity, values.reshape(-1))


def _draw_uniformly(
    key: Key, steps: Int[Array, " W"], oldest: Int[Array, " W"], *, count: int
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Environments and steps of one shard, each stored transition with equal probability."""
    drawable = steps - 1 - oldest  # the newest step's next observation is not stored yet
    ends = jnp.cumsum(drawable)
    choice = jax.random.randint(key, (count,), 0, ends[-1])
    environment = jnp.searchsorted(ends, choice, side="right").astype(jnp.int32)
    return environment, oldest[environment] + choice - (ends - drawable)[environment]


def _transitions(
    graph: Graph,
    rings: ReplayRing,
    environment: Int[Array, " N"],
    step: Int[Array, " N"],
    weight: Float[Array, " N"],
    key: KeyArray[Array, " N"],
) -> Transitions:
    """The transitions that begin with these steps."""
    assert graph.replay is not None
    n_step, gamma, capacity = graph.replay.n_step, graph.replay.gamma, graph.replay.capacity
    view_struct, outcome_struct = _structs(graph)
    first = environment * capacity

    def take(rows: Rows, struct: PyTree, number: Int[Array, " N"]) -> PyTree:
        flat = jax.tree.map(lambda leaf: leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:]), rows)
        places = first + number % capacity
        return from_rows(jax.tree.map(lambda leaf: leaf[places], flat), struct)

    begin: Outcome = take(rings.outcomes, outcome_struct, step)
    last, reward, factor = begin, begin.reward, jnp.full(len(step), gamma, jnp.float32)
    newest = rings.steps[environment] - 1
    for n in range(1, n_step):
        following: Outcome = take(rings.outcomes, outcome_struct, step + n)
        # A return ends with its episode, or before the newest step, whose next observation is not stored yet.
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


def _where(condition: Bool[Array, " N"], chosen: Array, other: Array) -> Array:
    return jnp.where(condition.reshape(-1, *[1] * (chosen.ndim - 1)), chosen, other)
