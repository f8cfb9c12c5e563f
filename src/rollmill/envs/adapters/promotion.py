"""Runs environments of other packages under standard JAX promotion of dtypes and ranks.

The caller may have set stricter rules, which other packages do not follow.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from rollmill.core.spaces import struct
from rollmill.core.types import Action, Environment, Key, Observation, Params, State, Timestep
from rollmill.envs.agents import reward_struct
from rollmill.gpus.jax_settings import standard_promotion


def promoting(env: Environment) -> Environment:
    """Runs an environment's reset and step under standard JAX promotion, and casts their results to fixed dtypes.

    States are cast to the dtypes that they have after a step, and observations to the dtypes of their space.
    """
    state_struct = _state_struct(env)
    observation_struct, rewards = struct(env.observation_space), reward_struct(env)

    def reset(key: Key, params: Params) -> tuple[Observation, State]:
        with standard_promotion():
            observation, state = env.reset(key, params)
            return _cast(observation, observation_struct), _cast(state, state_struct)

    def step(key: Key, state: State, action: Action, params: Params) -> Timestep:
        with standard_promotion():
            timestep = env.step(key, state, action, params)
            return Timestep(
                observation=_cast(timestep.observation, observation_struct),
                state=_cast(timestep.state, state_struct),
                reward=jax.tree.map(
                    lambda r, s: jnp.asarray(r, s.dtype).reshape(s.shape), timestep.reward, rewards
                ),
                terminated=jnp.asarray(timestep.terminated, bool),
                truncated=jnp.asarray(timestep.truncated, bool),
                info=timestep.info,
            )

    return env._replace(reset=reset, step=step)


def _state_struct(env: Environment) -> PyTree[jax.ShapeDtypeStruct]:
    key, action = jax.random.key(0), struct(env.action_space)
    with standard_promotion():
        _, state = jax.eval_shape(env.reset, key, env.params)
        return jax.eval_shape(env.step, key, state, action, env.params).state


def _cast(value: PyTree, like: PyTree[jax.ShapeDtypeStruct]) -> PyTree[Array]:
    return jax.tree.map(lambda leaf, s: jnp.asarray(leaf, s.dtype), value, like)
