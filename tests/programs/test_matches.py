"""Matches in games for two players, and the opponents of a fixed strength."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from envs import tic_tac_toe_reference as reference
from rollmill.algorithms import environment_functions, opponent
from rollmill.dataflow import Decision
from rollmill.envs import tic_tac_toe
from rollmill.policies.matches import match_runs
from rollmill.policies.policy import LoadedRun
from rollmill.programs.matches import Game, MatchResult, Player, play_match
from rollmill.tree_search.positions import Position
from wordings import raises

INDEX = {"X": 0, "O": 1}


def game_and_player(env, name):
    """The game with this name, and a player who moves as the fixed opponent."""
    functions = partial(environment_functions, env, num_envs=1)
    players = []
    for side in ("random", name):
        policy, knowledge = opponent(env, side)
        players.append(Player(policy, (), functions(mask=knowledge).action_mask))
    to_move = functions(mask=lambda env, state, params: env.to_move(state, params)).action_mask
    return Game(env.name, functions().start, functions().step, to_move, players[0]), players[1]


def perfect_player():
    """A player of tic-tac-toe that draws among the moves that keep the value of the position."""
    keeps = np.zeros((2**9, 2**9, 9), bool)
    for position in reference.positions():
        if not reference.is_over(position):
            own, other = (sum(1 << i for i in range(9) if position[i] == mark) for mark in sides_of(position))
            keeps[own, other, reference.best_moves(position)] = True
    keeps = jnp.asarray(keeps)

    def move(weights, key, memory, observation, now):
        best = keeps[now.state.own, now.state.opponent]
        return Decision(jax.random.categorical(key, jnp.where(best, 0.0, -jnp.inf)).astype(jnp.int32), memory, ())

    return move


def sides_of(position):
    mover = reference.player(position)
    return mover, "O" if mover == "X" else "X"


def marks(position):
    own, other = (sum(1 << i for i in range(9) if position[i] == mark) for mark in sides_of(position))
    return tic_tac_toe.TicTacToeState(jnp.uint32(own), jnp.uint32(other), jnp.int32(9 - position.count(".")))


def unfinished():
    return [position for position in reference.positions() if not reference.is_over(position)]


def best_over(position, plies):
    """Moves that are best over some plies, in plain Python."""

    def score(position, plies):
        if reference.is_over(position):
            return 0 if reference.winner(position) is None else -1
        return (
            max(-score(reference.after(position, s), plies - 1) for s in reference.legal(position)) if plies else 0
        )

    scores = {square: -score(reference.after(position, square), plies - 1) for square in reference.legal(position)}
    return {square for square, own in scores.items() if own == max(scores.values())}


@pytest.mark.parametrize("plies", [1, 2, 3])
def test_lookahead_draws_among_the_best_moves_over_its_plies(plies):
    policy, _ = opponent(rollmill.make("TicTacToe-v0"), f"lookahead-{plies}")
    every = unfinished()[:: 40 if plies == 3 else 10]
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(marks, every))

    def moves(state):
        now = Position(tic_tac_toe.legal_squares(state), state, ())
        return jax.vmap(lambda key: policy((), key, (), (), now).action)(jax.random.split(jax.random.key(0), 150))

    drawn = np.asarray(jax.jit(jax.vmap(moves))(states))
    assert [set(row.tolist()) for row in drawn] == [best_over(position, plies) for position in every]


def test_random_moves_are_uniform_over_the_legal_ones():
    policy, _ = opponent(rollmill.make("TicTacToe-v0"), "random")
    legal = jnp.arange(9) % 2 == 0
    keys = jax.random.split(jax.random.key(0), 5_000)
    moves = jax.jit(jax.vmap(lambda key: policy((), key, (), (), Position(legal, (), ())).action))(keys)
    assert np.bincount(np.asarray(moves), minlength=9) == pytest.approx(np.where(legal, 1_000, 0), abs=130)


def test_a_stronger_opponent_wins_and_nobody_beats_perfect_play():
    env = rollmill.make("TicTacToe-v0")
    game, two_plies = game_and_player(env, "lookahead-2")
    found = play_match(game, two_plies, game.opening, games=400, seed=1)
    assert found.score > 0.85 and found.elo > 200 and 0 < found.standard_error < 0.03
    perfect = two_plies._replace(policy=perfect_player())
    found = play_match(game, perfect, two_plies, games=400)
    assert min(found.moving_first.min(), found.moving_second.min()) == 0 and found.score > 0.5
    drawn = play_match(game, perfect, perfect, games=40)
    assert drawn.score == 0.5 and drawn.elo == 0 == drawn.standard_error


def test_either_side_sees_its_own_result_with_openings_of_both():
    """Two players exchanged are the same games, of which each loses what the other wins."""
    game, two_plies = game_and_player(rollmill.make("TicTacToe-v0"), "lookahead-2")
    one = play_match(game, two_plies, game.opening, games=60, opening_plies=3, seed=5)
    other = play_match(game, game.opening, two_plies, games=60, opening_plies=3, seed=5)
    np.testing.assert_array_equal(one.moving_first, -other.moving_second)
    np.testing.assert_array_equal(one.moving_second, -other.moving_first)
    assert one.score == pytest.approx(1 - other.score)


def test_openings_are_played_in_pairs():
    """A policy that always takes the first free square, against itself, wins only by the opening and the turn."""

    def first_free(weights, key, memory, observation, now):
        return Decision(jnp.argmax(now.action_mask).astype(jnp.int32), memory, ())

    game, player = game_and_player(rollmill.make("TicTacToe-v0"), "random")
    first_free = player._replace(policy=first_free)
    assert set(play_match(game, first_free, first_free, games=20).moving_first) == {1}
    found = play_match(game, first_free, first_free, games=60, opening_plies=2)
    np.testing.assert_array_equal(found.moving_first, -found.moving_second)
    assert {-1, 1} <= set(found.moving_first)
    assert found.score == 0.5 and found.standard_error == 0


def test_scores_and_ratings():
    result = MatchResult(np.array([1, 1, 0, 1]), np.array([1, -1, 0, 1]))
    assert result.score == 0.75 and result.elo == pytest.approx(190.85, abs=0.01)
    assert result.standard_error == pytest.approx(np.std([1, 0.5, 0.5, 1], ddof=1) / 2)
    assert MatchResult(np.ones(3), np.ones(3)).elo == np.inf


# --- runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def untrained():
    network = rollmill.NetworkConfig(hidden_sizes=(16,), activation="relu", shared_torso=True)
    sizes = {"num_envs": 8, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 64, "network": network}
    graph = rollmill.alphazero("TicTacToe-v0", num_simulations=32, **sizes)
    return LoadedRun(graph, graph.weights(graph.start_learner(jax.random.key(0))), 0)


@pytest.mark.slow
def test_a_search_plays_a_match(untrained):
    """Even without training it sees wins and threats, so that random moves lose."""
    against_random = match_runs(untrained, "random", games=40)
    assert against_random.score > 0.75
    itself = match_runs(untrained, untrained, games=20, opening_plies=2)
    np.testing.assert_array_equal(itself.moving_first, -itself.moving_second)


@pytest.mark.parametrize(
    ("against", "settings", "message"),
    [
        ("lookahead-0", {}, ("unknown-opponent-hint-random-lookahead", "'lookahead-0'")),
        ("lookahead-9", {}, ("would-look-at-sequences-actions", "9", "9", "65536", "lookahead-5")),
        ("random", {"games": 7}, ("games-must-be-even-and", "7")),
        ("random", {"games": 0}, ("games-must-be-even-and", "0")),
        ("random", {"opening_plies": -1}, ("opening-plies-must-lie-between", "-1")),
        ("random", {"env": "CartPole-v1"}, ("is-no-game-for-two", "CartPole-v1")),
        ("random", {"env": "ConnectFour-v0"}, ("has-other-than-policy-trained", "ConnectFour-v0", "observations")),
    ],
)
def test_refusals_name_a_way_out(untrained, against, settings, message):
    with raises(*message):
        match_runs(untrained, against, **settings)


def test_a_game_that_does_not_end_is_given_up(monkeypatch):
    game, player = game_and_player(rollmill.make("TicTacToe-v0"), "random")
    monkeypatch.setattr("rollmill.programs.matches.MAX_PLIES", 3)
    with raises("games-did-not-end-within", "TicTacToe-v0", "5", "5", "3"):
        play_match(game, player, player, games=10)
