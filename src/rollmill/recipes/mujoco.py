"""PPO on Gymnasium's MuJoCo environments, which are host environments."""

from rollmill.algorithms import PPOConfig
from rollmill.recipes.classic import Recipe


def half_cheetah() -> Recipe:
    """PPO on HalfCheetah-v5 in 1,000,000 steps.

    The hyperparameters are those of CleanRL's `ppo_continuous_action.py`, with its batch of 2,048 steps collected
    in 8 environments instead of one.
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


RECIPES = {"half-cheetah": half_cheetah}
