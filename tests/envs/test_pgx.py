"""Games of Pgx through their adapter, and the same games of our own beside them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from played_games import play

from rollmill import envs
from rollmill.envs.adapters.pgx import PLANNABLE
from rollmill.gpus.jax_settings import standard_promotion
from wordings import raises

pgx = pytest.importorskip("pgx", reason="pip install 'rollmill[pgx]'")

SAME = {"ConnectFour-v0": "connect_four", "TicTacToe-v0": "tic_tac_toe"}
WITH_CHANCE = {"2048", "backgammon", "minatar-breakout", "minatar-freeway"}
"""Some of the games with random steps."""


@pytest.mark.parametrize("legal", [1.0, 0.8])
@pytest.mark.parametrize("own", SAME)
@pytest.mark.slow_beyond(1)
def test_our_games_are_those_of_pgx_move_by_move(own, legal):
    source, env = pgx.make(SAME[own]), envs.auto_reset(envs.make(own))
    moves = play(env, num_games=64, num_steps=200, legal=legal)

    @eqx.filter_jit
    def theirs(actions, over):
        def step(state, now):
            action, ended = now
            with standard_promotion():
                after = source.step(state, action)
                fresh = source.init(jax.random.key(0))
            follows = jax.tree.map(lambda a, b: jnp.where(ended, a, b), fresh, after)
            return follows, (state.observation, state.legal_action_mask, state.current_player, after)

        with standard_promotion():
            first = source.init(jax.random.key(0))
        return jax.lax.scan(step, first, (actions, over))[1]

    by_game = lambda array: jnp.swapaxes(jnp.asarray(array), 0, 1)
    over = moves.timestep.terminated
    found = jax.vmap(theirs)(by_game(moves.action), by_game(over))
    observation, mask, mover, after = jax.tree.map(lambda a: np.asarray(jnp.swapaxes(a, 0, 1)), found)
    shape = moves.observation.shape
    np.testing.assert_array_equal(moves.observation, observation.astype(np.float32).reshape(shape))
    np.testing.assert_array_equal(moves.mask, mask)
    np.testing.assert_array_equal(moves.to_move, mover != mover[0, 0])
    np.testing.assert_array_equal(over, after.terminated)
    np.testing.assert_array_equal(
        moves.timestep.reward, np.take_along_axis(after.rewards, mover[..., None], 2)[..., 0]
    )
    legal_moves = np.take_along_axis(mask, moves.action[..., None], 2)[..., 0]
    final = moves.timestep.info["final_observation"]  # Pgx puts a stone on the board in an illegal move, too
    np.testing.assert_array_equal(
        final[legal_moves], after.observation.astype(np.float32).reshape(shape)[legal_moves]
    )
    assert over.sum() > 500


@pytest.mark.parametrize(
    "name",
    ["connect_four", "kuhn_poker", "leduc_holdem", "minatar-breakout", "othello"],
)
@pytest.mark.slow_beyond(2)
def test_games_keep_the_contract(name):
    env = envs.make(f"pgx:{name}")
    envs.check_environment(env, num_steps=30)
    assert env.num_players == pgx.make(name).num_players
    assert (env.planning_state is not None) == (name in PLANNABLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(pgx.available_envs()) - {"sparrow_mahjong"}))
def test_all_games_of_one_and_two_players_keep_the_contract(name):
    envs.check_environment(envs.make(f"pgx:{name}"), num_steps=30)


@pytest.mark.parametrize("name", ["connect_four", "hex", "leduc_holdem", "othello"])
@pytest.mark.slow_beyond(1)
def test_player_0_moves_first_and_rewards_are_those_of_the_mover(name):
    """Either of Pgx's players may begin; the adapter's numbers begin with 0."""
    source, env = pgx.make(name), envs.make(f"pgx:{name}")
    moves = play(envs.record_episodes(envs.auto_reset(env)), num_games=64, num_steps=130)
    over = moves.timestep.terminated
    begins = np.concatenate([np.ones((1, 64), bool), over[:-1]])
    assert (moves.to_move[begins] == 0).all() and set(np.unique(moves.to_move)) == {0, 1}
    game = moves.state.inner.game
    with standard_promotion():
        firsts = jax.vmap(source.init)(jax.random.split(jax.random.key(0), 50)).current_player
    assert set(np.asarray(firsts)) == {0, 1} == set(np.asarray(game.current_player)[begins])
    returns = moves.timestep.info["episode_return"][over]
    assert over.sum() > 60 and returns.min() < 0 < returns.max()


def test_the_first_players_return_is_pgxs_reward_of_the_player_that_began():
    source, env = pgx.make("leduc_holdem"), envs.record_episodes(envs.auto_reset(envs.make("pgx:leduc_holdem")))
    moves = play(env, num_games=64, num_steps=40)
    inner = moves.state.inner

    def rewards(game, action):
        with standard_promotion():
            return source.step(game.replace(observation=None), action).rewards

    theirs = jax.jit(jax.vmap(jax.vmap(rewards)))(inner.game, moves.action)
    of_first = np.take_along_axis(np.asarray(theirs), inner.first[..., None], 2)[..., 0]
    over = moves.timestep.terminated
    np.testing.assert_array_equal(moves.timestep.info["episode_return"][over], of_first[over])


def test_spaces_are_pgxs():
    env = envs.make("pgx:connect_four")
    assert (env.action_space, env.name) == (spaces.Discrete(7), "pgx:connect_four")
    assert env.observation_space == spaces.Box(0.0, 1.0, (6, 7, 2), np.float32)
    assert envs.make("pgx:backgammon").observation_space == spaces.Box(-np.inf, np.inf, (34,), np.float32)


def uses_its_key(name):
    env = envs.make(f"pgx:{name}")
    key = jax.random.key(0)
    _, state = jax.eval_shape(env.reset, key, ())
    traced = jax.make_jaxpr(lambda key, state, action: env.step(key, state, action, ()))(key, state, jnp.int32(0))
    used = [atom for equation in traced.jaxpr.eqns for atom in equation.invars]
    return any(atom is traced.jaxpr.invars[0] for atom in used)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("animal_shogi", "shogi") else name
        for name in sorted(PLANNABLE | WITH_CHANCE)
    ],
)
@pytest.mark.slow_beyond(3)
def test_planners_step_the_games_whose_steps_are_not_random(name):
    assert uses_its_key(name) == (name not in PLANNABLE)


def test_options_are_those_of_the_games_class():
    assert envs.make("pgx:go_9x9", komi=5.5).action_space == spaces.Discrete(82)
    assert envs.make("pgx:minatar-breakout", use_minimal_action_set=False).action_space == spaces.Discrete(6)
    with raises("pgx-with-cannot-be-reset", "hex", "{'size': 5}", "cannot reshape"):
        envs.make("pgx:hex", size=5)  # of the sizes that its class takes, Pgx 2.6.0 has a board for 11 alone
    with raises("has-no-option-options", "pgx:go_9x9", "'kom'", "Did you mean komi"):
        envs.make("pgx:go_9x9", kom=5.5)
    with raises("has-no-option-options", "pgx:go_9x9", "'size'"):
        envs.make("pgx:go_9x9", size=5)
    with raises("has-no-options-was-given", "pgx:chess", "'size'"):
        envs.make("pgx:chess", size=5)


@pytest.mark.parametrize(("name", "count"), [("bridge_bidding", 4), ("mahjong", 4), ("sparrow_mahjong", 3)])
def test_games_of_more_players_are_refused(name, count):
    with raises("pgx-is-game-players-expected", count, "are supported: 2048", "othello"):
        envs.make(f"pgx:{name}")


@pytest.mark.slow
def test_no_game_of_pgx_has_more_players_than_is_known():
    counts = {name: pgx.make(name).num_players for name in pgx.available_envs()}
    assert {name: count for name, count in counts.items() if count > 2} == {"sparrow_mahjong": 3}


def test_unknown_games_offer_the_nearest():
    with raises("unknown-setting", "pgx", "environment 'othelo'", "Did you mean othello"):
        envs.make("pgx:othelo")
