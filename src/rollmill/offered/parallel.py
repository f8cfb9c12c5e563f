"""Offers a multi-agent environment as a `pettingzoo.ParallelEnv`."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import jax
import numpy as np
import pettingzoo
from gymnasium.utils.seeding import np_random

from rollmill.core.errors import UsageError
from rollmill.core.types import AgentKind, Environment
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.envs import active_agents, strongly_typed
from rollmill.envs.field_checks import as_timestep
from rollmill.offered.rendering import check_render_mode, render_modes, show
from rollmill.offered.values import as_owned_arrays, checked_actions, element, single_action


class ParallelEnvironment(pettingzoo.ParallelEnv[str, Any, Any]):
    """A `pettingzoo.ParallelEnv` around a JAX environment, created by `rollmill.to_pettingzoo`.

    The agents of a kind are named `KIND_0`, `KIND_1` and so on. An agent that no longer takes part is terminated.
    """

    def __init__(self, env: Environment, *, render_mode: str | None = None) -> None:
        check_render_mode(env, render_mode)
        self.metadata = {"name": env.name, "render_modes": render_modes(env)}
        self.render_mode = render_mode
        self._env, self._typed = env, strongly_typed(env)
        self.possible_agents = [name for name, _, _ in self._places()]
        self.observation_spaces = {name: copy.deepcopy(k.observation_space) for name, k, _ in self._places()}
        self.action_spaces = {name: copy.deepcopy(kind.action_space) for name, kind, _ in self._places()}
        self.agents: list[str] = []
        self._generator: np.random.Generator | None = None
        self._reset, self._step = _programs(self._typed)
        self._carry: Any = None

    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        """Returns the space of an agent's observations."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        """Returns the space of an agent's actions."""
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Begins an episode. `seed` determines this and all later episodes. `options` must be empty."""
        if seed is not None or self._generator is None:
            self._generator, _ = np_random(seed)
        drawn = self._generator.integers(0, 2**32, dtype=np.uint32)
        with attribute_to_user_code(f"{self._env.name}: reset"):
            self._carry, observation, (mask, active) = self._reset(drawn)
        self.agents = self._active(active)
        return self._observations(observation, self.agents), self._infos(mask, self.agents)

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Advances the episode by the actions of all active agents.

        Raises a `UsageError` if an action is missing or outside its space.
        """
        acting = self.agents
        if missing := [name for name in acting if name not in actions]:
            raise UsageError(f"{self._env.name}: the active agents {', '.join(missing)} have no action.")
        if not acting:
            raise UsageError(f"{self._env.name}: no agent is active. hint: call reset() to begin an episode.")
        batch = {kind.name: self._of_kind(kind, actions) for kind in self._env.agents}
        with attribute_to_user_code(f"{self._env.name}: step"):
            self._carry, result, (mask, active) = self._step(self._carry, batch)
        observation, rewards, terminated, truncated = result
        terminated, truncated = bool(terminated), bool(truncated)
        alive = self._active(active)
        self.agents = [] if terminated or truncated else [name for name in acting if name in alive]
        reward = {name: float(rewards[kind.name][i]) for name, kind, i in self._places() if name in acting}
        return (
            self._observations(observation, acting),
            reward,
            {name: terminated or name not in alive for name in acting},
            dict.fromkeys(acting, truncated),
            self._infos(mask, acting),
        )

    def render(self) -> Any:
        """Returns the state as pixels or text. Returns None without a `render_mode`, or before the first reset."""
        return None if self._carry is None else show(self._env, self.render_mode, self._carry[1])

    def _places(self) -> Iterator[tuple[str, AgentKind, int]]:
        """Yields the name of each agent, its kind, and its index among the agents of that kind."""
        for kind in self._env.agents:
            for index in range(kind.count):
                yield f"{kind.name}_{index}", kind, index

    def _active(self, active: Mapping[str, Any]) -> list[str]:
        flags = {name: np.asarray(flag) for name, flag in active.items()}
        return [name for name, kind, index in self._places() if flags[kind.name][index]]

    def _of_kind(self, kind: AgentKind, actions: Mapping[str, Any]) -> Any:
        """Returns the actions `[count, ...]` of a kind. Those of agents that take part no longer are ignored."""
        names = [f"{kind.name}_{index}" for index in range(kind.count)]
        fallback = next((actions[name] for name in names if name in actions), None)
        if fallback is None:
            fallback = self.action_spaces[names[0]].sample()
        space, given = kind.action_space, [actions.get(name, fallback) for name in names]
        each = [single_action(self._env.name, space, action) for action in given]
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
        return checked_actions(self._env.name, space, batch, kind.count)

    def _observations(self, observation: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
        arrays = jax.device_get(observation)
        return {
            name: element(kind.observation_space, jax.tree.map(lambda leaf, at=i: leaf[at], arrays[kind.name]))
            for name, kind, i in self._places()
            if name in names
        }

    def _infos(self, mask: Mapping[str, Any] | None, names: list[str]) -> dict[str, dict[str, Any]]:
        masks = jax.device_get(mask or {})
        return {
            name: {"action_mask": as_owned_arrays(masks[kind.name][i])} if kind.name in masks else {}
            for name, kind, i in self._places()
            if name in names
        }


def _programs(env: Environment) -> tuple[Any, Any]:
    """Returns compiled functions of a seed, and of a carry and the actions of each kind.

    A carry has the data of a key, and the state.
    """

    def seen(state: Any) -> Any:
        mask = None if env.action_mask is None else env.action_mask(state, env.params)
        return mask, active_agents(env, state, env.params)

    def reset(seed: Any) -> Any:
        key, reset_key = jax.random.split(jax.random.key(seed))
        observation, state = env.reset(reset_key, env.params)
        return (jax.random.key_data(key), state), observation, seen(state)

    def step(carry: Any, actions: Any) -> Any:
        key, step_key = jax.random.split(jax.random.wrap_key_data(carry[0]))
        timestep = as_timestep(env.name, env.step(step_key, carry[1], actions, env.params))
        result = (timestep.observation, timestep.reward, timestep.terminated, timestep.truncated)
        return (jax.random.key_data(key), timestep.state), result, seen(timestep.state)

    return jax.jit(reset), jax.jit(step)
