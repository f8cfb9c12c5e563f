"""The training of tests that need one, whichever: its program is compiled once and then loaded by all of them."""

import rollmill

TINY = rollmill.NetworkConfig(hidden_sizes=(8,))
STEPS = 8 * 8
"""Steps of an iteration."""
SIZES = {"num_envs": 8, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1, "network": TINY}


def small_ppo(iterations=1, **config):
    """Returns PPO on CartPole, which learns from 64 steps in each iteration."""
    return rollmill.ppo("CartPole-v1", **({"total_timesteps": STEPS * iterations, **SIZES} | config))
