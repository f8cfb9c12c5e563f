"""Episodes of host environments: counted right, masked, and none that broke off."""

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill import envs
from rollmill.programs.evaluation.host_environments import evaluate_on_host
from wordings import raises


class Countdown(gymnasium.Env):
    """Ends after a drawn number of steps; the reward is 2 for the only legal action and -100 for others."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)
    info = {"action_mask": np.array([False, True])}
    fails_at = np.inf

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.np_random.integers(1, 6)
        return np.zeros(4), self.info

    def step(self, action):
        self.left -= 1
        if self.left >= self.fails_at:
            raise RuntimeError("out of breath")
        return np.zeros(4), 2.0 if action == 1 else -100.0, self.left == 0, False, self.info


@pytest.fixture(scope="module")
def policy():
    graph = rollmill.ppo(rollmill.make("CartPole-v1"), num_envs=4, num_steps=4, total_timesteps=16)
    learner = graph.start_learner(jax.random.key(0))
    return graph, graph.weights(learner)


def test_every_episode_counts_once_and_masks_are_kept(policy):
    env = envs.host_environment("Countdown", Countdown)
    episodes = evaluate_on_host(*policy, env, episodes=19, seed=3, stochastic=True)
    assert episodes.returns.shape == episodes.lengths.shape == (19,)
    np.testing.assert_array_equal(episodes.returns, 2 * episodes.lengths)
    assert set(episodes.lengths) <= set(range(1, 6)) and len(set(episodes.lengths)) > 2
    again = evaluate_on_host(*policy, env, episodes=19, seed=3, stochastic=True)
    np.testing.assert_array_equal(again.lengths, episodes.lengths)


def test_an_environment_that_raises_ends_the_evaluation(policy):
    class Breathless(Countdown):
        fails_at = 2

    env = envs.host_environment("Breathless", Breathless)
    with raises("raised-at", "Breathless", "step", "RuntimeError: out of breath", "raise RuntimeEr"):
        evaluate_on_host(*policy, env, episodes=19)


def test_evaluations_do_not_begin_with_the_seeds_of_trainings(policy):
    seeds = []

    class Seeded(Countdown):
        def reset(self, *, seed=None, options=None):
            seeds.extend([] if seed is None else [seed])
            return super().reset(seed=seed)

    env = envs.host_environment("Seeded", Seeded)
    seeds.clear()
    evaluate_on_host(*policy, env, episodes=8, seed=3)
    played, trained = set(seeds), set(env.start(range(8), seed=3).seeds)
    assert len(played) == len(trained) == 8 and not played & trained
    seeds.clear()
    evaluate_on_host(*policy, env, episodes=8, seed=3)
    assert set(seeds) == played
