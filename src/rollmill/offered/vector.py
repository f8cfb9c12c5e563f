"""Offers several copies of a JAX environment as a `gymnasium.vector.VectorEnv`.

Shape letter: `E` copies.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from jaxtyping import Bool

from rollmill.core.errors import UsageError
from rollmill.core.types import Environment
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.envs import auto_reset, strongly_typed, vectorise
from rollmill.offered.single import refuse_options
from rollmill.offered.values import as_owned_arrays, checked_actions, element

RESET_MASK = "reset_mask"


class VectorEnvironment(VectorEnv[Any, Any, Any]):
    """A `gymnasium.vector.VectorEnv` whose copies one compiled program steps, created
    by `rollmill.to_gymnasium`.
    """

    def __init__(self, env: Environment, num_envs: int, autoreset_mode: str) -> None:
        if num_envs < 1:
            raise UsageError(f"num_envs={num_envs} must be at least 1.")
        self.num_envs = num_envs
        self._mode = AutoresetMode(autoreset_mode)
        self.metadata = {"autoreset_mode": self._mode, "render_modes": []}
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(env.observation_space, num_envs)
        self.action_space = batch_space(env.action_space, num_envs)
        self.render_mode = None
        self._env = env
        self._reset, self._step, self._choose = _programs(strongly_typed(env), num_envs, self._mode)
        self._carry: Any = None
        self._ended = np.zeros(num_envs, bool)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode in each copy of the environment.

        Args:
            seed: one seed, from which copy `i` takes `seed + i`, or one seed per copy. Default: seeds are drawn
                from `np_random`, which an earlier seed determines.
            options: `{"reset_mask": mask}` begins episodes only in some copies, with a boolean mask `[E]`.

        Returns:
            Observations `[E, ...]`, and a dictionary with `action_mask` if the environment has action masks.
        """
        options = dict(options or {})
        chosen = options.pop(RESET_MASK, None)
        chosen = None if chosen is None else self._check_mask(chosen)
        refuse_options(self._env.name, options)
        seeds = self._seeds(seed)
        with attribute_to_user_code(f"{self._env.name}: reset"):
            begun = self._reset(seeds)
            if chosen is not None:
                begun = self._choose(chosen, begun, self._carry)
        self._carry = begun
        self._ended = np.zeros(self.num_envs, bool) if chosen is None else self._ended & ~chosen
        observation, mask = jax.device_get((begun[2], begun[3]))
        return element(self.single_observation_space, observation), self._info({}, mask)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Advances each copy by its action, and begins new episodes according to `metadata["autoreset_mode"]`.

        Raises a `UsageError` if an action is outside its space. Raises a `gymnasium.error.ResetNeeded` before the
        first reset and, in the mode `Disabled`, as long as an ended episode has not been reset.
        """
        if self._carry is None or (self._mode is AutoresetMode.DISABLED and self._ended.any()):
            raise gymnasium.error.ResetNeeded(f"{self._env.name}: call reset() to begin an episode.")
        batch = checked_actions(self._env.name, self.single_action_space, actions, self.num_envs)
        with attribute_to_user_code(f"{self._env.name}: step"):
            self._carry, result = self._step(self._carry, batch)
        (reward, terminated, truncated, final, info), observation, mask = jax.device_get(
            (result, self._carry[2], self._carry[3])
        )
        self._ended = terminated | truncated
        info = self._info(info, mask)
        if self._mode is AutoresetMode.SAME_STEP and self._ended.any():
            info |= {"final_obs": self._final_observations(final), "_final_obs": self._ended.copy()}
        observation = element(self.single_observation_space, observation)
        return observation, np.array(reward, np.float64), np.array(terminated), np.array(truncated), info

    def _final_observations(self, final: Any) -> np.ndarray:
        """Returns the last observations of episodes that ended as an array of objects, or None for others."""
        objects = np.full(self.num_envs, None, object)
        for copy in np.flatnonzero(self._ended):
            own = jax.tree.map(lambda leaf, at=copy: leaf[at], final)
            objects[copy] = element(self.single_observation_space, own)
        return objects

    def _seeds(self, seed: int | Sequence[int | None] | None) -> np.ndarray:
        """Returns a number of 32 bits for each copy."""
        if isinstance(seed, int | np.integer):
            self._np_random, self._np_random_seed = np_random(int(seed))
            return ((int(seed) + np.arange(self.num_envs)) % 2**32).astype(np.uint32)
        drawn = self.np_random.integers(0, 2**32, self.num_envs, dtype=np.uint32)
        if seed is None:
            return drawn
        if len(seed) != self.num_envs:
            raise UsageError(f"seed has {len(seed)} numbers, expected one for each of {self.num_envs} copies.")
        given = [number if own is None else own % 2**32 for own, number in zip(seed, drawn, strict=True)]
        return np.array(given, np.uint32)

    def _check_mask(self, chosen: Any) -> Bool[np.ndarray, " E"]:
        if self._carry is None:
            raise gymnasium.error.ResetNeeded(f"{self._env.name}: the first reset() must reset all copies.")
        array = np.asarray(chosen)
        if array.shape != (self.num_envs,) or array.dtype != bool:
            raise UsageError(
                f"{RESET_MASK} is {array.dtype} {list(array.shape)}, expected bool [{self.num_envs}], True for "
                "each copy that begins an episode."
            )
        return array

    def _info(self, info: dict[str, Any], mask: Any) -> dict[str, Any]:
        """Returns infos with the masks by which Gymnasium says which copies have an entry: here all."""
        info = (
            as_owned_arrays(info)
            if mask is None
            else {**as_owned_arrays(info), "action_mask": as_owned_arrays(mask)}
        )
        return info | {f"_{name}": np.ones(self.num_envs, bool) for name in info}


def _programs(env: Environment, num_envs: int, mode: AutoresetMode) -> tuple[Any, Any, Any]:
    """Returns compiled functions that begin episodes, step, and merge two carries by a mask.

    A carry has the data of keys, states, the observations to act on, their masks, and which episodes have just
    ended. With `NextStep` also the first observations of the episodes that follow.
    """
    resets = mode is not AutoresetMode.DISABLED
    copies = vectorise(auto_reset(env) if resets else env, num_envs)

    def mask_of(state: Any) -> Any:
        return None if copies.action_mask is None else copies.action_mask(state, env.params)

    def reset(seeds: Any) -> Any:
        keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed)))(seeds)
        observation, state = copies.reset(keys[:, 1], env.params)
        data = jax.random.key_data(keys[:, 0])
        return data, state, observation, mask_of(state), jnp.zeros(num_envs, bool), observation

    def step(carry: Any, actions: Any) -> Any:
        data, state, _, _, ended, first = carry
        keys = jax.vmap(jax.random.split)(jax.random.wrap_key_data(data))
        data = jax.random.key_data(keys[:, 0])
        timestep = copies.step(keys[:, 1], state, actions, env.params)
        info = dict(timestep.info)
        final = info.pop("final_observation", timestep.observation)
        flags = timestep.terminated, timestep.truncated
        if mode is not AutoresetMode.NEXT_STEP:
            result = (timestep.reward, *flags, final, info)
            over = jnp.zeros(num_envs, bool)
            return (data, timestep.state, timestep.observation, mask_of(timestep.state), over, first), result
        # If an episode ended in the last step, this step only returns the first observation of the next episode.
        state = _select(ended, state, timestep.state)
        observation = _select(ended, first, final)
        reward = jnp.where(ended, jnp.zeros_like(timestep.reward), timestep.reward)
        terminated, truncated = (flag & ~ended for flag in flags)
        shown = (data, state, observation, mask_of(state), terminated | truncated, timestep.observation)
        return shown, (reward, terminated, truncated, final, info)

    return jax.jit(reset), jax.jit(step), jax.jit(_select)


def _select(chosen: Any, one: Any, other: Any) -> Any:
    """Returns leaves `[E, ...]`, from `one` where `chosen` and from `other` elsewhere."""

    def select(a: Any, b: Any) -> Any:
        return jnp.where(chosen.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(select, one, other)
