"""Positions in environments that support planning: their legal actions, and the steps that a search takes.

The functions do not depend on the number of players. Rewards and values are for the player to move. Shape letter:
`A` actions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.spaces import space_text
from rollmill.core.types import Action, Environment, GymnasiumObject, HostEnvironment, Params, State, Timestep
from rollmill.envs.agents import legal_actions
from rollmill.envs.registry import single_agent


class Position(NamedTuple):
    """The part of an environment's state from which a search begins, created by `position`."""

    action_mask: PyTree[Bool[Array, "..."]]
    """Legal actions, or `()` if all are legal."""
    state: PyTree[Array]
    """The environment's planning state."""
    params: Params
    """Parameters to step the environment with."""


def plannable_parts(
    env: Environment | HostEnvironment | GymnasiumObject | str, *, who: str
) -> tuple[Environment, Environment]:
    """Returns an environment, and the version of it without transforms, in which a search can plan.

    Raises a `UsageError` if the environment does not support planning, or if its actions are not `Discrete`. The
    message names the algorithm or player `who`.
    """
    env = single_agent(env)
    if isinstance(env, HostEnvironment):
        raise UsageError(
            f"{env.name} is stepped by Python on the host and does not support a search, because a search steps "
            "copies of an environment from any state. hint: use an environment written in JAX, such as "
            "ConnectFour-v0."
        )
    require_discrete(env, who=who)
    planned = env.planning_env
    if planned is None or env.planning_state is None:
        raise UsageError(
            f"{env.name} does not support a search. hint: use ConnectFour-v0, TicTacToe-v0 or pgx:othello, or "
            "call rollmill.envs.plannable(env) if each step of your environment depends only on the state and "
            "the action."
        )
    if planned.observation_space != env.observation_space or planned.action_space != env.action_space:
        raise UsageError(
            f"a search steps {env.name} without its transforms, but these transforms change observations or "
            "actions. hint: call rollmill.envs.plannable after the transforms."
        )
    return env, planned


def require_discrete(env: Environment, *, who: str) -> None:
    """Raises a `UsageError` that names the algorithm or player `who` if the action space is not `Discrete`."""
    if not isinstance(env.action_space, spaces.Discrete):
        raise UsageError(f"{who} needs a Discrete action space, got {space_text(env.action_space)} of {env.name}.")


def position(env: Environment, state: State, params: Params = None) -> Position:
    """Returns the current position of an environment, from which a search can begin.

    Args:
        env: an environment that supports planning, with all of its transforms.
        state: state of the environment, as `reset` and `step` return it. It may be traced, for example under
            `jax.vmap`.
        params: parameters of the environment. Default: `env.params`.

    Raises:
        UsageError: the environment does not support planning.
    """
    params = env.params if params is None else params
    if env.planning_state is None or env.planning_params is None:
        raise UsageError(
            f"{env.name} does not support a search, so no position can be created. hint: call "
            "rollmill.envs.plannable(env) if each step of your environment depends only on the state and the "
            "action."
        )
    return Position(
        legal_actions(env, state, params), env.planning_state(state, params), env.planning_params(state, params)
    )


def discrete_action(env: Environment, choice: Int[Array, ""]) -> Action:
    """Returns the action of a `Discrete` space with the given index."""
    space: Any = env.action_space
    return (choice + int(space.start)).astype(jax.dtypes.canonicalize_dtype(space.dtype))


def advance(
    env: Environment, state: State, choice: Int[Array, ""], params: Params
) -> tuple[Timestep, Float[Array, ""]]:
    """Steps an environment without its transforms (`Environment.planning_env`), by the action with an index.

    Returns the timestep, and the discount of all later rewards for the player who moved: 1 if the turn stays, -1
    if it passes to the opponent, and 0 if the episode terminates.
    """
    # The steps of a plannable environment do not depend on the key.
    timestep = env.step(jax.random.key(0), state, discrete_action(env, choice), params)
    turn_stays = _player(env, state, params) == _player(env, timestep.state, params)
    factor = jnp.where(turn_stays, jnp.float32(1), jnp.float32(-1))
    return timestep, jnp.where(timestep.terminated, 0.0, factor)


def _player(env: Environment, state: State, params: Params) -> Int[Array, ""]:
    return jnp.int32(0) if env.to_move is None else env.to_move(state, params)
