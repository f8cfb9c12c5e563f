"""Steps of games, fused and unfused: each from where the unfused ones have come, over whole episodes."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from drawn_compare import AS_UNFUSED, Way, plain, results
from fused_runs import lowered_for
from game_environments import GAMES

from rollmill.envs import auto_reset
from rollmill.fusion import LoweredFunction


class Steps(NamedTuple):
    """Steps of a game by XLA, unfused."""

    lowered: LoweredFunction
    given: Any
    """Keys, states and actions `[steps]`."""
    expected: Any
    """Timesteps `[steps]`."""


def unfused_steps(name: str, *, steps: int, copies: int) -> Steps:
    """So many steps of some copies of a game with random actions."""
    env = auto_reset(GAMES[name]())
    reset, step = partial(env.reset, params=env.params), partial(env.step, params=env.params)
    actions = jax.random.randint(jax.random.key(1), (steps, copies), 0, env.action_space.n)
    keys = jax.random.split(jax.random.key(2), (steps, copies))

    def advance(state, drawn):
        timestep = jax.vmap(step)(drawn[0], state, drawn[1])
        return timestep.state, (state, timestep)

    def played(keys, actions):
        _, start = jax.vmap(reset)(keys[0])
        return jax.lax.scan(advance, start, (keys, actions))[1]

    before, expected = jax.jit(played, compiler_options=AS_UNFUSED)(keys, actions)
    flat = lambda tree: jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)
    given = (flat(keys), flat(before), flat(actions))
    return Steps(lowered_for(step, given), given, flat(expected))


def differing(steps: Steps, way: Way) -> int:
    """In how many steps a way differs; integers and flags exactly, floats by more than their last digits."""
    found = results(way, steps.lowered, steps.given)
    expected = list(map(plain, jax.tree.leaves(steps.expected)))
    unequal = np.zeros(len(expected[0]), bool)
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == other.dtype and own.shape == other.shape
        is_float = jnp.issubdtype(own.dtype, jnp.floating)
        same = np.isclose(own, other, rtol=1e-6, atol=1e-6) if is_float else own == other
        unequal |= ~same.reshape(len(unequal), -1).all(axis=1)
    return int(unequal.sum())
