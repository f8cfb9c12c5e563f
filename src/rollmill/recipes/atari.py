"""PPO on games of the Atari 2600, which are host environments."""

from rollmill.algorithms import PPOConfig
from rollmill.networks import NetworkConfig
from rollmill.recipes.classic import Recipe


def pong() -> Recipe:
    """PPO on Pong in 10,000,000 steps, which are 40,000,000 frames.

    Hyperparameters and network are those of Huang et al., "The 37 Implementation Details of Proximal Policy
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


RECIPES = {"atari-pong": pong}
