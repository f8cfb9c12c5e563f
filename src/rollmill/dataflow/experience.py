"""Functions that work with every kind of experience store."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from rollmill.core.types import Key
from rollmill.dataflow.graph import ExperienceStore, Graph, Loops

FILL = "replay/fill"
"""Metric: mean fraction of a store's capacity in use."""

FEW = 64
"""Maximum number of environments in a shard for which a draw is compared with every environment."""

Draw: TypeAlias = Callable[..., tuple[Int[Array, " B"], Int[Array, " B"], Float[Array, " B"]]]
"""Draws `count` samples from the rings of one shard: `(key, rings, *, count) -> environments, rows, weights`.

The results are the positions of the environments in the shard, the stored steps or rows at which the samples
begin, and importance weights.
"""


class RingRows(NamedTuple):
    """Rings and rows of the samples that were drawn, so that their priorities can be updated."""

    environment: Int[Array, " N"]
    """Position of the ring among those held here."""
    row: Int[Array, " N"]


def empty_experience(graph: Graph, index: Int[Array, " E"]) -> PyTree[Array]:
    """Returns the contents of a graph's experience store before the first step, or `()` without a store.

    `index` contains the global indices of the environments whose steps are stored here.
    """
    return () if graph.replay is None else graph.replay.empty(graph, index)


def first_learning_iteration(graph: Graph) -> int:
    """Returns the index of the first iteration that learns, which is 0 without an experience store."""
    return 0 if graph.replay is None else waiting_iterations(graph.replay, graph.loops)


def waiting_iterations(store: ExperienceStore, loops: Loops) -> int:
    """Returns how many iterations only fill the experience store before learning begins."""
    return -(-store.steps_before_learning(loops) // loops.batch_size) - 1


def draw_equally(key: Key, stored: Int[Array, " W"], *, count: int) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Draws `count` items of one shard of an experience store uniformly.

    `stored` counts the items of each environment. Returns the environment of each item, by position in the shard,
    and the item's number in that environment.
    """
    ends = jnp.cumsum(stored)
    choice = jax.random.randint(key, (count,), 0, ends[-1])
    # For few environments, this is a single GPU operation. For many, it is several, without a loop.
    method = "compare_all" if len(stored) <= FEW else "scan_unrolled"
    environment = jnp.searchsorted(ends, choice, side="right", method=method).astype(jnp.int32)
    return environment, choice - (ends - stored)[environment]
