"""Parts shared by board games of two players: the result of a move, random openings and drawings.

Shape letters: `A` actions, `H` rows and `W` columns of the board.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rollmill.core.errors import UsageError
from rollmill.core.types import Key, State, Timestep

SYMBOLS = {"ConnectFour-v0": "XO", "TicTacToe-v0": "XO"}
"""Symbols of player 0 and player 1 on boards drawn with characters, by environment."""
NO_PLAYER = -1
"""Value used instead of a player if nobody has won."""


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


def check_opening(name: str, random_plies: int, fewest_random_plies: int | None, max_plies: int) -> None:
    """Checks the length of a random opening.

    Raises a `UsageError` if the length is negative or above `max_plies`, or if the minimum exceeds the maximum.
    """
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
