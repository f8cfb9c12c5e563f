"""Steps of games, fused and unfused: each from where the unfused ones have come, over whole episodes.

The unfused ones are computed on the CPU also where there is a GPU: docs/numbers.md names a fault of XLA on GPUs
that such games show.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from drawn_compare import AS_UNFUSED, Way, plain, results
from fused_runs import lowered_for
from game_environments import GAMES
from user_environments import ENVIRONMENTS
from user_games import GAMES_OF_USERS
from user_systems import SYSTEMS

from rollmill.envs import auto_reset
from rollmill.fusion import LoweredFunction

EVERY = GAMES | ENVIRONMENTS | GAMES_OF_USERS | SYSTEMS


class Steps(NamedTuple):
    """Steps of a game by XLA on the CPU, unfused."""

    lowered: LoweredFunction
    given: Any
    """Keys, states and actions `[steps]`."""
    expected: Any
    """Timesteps `[steps]`."""
    copies: int
    """Copies of the game, the steps of which alternate."""


def unfused_steps(name: str, *, steps: int, copies: int) -> Steps:
    """So many steps of some copies of a game with random actions."""
    with jax.default_device(jax.devices("cpu")[0]):
        return _played(name, steps, copies)


def _played(name: str, steps: int, copies: int) -> Steps:
    env = auto_reset(EVERY[name]())
    reset, step = partial(env.reset, params=env.params), step_of(name)
    actions = jax.random.randint(jax.random.key(1), (steps, copies), 0, env.action_space.n)
    keys = jax.random.split(jax.random.key(2), (steps, copies))

    def advance(state, drawn):
        timestep = jax.vmap(step)(drawn[0], state, drawn[1])
        return timestep.state, (state, timestep)

    def played(keys, actions):
        _, start = jax.vmap(reset)(keys[0])
        return jax.lax.scan(advance, start, (keys, actions))[1]

    before, expected = jax.jit(played, compiler_options=AS_UNFUSED)(keys, actions)
    flat = lambda tree: jax.tree.map(lambda leaf: in_pairs(leaf.reshape(-1, *leaf.shape[2:])), tree)
    given = (flat(keys), flat(before), flat(actions))
    like = jax.tree.map(lambda leaf: leaf.dtype, before)
    step_in_pairs = lambda key, state, action: jax.tree.map(in_pairs, step(key, whole(state, like), action))
    return Steps(lowered_for(step_in_pairs, given), given, flat(expected), copies)


def in_pairs(leaf):
    """Complex numbers as a last axis of two floats, as kernels hold them; all else as it is."""
    is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    return jnp.stack([leaf.real, leaf.imag], axis=-1) if is_complex else leaf


def whole(state, like):
    """A state with the complex numbers that `in_pairs` took apart, by the types that its leaves had."""
    is_complex = lambda dtype: jnp.issubdtype(dtype, jnp.complexfloating)
    join = lambda leaf, dtype: jax.lax.complex(leaf[..., 0], leaf[..., 1]) if is_complex(dtype) else leaf
    return jax.tree.map(join, state, like)


def step_of(name: str) -> Any:
    """`step(key, state, action)` of a game."""
    env = auto_reset(EVERY[name]())
    return partial(env.step, params=env.params)


def steps_by_xla(name: str, steps: Steps) -> list[np.ndarray]:
    """The same steps by XLA on JAX's default device, unfused: those of all copies at once, one after the other."""
    given = jax.device_put(steps.given, jax.devices()[0])
    turns = jax.tree.map(lambda leaf: leaf.reshape(-1, steps.copies, *leaf.shape[1:]), given)
    options = {name: value for name, value in AS_UNFUSED.items() if "cpu" not in name}
    advance = lambda _, turn: (None, jax.vmap(step_of(name))(*turn))
    found = jax.jit(lambda own: jax.lax.scan(advance, None, own)[1], compiler_options=options)(turns)
    whole = [plain(leaf) for leaf in jax.tree.leaves(found)]
    return [leaf.reshape(-1, *leaf.shape[2:]) for leaf in whole]


def differing(steps: Steps, way: Way, *, tolerance: float = 1e-6) -> int:
    """In how many steps a way differs."""
    return differing_from(steps, results(way, steps.lowered, steps.given), tolerance=tolerance)


def differing_from(steps: Steps, found: Sequence[np.ndarray], *, tolerance: float = 1e-6) -> int:
    """In how many steps results differ; integers and flags exactly, floats by more than their last digits."""
    expected = list(map(plain, jax.tree.leaves(steps.expected)))
    unequal = np.zeros(len(expected[0]), bool)
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == other.dtype and own.shape == other.shape
        is_float = jnp.issubdtype(own.dtype, jnp.floating)
        same = np.isclose(own, other, rtol=tolerance, atol=tolerance) if is_float else own == other
        unequal |= ~same.reshape(len(unequal), -1).all(axis=1)
    return int(unequal.sum())
