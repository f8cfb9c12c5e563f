"""Offers one JAX environment as a `gymnasium.Env`."""

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from rollmill.core.errors import UsageError
from rollmill.core.types import Environment
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.envs import strongly_typed
from rollmill.envs.field_checks import as_timestep
from rollmill.offered.rendering import check_render_mode, render_modes, show
from rollmill.offered.values import as_owned_arrays, batch_of_one, checked_actions, element


class SingleEnvironment(gymnasium.Env[Any, Any]):
    """A `gymnasium.Env` whose reset and step are compiled programs, created by `rollmill.to_gymnasium`.

    After an episode has ended, `reset` must be called to begin the next one.
    """

    def __init__(self, env: Environment, *, render_mode: str | None = None) -> None:
        check_render_mode(env, render_mode)
        self.metadata = {"render_modes": render_modes(env), "render_fps": 30}
        self.render_mode = render_mode
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self._env = env
        self._reset, self._step = _programs(strongly_typed(env))
        self._carry: Any = None
        self._ended = True
        self._mask: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode. `seed` determines this and all later episodes."""
        super().reset(seed=seed)
        refuse_options(self._env.name, options)
        drawn = self.np_random.integers(0, 2**32, dtype=np.uint32)
        with attribute_to_user_code(f"{self._env.name}: reset"):
            self._carry, observation, self._mask = self._reset(drawn)
        self._ended = False
        return element(self.observation_space, observation), self._with_mask({})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Advances the episode by an action.

        Raises a `gymnasium.error.ResetNeeded` before the first reset and after the end of an episode, and a
        `UsageError` if the action is outside its space.
        """
        if self._ended:
            raise gymnasium.error.ResetNeeded(f"{self._env.name}: call reset() to begin an episode.")
        name, space = self._env.name, self.action_space
        batch = checked_actions(name, space, batch_of_one(name, space, action), 1)
        with attribute_to_user_code(f"{self._env.name}: step"):
            self._carry, result, self._mask = self._step(self._carry, batch)
        observation, numbers, info = result
        reward, terminated, truncated = np.asarray(numbers).tolist()
        self._ended = bool(terminated or truncated)
        observation = element(self.observation_space, observation)
        return observation, reward, bool(terminated), bool(truncated), self._with_mask(as_owned_arrays(info))

    def action_masks(self) -> Any:
        """Returns the mask of legal actions, for `MaskablePPO` of sb3-contrib.

        Raises a `UsageError` if the environment has no action masks.
        """
        if self._env.action_mask is None:
            raise UsageError(f"{self._env.name} has no action masks.")
        return as_owned_arrays(self._mask)

    def render(self) -> Any:
        """Returns the state as pixels or text. Returns None without a `render_mode`."""
        if self.render_mode is None:
            gymnasium.logger.warn(
                "render() needs render_mode: rollmill.to_gymnasium(env, render_mode='rgb_array')."
            )
            return None
        if self._carry is None:
            raise gymnasium.error.ResetNeeded(f"{self._env.name}: there is no state before the first reset().")
        return show(self._env, self.render_mode, self._carry[1])

    def _with_mask(self, info: dict[str, Any]) -> dict[str, Any]:
        return info if self._mask is None else {**info, "action_mask": as_owned_arrays(self._mask)}


def refuse_options(name: str, options: dict[str, Any] | None) -> None:
    """Raises a `UsageError` if `options` of a reset are given, because JAX environments have none."""
    if options:
        raise UsageError(
            f"{name}: reset does not support options, got {', '.join(options)}. hint: pass them to rollmill.make."
        )


def _programs(env: Environment) -> tuple[Any, Any]:
    """Returns compiled functions of a seed, and of a carry and a batch of one action.

    A carry has the data of a key, which costs less per call than a typed key, and the state.
    """

    def mask_of(state: Any) -> Any:
        return None if env.action_mask is None else env.action_mask(state, env.params)

    def reset(seed: Any) -> Any:
        key, reset_key = jax.random.split(jax.random.key(seed))
        observation, state = env.reset(reset_key, env.params)
        return (jax.random.key_data(key), state), observation, mask_of(state)

    def step(carry: Any, batch: Any) -> Any:
        key, step_key = jax.random.split(jax.random.wrap_key_data(carry[0]))
        action = jax.tree.map(lambda leaf: leaf[0], batch)
        timestep = as_timestep(env.name, env.step(step_key, carry[1], action, env.params))
        # combined in one array, because each transfer takes time
        numbers = [timestep.reward, timestep.terminated, timestep.truncated]
        result = (timestep.observation, jnp.stack([jnp.asarray(n, jnp.float32) for n in numbers]), timestep.info)
        return (jax.random.key_data(key), timestep.state), result, mask_of(timestep.state)

    return jax.jit(reset), jax.jit(step)
