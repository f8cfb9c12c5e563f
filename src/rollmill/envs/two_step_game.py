"""TwoStepGame-v0, a task for a team whose value no sum of the agents' values can represent.

See Rashid et al., "QMIX: Monotonic Value Function Factorisation for Deep Multi-Agent Reinforcement Learning" (ICML
2018), section 5.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Float, Int

from rollmill.core.types import AgentKind, Environment, Key, Timestep
from rollmill.envs.agents import joint_spaces

START, SAFE, RISKY = 0, 1, 2

PAYOFFS = np.array([[[0, 0], [0, 0]], [[7, 7], [7, 7]], [[0, 1], [1, 8]]], np.float32)
"""Reward of the team by state, action of the first agent, and action of the second agent."""


class TwoStepGameState(eqx.Module):
    """State of the game: `START`, `SAFE` or `RISKY`."""

    place: Int[Array, ""]


def two_step_game() -> Environment:
    """Two agents with two actions play two steps for a common reward of at most 8. A sum of values finds 7.

    In the first step, the first agent chooses the second step's game. In the safe game (action 0), every pair of
    actions pays 7. In the risky game (action 1), a pair pays 8 if both choose action 1, 1 if one of them does, and
    0 otherwise. Each agent observes the state as a one-hot, which is also the central features.
    """
    kind = AgentKind("agent", 2, spaces.Box(0.0, 1.0, (3,), np.float32), spaces.Discrete(2))
    observation_space, action_space = joint_spaces((kind,))
    return Environment(
        name="TwoStepGame-v0",
        reset=_reset,
        step=_step,
        observation_space=observation_space,
        action_space=action_space,
        agents=(kind,),
        central=lambda state, params: _encode(state),
    )


def _reset(key: Key, params: tuple[()]) -> tuple[dict[str, Float[Array, "2 3"]], TwoStepGameState]:
    state = TwoStepGameState(jnp.int32(START))
    return _observe(state), state


def _step(key: Key, state: TwoStepGameState, action: dict[str, Int[Array, "2"]], params: tuple[()]) -> Timestep:
    first, second = action["agent"]
    game = jnp.where(first == 0, SAFE, RISKY).astype(jnp.int32)
    after = TwoStepGameState(jnp.where(state.place == START, game, state.place))
    payoff = jnp.asarray(PAYOFFS)[state.place, first, second]
    return Timestep(
        observation=_observe(after),
        state=after,
        reward={"agent": jnp.full(2, payoff)},
        terminated=state.place != START,
        truncated=jnp.zeros((), bool),
        info={},
    )


def _encode(state: TwoStepGameState) -> Float[Array, "3"]:
    return (jnp.arange(3) == state.place).astype(jnp.float32)


def _observe(state: TwoStepGameState) -> dict[str, Float[Array, "2 3"]]:
    return {"agent": jnp.broadcast_to(_encode(state), (2, 3))}
