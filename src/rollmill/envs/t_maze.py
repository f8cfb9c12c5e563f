"""TMaze-v0 tests memory: a cue in the first step shows which way to turn at the end of a corridor.

It follows Bakker, "Reinforcement learning with long short-term memory" (2001), but tests only memory. The agent
walks automatically, and chooses only the turn.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Float, Int

from rollmill.core.types import Environment, Key, Timestep


class TMazeState(eqx.Module):
    """State of TMaze: the number of cells walked so far, and the cue, which is 1 for right and -1 for left."""

    position: Int[Array, ""]
    cue: Float[Array, ""]


def t_maze(*, length: int = 5) -> Environment:
    """A memory probe: turn as the first step's cue shows, 5 steps later. Best return 1, 0 without memory.

    The observation is `[cue, junction]`. The cue is -1 (left) or 1 (right) in the first step, and 0 afterwards.
    The second element is 1 at the junction, and 0 before. Actions are 0 (left) and 1 (right), and matter only at
    the junction, which is reached after `length` steps. There, the right action pays 1 and the wrong action pays
    -1, and the episode terminates. A policy without memory has an expected return of 0.

    Args:
        length: steps between the cue and the turn, at least 1.
    """

    def reset(key: Key, params: tuple[()]) -> tuple[Float[Array, "2"], TMazeState]:
        state = TMazeState(position=jnp.zeros((), jnp.int32), cue=jax.random.rademacher(key, (), jnp.float32))
        return _observe(state, length), state

    def step(key: Key, state: TMazeState, action: Int[Array, ""], params: tuple[()]) -> Timestep:
        turned = state.position >= length
        correct = (action == 1) == (state.cue > 0)
        moved = TMazeState(position=state.position + 1, cue=state.cue)
        pay = jnp.where(correct, jnp.float32(1.0), jnp.float32(-1.0))
        return Timestep(
            observation=_observe(moved, length),
            state=moved,
            reward=jnp.where(turned, pay, 0.0),
            terminated=turned,
            truncated=jnp.zeros((), bool),
            info={},
        )

    return Environment(
        name="TMaze-v0",
        reset=reset,
        step=step,
        observation_space=spaces.Box(
            np.array([-1.0, 0.0], np.float32), np.array([1.0, 1.0], np.float32), dtype=np.float32
        ),
        action_space=spaces.Discrete(2),
    )


def _observe(state: TMazeState, length: int) -> Float[Array, "2"]:
    cue = jnp.where(state.position == 0, state.cue, 0.0)
    junction = (state.position == length).astype(jnp.float32)
    return jnp.stack([cue, junction])
