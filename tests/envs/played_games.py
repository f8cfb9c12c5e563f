"""Games of two players under random actions, as arrays to compare with a reference."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from rollmill import envs
from rollmill.core.types import Timestep


class Moves(NamedTuple):
    """T moves of E games side by side, leaves `[T, E, ...]`; the next game follows in the step that ends one."""

    observation: np.ndarray
    """The position before the move."""
    state: object
    to_move: np.ndarray
    mask: np.ndarray
    action: np.ndarray
    timestep: Timestep


def play(env, *, num_games, num_steps, legal=1.0, seed=0):
    """Random moves of an environment that resets itself: legal ones, but for a share that may be of any kind."""
    batch = envs.vectorise(env, num_games)

    def step(carry, key):
        observation, state = carry
        keys = jax.random.split(key, (3, num_games))
        mask = batch.action_mask(state, env.params)
        anything = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - legal))(keys[0])
        scores = jax.vmap(lambda k: jax.random.uniform(k, (mask.shape[1],)))(keys[1])
        action = jnp.argmax(jnp.where(mask | anything[:, None], scores, jnp.float32(-1)), axis=1)
        timestep = batch.step(keys[2], state, action, env.params)
        moves = Moves(observation, state, batch.to_move(state, env.params), mask, action, timestep)
        return (timestep.observation, timestep.state), moves

    @eqx.filter_jit
    def run(key):
        first_key, steps_key = jax.random.split(key)
        first = batch.reset(jax.random.split(first_key, num_games), env.params)
        return jax.lax.scan(step, first, jax.random.split(steps_key, num_steps))[1]

    return jax.tree.map(np.asarray, run(jax.random.key(seed)))
