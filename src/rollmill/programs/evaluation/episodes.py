"""Types for the episodes of an evaluation, and limits on their number and length.

Shape letters: `N` episodes, each in its own environment.
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
"""Maximum number of steps of an evaluated episode."""

MAX_EPISODES = 10_000_000
"""Maximum number of episodes of an evaluation."""


CHUNK = 32
"""Number of steps after which an evaluation checks whether all episodes have ended, for which a GPU waits for the
host.

`CHUNK` divides `MAX_STEPS`. Its value does not affect results, because an episode that has ended counts only once.
"""

OUTCOME = ("episode_return", "episode_length", "agent_returns")
"""Names of entries in a step's `info` about an ended episode. The last exists only with several agents."""


class Playing(NamedTuple):
    """A batch of episodes while they are being played."""

    collector: Collector
    returns: Float[Array, " N"]
    lengths: Int[Array, " N"]
    agent_returns: dict[str, Float[Array, " N"]]
    done: Bool[Array, " N"]
    chunks: Int[Array, ""]


Advance: TypeAlias = Callable[[Weights, Playing, Key], Playing]
"""Function that plays `CHUNK` steps of a batch of episodes, with the random key of this chunk."""


class EvaluationEpisodes(NamedTuple):
    """Results of the finished episodes of an evaluation, with one entry per episode."""

    returns: Float[np.ndarray, " N"]
    """Returns of the episodes. In a multi-agent environment, each is the mean over all agents."""
    lengths: Int[np.ndarray, " N"]
    agent_returns: Mapping[str, Float[np.ndarray, " N"]] = MappingProxyType({})
    """Mean returns over the agents of each kind, by the name of the kind. Empty with a single agent."""


Evaluator: TypeAlias = Callable[[Weights], EvaluationEpisodes]
"""Compiled function that plays the same episodes with any weights of a policy."""


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
    """Returns the error for an evaluation in which `count` of `episodes` episodes have not ended within
    `MAX_STEPS` steps.
    """
    return UsageError(
        f"{count} of {episodes} episodes did not end within {MAX_STEPS} steps. hint: limit the length of an "
        "episode: rollmill.time_limit(env, max_steps)."
    )


def start_memories(start_memory: Callable[[], Memory], count: int) -> Memory:
    """Returns the initial memories of a policy for `count` episodes, with leaves `[count, ...]`."""
    return jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf)[None], count, axis=0), start_memory())


def where_rows(condition: Bool[Array, " N"], chosen: PyTree, other: PyTree) -> PyTree:
    """Selects whole rows of leaves `[N, ...]`: from `chosen` if `condition` is true, and otherwise from
    `other`.
    """
    broadcast = lambda leaf: condition.reshape(-1, *(1,) * (leaf.ndim - 1))
    return jax.tree.map(lambda one, two: jnp.where(broadcast(two), one, two), chosen, other)


def with_outcome(now: Playing, ends: Bool[Array, " N"], info: Mapping[str, PyTree[Array]]) -> Playing:
    """Returns `now` with the outcome of the episodes that end in this step (`ends`), as given by the step's
    `info`.
    """
    keep = lambda outcome, before: jnp.where(ends, outcome, before)
    return now._replace(
        returns=keep(info["episode_return"], now.returns),
        lengths=keep(info["episode_length"], now.lengths),
        agent_returns=jax.tree.map(keep, dict(info.get("agent_returns", {})), now.agent_returns),
        done=now.done | ends,
    )
