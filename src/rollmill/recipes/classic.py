"""PPO, A3C, IMPALA and DQN on the classic environments.

The `rejax_*` recipes contain the hyperparameters that Rejax 0.1 publishes for its PPO (configs/gymnax/*.yaml in
its repository), for comparisons. The `*_two_cores` recipes are tuned for wall time on two CPU cores.
"""

from typing import Any, NamedTuple

from rollmill.algorithms import A3CConfig, DQNConfig, IMPALAConfig, PPOConfig
from rollmill.core.types import NO_OPTIONS, Options
from rollmill.networks import NetworkConfig


class Recipe(NamedTuple):
    """An algorithm, an environment with its options, and a complete set of hyperparameters."""

    algorithm: str
    environment: str
    config: Any
    """Hyperparameters, an instance of the algorithm's config class."""
    summary: str
    """One line for `rollmill list`."""
    env_options: Options = NO_OPTIONS


def cartpole_two_cores() -> Recipe:
    """PPO on CartPole-v1, which is solved in a few seconds on two CPU cores."""
    config = PPOConfig(
        total_timesteps=150_000,
        num_envs=32,
        num_steps=64,
        update_epochs=8,
        num_minibatches=4,
        learning_rate=2.5e-3,
        clip_vloss=False,
        normalize_values=False,
    )
    return Recipe("ppo", "CartPole-v1", config, "CartPole-v1 in a few seconds on two cores")


def mountain_car() -> Recipe:
    """PPO on MountainCar-v0 in 500,000 steps.

    As in RL Zoo (hyperparams/ppo.yml), 16 environments take 16 steps between updates, and observations and rewards
    are normalised. A velocity, which is at most 0.07, then has the same influence as a position.
    """
    config = PPOConfig(
        total_timesteps=500_000,
        num_envs=16,
        num_steps=16,
        gae_lambda=0.98,
        normalize_observations=True,
        normalize_rewards=True,
    )
    return Recipe("ppo", "MountainCar-v0", config, "MountainCar-v0 in half a million steps")


def a3c_cartpole() -> Recipe:
    """A3C on CartPole-v1, with settings that tolerate gradients from weights that are some updates old."""
    config = A3CConfig(
        total_timesteps=500_000,
        num_envs=16,
        num_steps=16,
        learning_rate=3e-3,
        norm_adv=False,
        normalize_values=False,
    )
    return Recipe("a3c", "CartPole-v1", config, "CartPole-v1 with A3C, in one program or by workers")


def impala_cartpole() -> Recipe:
    """IMPALA on CartPole-v1, with settings that tolerate trajectories from weights that are some updates old."""
    config = IMPALAConfig(
        total_timesteps=500_000,
        num_envs=16,
        num_steps=16,
        learning_rate=3e-3,
        rms_eps=1e-7,
        rms_bias_correction=True,
    )
    return Recipe("impala", "CartPole-v1", config, "CartPole-v1 with IMPALA, in one program or from actors")


def rainbow() -> Recipe:
    """Rainbow DQN on CartPole-v1 (Hessel et al., AAAI 2018), with random actions instead of noisy layers."""
    config = DQNConfig(
        total_timesteps=100_000,
        double=True,
        duelling=True,
        prioritised=True,
        n_step=3,
        value_distribution="c51",
    )
    return Recipe("dqn", "CartPole-v1", config, "CartPole-v1 with Rainbow without noisy layers")


def rejax_cartpole() -> Recipe:
    """PPO on CartPole-v1 with the hyperparameters of Rejax, over 500,000 steps instead of 100,000."""
    return Recipe("ppo", "CartPole-v1", _rejax_small(), "Rejax's hyperparameters for CartPole-v1")


def rejax_acrobot() -> Recipe:
    """PPO on Acrobot-v1 with the hyperparameters of Rejax, over 500,000 steps instead of 100,000."""
    config = _rejax_small(normalize_observations=True)
    return Recipe("ppo", "Acrobot-v1", config, "Rejax's hyperparameters for Acrobot-v1")


def rejax_pendulum() -> Recipe:
    """PPO on Pendulum-v1 with the hyperparameters of Rejax, over 500,000 steps instead of 150,000."""
    config = PPOConfig(
        total_timesteps=500_000,
        num_envs=100,
        num_steps=100,
        update_epochs=10,
        num_minibatches=10,
        learning_rate=1e-3,
        anneal_lr=False,
        max_grad_norm=10.0,
        gamma=0.995,
        ent_coef=0.0,
        normalize_observations=True,
        normalize_values=False,
        network=NetworkConfig(activation="swish"),
    )
    return Recipe("ppo", "Pendulum-v1", config, "Rejax's hyperparameters for Pendulum-v1")


def t_maze_gru() -> Recipe:
    """PPO with a recurrent policy on TMaze-v0, which needs a memory."""
    config = PPOConfig(
        total_timesteps=150_000,
        num_envs=64,
        num_steps=64,
        learning_rate=1e-3,
        normalize_values=False,
        network=NetworkConfig(torso="gru"),
    )
    return Recipe("ppo", "TMaze-v0", config, "TMaze-v0, which only a policy with memory solves")


def _rejax_small(**overrides: Any) -> PPOConfig:
    return PPOConfig(
        total_timesteps=500_000,
        num_envs=5,
        num_steps=100,
        update_epochs=5,
        num_minibatches=5,
        learning_rate=7.5e-4,
        anneal_lr=False,
        normalize_values=False,
        **overrides,
    )


RECIPES = {
    "a3c-cartpole": a3c_cartpole,
    "cartpole-two-cores": cartpole_two_cores,
    "impala-cartpole": impala_cartpole,
    "mountain-car": mountain_car,
    "rainbow": rainbow,
    "rejax-acrobot": rejax_acrobot,
    "rejax-cartpole": rejax_cartpole,
    "rejax-pendulum": rejax_pendulum,
    "t-maze-gru": t_maze_gru,
}
