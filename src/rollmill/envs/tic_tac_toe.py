"""TicTacToe-v0: two players mark nine squares in turn, and three in a line win. Perfect play is a draw."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from rollmill.core.types import Environment, Timestep
from rollmill.envs.board_games import board_game, draw_board, move_result, to_move, winner_of
from rollmill.envs.drawings.boards import draw_marks

SIZE = 3
SQUARES = SIZE * SIZE

_LINES = (0o007, 0o070, 0o700, 0o111, 0o222, 0o444, 0o124, 0o421)
"""The squares of each line: rows, columns and diagonals. An octal digit is a row."""


class TicTacToeState(eqx.Module):
    """A tic-tac-toe position: a bit for each square that a player has marked, and the number of moves so far."""

    own: UInt32[Array, ""]
    """Squares of the player to move, as bit `3 row + column`."""
    opponent: UInt32[Array, ""]
    moves: Int[Array, ""]


def tic_tac_toe(*, random_plies: int = 0, fewest_random_plies: int | None = None) -> Environment:
    """Tic-tac-toe for two players, 9 squares, with reward 1 for three in line and 0 for a draw.

    The observation has the shape `[row, column, player]`, and is 1 for each mark. The first plane shows the marks
    of the player to move, and the second plane the opponent's. Action `3 row + column` marks a square. Choosing a
    marked square is illegal, and loses the game.

    Args:
        random_plies: number of random moves of both players at the beginning of each game, from 0 to 8. Each is
            drawn uniformly from the moves that do not end the game, and fewer are played if there are none. The
            moves count as moves of the game, so player 1 moves next after an odd number.
        fewest_random_plies: if given, the number of random moves is drawn for each game, from this value to
            `random_plies`. Default: `random_plies` moves in every game.
    """
    return board_game(
        "TicTacToe-v0",
        shape=(SIZE, SIZE),
        empty=empty,
        move=move,
        legal=legal_squares,
        observe=observe,
        render=render,
        draw=draw_marks,
        num_actions=SQUARES,
        random_plies=random_plies,
        fewest_random_plies=fewest_random_plies,
    )


def empty() -> TicTacToeState:
    """Returns the first position of a tic-tac-toe game, with no marks."""
    return TicTacToeState(own=jnp.uint32(0), opponent=jnp.uint32(0), moves=jnp.int32(0))


def move(state: TicTacToeState, square: Int[Array, ""]) -> Timestep:
    """Marks a square for the player to move. If it is already marked, it stays as it is, and the player loses."""
    marked = state.own | state.opponent
    mark = ~marked & (jnp.uint32(1) << square.astype(jnp.uint32))
    mine = state.own | mark
    after = TicTacToeState(own=state.opponent, opponent=mine, moves=state.moves + 1)
    return move_result(after, observe(after), legal=mark != 0, won=has_three(mine), drawn=after.moves == SQUARES)


def has_three(squares: UInt32[Array, ""]) -> Bool[Array, ""]:
    """Returns whether a player's squares contain a whole row, column or diagonal."""
    lines = jnp.array(_LINES, jnp.uint32)
    return ((squares & lines) == lines).any()


def legal_squares(state: TicTacToeState) -> Bool[Array, "9"]:
    """Returns a boolean for each square, which is True if the square is not marked."""
    return _bits(state.own | state.opponent) == 0


def observe(state: TicTacToeState) -> Float[Array, "3 3 2"]:
    """Returns the observation: planes of 0 and 1 for the player to move and for the opponent."""
    planes = jnp.stack([_bits(state.own), _bits(state.opponent)], axis=-1)
    return planes.reshape(SIZE, SIZE, 2).astype(jnp.float32)


def winner(state: TicTacToeState) -> Int[Array, ""]:
    """Returns the player who has three in a line, 0 or 1, or -1 if no player has."""
    return winner_of(has_three(state.own), has_three(state.opponent), to_move(state))


def render(state: TicTacToeState) -> str:
    """Formats a tic-tac-toe board as a string: `X` for player 0, `O` for player 1, numbers for free squares."""
    planes = np.asarray(observe(state))
    actions = np.arange(9).reshape(3, 3).astype(str)
    return draw_board(planes[..., 0], planes[..., 1], int(to_move(state)), empty=actions)


def _bits(squares: UInt32[Array, ""]) -> UInt32[Array, "9"]:
    return (squares >> jnp.arange(SQUARES, dtype=jnp.uint32)) & 1
