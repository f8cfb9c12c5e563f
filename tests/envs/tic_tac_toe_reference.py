"""Tic-tac-toe in plain Python: the rules, all positions, and the value of each under perfect play.

A position is a string of nine characters, `X`, `O` or `.`; X moves first.
"""

from functools import cache

START = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def player(position):
    return "X" if position.count("X") == position.count("O") else "O"


def winner(position):
    won = {position[a] for a, b, c in LINES if position[a] == position[b] == position[c] != "."}
    return won.pop() if won else None


def is_over(position):
    return winner(position) is not None or "." not in position


def legal(position):
    return [square for square in range(9) if position[square] == "."]


def after(position, square):
    return position[:square] + player(position) + position[square + 1 :]


@cache
def value(position):
    """Result under perfect play for the player to move: 1, 0 or -1."""
    if winner(position):
        return -1  # the opponent has just won
    if "." not in position:
        return 0
    return max(-value(after(position, square)) for square in legal(position))


def best_moves(position):
    """The moves that keep the value of a position."""
    return [square for square in legal(position) if -value(after(position, square)) == value(position)]


def positions():
    """All positions that games reach."""
    seen, new = set(), {START}
    while new:
        seen |= new
        new = {after(p, square) for p in new if not is_over(p) for square in legal(p)}
    return sorted(seen)
