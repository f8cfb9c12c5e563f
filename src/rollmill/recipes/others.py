"""Defaults of other libraries, for users who come from these libraries.

`sb3_*` recipes contain the defaults of Stable-Baselines3 2.7, and `cleanrl_*` recipes the defaults in the CleanRL
files with the same names. Stable-Baselines3 does not halve the squared error of a value, so `vf_coef` is twice as
large in the recipe. Both libraries count steps between moves of a target network, whereas Rollmill counts updates.
"""

from rollmill.algorithms import DQNConfig, PPOConfig, SACConfig, TD3Config
from rollmill.networks import NetworkConfig
from rollmill.recipes.classic import Recipe

INFINITE = float("inf")


def sb3_ppo() -> Recipe:
    """PPO on CartPole-v1 with the defaults of Stable-Baselines3, over 100,000 steps."""
    config = PPOConfig(
        total_timesteps=100_000,
        num_envs=1,
        num_steps=2_048,
        update_epochs=10,
        num_minibatches=32,
        learning_rate=3e-4,
        anneal_lr=False,
        clip_vloss=False,
        ent_coef=0.0,
        vf_coef=1.0,
        normalize_observations=False,
        normalize_values=False,
    )
    return Recipe("ppo", "CartPole-v1", config, "defaults of Stable-Baselines3's PPO")


def sb3_dqn() -> Recipe:
    """`DQN("MlpPolicy", env)` of Stable-Baselines3, over 100,000 steps."""
    config = DQNConfig(
        total_timesteps=100_000,
        num_envs=1,
        num_steps=4,
        gradient_steps=1,
        buffer_size=1_000_000,
        batch_size=32,
        learning_starts=100,
        learning_rate=1e-4,
        anneal_lr=False,
        tau=1.0,
        target_interval=2_500,
        exploration_fraction=0.1,
        double=False,
        n_step=1,
        huber=True,
        network=NetworkConfig(hidden_sizes=(64, 64), activation="relu"),
    )
    return Recipe("dqn", "CartPole-v1", config, "defaults of Stable-Baselines3's DQN")


def sb3_sac() -> Recipe:
    """`SAC("MlpPolicy", env)` of Stable-Baselines3, over 100,000 steps. Learning starts with a whole batch."""
    config = SACConfig(total_timesteps=100_000, num_envs=1, learning_starts=256, critic_learning_rate=3e-4)
    return Recipe("sac", "Pendulum-v1", config, "defaults of Stable-Baselines3's SAC")


def sb3_td3() -> Recipe:
    """`TD3("MlpPolicy", env)` of Stable-Baselines3, without noise. Learning starts with a whole batch."""
    config = TD3Config(
        total_timesteps=100_000,
        num_envs=1,
        learning_starts=256,
        learning_rate=1e-3,
        exploration_noise=0.0,
        network=NetworkConfig(hidden_sizes=(400, 300), activation="relu"),
    )
    return Recipe("td3", "Pendulum-v1", config, "defaults of Stable-Baselines3's TD3")


def cleanrl_ppo() -> Recipe:
    """PPO with the defaults of `ppo.py` in CleanRL."""
    config = PPOConfig(
        total_timesteps=500_000,
        num_envs=4,
        num_steps=128,
        learning_rate=2.5e-4,
        normalize_observations=False,
        normalize_values=False,
    )
    return Recipe("ppo", "CartPole-v1", config, "defaults of CleanRL's ppo.py")


def cleanrl_ppo_continuous() -> Recipe:
    """PPO with the defaults of `ppo_continuous_action.py` in CleanRL, without bounds on normalised values."""
    config = PPOConfig(
        total_timesteps=1_000_000,
        num_envs=1,
        num_steps=2_048,
        update_epochs=10,
        num_minibatches=32,
        learning_rate=3e-4,
        ent_coef=0.0,
        normalize_observations=True,
        normalize_rewards=True,
        normalize_values=False,
    )
    return Recipe("ppo", "gymnasium:HalfCheetah-v5", config, "defaults of CleanRL's ppo_continuous_action.py")


def cleanrl_dqn() -> Recipe:
    """DQN with the defaults of `dqn.py` in CleanRL."""
    config = DQNConfig(
        total_timesteps=500_000,
        num_envs=1,
        num_steps=10,
        gradient_steps=1,
        buffer_size=10_000,
        learning_starts=10_000,
        learning_rate=2.5e-4,
        anneal_lr=False,
        max_grad_norm=INFINITE,
        tau=1.0,
        target_interval=50,
        exploration_fraction=0.5,
        double=False,
        n_step=1,
    )
    return Recipe("dqn", "CartPole-v1", config, "defaults of CleanRL's dqn.py")


def cleanrl_sac() -> Recipe:
    """SAC with the defaults of `sac_continuous_action.py` in CleanRL.

    In CleanRL, the actor learns twice at every other update. In Rollmill, it learns once at every update.
    """
    config = SACConfig(num_envs=1)
    return Recipe("sac", "gymnasium:Hopper-v5", config, "defaults of CleanRL's sac_continuous_action.py")


RECIPES = {
    "cleanrl-dqn": cleanrl_dqn,
    "cleanrl-ppo": cleanrl_ppo,
    "cleanrl-ppo-continuous": cleanrl_ppo_continuous,
    "cleanrl-sac": cleanrl_sac,
    "sb3-dqn": sb3_dqn,
    "sb3-ppo": sb3_ppo,
    "sb3-sac": sb3_sac,
    "sb3-td3": sb3_td3,
}
