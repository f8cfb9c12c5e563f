"""Step by step, the classic environments give Gymnasium's numbers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.envs import make
from rollmill.envs.acrobot import AcrobotState
from rollmill.envs.cartpole import CartPoleState
from rollmill.envs.mountain_car import MountainCarState
from rollmill.envs.pendulum import PendulumState
from rollmill.envs.transforms import TimeLimitState

RANDOM_STEPS, DRIVEN_STEPS = 1000, 500


class Case(NamedTuple):
    state: type
    drive: Callable[[np.ndarray], Any]
    """Actions that reach the episode's end by termination, where there is one."""
    idle: Callable[[Any], Any]
    """Actions that reach the time limit, by NumPy or JAX."""
    limit: int
    terminates: bool = True
    angles: int = 0
    """How many components of the state, from the first, are angles that are kept within one turn."""


def _balance(observation):
    position, velocity, angle, rate = observation
    return (angle + 0.3 * rate + 0.01 * position + 0.03 * velocity > 0).astype(np.int32)


CASES = {
    "CartPole-v1": Case(CartPoleState, lambda state: 1, _balance, 500),
    "Acrobot-v1": Case(AcrobotState, lambda state: 2 if state[3] > 0 else 0, lambda o: 1, 500, angles=2),
    "MountainCar-v0": Case(MountainCarState, lambda state: 2 if state[1] >= 0 else 0, lambda o: 1, 200),
    "MountainCarContinuous-v0": Case(
        MountainCarState,
        lambda state: np.array([1.3 if state[1] >= 0 else -1.3], np.float32),
        lambda o: np.zeros(1, np.float32),
        999,
    ),
    "Pendulum-v1": Case(
        PendulumState,
        lambda state: np.array([3.0 if state[1] >= 0 else -3.0], np.float32),
        lambda o: np.zeros(1, np.float32),
        200,
        terminates=False,
        angles=1,
    ),
}


class Recorded(NamedTuple):
    before: np.ndarray
    action: np.ndarray
    observation: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    after: np.ndarray


def record_gymnasium(name, policy, num_steps):
    """`num_steps` of Gymnasium's environment, anew after each termination or 200 steps."""
    env = gymnasium.make(name).unwrapped
    env.reset(seed=1)
    rows, age = [], 0
    for _ in range(num_steps):
        before = np.array(env.state, np.float64)
        action = policy(before)
        observation, reward, terminated, _, _ = env.step(action)
        rows.append((before, action, np.array(observation), reward, terminated, np.array(env.state, np.float64)))
        age += 1
        if terminated or age == 200:
            env.reset()
            age = 0
    return Recorded(*(np.stack(column) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize("driven", [False, True], ids=["random", "driven"])
@pytest.mark.parametrize("name", CASES)
def test_every_step_equals_gymnasiums(name, driven):
    case, env = CASES[name], make(name)
    actions = gymnasium.make(name).action_space
    actions.seed(2)
    policy = case.drive if driven else lambda state: actions.sample()
    truth = record_gymnasium(name, policy, DRIVEN_STEPS if driven else RANDOM_STEPS)
    assert truth.terminated.any() == case.terminates or not driven

    @eqx.filter_jit
    @jax.vmap
    def step(before, action):
        state = TimeLimitState(inner=case.state(*before), elapsed=jnp.int32(0))
        timestep = env.step(jax.random.key(0), state, action, env.params)
        return timestep, jnp.stack(jax.tree.leaves(timestep.state.inner))

    dtype = np.float32 if env.action_space.shape else np.int32
    before = within_one_turn(truth.before, np.zeros_like(truth.before), case.angles)
    ours, after = step(before.astype(np.float32), truth.action.astype(dtype))
    np.testing.assert_array_equal(ours.terminated, truth.terminated)
    assert not np.asarray(ours.truncated).any()
    assert_components_close(ours.observation, truth.observation)
    assert_components_close(np.asarray(ours.reward)[:, None], truth.reward[:, None])
    assert_components_close(after, within_one_turn(truth.after, np.asarray(after), case.angles))


def within_one_turn(states, near, angles):
    """The states with the first `angles` components moved by whole turns next to those of `near`."""
    states = states.copy()
    turns = np.round((states[:, :angles] - near[:, :angles]) / (2 * np.pi))
    states[:, :angles] -= 2 * np.pi * turns
    return states


def assert_components_close(ours, truth):
    """1e-5 relative, each component; near zero, where float32 sums of larger terms cancel, 2e-6 of its
    range.

    The range matters: a cosine near zero is as precise as its angle, which is near pi / 2.
    """
    for component in range(truth.shape[1]):
        found, expected = np.asarray(ours)[:, component], truth[:, component]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_the_time_limit_is_gymnasiums(name):
    case, env = CASES[name], make(name)
    theirs = gymnasium.make(name)
    observation, _ = theirs.reset(seed=0)
    flags = []
    for _ in range(case.limit):
        observation, _, terminated, truncated, _ = theirs.step(case.idle(observation))
        flags.append((terminated, truncated))

    def step(carry, key):
        observation, state = carry
        action = jnp.asarray(case.idle(observation))
        timestep = env.step(key, state, action, env.params)
        return (timestep.observation, timestep.state), (timestep.terminated, timestep.truncated)

    @eqx.filter_jit
    def episode(key):
        return jax.lax.scan(step, env.reset(key, env.params), jax.random.split(key, case.limit))[1]

    terminated, truncated = episode(jax.random.key(0))
    np.testing.assert_array_equal(np.stack([terminated, truncated], axis=1), np.array(flags))
    assert not np.asarray(terminated).any()
    np.testing.assert_array_equal(truncated, np.arange(1, case.limit + 1) == case.limit)


@pytest.mark.parametrize("name", CASES)
def test_resets_are_distributed_as_gymnasiums(name):
    env, theirs = make(name), gymnasium.make(name)
    ours, _ = eqx.filter_jit(jax.vmap(env.reset, in_axes=(0, None)))(
        jax.random.split(jax.random.key(3), 4000), env.params
    )
    truth = np.stack([theirs.reset(seed=seed)[0] for seed in range(1000)])
    width = np.maximum(truth.max(axis=0) - truth.min(axis=0), 1e-6)
    for quantile in (0.0, 0.25, 0.5, 0.75, 1.0):
        found, expected = np.quantile(ours, quantile, axis=0), np.quantile(truth, quantile, axis=0)
        assert (np.abs(found - expected) < 0.08 * width).all(), (quantile, found, expected)


@pytest.mark.parametrize("name", CASES)
def test_spaces_are_gymnasiums(name):
    env, theirs = make(name), gymnasium.make(name)
    assert env.observation_space == theirs.observation_space
    assert env.action_space == theirs.action_space
