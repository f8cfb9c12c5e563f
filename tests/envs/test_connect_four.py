"""Connect Four beside a reference in plain Python, and every way to have four in line."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from played_games import play

from rollmill import envs
from rollmill.envs import connect_four
from rollmill.envs.connect_four import Stones
from wordings import raises

DRAWN = "361313645534311043046626105524515600224220"
"""The columns of a game without a winner."""
WON_LAST = "460265125234114035562430131501302624304665"
"""The columns of a game that the last stone wins."""


class Reference:
    """The rules once more, by lists of columns, each from the bottom up."""

    def __init__(self):
        self.columns, self.player = [[] for _ in range(7)], 0

    def legal(self):
        return [len(column) < 6 for column in self.columns]

    def planes(self):
        board = np.zeros((6, 7, 2), np.float32)
        for c, column in enumerate(self.columns):
            for height, owner in enumerate(column):
                board[5 - height, c, 0 if owner == self.player else 1] = 1
        return board

    def move(self, c):
        """Reward of the mover, and whether the game is over."""
        mover, self.player = self.player, 1 - self.player
        if len(self.columns[c]) == 6:
            return -1, True
        self.columns[c].append(mover)
        if self.has_line(c, mover):
            return 1, True
        return 0, not any(self.legal())

    def has_line(self, c, mover):
        """True if the topmost stone of a column is in a line of four."""
        height = len(self.columns[c]) - 1

        def length(dx, dy):
            x, y, found = c + dx, height + dy, 0
            while 0 <= x < 7 and 0 <= y < len(self.columns[x]) and self.columns[x][y] == mover:
                x, y, found = x + dx, y + dy, found + 1
            return found

        return any(length(*d) + length(-d[0], -d[1]) >= 3 for d in ((1, 0), (0, 1), (1, 1), (1, -1)))


def has_four(boards):
    """For boards `[N, 6, 7]` whose top row comes first."""
    boards = np.asarray(boards, np.int64)
    weights = 1 << (8 * np.arange(2, -1, -1)[:, None] + np.arange(7))
    words = [(rows * weights).sum((1, 2)) for rows in (boards[:, :3], boards[:, 3:])]
    asked = jax.vmap(lambda upper, lower: connect_four.has_four(Stones(upper, lower)))
    return np.asarray(asked(*(jnp.asarray(word, jnp.uint32) for word in words)))


LINES = [
    [(r + k * dr, c + k * dc) for k in range(4)]
    for dr, dc in ((0, 1), (1, 0), (1, 1), (1, -1))
    for r, c in itertools.product(range(6), range(7))
    if 0 <= r + 3 * dr < 6 and 0 <= c + 3 * dc < 7
]


def board_of(squares):
    board = np.zeros((6, 7), np.int64)
    for square in squares:
        board[square] = 1
    return board


def test_each_of_the_69_lines_wins_and_three_of_it_do_not():
    assert len(LINES) == 69
    assert has_four([board_of(line) for line in LINES]).all()
    assert not has_four([board_of(three) for line in LINES for three in itertools.combinations(line, 3)]).any()


def test_four_at_equal_distances_in_reading_order_win_only_without_going_around_the_edge():
    """By rows and by columns, so that lines around every edge are among them."""
    lines = {frozenset(line) for line in LINES}
    by_row = lambda n: (n // 7, n % 7)
    by_column = lambda n: (n % 6, n // 6)
    sets = [
        [square(start + k * distance) for k in range(4)]
        for square in (by_row, by_column)
        for start, distance in itertools.product(range(42), range(1, 14))
        if start + 3 * distance < 42
    ]
    np.testing.assert_array_equal(has_four([board_of(s) for s in sets]), [frozenset(s) in lines for s in sets])


def test_random_boards_have_four_where_one_of_the_lines_is_full():
    boards = np.random.default_rng(0).random((20_000, 6, 7)) < 0.45
    rows, columns = np.array(LINES).transpose(2, 0, 1)
    expected = boards[:, rows, columns].all(axis=2).any(axis=1)
    assert 0.2 < expected.mean() < 0.9
    np.testing.assert_array_equal(has_four(boards), expected)


@pytest.mark.parametrize(("legal", "least"), [(1.0, 2_000), (0.8, 2_000)])
def test_games_are_those_of_the_reference(legal, least):
    moves = play(envs.auto_reset(envs.make("ConnectFour-v0")), num_games=256, num_steps=190, legal=legal)
    assert (jax.vmap(jax.vmap(connect_four.winner))(moves.state) == -1).all()
    final = moves.timestep.info["final_observation"]
    seen, legal_columns, players, ended, afterwards = [], [], [], [], []
    for game in range(256):
        reference = Reference()
        for t in range(190):
            seen.append(reference.planes())
            legal_columns.append(reference.legal())
            players.append(reference.player)
            ended.append(reference.move(moves.action[t, game]))
            afterwards.append(reference.planes())
            if ended[-1][1]:
                reference = Reference()
    by_game = lambda array: np.swapaxes(array, 0, 1).reshape(-1, *array.shape[2:])
    np.testing.assert_array_equal(by_game(moves.observation), seen)
    np.testing.assert_array_equal(by_game(moves.mask), legal_columns)
    np.testing.assert_array_equal(by_game(moves.to_move), players)
    rewards, over = np.array(ended).T
    np.testing.assert_array_equal(by_game(moves.timestep.reward), rewards)
    np.testing.assert_array_equal(by_game(moves.timestep.terminated), over)
    np.testing.assert_array_equal(by_game(final), afterwards)
    assert over.sum() > least and set(rewards) == ({0, 1} if legal == 1 else {0, 1, -1})


def replayed(columns):
    timesteps, state = [], connect_four.empty()
    move = jax.jit(connect_four.move)
    for column in columns:
        timesteps.append(move(state, jnp.int32(column)))
        state = timesteps[-1].state
    return timesteps


def test_a_full_board_without_a_line_is_a_draw():
    timesteps = replayed(map(int, DRAWN))
    assert [bool(t.terminated) for t in timesteps] == [False] * 41 + [True]
    assert all(t.reward == 0 for t in timesteps) and connect_four.winner(timesteps[-1].state) == -1
    assert not connect_four.legal_columns(timesteps[-1].state).any()


def test_the_last_stone_of_a_full_board_can_win():
    timesteps = replayed(map(int, WON_LAST))
    assert [bool(t.terminated) for t in timesteps] == [False] * 41 + [True]
    assert timesteps[-1].reward == 1 and connect_four.winner(timesteps[-1].state) == 1


def test_a_winner_is_known_by_the_position():
    first, second = replayed([3, 2, 3, 2, 3, 2, 3])[-1], replayed([0, 3, 1, 3, 0, 3, 1, 3])[-1]
    assert (first.reward, first.terminated, connect_four.winner(first.state)) == (1, True, 0)
    assert (second.reward, second.terminated, connect_four.winner(second.state)) == (1, True, 1)


def test_a_stone_in_a_full_column_loses_and_is_not_on_the_board():
    *_, full, illegal = replayed([5] * 7)
    assert (full.reward, full.terminated) == (0, False)
    assert (illegal.reward, illegal.terminated, connect_four.winner(illegal.state)) == (-1, True, -1)
    np.testing.assert_array_equal(illegal.observation[..., ::-1], full.observation)


def test_a_drawing_of_the_board():
    state = replayed([3, 3, 2, 0])[-1].state
    assert connect_four.render(state).splitlines()[3:] == [
        ". . . . . . .",
        ". . . O . . .",
        "O . X X . . .",
        "0 1 2 3 4 5 6",
    ]
    assert connect_four.render(replayed([6])[-1].state).splitlines()[5:] == [". . . . . . X", "0 1 2 3 4 5 6"]


@pytest.mark.parametrize("plies", [1, 8, 41])
def test_openings_are_random_legal_and_unfinished(plies):
    env = envs.make("ConnectFour-v0", random_plies=plies)
    reset = jax.jit(jax.vmap(lambda key: env.reset(key, env.params)))
    observation, state = reset(jax.random.split(jax.random.key(0), 600))
    observation = np.asarray(observation)
    moves = np.asarray(state.moves)
    assert (moves <= plies).all() and (moves == plies).mean() > (0.99 if plies < 41 else 0.1)
    np.testing.assert_array_equal(jax.vmap(connect_four.to_move)(state), moves % 2)
    own, opponents = observation.sum((1, 2)).T
    np.testing.assert_array_equal(own + opponents, moves)
    np.testing.assert_array_equal(opponents - own, moves % 2)
    filled = observation.sum(-1)
    assert (np.diff(filled, axis=1) >= 0).all() and filled.max() == 1  # no stone hangs in the air
    assert (jax.vmap(connect_four.winner)(state) == -1).all()
    assert jax.vmap(connect_four.legal_columns)(state).any(axis=1).all()
    if plies == 1:  # all columns alike
        np.testing.assert_allclose(filled[:, 5].mean(0), 1 / 7, atol=0.05)


def test_openings_of_any_length_between_two():
    env = envs.make("ConnectFour-v0", random_plies=6, fewest_random_plies=2)
    _, state = jax.jit(jax.vmap(lambda key: env.reset(key, env.params)))(jax.random.split(jax.random.key(0), 1000))
    lengths, counts = np.unique(np.asarray(state.moves), return_counts=True)
    np.testing.assert_array_equal(lengths, np.arange(2, 7))
    np.testing.assert_allclose(counts / 1000, 0.2, atol=0.05)
    with raises("fewest-random-plies-has-to", "7", "6"):
        envs.make("ConnectFour-v0", random_plies=6, fewest_random_plies=7)


@pytest.mark.parametrize("plies", [-1, 42])
def test_an_opening_has_to_leave_a_move(plies):
    with raises("random-plies-has-to-be", "ConnectFour-v0", plies, "41"):
        envs.make("ConnectFour-v0", random_plies=plies)


def test_a_planner_steps_the_game_itself():
    env = envs.make("ConnectFour-v0")
    lifted = envs.record_episodes(envs.auto_reset(envs.time_limit(env, 20)))
    _, state = lifted.reset(jax.random.key(0), env.params)
    timestep = lifted.step(jax.random.key(1), state, jnp.int32(3), env.params)
    planned = env.step(jax.random.key(2), lifted.planning_state(state, env.params), jnp.int32(3), env.params)
    np.testing.assert_array_equal(planned.observation, timestep.observation)
    assert connect_four.render(lifted.planning_state(timestep.state, env.params)).count("X") == 1
