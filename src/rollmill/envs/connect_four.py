"""ConnectFour-v0: two players drop stones into seven columns, and the first to have four in a line wins.

Allis, "A knowledge-based approach of Connect-Four" (1988), describes the rules. The first player wins if both play
perfectly. Boards are stored as bits of integers, so a move and the search for lines take about sixty integer
operations.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from rollmill.core.types import Environment, Timestep
from rollmill.envs.board_games import board_game, draw_board, move_result, to_move, winner_of
from rollmill.envs.drawings.boards import draw_stones

ROWS, COLUMNS = 6, 7
SQUARES = ROWS * COLUMNS

ROW_BITS = 8
"""Bits of a row in a word: one for each column, and one that is always 0, so that no line goes around the edge."""
WORD_BITS = 3 * ROW_BITS
BOTTOM_LEFT = 0x01_01_01
"""Squares of column 0 in a word."""
UPWARDS = (ROW_BITS - 1, ROW_BITS, ROW_BITS + 1)
"""Distances in bits to the next square up to the left, up, and up to the right."""

_BITS = (
    ROW_BITS * np.arange(2, -1, -1, dtype=np.uint32)[:, None, None] + np.arange(COLUMNS, dtype=np.uint32)[:, None]
)
"""The bit of each square of a word, `[3, COLUMNS, 1]`. The top row comes first."""


class Stones(eqx.Module):
    """Stones of one player on a Connect Four board, as bits of two words.

    One word holds rows 3 to 5 from the bottom, and the other rows 0 to 2. The bit of column `c` in row `r` of a
    word is `8 r + c`. Every eighth bit is 0.
    """

    upper: UInt32[Array, ""]
    lower: UInt32[Array, ""]

    def __or__(self, other: "Stones") -> "Stones":
        return Stones(self.upper | other.upper, self.lower | other.lower)


class ConnectFourState(eqx.Module):
    """A Connect Four position: the stones of both players, and the number of moves so far."""

    own: Stones
    """Stones of the player to move."""
    opponent: Stones
    moves: Int[Array, ""]


def connect_four(*, random_plies: int = 0, fewest_random_plies: int | None = None) -> Environment:
    """Connect Four for two players, 7 columns, with reward 1 for four in line and 0 for a draw (Allis 1988).

    The observation has the shape `[row, column, player]`, and is 1 for each stone. The first plane shows the
    stones of the player to move, and the second plane the opponent's. Row 0 is the top. An action is the column to
    drop a stone into. Choosing a full column is illegal, and loses the game.

    Args:
        random_plies: number of random moves of both players at the beginning of each game, from 0 to 41. Each is
            drawn uniformly from the moves that do not end the game, and fewer are played if there are none. The
            moves count as moves of the game, so player 1 moves next after an odd number.
        fewest_random_plies: if given, the number of random moves is drawn for each game, from this value to
            `random_plies`. Default: `random_plies` moves in every game.
    """
    return board_game(
        "ConnectFour-v0",
        shape=(ROWS, COLUMNS),
        empty=empty,
        move=move,
        legal=legal_columns,
        observe=observe,
        render=render,
        draw=draw_stones,
        num_actions=COLUMNS,
        random_plies=random_plies,
        fewest_random_plies=fewest_random_plies,
    )


def empty() -> ConnectFourState:
    """Returns the first position of a Connect Four game, with an empty board."""
    nothing = Stones(jnp.uint32(0), jnp.uint32(0))
    return ConnectFourState(own=nothing, opponent=nothing, moves=jnp.int32(0))


def move(state: ConnectFourState, column: Int[Array, ""]) -> Timestep:
    """Drops a stone of the player to move into a column. If the column is full, the player loses."""
    stone = landing_square(state.own | state.opponent, column)
    mine = state.own | stone
    after = ConnectFourState(own=state.opponent, opponent=mine, moves=state.moves + 1)
    return move_result(
        after,
        observe(after),
        legal=(stone.upper | stone.lower) != 0,
        won=has_four(mine),
        drawn=after.moves == SQUARES,
    )


def landing_square(stones: Stones, column: Int[Array, ""]) -> Stones:
    """Returns the square on which a dropped stone comes to rest, or no square if the column is full."""
    squares = jnp.uint32(BOTTOM_LEFT) << column.astype(jnp.uint32)
    free_lower = ~stones.lower & squares
    free_upper = jnp.where(free_lower == 0, ~stones.upper & squares, jnp.uint32(0))
    return Stones(upper=_lowest_bit(free_upper), lower=_lowest_bit(free_lower))


def has_four(stones: Stones) -> Bool[Array, ""]:
    """Returns whether a player's stones contain four in a line: in a row, a column or a diagonal."""
    lines = _along_rows(stones.upper) | _along_rows(stones.lower)
    for distance in UPWARDS:
        lines |= _across_rows(stones, distance)
    return lines != 0


def legal_columns(state: ConnectFourState) -> Bool[Array, "7"]:
    """Returns a boolean for each column of a Connect Four board, which is True if the column is not full."""
    top = (state.own.upper | state.opponent.upper) >> jnp.uint32(2 * ROW_BITS)
    return ((top >> jnp.arange(COLUMNS, dtype=jnp.uint32)) & 1) == 0


def observe(state: ConnectFourState) -> Float[Array, "6 7 2"]:
    """Returns planes of 0 and 1 for the player to move and the opponent, with the top row first."""
    upper = jnp.stack([state.own.upper, state.opponent.upper]).reshape(1, 1, 2)
    lower = jnp.stack([state.own.lower, state.opponent.lower]).reshape(1, 1, 2)
    return jnp.concatenate([(upper >> _BITS) & 1, (lower >> _BITS) & 1]).astype(jnp.float32)


def winner(state: ConnectFourState) -> Int[Array, ""]:
    """Returns the player who has four in a line, 0 or 1, or -1 if no player has."""
    return winner_of(has_four(state.own), has_four(state.opponent), to_move(state))


def render(state: ConnectFourState) -> str:
    """Formats a Connect Four board as a string, with column indices below. Player 0 is `X`, player 1 is `O`."""
    planes = np.asarray(observe(state))
    board = draw_board(planes[..., 0], planes[..., 1], int(to_move(state)))
    return f"{board}\n{' '.join(map(str, range(COLUMNS)))}"


def _lowest_bit(word: UInt32[Array, ""]) -> UInt32[Array, ""]:
    return word & (~word + 1)


def _along_rows(word: UInt32[Array, ""]) -> UInt32[Array, ""]:
    """Returns the left ends of four stones side by side."""
    pairs = word & (word >> 1)
    return pairs & (pairs >> 2)


def _across_rows(stones: Stones, distance: int) -> UInt32[Array, ""]:
    """Returns the lower ends of four stones in four rows, each `distance` bits above the previous stone."""
    four_rows = stones.lower | (stones.upper << WORD_BITS)
    pairs = four_rows & (four_rows >> distance)
    pairs_above = stones.upper & (stones.upper >> distance)
    two_rows_on = (pairs >> (2 * distance)) | (pairs_above << (WORD_BITS - 2 * distance))
    return pairs & two_rows_on
