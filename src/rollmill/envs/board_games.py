"""Parts shared by board games of two players: the environment, the result of a move, random openings and drawings.

Shape letters: `A` actions, `H` rows and `W` columns of the board.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int

from rollmill.core.drawing import Drawing
from rollmill.core.errors import UsageError
from rollmill.core.types import Environment, Key, State, Timestep
from rollmill.envs.transforms import plannable

SYMBOLS = {"ConnectFour-v0": "XO", "TicTacToe-v0": "XO"}
"""Symbols of player 0 and player 1 on boards drawn with characters, by environment."""
NO_PLAYER = -1
"""Value used instead of a player if nobody has won."""


def board_game(
    name: str,
    *,
    shape: tuple[int, int],
    empty: Callable[[], State],
    move: Callable[[State, Int[Array, ""]], Timestep],
    legal: Callable[[State], Bool[Array, " A"]],
    observe: Callable[[State], Float[Array, "H W 2"]],
    render: Callable[[State], str],
    draw: Callable[[np.ndarray, np.ndarray], Drawing],
    num_actions: int,
    random_plies: int,
    fewest_random_plies: int | None,
) -> Environment:
    """Returns the environment of a board game, given its rules as functions of a state with the field `moves`.

    The numbers of random moves at the beginning of a game are explained at `random_opening`. Raises a `UsageError`
    if they leave no move for the players.
    """
    max_plies = shape[0] * shape[1] - 1
    if not 0 <= random_plies <= max_plies:
        raise UsageError(
            f"{name}: random_plies={random_plies} must lie between 0 and {max_plies}, so that at least one move "
            "is left."
        )
    if fewest_random_plies is not None and not 0 <= fewest_random_plies <= random_plies:
        raise UsageError(
            f"{name}: fewest_random_plies={fewest_random_plies} must lie between 0 and "
            f"random_plies={random_plies}."
        )
    plies = {"num_plies": random_plies, "fewest_plies": fewest_random_plies}

    def reset(key: Key, params: tuple[()]) -> tuple[Float[Array, "H W 2"], State]:
        state = random_opening(key, empty(), move, num_actions=num_actions, **plies)
        return observe(state), state

    env = Environment(
        name=name,
        reset=reset,
        step=lambda key, state, action, params: move(state, action),
        observation_space=spaces.Box(0.0, 1.0, (*shape, 2), np.float32),
        action_space=spaces.Discrete(num_actions),
        action_mask=lambda state, params: legal(state),
        num_players=2,
        to_move=lambda state, params: to_move(state),
        render=lambda state, params: render(state),
        draw=lambda state, params: draw(*stones_of_players(np.asarray(observe(state)), state.moves)),
    )
    return plannable(env)


def to_move(state: Any) -> Int[Array, ""]:
    """Returns the player whose turn it is: 0, who moves first, or 1."""
    return state.moves & 1


def move_result(
    state: State,
    observation: Float[Array, "H W 2"],
    *,
    legal: Bool[Array, ""],
    won: Bool[Array, ""],
    drawn: Bool[Array, ""],
) -> Timestep:
    """Returns the timestep after a move in a two-player board game.

    The reward is 1 if the move has `won` the game, -1 if it was not `legal`, and 0 otherwise. The state is the
    position after the move, and the observation belongs to the next player. The game ends if it is won or `drawn`,
    or if the move was illegal.
    """
    reward = jnp.where(legal, won.astype(jnp.float32), jnp.float32(-1))
    return Timestep(
        observation=observation,
        state=state,
        reward=reward,
        terminated=won | drawn | ~legal,
        truncated=jnp.zeros((), bool),
        info={},
    )


def random_opening(
    key: Key,
    start: State,
    move: Callable[[State, Int[Array, ""]], Timestep],
    *,
    num_actions: int,
    num_plies: int,
    fewest_plies: int | None = None,
) -> State:
    """Plays random moves from a position, each drawn uniformly from the moves that do not end the game.

    `num_plies` is the number of moves of both players together. With `fewest_plies`, the number is drawn
    uniformly from `fewest_plies` to `num_plies`. Fewer moves are played if every further move would end the
    game. `move` maps a position and an action to the timestep after that move.
    """
    drawn = jnp.int32(num_plies)
    if fewest_plies is not None:
        drawn = jax.random.randint(jax.random.fold_in(key, num_plies), (), fewest_plies, num_plies + 1)

    def ply(index: Int[Array, ""], state: State) -> State:
        ends = jax.vmap(lambda action: move(state, action).terminated)(jnp.arange(num_actions))
        scores = jax.random.uniform(jax.random.fold_in(key, index), (num_actions,))
        action = jnp.argmax(jnp.where(ends, jnp.float32(-1), scores))
        after, stays = move(state, action).state, ends.all() | (index >= drawn)
        return jax.tree.map(lambda old, new: jnp.where(stays, old, new), state, after)

    return jax.lax.fori_loop(0, num_plies, ply, start) if num_plies else start


def winner_of(
    own_line: Bool[Array, ""], opponents_line: Bool[Array, ""], to_move: Int[Array, ""]
) -> Int[Array, ""]:
    """Returns the player who has completed a line, 0 or 1, or -1 if no player has.

    `own_line` says whether the player to move has a line.
    """
    opponents = jnp.where(opponents_line, 1 - to_move, NO_PLAYER)
    return jnp.where(own_line, to_move, opponents).astype(jnp.int32)


def draw_board(own: np.ndarray, opponents: np.ndarray, to_move: int, *, empty: str | np.ndarray = ".") -> str:
    """Formats a two-player board as a string.

    Player 0 is shown as `X`, and player 1 as `O`. An empty square shows its entry in `empty`. `own` and
    `opponents` mark the squares `[H, W]` with stones of the player to move and of the other player.
    """
    first, second = (opponents, own) if to_move else (own, opponents)
    symbols = np.where(first != 0, "X", np.where(second != 0, "O", empty))
    return "\n".join(" ".join(row) for row in symbols)


def stones_of_players(
    planes: Float[np.ndarray, "H W 2"], moves: int | Int[Array, ""] | Int[np.ndarray, ""]
) -> tuple[Bool[np.ndarray, "H W"], Bool[np.ndarray, "H W"]]:
    """Returns the stones of player 0 and player 1, given the stones of the player to move and of the opponent."""
    own, opponents = planes[..., 0] != 0, planes[..., 1] != 0
    return (opponents, own) if int(moves) % 2 else (own, opponents)
