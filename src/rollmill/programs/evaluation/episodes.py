"""The episodes of an evaluation, and the limits on them.

Shape letters: `N` episodes, each in an environment of its own.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.schema import coerce
from rollmill.core.types import Key, Memory
from rollmill.dataflow import Collector, Weights
from rollmill.gpus.jax_settings import check_compiled

MAX_STEPS = 100_000
"""An evaluation gives up on an episode that is longer than this."""

MAX_EPISODES = 10_000_000
"""More say nothing that these do not."""


CHUNK = 32
"""Steps between two looks at whether all episodes have ended, for which a GPU waits for its host.

They divide `MAX_STEPS`. The looks change no result: an episode that has ended counts once.
"""

OUTCOME = ("episode_return", "episode_length", "agent_returns")
"""What a step's `info` tells of an episode that ends with it. The last exists with several agents only."""


class Playing(NamedTuple):
    """The episodes of a batch while they are played."""

    collector: Collector
    returns: Float[Array, " N"]
    lengths: Int[Array, " N"]
    agent_returns: dict[str, Float[Array, " N"]]
    done: Bool[Array, " N"]
    chunks: Int[Array, ""]


Advance: TypeAlias = Callable[[Weights, Playing, Key], Playing]
"""Plays `CHUNK` steps, with the key of this chunk."""


class EvaluationEpisodes(NamedTuple):
    """Finished episodes, one entry each."""

    returns: Float[np.ndarray, " N"]
    """With several agents, the mean over all of them."""
    lengths: Int[np.ndarray, " N"]
    agent_returns: Mapping[str, Float[np.ndarray, " N"]] = MappingProxyType({})
    """Mean return over the agents of each kind, empty with a single agent."""


Evaluator: TypeAlias = Callable[[Weights], EvaluationEpisodes]
"""Plays the same episodes by the policy of any weights, compiled already."""


def check_numbers(episodes: int, seed: int) -> tuple[int, int]:
    """Checks the number of episodes and the seed of an evaluation, and returns them as integers."""
    check_compiled()
    episodes, seed = coerce("episodes", int, episodes), coerce("seed", int, seed)
    if episodes < 1:
        raise UsageError(f"episodes={episodes} must be at least 1.")
    if episodes > MAX_EPISODES:
        raise UsageError(
            f"episodes={episodes} is more than the limit of {MAX_EPISODES}. hint: 100 to 10,000 suffice for a "
            "mean."
        )
    check_seed(seed)
    return episodes, seed


def check_seed(seed: int) -> None:
    """Raises a `UsageError` if an evaluation's seed exceeds 32 bits."""
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed={seed} must lie between 0 and 2**32 - 1.")


def never_ends(count: int, episodes: int) -> UsageError:
    """Returns the error for episodes that are too long."""
    return UsageError(
        f"{count} of {episodes} episodes did not end within {MAX_STEPS} steps. hint: limit the length of an "
        "episode: rollmill.time_limit(env, max_steps)."
    )


def start_memories(start_memory: Callable[[], Memory], count: int) -> Memory:
    """Returns the policy's memory at the start of `count` episodes, leaves `[count, ...]`."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], count, axis=0), start_memory())


def where_rows(condition: Bool[Array, " N"], chosen: PyTree, other: PyTree) -> PyTree:
    """Returns rows of `chosen` where the condition holds, and of `other` elsewhere, with leaves `[N, ...]`."""
    broadcast = lambda leaf: condition.reshape(-1, *(1,) * (leaf.ndim - 1))
    return jax.tree.map(lambda one, two: jnp.where(broadcast(two), one, two), chosen, other)


def with_outcome(now: Playing, ends: Bool[Array, " N"], info: Mapping[str, PyTree[Array]]) -> Playing:
    """Keeps the outcome of the episodes that end."""
    keep = lambda outcome, before: jnp.where(ends, outcome, before)
    return now._replace(
        returns=keep(info["episode_return"], now.returns),
        lengths=keep(info["episode_length"], now.lengths),
        agent_returns=jax.tree.map(keep, dict(info.get("agent_returns", {})), now.agent_returns),
        done=now.done | ends,
    )
