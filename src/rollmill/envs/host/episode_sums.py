"""Sums up the episodes of host environments, as `envs.accounting` does, for batches in NumPy.

Shape letters: `n` environments, `A` agents of a kind.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from rollmill.core.types import AgentKind, HostStep


class RunningSums:
    """Returns, lengths and discounted returns of the current episodes of `n` host environments, `[n]` each."""

    def __init__(self, num_envs: int, gamma: float | None) -> None:
        self._returns = np.zeros(num_envs, np.float32)
        self._lengths = np.zeros(num_envs, np.int32)
        self._discounted = np.zeros(num_envs, np.float32)
        self._gamma = None if gamma is None else np.float32(gamma)

    def step_of(self, i: int) -> int:
        """Returns how many steps the current episode of environment `i` has made."""
        return int(self._lengths[i])

    def restart(self) -> None:
        """Resets all sums to 0, because all environments begin a new episode."""
        for sums in (self._returns, self._lengths, self._discounted):
            sums[:] = 0

    def add(self, step: HostStep, done: Bool[np.ndarray, " n"]) -> None:
        """Adds a step to the sums, writes them to `step.info`, and resets the sums of episodes that ended."""
        self._returns += step.reward
        self._lengths += 1
        step.info["episode_return"][:] = self._returns
        step.info["episode_length"][:] = self._lengths
        self._returns[done] = 0
        self._lengths[done] = 0
        if self._gamma is not None:
            self._discounted *= self._gamma
            self._discounted += step.reward
            step.info["discounted_return"][:] = self._discounted
            self._discounted[done] = 0


class AgentSums:
    """Returns and lengths of the current episodes of `n` multi-agent host environments, `[n]` each.

    Returns are means over the agents of each kind, and over all agents.
    """

    def __init__(self, agents: Sequence[AgentKind], num_envs: int) -> None:
        self._shares = {kind.name: kind.count / sum(k.count for k in agents) for kind in agents}
        self._returns = {kind.name: np.zeros(num_envs, np.float32) for kind in agents}
        self._lengths = np.zeros(num_envs, np.int32)

    def step_of(self, i: int) -> int:
        """Returns how many steps the current episode of environment `i` has made."""
        return int(self._lengths[i])

    def restart(self) -> None:
        """Resets all sums to 0, because all environments begin a new episode."""
        self._reset(np.ones(len(self._lengths), bool))

    def add(self, step: HostStep, done: Bool[np.ndarray, " n"]) -> None:
        """Adds a step to the sums, writes them to `step.info`, and resets the sums of episodes that ended.

        Rewards of inactive agents must be 0.
        """
        self._lengths += 1
        step.info["episode_length"][:] = self._lengths
        step.info["episode_return"][:] = 0
        for kind, returns in self._returns.items():
            returns += step.reward[kind].mean(axis=1)
            step.info["agent_returns"][kind][:] = returns
            step.info["episode_return"][:] += np.float32(self._shares[kind]) * returns
        self._reset(done)

    def _reset(self, ended: Bool[np.ndarray, " n"]) -> None:
        for sums in (self._lengths, *self._returns.values()):
            sums[ended] = 0
