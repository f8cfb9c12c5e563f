"""Tic-tac-toe in all of its positions, and a perfect player."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import tic_tac_toe_reference as reference

from rollmill import envs
from rollmill.envs import tic_tac_toe
from rollmill.envs.tic_tac_toe import TicTacToeState

POSITIONS = reference.positions()
PLAYERS = ("X", "O")


def bits(position, symbol):
    return sum(1 << square for square in range(9) if position[square] == symbol)


def states(positions):
    own = [bits(p, reference.player(p)) for p in positions]
    opponent = [bits(p, "XO".replace(reference.player(p), "")) for p in positions]
    moves = [9 - p.count(".") for p in positions]
    words = jnp.array(own, jnp.uint32), jnp.array(opponent, jnp.uint32)
    return jax.vmap(TicTacToeState)(*words, jnp.array(moves, jnp.int32))


def planes(position):
    mover = reference.player(position)
    own_and_others = [[float(s == mover), float(s not in (mover, "."))] for s in position]
    return np.array(own_and_others, np.float32).reshape(3, 3, 2)


def test_a_game_has_5478_positions():
    assert len(POSITIONS) == 5478


def test_every_position_looks_as_it_should():
    every = states(POSITIONS)
    np.testing.assert_array_equal(jax.vmap(tic_tac_toe.observe)(every), [planes(p) for p in POSITIONS])
    masks = [[s == "." for s in p] for p in POSITIONS]
    np.testing.assert_array_equal(jax.vmap(tic_tac_toe.legal_squares)(every), masks)
    players = [PLAYERS.index(reference.player(p)) for p in POSITIONS]
    np.testing.assert_array_equal(jax.vmap(tic_tac_toe.to_move)(every), players)
    winners = [-1 if reference.winner(p) is None else PLAYERS.index(reference.winner(p)) for p in POSITIONS]
    np.testing.assert_array_equal(jax.vmap(tic_tac_toe.winner)(every), winners)


def test_every_move_in_every_position():
    unfinished = [p for p in POSITIONS if not reference.is_over(p)]
    moves = jax.vmap(jax.vmap(tic_tac_toe.move, in_axes=(None, 0)), in_axes=(0, None))
    found = jax.tree.map(np.asarray, jax.jit(moves)(states(unfinished), jnp.arange(9)))
    for n, position in enumerate(unfinished):
        for square in range(9):
            if position[square] != ".":
                assert (found.reward[n, square], found.terminated[n, square]) == (-1, True)
                continue
            after = reference.after(position, square)
            won = reference.winner(after) is not None
            assert (found.reward[n, square], found.terminated[n, square]) == (won, reference.is_over(after))
    legal = [(n, s) for n, p in enumerate(unfinished) for s in reference.legal(p)]
    rows, squares = np.array(legal).T
    expected = states([reference.after(unfinished[n], s) for n, s in legal])
    jax.tree.map(
        lambda mine, right: np.testing.assert_array_equal(mine[rows, squares], right), found.state, expected
    )
    np.testing.assert_array_equal(found.observation[rows, squares], jax.vmap(tic_tac_toe.observe)(expected))
    assert not found.truncated.any()


def test_perfect_play_is_a_draw_and_a_perfect_player_never_loses():
    assert reference.value(reference.START) == 0 and reference.best_moves("XX.OO....") == [2]
    env, rng = envs.make("TicTacToe-v0"), random.Random(0)
    step = jax.jit(env.step)
    results = []
    for game in range(60):
        _, state = env.reset(jax.random.key(0), env.params)
        position, perfect = reference.START, "XO"[game % 2]
        while True:
            moves = reference.best_moves if reference.player(position) == perfect else reference.legal
            square = rng.choice(moves(position))
            mover = reference.player(position)
            timestep = step(jax.random.key(0), state, jnp.int32(square), env.params)
            state, position = timestep.state, reference.after(position, square)
            if timestep.terminated:
                results.append(float(timestep.reward) * (1 if mover == perfect else -1))
                break
    assert min(results) == 0 and max(results) == 1


def test_a_drawing_of_the_board():
    state = tic_tac_toe.empty()
    for square in (4, 0, 8):
        state = tic_tac_toe.move(state, jnp.int32(square)).state
    assert tic_tac_toe.render(state) == "O 1 2\n3 X 5\n6 7 X"


def test_openings_leave_games_unfinished():
    env = envs.make("TicTacToe-v0", random_plies=8)
    _, state = jax.jit(jax.vmap(lambda key: env.reset(key, env.params)))(jax.random.split(jax.random.key(0), 500))
    assert (jax.vmap(tic_tac_toe.winner)(state) == -1).all() and set(np.asarray(state.moves)) <= {5, 6, 7, 8}
    assert jax.vmap(tic_tac_toe.legal_squares)(state).any(axis=1).all()
