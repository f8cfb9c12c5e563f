"""Advantages against numbers worked out by hand, and against a loop."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.algorithms import bootstrap_values, generalised_advantages


@eqx.filter_jit
def estimate(reward, value, next_value, done, gamma, gae_lambda):
    return generalised_advantages(reward, value, next_value, done, gamma=gamma, gae_lambda=gae_lambda)


def floats(*values):
    return jnp.array(values, jnp.float32)


def flags(*values):
    return jnp.array(values, bool)


def bootstrap(value, last_value, final_value, terminated, truncated):
    found = eqx.filter_jit(bootstrap_values)(value, jnp.float32(last_value), final_value, terminated, truncated)
    return np.asarray(found)


def test_bootstrap_values_by_hand():
    """Steps: goes on, terminated, goes on, truncated, both at once, and the cut of the rollout."""
    found = bootstrap(
        value=floats(1, 2, 3, 4, 5, 6),
        last_value=7.0,
        final_value=floats(10, 20, 30, 40, 50, 60),
        terminated=flags(0, 1, 0, 0, 1, 0),
        truncated=flags(0, 0, 0, 1, 1, 0),
    )
    np.testing.assert_array_equal(found, [2, 0, 4, 40, 0, 7])


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"), [(0, 0, 7), (1, 0, 0), (0, 1, 60), (1, 1, 0)], ids=str
)
def test_the_last_step_of_a_rollout_can_end_an_episode(terminated, truncated, expected):
    found = bootstrap(floats(1, 2), 7.0, floats(50, 60), flags(0, terminated), flags(0, truncated))
    np.testing.assert_array_equal(found, [2, expected])


def test_final_values_are_read_only_at_truncations():
    """They may be anything elsewhere: not computed, for one."""
    nans = floats(*[np.nan] * 3)
    found = bootstrap(floats(1, 2, 3), 4.0, nans.at[1].set(9.0), flags(0, 0, 1), flags(0, 1, 1))
    np.testing.assert_array_equal(found, [2, 9, 0])


def test_generalised_advantages_by_hand():
    """gamma = 1/2, lambda = 1/2. The third step ends an episode and bootstraps from 8.

    deltas, from the back: 4 + 1/2 6 - 2 = 5; 3 + 1/2 8 - 1 = 6; 2 + 1/2 1 - 0 = 2.5; 1 + 1/2 0 - 4 = -3
    """
    advantage, target = estimate(
        floats(1, 2, 3, 4), floats(4, 0, 1, 2), floats(0, 1, 8, 6), flags(0, 0, 1, 0), 0.5, 0.5
    )
    np.testing.assert_array_equal(advantage, [-3 + 4 / 4, 2.5 + 6 / 4, 6, 5])
    np.testing.assert_array_equal(target, [2, 4, 7, 7])


def plain_loop(reward, value, last_value, final_value, terminated, truncated, gamma, gae_lambda):
    steps, advantage, following = len(reward), np.zeros(len(reward)), 0.0
    for t in reversed(range(steps)):
        if terminated[t]:
            next_value, following = 0.0, 0.0
        elif truncated[t]:
            next_value, following = final_value[t], 0.0
        else:
            next_value = value[t + 1] if t + 1 < steps else last_value
        following = reward[t] + gamma * next_value - value[t] + gamma * gae_lambda * following
        advantage[t] = following
    return advantage


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_generalised_advantages_are_those_of_a_plain_loop(gamma, gae_lambda):
    for seed in range(5):
        random = np.random.default_rng(seed)
        reward, value, final_value = random.normal(size=(3, 37)).astype(np.float32)
        last_value = np.float32(random.normal())
        terminated, truncated = random.random((2, 37)) < 0.2
        terminated[20 + seed] = truncated[20 + seed] = True
        next_value = bootstrap(*map(jnp.asarray, (value, last_value, final_value, terminated, truncated)))
        found = estimate(*map(jnp.asarray, (reward, value, next_value, terminated | truncated)), gamma, gae_lambda)
        expected = plain_loop(reward, value, last_value, final_value, terminated, truncated, gamma, gae_lambda)
        np.testing.assert_allclose(found.advantage, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.target, expected + value, rtol=1e-4, atol=1e-5)


def test_lambda_one_is_the_discounted_return_less_the_value():
    """Two episodes, the first terminated after 3 steps, the second cut with 10 to come."""
    reward, value = floats(1, 2, 3, 4, 5), floats(9, 8, 7, 6, 5)
    found = estimate(reward, value, floats(8, 7, 0, 5, 10), flags(0, 0, 1, 0, 0), 0.5, 1.0)
    returns = [1 + 2 / 2 + 3 / 4, 2 + 3 / 2, 3, 4 + 5 / 2 + 10 / 4, 5 + 10 / 2]
    np.testing.assert_array_equal(found.target, returns)
    np.testing.assert_array_equal(found.advantage, np.array(returns) - np.asarray(value))


def test_lambda_zero_is_the_one_step_error():
    reward, value, next_value = floats(1, 2, 3), floats(4, 5, 6), floats(5, 6, 2)
    for done in (flags(0, 0, 0), flags(1, 0, 1)):
        found = estimate(reward, value, next_value, done, 0.5, 0.0)
        np.testing.assert_array_equal(found.advantage, [1 + 2.5 - 4, 2 + 3 - 5, 3 + 1 - 6])
        np.testing.assert_array_equal(found.target, [3.5, 5, 4])
