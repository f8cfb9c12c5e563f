"""A game in one file: Nim with one heap, of which each player takes one to three; who takes the last one wins."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

import rollmill
from rollmill.envs import plannable

MOST = 15


class Heap(NamedTuple):
    left: jax.Array
    player: jax.Array


def nim():
    """Nim, which the player to move loses if a multiple of four is left."""

    def reset(key, params):
        state = Heap(jax.random.randint(key, (), 4, MOST + 1), jnp.int32(0))
        return observe(state), state

    def step(key, state, action, params):
        after = Heap(state.left - 1 - action, 1 - state.player)
        reward = jnp.where(after.left < 0, jnp.float32(-1), (after.left == 0).astype(jnp.float32))
        return rollmill.Timestep(observe(after), after, reward, after.left <= 0, jnp.asarray(False), {})

    env = rollmill.Environment(
        "Nim-v0",
        reset,
        step,
        spaces.Box(0.0, 1.0, (MOST + 1,), np.float32),
        spaces.Discrete(3),
        action_mask=lambda state, params: jnp.arange(3) < state.left,
        num_players=2,
        to_move=lambda state, params: state.player,
        render=lambda state, params: f"{int(state.left)} left",
    )
    return plannable(env)


def observe(state):
    return jax.nn.one_hot(state.left, MOST + 1)
