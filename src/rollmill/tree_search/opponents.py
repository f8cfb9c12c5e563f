"""Fixed opponents for two-player games: random moves, and searches of a few plies.

Opponents are policy fragments (`dataflow.PolicyFunction`) without weights, and receive the state as a `Position`.
Shape letter: `A` actions.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.types import Environment, Key, Memory, Observation, Params, State
from rollmill.dataflow import Decision, PolicyFunction
from rollmill.envs.agents import legal_actions
from rollmill.tree_search.positions import (
    Position,
    advance,
    discrete_action,
    plannable_parts,
    position,
    require_discrete,
)

MAX_LINES = 2**16
"""Maximum number of action sequences that a lookahead search examines."""

LOOKAHEAD = "lookahead-"


def opponent(
    env: Environment, name: str
) -> tuple[PolicyFunction, Callable[[Environment, State, Params], Position]]:
    """Returns the policy of a fixed opponent, and the function that returns the position in which it must move.

    Args:
        env: a game for two players.
        name: `random`, which draws uniformly from the legal actions, or `lookahead-N`, which plays optimally over
            the next `N` plies and draws among equal moves. `lookahead-1` makes a winning move if there is one, and
            `lookahead-2` also prevents a winning move of the opponent.

    Raises:
        UsageError: the name is invalid, the environment does not support planning, or there are too many sequences
            of `N` actions.
    """
    if name == "random":
        require_discrete(env, who=name)
        return partial(_random_move, env), _legal_actions_only
    plies = name.removeprefix(LOOKAHEAD)
    if not name.startswith(LOOKAHEAD) or not plies.isdecimal() or int(plies) < 1:
        raise UsageError(
            f"unknown opponent {name!r}. hint: use random, lookahead-1, lookahead-2, or the directory of a run."
        )
    env, planned = plannable_parts(env, who=name)
    most = max(1, int(math.log(MAX_LINES, max(2, _num_actions(planned)))))
    if int(plies) > most:
        raise UsageError(
            f"{name} would search {_num_actions(planned)}^{plies} sequences of actions in every position of "
            f"{env.name}, more than the limit of {MAX_LINES}. hint: {LOOKAHEAD}{most}."
        )
    return partial(_best_move, planned, int(plies)), position


def _num_actions(env: Environment) -> int:
    space: Any = env.action_space
    return int(space.n)


def _legal_actions_only(env: Environment, state: State, params: Params) -> Position:
    return Position(legal_actions(env, state, params), (), ())


def _random_move(
    env: Environment, weights: PyTree, key: Key, memory: Memory, observation: Observation, now: Position
) -> Decision:
    equal = jnp.zeros(_num_actions(env), jnp.float32)
    return Decision(discrete_action(env, _draw_best(key, _legal_only(now.action_mask, equal))), memory, ())


def _best_move(
    env: Environment,
    plies: int,
    weights: PyTree,
    key: Key,
    memory: Memory,
    observation: Observation,
    now: Position,
) -> Decision:
    scores = _scores(env, plies, now)
    return Decision(discrete_action(env, _draw_best(key, scores)), memory, ())


def _scores(env: Environment, plies: int, now: Position) -> Float[Array, " A"]:
    """Returns the sum of rewards over the next plies for the player to move, by the first action.

    Illegal actions have a sum of -inf. Both players play best (negamax). Positions after the last ply have a value
    of 0.
    """

    def after(choice: Array) -> Float[Array, ""]:
        timestep, factor = advance(env, now.state, choice, now.params)
        if plies == 1:
            return timestep.reward
        legal = legal_actions(env, timestep.state, now.params)
        best = jnp.max(_scores(env, plies - 1, Position(legal, timestep.state, now.params)))
        return timestep.reward + jnp.where(
            factor == 0, 0.0, factor * best
        )  # the best score would be -inf if the game has ended and no move is legal

    return _legal_only(now.action_mask, jax.vmap(after)(jnp.arange(_num_actions(env))))


def _legal_only(mask: PyTree[Bool[Array, "..."]], scores: Float[Array, " A"]) -> Float[Array, " A"]:
    return scores if isinstance(mask, tuple) else jnp.where(mask, scores, -jnp.inf)


def _draw_best(key: Key, scores: Float[Array, " A"]) -> Array:
    """Draws one of the actions with the highest score, each equally likely."""
    return jax.random.categorical(key, jnp.where(scores == jnp.max(scores), 0.0, -jnp.inf)).astype(jnp.int32)
