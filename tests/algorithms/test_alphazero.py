"""AlphaZero: its search, its targets, and the games that it learns."""

import functools
import shutil
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from envs import tic_tac_toe_reference as reference
from rollmill.algorithms.alphazero import Position, SearchExtras
from rollmill.algorithms.returns import lambda_returns
from rollmill.dataflow import Trajectory, collect, init_state
from rollmill.envs import connect_four, plannable, tic_tac_toe, vary
from rollmill.fusion import CannotFuse, lower_gradients, lower_rollout
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from wordings import raises

SMALL = rollmill.NetworkConfig(hidden_sizes=(16,), activation="relu", shared_torso=True)
SIZES = {"num_envs": 8, "num_steps": 8, "num_minibatches": 2, "num_simulations": 8, "network": SMALL}


def small(env="TicTacToe-v0", *, iterations=3, **settings):
    sizes = SIZES | settings
    total = iterations * sizes["num_envs"] * sizes["num_steps"]
    return rollmill.alphazero(env, total_timesteps=total, **sizes)


def first_weights(graph, seed=0):
    return graph.weights(graph.start_learner(jax.random.key(seed)))


def train(graph):
    program, rows = lower(graph), []
    for window in dispatch_ahead(program, program.start(), first=0, until=graph.loops.iterations):
        rows += window.metrics
    return window.after, rows


# --- value targets ------------------------------------------------------------------------------------

WON = ([0.0, 0.0, 1.0], [-1.0, -1.0, 0.0], [False, False, True])
"""Rewards, discounts and ends of a game that its third move wins."""


@pytest.mark.parametrize(
    ("rollout", "next_value", "td_lambda", "expected"),
    [
        (WON, [0.0, 0.0, 0.0], 1.0, [1.0, -1.0, 1.0]),
        (WON, [0.4, -0.6, 0.0], 0.0, [-0.4, 0.6, 1.0]),
        # 1; 0.5 (0.6) + 0.5 (-1) = -0.2; 0.5 (-0.4) + 0.5 (0.2) = -0.1
        (WON, [0.4, -0.6, 0.0], 0.5, [-0.1, -0.2, 1.0]),
        # The rollout ends before the game: the value after its last move is the opponent's.
        (([0.0, 0.0], [-1.0, -1.0], [False, False]), [0.9, 0.25], 1.0, [0.25, -0.25]),
        # A lost game by an illegal move, and the first moves of the next one.
        (([-1.0, 0.0, 0.0], [0.0, -1.0, -1.0], [True, False, False]), [0.0, 0.1, 0.5], 1.0, [-1.0, 0.5, -0.5]),
        # A player who moves twice, and a truncation, after which the final position counts.
        (([0.0, 0.0, 0.0], [1.0, -1.0, -1.0], [False, True, False]), [0.1, 0.75, 0.5], 1.0, [-0.75, -0.75, -0.5]),
        # One player, who is paid on the way.
        (([1.0, 0.0, 2.0], [0.9, 0.9, 0.0], [False, False, True]), [7.0, 7.0, 0.0], 1.0, [2.62, 1.8, 2.0]),
    ],
)
def test_value_targets_by_hand(rollout, next_value, td_lambda, expected):
    reward, discount, done = (jnp.asarray(part) for part in rollout)
    found = lambda_returns(reward, jnp.asarray(next_value), discount, done, td_lambda=td_lambda)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_targets_of_games_are_their_results_for_the_player_to_move():
    graph = small(num_steps=20)

    @jax.jit
    def roll(key):
        state = init_state(graph, key, jnp.arange(8))
        _, trajectory = collect(graph, graph.weights(state.learner), state.collector, jax.random.key(1))
        return trajectory, graph.prepare(state.learner, trajectory, reduce=lambda tree: tree, replicas=1)[1]

    trajectory, batch = roll(jax.random.key(0))
    steps: Trajectory = jax.tree.map(np.asarray, trajectory.steps)
    player = np.asarray(steps.action_mask.state.moves) % 2
    games = 0
    for e in range(8):
        ends = np.flatnonzero(steps.terminated[:, e])
        for first, last in zip([0, *ends[:-1] + 1], ends, strict=True):
            won_by_last = steps.reward[last, e]
            for t in range(first, last + 1):
                sign = 1 if player[t, e] == player[last, e] else -1
                assert batch.samples.target[t, e] == sign * won_by_last
            games += 1
        # The rest is bootstrapped from the network's value of the position that comes next.
        for t in range(ends[-1] + 1, 20):
            value = np.asarray(batch.samples.target[t, e])
            assert value == -np.asarray(batch.samples.target[t - 1, e]) or t == ends[-1] + 1
    assert games > 10
    weights_sum = np.asarray(batch.samples.action_weights).sum(-1)
    np.testing.assert_allclose(weights_sum, 1.0, rtol=1e-5)
    assert (np.asarray(batch.samples.action_weights)[~np.asarray(batch.samples.action_mask)] == 0).all()


@pytest.mark.slow
def test_an_iteration_counts_its_games():
    _, rows = train(small())
    assert rows[0].keys() >= {"losses/policy", "losses/value", "search/entropy", "search/agreement"}
    for row in rows:
        losses = row["episodes/ended"] - row["games/first_wins"] - row["games/draws"]
        assert row["games/first_wins"] - losses == pytest.approx(row["episodes/return_sum"])
        assert 0 <= row["search/agreement"] <= 1 and 0 < row["search/entropy"] < np.log(9)


# --- the search ---------------------------------------------------------------------------------------


def bits(position, symbol):
    return jnp.uint32(sum(1 << square for square in range(9) if position[square] == symbol))


def marks(position):
    mover = reference.player(position)
    other = "XO".replace(mover, "")
    return tic_tac_toe.TicTacToeState(
        bits(position, mover), bits(position, other), jnp.int32(9 - position.count("."))
    )


def stones(columns):
    state, move = connect_four.empty(), jax.jit(connect_four.move)
    for column in columns:
        state = move(state, jnp.int32(int(column))).state
    return state


def valueless(weights):
    """The weights of a policy whose values are all 0."""
    return eqx.tree_at(
        lambda w: w.network.critic, weights, replace_fn=lambda layer: jax.tree.map(jnp.zeros_like, layer)
    )


@functools.cache
def deciding(env, search):
    """A graph, and its compiled greedy policy, for all positions of a game."""
    graph = small(env, num_simulations=400, search=search)
    return graph, jax.jit(graph.greedy)


@pytest.mark.parametrize("search", ["gumbel", "puct"])
@pytest.mark.parametrize(
    ("env", "position", "best"),
    [
        ("TicTacToe-v0", "XX.OO....", 2),
        ("TicTacToe-v0", "XX..O....", 2),
        ("ConnectFour-v0", "030303", 0),
        ("ConnectFour-v0", "03030", 0),
    ],
    ids=["wins a row", "blocks a row", "wins a column", "blocks a column"],
)
def test_a_search_with_random_weights_finds_what_wins_and_what_does_not_lose(env, position, best, search):
    """Between moves that lose at the third ply, Gumbel search is led by values, so its values are 0 here."""
    graph, decide = deciding(env, search)
    rules = tic_tac_toe if env.startswith("Tic") else connect_four
    state = marks(position) if rules is tic_tac_toe else stones(position)
    legal = rules.legal_squares(state) if rules is tic_tac_toe else rules.legal_columns(state)
    now = Position(legal, state, ())
    for seed in range(3):
        weights = first_weights(graph, seed)
        weights = valueless(weights) if search == "gumbel" else weights
        assert int(decide(weights, jax.random.key(seed), (), rules.observe(state), now).action) == best


def positions(graph, count, plies):
    """Positions after some moves, one of each environment, and all that its policy is given."""
    state = init_state(
        graph._replace(loops=graph.loops._replace(num_envs=count)), jax.random.key(3), jnp.arange(count)
    )
    weights = graph.weights(state.learner)
    shorter = graph._replace(loops=graph.loops._replace(num_steps=plies))
    after, _ = jax.jit(functools.partial(collect, shorter))(weights, state.collector, jax.random.key(4))
    return weights, after


@pytest.mark.slow
@pytest.mark.parametrize("search", ["gumbel", "puct"])
def test_a_move_does_not_depend_on_the_games_beside_it(search):
    graph = small("ConnectFour-v0", search=search, num_simulations=12)
    weights, now = positions(graph, 8, 5)
    keys = jax.random.split(jax.random.key(5), 8)

    @jax.jit
    def play(rows):
        given = jax.tree.map(lambda leaf: leaf[rows], (keys, now.memory, now.observation, now.action_mask))
        return jax.vmap(graph.policy, in_axes=(None, 0, 0, 0, 0))(weights, *given)

    together = play(jnp.arange(8))
    for rows in (jnp.array([7, 3, 1, 0, 2, 6, 5, 4]), jnp.array([2, 2, 2, 2, 2, 2, 2, 5])):
        for mine, right in zip(jax.tree.leaves(play(rows)), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(mine, right[rows])
    alone = play(jnp.array([6, 2]))  # matrix products of another size may be rounded otherwise
    np.testing.assert_array_equal(alone.action, together.action[jnp.array([6, 2])])
    np.testing.assert_allclose(
        alone.extras.action_weights, together.extras.action_weights[jnp.array([6, 2])], rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_greedy_moves_have_no_noise_and_those_of_self_play_have():
    graph = small("ConnectFour-v0", num_simulations=8)
    weights, now = positions(graph, 1, 2)
    given = jax.tree.map(lambda leaf: leaf[0], (now.memory, now.observation, now.action_mask))
    keys = jax.random.split(jax.random.key(0), 20)
    actions = lambda policy: set(map(int, jax.jit(jax.vmap(lambda k: policy(weights, k, *given).action))(keys)))
    assert len(actions(graph.greedy)) == 1 < len(actions(graph.policy))


def test_without_simulations_the_network_plays_alone():
    graph = small(num_simulations=0)
    weights, mask = first_weights(graph), jnp.arange(9) % 2 == 1
    observation = tic_tac_toe.observe(tic_tac_toe.empty())
    decision = graph.greedy(weights, jax.random.key(0), (), observation, mask)
    extras: SearchExtras = decision.extras
    assert int(decision.action) == int(jnp.argmax(extras.action_weights)) and int(decision.action) % 2 == 1
    assert (np.asarray(extras.action_weights)[::2] == 0).all() and float(extras.agrees) == 1
    with raises("search-this-policy-for-starts"):
        small().greedy(weights, jax.random.key(0), (), observation, mask)


# --- other environments -------------------------------------------------------------------------------


class Walk(NamedTuple):
    place: jax.Array
    steps: jax.Array


def corridor():
    """Seven places in a row, the walk begins at the third: the left end pays 0.3, the right end `prize`."""

    def observe(state):
        return jax.nn.one_hot(state.place, 7)

    def reset(key, params):
        state = Walk(jnp.int32(2), jnp.int32(0))
        return observe(state), state

    def step(key, state, action, params):
        after = Walk(state.place + 2 * action - 1, state.steps + 1)
        reward = jnp.where(after.place == 0, 0.3, jnp.where(after.place == 6, params["prize"], 0.0))
        ended = (after.place == 0) | (after.place == 6)
        return rollmill.Timestep(observe(after), after, reward, ended, jnp.asarray(False), {})

    env = rollmill.Environment(
        "Corridor-v0",
        reset,
        step,
        spaces.Box(0.0, 1.0, (7,), np.float32),
        spaces.Discrete(2),
        params={"prize": jnp.float32(1.0)},
    )
    return rollmill.time_limit(plannable(env), 20)


WALKING = {"gamma": 0.9, "num_simulations": 32, "learning_rate": 1e-2, "num_envs": 16, "num_steps": 16}


@pytest.mark.slow
def test_a_single_player_plans_with_discounts():
    graph = small(corridor(), iterations=12, **WALKING)
    assert graph.settings["config"]["squash_values"] is None
    after, rows = train(graph)
    last = rows[-1]
    assert last["episodes/return_sum"] / last["episodes/ended"] > 0.95
    assert not any(name.startswith("games/") for name in last)
    observation, now = jnp.eye(7)[2], Position((), Walk(jnp.int32(2), jnp.int32(0)), {"prize": jnp.float32(1.0)})
    decision = jax.jit(graph.greedy)(graph.weights(after.learner), jax.random.key(0), (), observation, now)
    assert int(decision.action) == 1
    np.testing.assert_allclose(decision.extras.value, 0.9**3, atol=0.05)


@pytest.mark.slow
def test_a_search_steps_each_environment_by_its_own_parameters():
    """At the fifth place a prize of 1 lies one step to the right, and a fine of 1 in other copies."""
    prizes = jnp.where(jnp.arange(8) % 2 == 0, 1.0, -1.0)
    own = small(corridor(), params={"prize": prizes}, gamma=0.9)
    varied = small(vary(corridor(), lambda key, params: {"prize": jnp.float32(-1.0)}), gamma=0.9)
    state = init_state(own, jax.random.key(0), jnp.arange(8))
    place = jnp.full(8, 5)
    now = state.collector.action_mask
    now = now._replace(state=now.state._replace(place=place))
    decide = jax.jit(jax.vmap(own.greedy, in_axes=(None, None, None, 0, 0)))
    decision = decide(own.weights(state.learner), jax.random.key(0), (), jax.nn.one_hot(place, 7), now)
    np.testing.assert_array_equal(decision.action, jnp.arange(8) % 2 == 0)
    travelling = init_state(varied, jax.random.key(0), jnp.arange(8)).collector.action_mask
    np.testing.assert_array_equal(travelling.params["prize"], -1.0)


# --- learning -----------------------------------------------------------------------------------------


def unfinished():
    return [position for position in reference.positions() if not reference.is_over(position)]


def moves_of(graph, weights):
    """The policy's move in every position of tic-tac-toe."""
    every = unfinished()
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(marks, every))

    def move(state):
        now = Position(tic_tac_toe.legal_squares(state), state, ())
        return graph.greedy(weights, jax.random.key(0), (), tic_tac_toe.observe(state), now).action

    return dict(zip(every, map(int, jax.jit(jax.vmap(move))(states)), strict=True))


def worst_result(moves, symbol):
    """The worst result of a player, in all games against all perfect opponents: 1, 0 or -1."""

    @functools.cache
    def worst(position):
        if reference.is_over(position):
            return {None: 0, symbol: 1}.get(reference.winner(position), -1)
        if reference.player(position) == symbol:
            return worst(reference.after(position, moves[position]))
        return min(worst(reference.after(position, square)) for square in reference.best_moves(position))

    return worst(reference.START)


@pytest.mark.slow
def test_tic_tac_toe_is_learned_so_that_no_perfect_player_wins():
    """It loses none of all games against all perfect opponents, as the first player and as the second."""
    network = rollmill.NetworkConfig(hidden_sizes=(64, 64), activation="relu", shared_torso=True)
    sizes = {"num_envs": 64, "num_steps": 16, "num_minibatches": 4, "learning_rate": 2e-3, "network": network}
    env = rollmill.make("TicTacToe-v0", random_plies=5, fewest_random_plies=0)
    graph = small(env, iterations=200, num_simulations=32, **sizes)
    after, _ = train(graph)
    player = small(env, num_simulations=128, network=network)
    moves = moves_of(player, graph.weights(after.learner))
    assert [worst_result(moves, symbol) for symbol in "XO"] == [0, 0]
    untrained = moves_of(player, first_weights(graph))
    assert min(worst_result(untrained, symbol) for symbol in "XO") == -1


@pytest.mark.slow
def test_resumed_is_never_stopped(tmp_path):
    options = {"quiet": True, "tensorboard": False, "checkpoint_iterations": 1, "keep_last": 20}
    graph = small(iterations=6, weight_decay=1e-4, td_lambda=0.9)
    whole = rollmill.train(graph, run_dir=tmp_path / "run", **options)
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        if int(checkpoint.name) > 3:
            shutil.rmtree(checkpoint)
    (tmp_path / "run" / "summary.json").unlink()
    resumed = rollmill.resume(tmp_path / "run", quiet=True)
    assert resumed.summary["iterations"] == 6
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    # Evaluation searches in the environment that is played.
    episodes = rollmill.evaluate(tmp_path / "run", env="TicTacToe-v0", env_options={"random_plies": 5}, episodes=5)
    assert min(episodes.lengths) >= 1 and max(episodes.lengths) <= 4


# --- messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "settings", "message"),
    [
        ("CartPole-v1", {}, ("cannot-be-planned-in-hint", "CartPole-v1")),
        ("pgx:2048", {}, ("cannot-be-planned-in-hint", "pgx:2048")),
        ("Pendulum-v1", {}, ("needs-discrete-action-space-is", "alphazero", "Pendulum-v1", "Box")),
        ("gymnasium:CartPole-v1", {}, ("is-stepped-by-python-on",)),
        ("TagGridWorld-Small-v0", {}, ("has-several-agents-train-with",)),
        ("TicTacToe-v0", {"network": "gru"}, ("alphazero-needs-network-without-memory",)),
        ("TicTacToe-v0", {"num_simulations": -1}, ("expected-number", "num_simulations", "-1", "at least 0")),
        (
            "TicTacToe-v0",
            {"dirichlet_alpha": 0.0},
            ("expected-number", "dirichlet_alpha", "0.0", "greater than 0"),
        ),
    ],
)
def test_refusals_name_a_way_out(env, settings, message):
    with raises(*message):
        small(env, **settings)


@pytest.mark.parametrize("algorithm", ["ppo", "a3c", "impala", "dqn", "sac", "td3"])
def test_algorithms_for_one_player_refuse_games_for_two(algorithm):
    with raises("is-game-for-two-players", "TicTacToe-v0"):
        getattr(rollmill, algorithm)("TicTacToe-v0")


def test_transforms_that_a_search_would_not_see_are_refused():
    env = rollmill.make("TicTacToe-v0")._replace(observation_space=spaces.Box(-1.0, 1.0, (3, 3, 2), np.float32))
    with raises("search-steps-without-transforms-but"):
        small(env)


def test_rollouts_are_no_kernel_and_a_sentence_says_why():
    with pytest.raises(CannotFuse, match="alphazero searches a tree before each move"):
        lower_rollout(small())
    assert lower_gradients(small()).program.nodes()
