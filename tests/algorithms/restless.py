"""An environment whose episodes terminate, are truncated, or both, at random and often."""

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollmill import Environment, Timestep


def restless():
    """Two random numbers to see, three actions; an episode goes on with probability 0.64."""

    def reset(key, params):
        observation = 3 + 2 * jax.random.normal(key, (2,))
        return observation, observation

    def step(key, state, action, params):
        move_key, terminate_key, truncate_key = jax.random.split(key, 3)
        observation = 3 + 2 * jax.random.normal(move_key, (2,))
        return Timestep(
            observation=observation,
            state=observation,
            reward=state[0] * action.astype(jnp.float32) - state[1],
            terminated=jax.random.bernoulli(terminate_key, 0.2),
            truncated=jax.random.bernoulli(truncate_key, 0.2),
            info={},
        )

    return Environment("Restless", reset, step, spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(3))
