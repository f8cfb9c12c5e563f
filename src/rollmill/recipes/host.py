"""PPO on host environments: Atari 2600 games, and environments of Gymnasium."""

from rollmill.algorithms import PPOConfig
from rollmill.networks import NetworkConfig
from rollmill.recipes.classic import Recipe


def pong() -> Recipe:
    """PPO on Pong in 10,000,000 steps, which are 40,000,000 frames.

    Hyperparameters and network follow Huang et al., "The 37 Implementation Details of Proximal Policy
    Optimization" (2022), after Schulman et al. (2017).
    """
    config = PPOConfig(
        total_timesteps=10_000_000,
        num_envs=8,
        num_steps=128,
        update_epochs=4,
        num_minibatches=4,
        learning_rate=2.5e-4,
        clip_coef=0.1,
        ent_coef=0.01,
        vf_coef=0.5,
        max_grad_norm=0.5,
        normalize_values=False,
        network=NetworkConfig(torso="cnn", hidden_sizes=(512,), activation="relu", shared_torso=True),
    )
    return Recipe("ppo", "ale:Pong", config, "Pong in 10 million steps; fits other Atari games too")


def half_cheetah() -> Recipe:
    """PPO on HalfCheetah-v5 in 1,000,000 steps.

    The hyperparameters follow CleanRL's `ppo_continuous_action.py`, with its batch of 2,048 steps collected in 8
    environments instead of one.
    """
    config = PPOConfig(
        total_timesteps=1_000_000,
        num_envs=8,
        num_steps=256,
        update_epochs=10,
        num_minibatches=32,
        learning_rate=3e-4,
        ent_coef=0.0,
        normalize_observations=True,
        normalize_rewards=True,
        normalize_values=False,
    )
    return Recipe("ppo", "gymnasium:HalfCheetah-v5", config, "HalfCheetah-v5 in a million steps")


def lunar_lander() -> Recipe:
    """PPO on LunarLander-v3 in 1,000,000 steps.

    Batches, discount and learning rate follow RL Zoo (hyperparams/ppo.yml). Unlike there, observations and values
    are normalised, as by default.
    """
    config = PPOConfig(
        total_timesteps=1_000_000,
        num_envs=16,
        num_steps=1_024,
        update_epochs=4,
        num_minibatches=256,
        learning_rate=3e-4,
        gamma=0.999,
        gae_lambda=0.98,
        ent_coef=0.01,
    )
    return Recipe("ppo", "gymnasium:LunarLander-v3", config, "LunarLander-v3 in a million steps")


RECIPES = {"atari-pong": pong, "half-cheetah": half_cheetah, "lunar-lander": lunar_lander}
