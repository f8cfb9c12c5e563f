"""Games whose rules are loops under `vmap`: each lane of a board is walked for as long as it goes on."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollmill import Environment, Timestep

lax = jax.lax

DIRECTIONS = jnp.asarray([(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if dy or dx], jnp.int32)


def game(name: str, cells: int, actions: int, reset: Callable, step: Callable) -> Environment:
    """A game that is observed as its board."""
    return Environment(name, reset, step, spaces.Box(-9, 99, (cells,), np.float32), spaces.Discrete(actions))


def seen(board: jax.Array) -> jax.Array:
    return board.reshape(-1).astype(jnp.float32)


# --- Othello ------------------------------------------------------------------------------------------------

OTHELLO = 6


def stones_on_the_ray(board: jax.Array, place: jax.Array, direction: jax.Array, player: jax.Array) -> jax.Array:
    """How many stones of the other player lie between a place and the next one of one's own; 0 where none does."""
    on_board = lambda at: jnp.all((at >= 0) & (at < OTHELLO))
    at = lambda count: place + direction * count
    is_other = lambda count: on_board(at(count)) & (board[at(count)[0], at(count)[1]] == -player)
    count = lax.while_loop(is_other, lambda count: count + 1, jnp.int32(1))
    closed = on_board(at(count)) & (board[at(count)[0], at(count)[1]] == player)
    return jnp.where(closed, count - 1, 0)


def othello() -> Environment:
    """Othello on 6 x 6 cells: stones are turned along eight rays, walked under `vmap`; an illegal move passes."""
    middle = OTHELLO // 2
    start = jnp.zeros((OTHELLO, OTHELLO), jnp.int8)
    start = start.at[middle - 1 : middle + 1, middle - 1 : middle + 1].set(
        jnp.asarray([[1, -1], [-1, 1]], jnp.int8)
    )
    rows, columns = jnp.indices((OTHELLO, OTHELLO))

    def reset(key, params):
        player = jnp.where(jax.random.bernoulli(key), 1, -1).astype(jnp.int8)
        return seen(start), (start, player, jnp.int32(0))

    def step(key, state, action, params):
        board, player, passes = state
        place = jnp.stack(jnp.divmod(action.astype(jnp.int32), OTHELLO))
        counts = jax.vmap(stones_on_the_ray, (None, None, 0, None))(board, place, DIRECTIONS, player)
        legal = (board[place[0], place[1]] == 0) & (counts.sum() > 0)

        def turned(direction, count):
            steps = jnp.where(
                direction[0] != 0, (rows - place[0]) * direction[0], (columns - place[1]) * direction[1]
            )
            on_ray = (rows == place[0] + steps * direction[0]) & (columns == place[1] + steps * direction[1])
            return on_ray & (steps >= 0) & (steps <= count)

        changed = jax.vmap(turned)(DIRECTIONS, counts).any(axis=0) & legal
        board = jnp.where(changed, player, board)
        passes = jnp.where(legal, 0, passes + 1)
        reward = counts.sum().astype(jnp.float32) * legal.astype(jnp.float32)
        done = (board != 0).all() | (passes >= 40)
        return Timestep(seen(board), (board, -player, passes), reward, done, jnp.asarray(False), {})

    return game("Othello", OTHELLO**2, OTHELLO**2, reset, step)


# --- Gomoku -------------------------------------------------------------------------------------------------

GOMOKU, ROW = 7, 4


def gomoku() -> Environment:
    """Four in a row on 7 x 7 cells; both ends of four axes are walked under two `vmap`s."""
    axes = jnp.asarray([(0, 1), (1, 0), (1, 1), (1, -1)], jnp.int32)

    def reset(key, params):
        board = jnp.zeros((GOMOKU, GOMOKU), jnp.int8)
        return seen(board), (board, jnp.int8(1))

    def stones(board, place, axis, sign, player):
        def goes_on(at):
            inside = jnp.all((at >= 0) & (at < GOMOKU))
            return inside & (board[at[0], at[1]] == player)

        end = lax.while_loop(goes_on, lambda at: at + sign * axis, place + sign * axis)
        return jnp.abs(end - place).max() - 1

    def step(key, state, action, params):
        board, player = state
        place = jnp.stack(jnp.divmod(action.astype(jnp.int32), GOMOKU))
        free = board[place[0], place[1]] == 0
        board = jnp.where(free, board.at[place[0], place[1]].set(player), board)
        ends = jax.vmap(stones, (None, None, None, 0, None))
        both = jax.vmap(ends, (None, None, 0, None, None))(board, place, axes, jnp.asarray([-1, 1]), player)
        longest = (both.sum(axis=1) + 1).max()
        won = free & (longest >= ROW)
        done = won | (board != 0).all()
        reward = won.astype(jnp.float32) - 0.125 * (~free).astype(jnp.float32)
        return Timestep(seen(board), (board, -player), reward, done, jnp.asarray(False), {})

    return game("Gomoku", GOMOKU**2, GOMOKU**2, reset, step)


# --- walks along a line -------------------------------------------------------------------------------------

LINE = 12


def line_reversal() -> Environment:
    """Reversi on a line: every empty place is judged by walks in both directions, and the best may be played."""
    places = jnp.arange(LINE)

    def gain(board, place, direction, player):
        def goes_on(carry):
            at, _ = carry
            return (at >= 0) & (at < LINE) & (board[at] == -player)

        at, count = lax.while_loop(
            goes_on, lambda c: (c[0] + direction, c[1] + 1), (place + direction, jnp.int32(0))
        )
        return jnp.where((at >= 0) & (at < LINE) & (board[at] == player), count, 0)

    def reset(key, params):
        board = jnp.where(jax.random.bernoulli(key, 0.5, (LINE,)), 1, -1) * (places % 3 > 0).astype(jnp.int32)
        return seen(board), (board.astype(jnp.int32), jnp.int32(1))

    def step(key, state, action, params):
        board, player = state
        signs = jnp.asarray([-1, 1])
        of_place = jax.vmap(gain, (None, None, 0, None))
        gains = jax.vmap(of_place, (None, 0, None, None))(board, places, signs, player)
        gains = jnp.where((board == 0)[:, None], gains, 0)
        place = jnp.where(action % 2 == 0, jnp.argmax(gains.sum(axis=1)), action)
        left, right = gains[place, 0], gains[place, 1]
        plays = (board[place] == 0) & (left + right > 0)
        taken = (places >= place - left) & (places <= place + right) & plays
        board = jnp.where(taken, player, board)
        swept = jax.random.randint(key, (), 0, LINE)
        board = board.at[swept].set(jnp.where(plays, board[swept], 0))
        reward = (left + right).astype(jnp.float32) * plays.astype(jnp.float32)
        return Timestep(seen(board), (board, -player), reward, (board != 0).all(), jnp.asarray(False), {})

    return game("LineReversal", LINE, LINE, reset, step)


# --- shortest paths -----------------------------------------------------------------------------------------

MAZE = 4


def hunted() -> Environment:
    """A maze in which hunters follow shortest paths: breadth-first searches from three places, under `vmap`."""
    moves = jnp.asarray([(0, 1), (1, 0), (0, -1), (-1, 0)], jnp.int32)

    def spread(cells):
        padded = jnp.pad(cells, 1)
        inner = slice(1, MAZE + 1)
        return cells | padded[:-2, inner] | padded[2:, inner] | padded[inner, :-2] | padded[inner, 2:]

    def distances(walls, goal):
        """How far each cell lies from a goal; 99 where no way leads there."""

        def goes_on(carry):
            reached, before, _, _ = carry
            return (reached != before).any()

        def turn(carry):
            reached, _, far, count = carry
            after = spread(reached) & ~walls
            return after, reached, jnp.where(after & ~reached, count, far), count + 1

        first = jnp.zeros((MAZE, MAZE), bool).at[goal[0], goal[1]].set(True)
        far = jnp.where(first, 0, jnp.full((MAZE, MAZE), 99, jnp.int32))
        return lax.while_loop(goes_on, turn, (first, jnp.zeros_like(first), far, jnp.int32(1)))[2]

    def reset(key, params):
        of_walls, of_places = jax.random.split(key)
        walls = jax.random.bernoulli(of_walls, 0.25, (MAZE, MAZE))
        places = jax.random.randint(of_places, (3, 2), 0, MAZE)
        return seen(walls), (walls, places)

    def step(key, state, action, params):
        walls, places = state
        own = jnp.clip(places[0] + moves[action], 0, MAZE - 1)
        own = jnp.where(walls[own[0], own[1]], places[0], own)
        places = places.at[0].set(own)
        far = jax.vmap(distances, (None, 0))(walls, places)

        def follow(place):
            options = jnp.clip(place[None] + moves, 0, MAZE - 1)
            return options[jnp.argmin(far[0][options[:, 0], options[:, 1]])]

        hunters = jax.vmap(follow)(places[1:])
        caught = (hunters == own[None]).all(axis=1).any()
        places = jnp.concatenate([own[None], hunters])
        observation = jnp.minimum(far.min(axis=0), 9)
        reward = far[0].min().astype(jnp.float32) - 0.125 * far[1:].sum().astype(jnp.float32)
        return Timestep(seen(observation), (walls, places), reward, caught, jnp.asarray(False), {})

    return game("Hunted", MAZE**2, 4, reset, step)


GAMES = {"othello": othello, "gomoku": gomoku, "line reversal": line_reversal, "hunted": hunted}
