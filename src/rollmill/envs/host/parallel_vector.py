"""Multi-agent host environments: Python objects with the parallel PettingZoo interface, stepped one by one.

Shape letters: `n` environments, `A` agents of a kind.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.core.errors import ContractError
from rollmill.core.types import AgentKind, HostEnvironment, HostStep
from rollmill.envs.agents import possible_masks
from rollmill.envs.host.action_masks import LATE_MASK, mask_of_shape
from rollmill.envs.host.actions import element_splitter
from rollmill.envs.host.episode_sums import AgentSums
from rollmill.envs.host.layout import step_struct
from rollmill.envs.host.numbers import is_number
from rollmill.envs.host.observations import Write, writer
from rollmill.envs.host.sequential_vector import OneByOne

Agent = Hashable
"""Name of an agent in PettingZoo, usually a string."""

ByAgent = Mapping[Agent, Any]


@runtime_checkable
class ParallelObject(Protocol):
    """The part of the `pettingzoo.ParallelEnv` interface that Rollmill uses."""

    agents: list[Agent]
    """Agents that act in the next step."""

    def reset(self, seed: int | None = None) -> tuple[ByAgent, ByAgent]:
        """Starts an episode, and returns observations and infos."""
        ...

    def step(self, actions: dict[Agent, Any]) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """Takes a step, and returns observations, rewards, terminations, truncations and infos."""
        ...

    def close(self) -> object:
        """Frees all resources."""
        ...


Members = dict[str, list[Agent]]
"""Agents of each kind, by the name of the kind."""


class _Column(NamedTuple):
    """An agent's column in the arrays of its kind, `[n, A, ...]`."""

    kind: str
    number: int


class ParallelVector(OneByOne):
    """A `core.types.HostVector` of objects with the parallel PettingZoo interface, created at the first reset.

    An episode ends when no agent is left. It counts as truncated if any of the last agents was truncated, and as
    terminated otherwise. An agent that terminates before the others is inactive for the rest of the episode.
    """

    def __init__(
        self,
        env: HostEnvironment,
        make: Callable[[], ParallelObject],
        members: Members,
        indices: Sequence[int],
        *,
        seed: int,
        generation: int,
    ) -> None:
        struct, sums = step_struct(env, len(indices)), AgentSums(env.agents, len(indices))
        super().__init__(env, make, indices, seed=seed, generation=generation, struct=struct, sums=sums)
        self._kinds = {kind.name: kind for kind in env.agents}
        self._columns = {
            agent: _Column(kind, column) for kind, agents in members.items() for column, agent in enumerate(agents)
        }
        zeros = lambda leaf: np.zeros(leaf.shape, leaf.dtype)
        self._active = jax.tree.map(zeros, struct.info["active"])
        self._possible = possible_masks(env)
        self._masks = jax.tree.map(zeros, struct.info["action_mask"]) if env.has_action_mask else None
        self._rows = {kind.name: _rows(kind, self._current[kind.name]) for kind in env.agents}
        self._writers: dict[str, Write] = {kind.name: writer(kind.observation_space) for kind in env.agents}
        self._elements = {kind.name: element_splitter(kind.action_space) for kind in env.agents}

    # --- one environment -------------------------------------------------------------------------------

    def _begin_episode(self, i: int) -> None:
        def reset(env: Any, seed: int | None) -> None:  # PettingZoo sets `agents` at the first reset
            observations, infos = env.reset(seed=seed)
            self._see(i, observations, infos, env.agents)
            self._mark_active(i, env.agents)

        self._copies.begin_episode(i, reset)

    def _step_one(self, i: int, chosen: dict[str, list[Any]], out: HostStep) -> None:
        for reward in out.reward.values():
            reward[i] = 0
        out.terminated[i] = out.truncated[i] = False
        env: Any = self._copies.objects[i]
        try:
            acting = list(env.agents)
            columns = self._columns
            actions = {agent: chosen[columns[agent].kind][self._row(i, columns[agent])] for agent in acting}
            observations, rewards, terminations, truncations, infos = env.step(actions)
            for agent in acting:
                _check_result(agent, rewards[agent], terminations[agent], truncations[agent])
            terminated = [agent for agent in acting if terminations[agent]]
            truncated = [agent for agent in acting if truncations[agent] and not terminations[agent]]
            left = [agent for agent in env.agents if agent not in terminated and agent not in truncated]
            self._see(i, observations, infos, left, ended=[*terminated, *truncated])
            for agent in acting:
                out.reward[columns[agent].kind][i, columns[agent].number] = rewards[agent]
        except (Exception, SystemExit) as error:
            self._copies.fail(i, "step", error)
            for reward in out.reward.values():
                reward[i] = 0
            out.truncated[i] = True
            return
        if truncated and left:
            raise ContractError(
                f"{self._name}: the agent {truncated[0]} was truncated while {left[0]} continues. An agent may "
                "terminate before the others, but a time limit must end the episode of all agents at the same "
                "time. hint: report it as terminated, or truncate the others too."
            )
        out.terminated[i], out.truncated[i] = not left and not truncated, bool(truncated)
        self._mark_active(i, left or truncated)

    def _see(
        self, i: int, observations: ByAgent, infos: ByAgent, left: Sequence[Agent], ended: Sequence[Agent] = ()
    ) -> None:
        """Stores observations and legal actions of agents. Agents that have terminated may lack an observation."""
        for agent in [*left, *(agent for agent in ended if agent in observations)]:
            where = self._columns[agent]
            self._writers[where.kind](self._rows[where.kind], self._row(i, where), observations[agent])
        if self._masks is not None:
            for kind, mask in self._masks.items():
                mask[i] = self._possible[kind]
            for agent in left:
                where = self._columns[agent]
                if where.kind in self._masks and "action_mask" in infos[agent]:
                    row = self._masks[where.kind][i, where.number]
                    row[:] = mask_of_shape(infos[agent]["action_mask"], row.shape)
        elif any(infos[agent].get("action_mask") is not None for agent in left if agent in infos):
            raise ValueError(LATE_MASK)

    def _mark_active(self, i: int, agents: Sequence[Agent]) -> None:
        for active in self._active.values():
            active[i] = False
        for agent in agents:
            where = self._columns[agent]
            self._active[where.kind][i, where.number] = True

    # --- all environments ------------------------------------------------------------------------------

    def _row(self, i: int, where: _Column) -> int:
        return i * self._kinds[where.kind].count + where.number

    def _step_each(self, actions: PyTree[np.ndarray], out: HostStep) -> None:
        """Steps all environments: stores observations as current ones, writes rewards and ends to `out`. Raises a
        `ContractError` if an agent is truncated before the others.
        """
        flat = {name: _rows(kind, actions[name]) for name, kind in self._kinds.items()}
        chosen = {name: list(split(flat[name])) for name, split in self._elements.items()}
        for i in range(self._count):
            self._step_one(i, chosen, out)

    def _copy_final(self, out: HostStep) -> None:
        self._copy_active(out.info["final_active"])

    def _copy_next(self, out: HostStep) -> None:
        self._copy_active(out.info["active"])
        if self._masks is not None:
            for kind, mask in self._masks.items():
                out.info["action_mask"][kind][:] = mask

    def _copy_active(self, target: dict[str, np.ndarray]) -> None:
        for kind, active in self._active.items():
            target[kind][:] = active


def _check_result(agent: Agent, reward: Any, terminated: Any, truncated: Any) -> None:
    """Raises a `ValueError` if the reward or the flags of an agent are no numbers."""
    if not (is_number(reward) and is_number(terminated) and is_number(truncated)):
        raise ValueError(
            f"step returned reward={reward!r}, terminated={terminated!r} and truncated={truncated!r} for the "
            f"agent {agent}, expected a number and two booleans."
        )


def _rows(kind: AgentKind, batch: PyTree[np.ndarray]) -> PyTree[np.ndarray]:
    """Returns views of the leaves `[n, A, ...]`, reshaped to `[n * A, ...]`."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
