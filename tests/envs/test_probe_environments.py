"""The probes' values, by hand and by solving for them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.envs import auto_reset, make

GAMMA = 0.9


def play(env, policy, num_steps, seed=0):
    """`num_steps` of `policy(observation, state, key)`; returns observations before and timesteps."""
    env = auto_reset(env)

    def step(carry, key):
        observation, state = carry
        timestep = env.step(key, state, policy(observation, state, key), env.params)
        return (timestep.observation, timestep.state), (observation, timestep)

    @eqx.filter_jit
    def run(key):
        return jax.lax.scan(step, env.reset(key, env.params), jax.random.split(key, num_steps))[1]

    return run(jax.random.key(seed))


def always(action):
    return lambda observation, state, key: jnp.asarray(action, jnp.int32)


@pytest.mark.parametrize("action", [0, 1])
def test_constant_reward_is_one_and_the_end(action):
    seen, timestep = play(make("Probe-ConstantReward-v0"), always(action), 10)
    assert (np.asarray(timestep.reward) == 1).all() and np.asarray(timestep.terminated).all()
    assert (np.asarray(seen) == 0).all()


def test_observation_reward_is_the_observation():
    seen, timestep = play(make("Probe-ObservationReward-v0"), always(0), 64)
    np.testing.assert_array_equal(timestep.reward, np.asarray(seen)[:, 0])
    assert set(np.asarray(timestep.reward)) == {-1.0, 1.0}
    assert np.asarray(timestep.terminated).all()


def test_discounted_reward_comes_one_step_late():
    seen, timestep = play(make("Probe-DiscountedReward-v0"), always(0), 6)
    np.testing.assert_array_equal(np.asarray(seen)[:, 0], [0, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(timestep.reward, [0, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(timestep.terminated, [False, True] * 3)
    values = solve_values(seen, timestep, timestep.info["final_observation"], timestep.terminated)
    np.testing.assert_allclose(values, [GAMMA, 1.0])


@pytest.mark.parametrize(("action", "reward"), [(0, -1.0), (1, 1.0)])
def test_action_reward_is_the_actions(action, reward):
    _, timestep = play(make("Probe-ActionReward-v0"), always(action), 8)
    np.testing.assert_array_equal(timestep.reward, np.full(8, reward))
    assert np.asarray(timestep.terminated).all()


def test_action_observation_pays_the_action_that_fits():
    env = make("Probe-ActionObservation-v0")
    _, best = play(env, lambda o, s, k: (o[0] > 0).astype(jnp.int32), 64)
    _, worst = play(env, lambda o, s, k: (o[0] < 0).astype(jnp.int32), 64)
    seen, blind = play(env, always(1), 64)
    assert (np.asarray(best.reward) == 1).all() and (np.asarray(worst.reward) == -1).all()
    np.testing.assert_array_equal(blind.reward, np.asarray(seen)[:, 0])


def solve_values(seen, timestep, following, stop):
    """Tabular TD(0) fixed point of the values of observations 0 and 1."""
    now, after = (np.asarray(o)[:, 0].astype(int) for o in (seen, following))
    continues = 1.0 - np.asarray(stop)
    features, next_features = np.eye(2)[now], np.eye(2)[after] * continues[:, None]
    matrix = features.T @ (features - GAMMA * next_features)
    return np.linalg.solve(matrix, features.T @ np.asarray(timestep.reward, np.float64))


def test_truncation_has_its_value_only_if_bootstrapped_from_the_final_observation():
    seen, timestep = play(make("Probe-Truncation-v0"), always(0), 40)
    np.testing.assert_array_equal(timestep.truncated, [False, False, False, True] * 10)
    assert not np.asarray(timestep.terminated).any()
    np.testing.assert_array_equal(np.asarray(timestep.observation)[:, 0], [1, 1, 1, 0] * 10)
    final = timestep.info["final_observation"]

    right = solve_values(seen, timestep, final, timestep.terminated)
    np.testing.assert_allclose(right, [-10 + GAMMA / (1 - GAMMA), 1 / (1 - GAMMA)])
    as_termination = solve_values(seen, timestep, final, timestep.truncated)
    np.testing.assert_allclose(as_termination[1], 2.5)
    from_reset = solve_values(seen, timestep, timestep.observation, timestep.terminated)
    np.testing.assert_allclose(from_reset[1], -2 / 0.13)


def test_continuous_action_pays_one_at_the_observation():
    env = make("Probe-ContinuousAction-v0")
    seen, best = play(env, lambda o, s, k: o, 32)
    assert (np.asarray(best.reward) == 1).all() and np.asarray(seen).std() > 0.3
    _, off = play(env, lambda o, s, k: o + 0.5, 32)
    np.testing.assert_allclose(off.reward, np.full(32, 0.75), rtol=1e-6)


def test_multi_discrete_pays_half_for_each_right_choice():
    env = make("Probe-MultiDiscrete-v0")
    seen, best = play(env, lambda o, s, k: o.astype(jnp.int32), 64)
    assert (np.asarray(best.reward) == 1).all()
    assert {tuple(pair) for pair in np.asarray(seen).astype(int)} == {(a, b) for a in (0, 1) for b in (0, 1, 2)}
    _, first_only = play(
        env, lambda o, s, k: jnp.stack([o[0].astype(jnp.int32), (o[1].astype(jnp.int32) + 1) % 3]), 16
    )
    np.testing.assert_array_equal(first_only.reward, np.full(16, 0.5))


def test_action_mask_names_the_two_actions_that_pay():
    env = make("Probe-ActionMask-v0")

    def obey(observation, state, key):
        return jnp.argmax(env.action_mask(state, env.params))

    def disobey(observation, state, key):
        return jnp.argmin(env.action_mask(state, env.params))

    _, legal = play(env, obey, 64)
    _, illegal = play(env, disobey, 64)
    _, unmasked = play(env, always(2), 4000)
    assert (np.asarray(legal.reward) == 1).all() and (np.asarray(illegal.reward) == -1).all()
    assert abs(np.asarray(unmasked.reward).mean()) < 0.08  # five standard errors of a fair coin
    states = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(jax.random.key(0), 50), ())[1]
    assert (np.asarray(states.legal).sum(axis=1) == 2).all()


def test_t_maze_shows_its_cue_once_and_pays_who_remembers():
    length = 3
    env = make("TMaze-v0", length=length)
    seen, timestep = play(env, always(1), 400)
    seen = np.asarray(seen).reshape(100, length + 1, 2)
    reward = np.asarray(timestep.reward).reshape(100, length + 1)
    cue = seen[:, 0, 0]
    assert set(cue) == {-1.0, 1.0}
    np.testing.assert_array_equal(seen[:, 1:, 0], np.zeros((100, length)))
    np.testing.assert_array_equal(seen[:, :, 1], np.tile([0, 0, 0, 1], (100, 1)))
    np.testing.assert_array_equal(reward[:, :length], np.zeros((100, length)))
    np.testing.assert_array_equal(reward[:, length], cue)  # turning right always: 1 or -1 by the cue alone
    np.testing.assert_array_equal(
        np.asarray(timestep.terminated).reshape(100, length + 1), np.tile([False] * length + [True], (100, 1))
    )

    _, remembered = play(env, lambda o, state, k: (state.cue > 0).astype(jnp.int32), 400)
    assert np.asarray(remembered.reward).sum() == 100


def test_dict_goal_pays_the_distance_gained_and_one_on_arrival():
    env = make("DictGoal-v0")

    def straight(observation, state, key):
        corners = jnp.array([[-0.75, -0.75], [-0.75, 0.75], [0.75, -0.75], [0.75, 0.75]])
        gap = corners[observation["goal"]] - observation["position"]
        across = jnp.abs(gap[0]) > jnp.abs(gap[1])
        return jnp.where(across, (gap[0] > 0).astype(jnp.int32), 2 + (gap[1] > 0).astype(jnp.int32))

    seen, timestep = play(env, straight, 300)
    ends = np.flatnonzero(timestep.terminated)
    assert len(ends) > 40 and not np.asarray(timestep.truncated).any()
    returns = np.diff(np.concatenate([[0.0], np.cumsum(timestep.reward)[ends]]))
    assert returns.min() > 1.4 and returns.max() < 2.2
    assert set(np.asarray(seen["goal"])) == {0, 1, 2, 3}
