"""Truncates stored episodes of environments that were lost, because these environments begin new episodes.

Environments that Python steps, and those of asynchronous groups, are not part of a checkpoint. A resumed run has
its replay memory, but its environments begin new episodes. So do the environments of an actor that was replaced.

Shape letter: `E` environments of this replica.
"""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from rollmill.dataflow.graph import Graph, Step
from rollmill.dataflow.packing import Rows, from_rows, to_rows
from rollmill.dataflow.replay import RUNNING, TRUNCATED, ReplayRing
from rollmill.dataflow.sequences import SequenceRing, StoredRollout, rollout_struct

END = -2
"""Word of an outcome's row that says how the step ended, before the number of its slot (`replay.Outcome`)."""


def end_running_episodes(
    graph: Graph, contents: PyTree[Array], lost: Bool[Array, " E"] | None = None
) -> PyTree[Array]:
    """Returns the contents of an experience store with running episodes truncated after their last step.

    A replay memory of single steps leaves out the newest step of these episodes, whose next observation is not
    known, and truncates the step before it. Stores of other types are returned unchanged.

    Args:
        graph: graph that the contents belong to.
        contents: contents of `graph.replay`, leaves `[E, ...]`.
        lost: environments that were lost. Default: all.
    """
    match contents:
        case ReplayRing():
            ended = jax.vmap(_without_newest)(contents)
        case SequenceRing():
            ended = _truncate_newest(graph, contents)
        case _:
            return contents
    if lost is None:
        return ended
    select = lambda new, old: jnp.where(lost.reshape(-1, *[1] * (new.ndim - 1)), new, old)
    return jax.tree.map(select, ended, contents)


def _without_newest(ring: ReplayRing) -> ReplayRing:
    """Returns ONE ring without its newest step, if its episode has not ended."""
    words = ring.outcomes.words
    capacity = words.shape[0]
    ends = jax.lax.bitcast_convert_type(words[:, END], jnp.int32)
    newest, before = (ring.steps - 1) % capacity, (ring.steps - 2) % capacity
    leaves_out = (ring.steps > ring.oldest) & (ends[newest] == RUNNING)
    # The observation of the newest step becomes the final observation of the step before it.
    truncates = leaves_out & (ring.steps - 1 > ring.oldest) & (ends[before] == RUNNING)
    end = jnp.where(truncates, TRUNCATED, ends[before])
    words = words.at[before, END].set(jax.lax.bitcast_convert_type(end, jnp.uint32))
    return eqx.tree_at(
        lambda ring: (ring.outcomes.words, ring.steps, ring.slots),
        ring,
        (
            words,
            ring.steps - leaves_out.astype(jnp.int32),
            ring.slots - (leaves_out & ~truncates).astype(jnp.int32),
        ),
    )


def _truncate_newest(graph: Graph, ring: SequenceRing) -> SequenceRing:
    """Returns the rings with the last step of each newest rollout truncated, if its episode has not ended.

    The observation after a rollout is stored with it, so it can be the final observation of the last step.
    """
    each = jnp.arange(len(ring.newest))
    taken: Rows = jax.tree.map(lambda leaf: leaf[each, ring.newest], ring.rows)
    rollout: StoredRollout = from_rows(taken, rollout_struct(graph))
    steps: Step = rollout.steps
    ends = (ring.count > 0) & ~steps.terminated[:, -1] & ~steps.truncated[:, -1]
    final = jax.tree.map(partial(_with_last, ends), steps.final_observation, rollout.observation)
    steps = steps._replace(truncated=_with_last(ends, steps.truncated, ends), final_observation=final)
    rows = to_rows(rollout._replace(steps=steps))
    write = lambda table, new: table.at[each, ring.newest].set(new)
    return eqx.tree_at(lambda ring: ring.rows, ring, jax.tree.map(write, ring.rows, rows))


def _with_last(where: Array, leaf: Array, new: Array) -> Any:
    """Returns leaves `[E, T, ...]` with `new`, `[E, ...]`, as the last step of some environments."""
    condition = where.reshape(-1, *[1] * (new.ndim - 1))
    return leaf.at[:, -1].set(jnp.where(condition, new, leaf[:, -1]))
