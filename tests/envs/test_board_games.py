"""Games of two players under transforms: whose turn it is, whose return is recorded, where planners begin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from played_games import play

from rollmill import envs
from rollmill.core.types import HostEnvironment
from wordings import raises

GAMES = ["ConnectFour-v0", "TicTacToe-v0"]


def lifted(name):
    return envs.record_episodes(envs.auto_reset(envs.time_limit(envs.make(name), 100)))


def replay(env, actions):
    """Timesteps of one environment, and the player to move before each step."""

    def step(state, action):
        player = env.to_move(state, env.params)
        timestep = env.step(jax.random.key(0), state, action, env.params)
        return timestep.state, (player, timestep)

    _, state = env.reset(jax.random.key(0), env.params)
    return jax.lax.scan(step, state, jnp.array(actions, jnp.int32))[1]


def test_the_recorded_return_is_that_of_the_first_player():
    first_wins, second_wins = [0, 3, 1, 4, 2], [0, 3, 1, 4, 8, 5]
    draw, illegal_by_second = [0, 1, 2, 4, 3, 5, 7, 6, 8], [4, 4]
    actions = [*first_wins, *second_wins, *draw, *illegal_by_second]
    players, timestep = replay(lifted("TicTacToe-v0"), actions)
    lengths = [5, 6, 9, 2]
    np.testing.assert_array_equal(players, [t % 2 for length in lengths for t in range(length)])
    ends = np.cumsum(lengths) - 1
    np.testing.assert_array_equal(np.flatnonzero(timestep.terminated), ends)
    np.testing.assert_array_equal(timestep.reward[ends], [1, 1, 0, -1])
    np.testing.assert_array_equal(timestep.info["episode_return"][ends], [1, -1, 0, 1])
    np.testing.assert_array_equal(timestep.info["episode_length"][ends], lengths)
    assert timestep.info["episode_return"].dtype == jnp.float32


def test_returns_add_up_over_moves_of_both_players():
    """A game that pays the mover 1 in each step, and where one player moves twice in a row."""
    env = envs.make("TicTacToe-v0")
    step = lambda *arguments: env.step(*arguments)._replace(reward=jnp.float32(1))
    paying = env._replace(step=step, to_move=lambda state, params: state.moves // 2 & 1)
    _, timestep = replay(envs.record_episodes(envs.auto_reset(paying)), [0, 1, 3, 4])
    np.testing.assert_array_equal(timestep.info["episode_return"], [1, 2, 1, 0])


@pytest.mark.parametrize("name", GAMES)
def test_functions_of_the_state_are_lifted_through_all_transforms(name):
    raw, batch = envs.make(name), envs.vectorise(lifted(name), 3)
    assert batch.num_players == 2
    keys = jax.random.split(jax.random.key(0), 3)
    observation, state = batch.reset(keys, batch.params)
    alone, own = raw.reset(keys[0], raw.params)
    for action in (3, 5, 3):
        inner = batch.planning_state(state, batch.params)
        assert jax.tree.structure(inner) == jax.tree.structure(own)
        jax.tree.map(lambda mine, right: np.testing.assert_array_equal(mine, [right] * 3), inner, own)
        np.testing.assert_array_equal(observation[1], alone)
        np.testing.assert_array_equal(batch.to_move(state, batch.params), [raw.to_move(own, raw.params)] * 3)
        np.testing.assert_array_equal(batch.action_mask(state, batch.params)[2], raw.action_mask(own, raw.params))
        actions = jnp.full(3, action, jnp.int32)
        observation, state = batch.step(keys, state, actions, batch.params)[:2]
        alone, own = raw.step(keys[0], own, jnp.int32(action), raw.params)[:2]


@pytest.mark.parametrize("name", GAMES)
def test_the_first_player_wins_more_random_games_than_it_loses(name):
    moves = play(envs.record_episodes(envs.auto_reset(envs.make(name))), num_games=256, num_steps=200)
    over = moves.timestep.terminated
    returns = moves.timestep.info["episode_return"][over]
    winners = np.where(moves.timestep.reward == 1, 1 - 2 * moves.to_move, 0)[over]
    np.testing.assert_array_equal(returns, winners)
    assert len(returns) > 2_000 and set(returns) == {-1, 0, 1}
    assert 0.05 < returns.mean() < 0.4


@pytest.mark.parametrize("name", ["CartPole-v1", "TMaze-v0"])
def test_other_environments_are_for_one_player_and_not_planned_in(name):
    env = lifted(name)
    assert (env.num_players, env.to_move, env.planning_state) == (1, None, None)


def test_plannable_refuses_environments_of_the_host():
    host = envs.make("gymnasium:CartPole-v1")
    assert isinstance(host, HostEnvironment)
    with raises("takes-environment-jax-functions-is"):
        getattr(envs.plannable, "__wrapped__", envs.plannable)(host)
