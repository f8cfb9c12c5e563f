"""PPO on robots, with the hyperparameters that IsaacGymEnvs publishes for its tasks (cfg/train/*PPO.yaml there).

IsaacGymEnvs scales rewards before learning, whereas these recipes standardise values instead. At each minibatch,
the learning rate follows a one-sample estimate of the KL divergence, whereas IsaacGymEnvs uses the divergence of
Gaussians.
"""

from typing import Any

from rollmill.algorithms import PPOConfig
from rollmill.networks import NetworkConfig
from rollmill.recipes.classic import Recipe


def robots_ant() -> Recipe:
    """PPO on robots:Ant in 32,768,000 steps."""
    config = _isaac(
        total_timesteps=500 * 4_096 * 16,
        num_envs=4_096,
        num_minibatches=2,
        update_epochs=4,
        vf_coef=2.0,
        max_grad_norm=float("inf"),
        network=_network(256, 128, 64),
    )
    return Recipe("ppo", "robots:Ant", config, "Isaac Gym's hyperparameters for its ant")


def robots_anymal() -> Recipe:
    """PPO on robots:Anymal in 98,304,000 steps."""
    config = _isaac(
        total_timesteps=1000 * 4_096 * 24,
        num_envs=4_096,
        num_steps=24,
        num_minibatches=3,
        update_epochs=5,
        vf_coef=2.0,
        max_grad_norm=1.0,
        bound_coef=1e-3,
        network=_network(256, 128, 64),
    )
    return Recipe("ppo", "robots:Anymal", config, "Isaac Gym's hyperparameters for its quadruped")


def robots_ball_balance() -> Recipe:
    """PPO on robots:BallBalance in 16,384,000 steps."""
    config = _isaac(
        total_timesteps=250 * 4_096 * 16,
        num_envs=4_096,
        num_minibatches=8,
        update_epochs=8,
        vf_coef=4.0,
        max_grad_norm=1.0,
        network=_network(128, 64, 32),
    )
    return Recipe("ppo", "robots:BallBalance", config, "Isaac Gym's hyperparameters for its tray and ball")


def robots_cartpole() -> Recipe:
    """PPO on robots:Cartpole in 819,200 steps."""
    config = _isaac(
        total_timesteps=100 * 512 * 16,
        num_envs=512,
        num_minibatches=1,
        update_epochs=8,
        vf_coef=4.0,
        max_grad_norm=1.0,
        network=_network(32, 32),
    )
    return Recipe("ppo", "robots:Cartpole", config, "Isaac Gym's hyperparameters for its cart and pole")


def robots_franka_cabinet() -> Recipe:
    """PPO on robots:FrankaCabinet in 98,304,000 steps."""
    config = _isaac(
        total_timesteps=1500 * 4_096 * 16,
        num_envs=4_096,
        num_minibatches=8,
        update_epochs=8,
        learning_rate=5e-4,
        vf_coef=4.0,
        max_grad_norm=1.0,
        network=_network(256, 128, 64),
    )
    return Recipe("ppo", "robots:FrankaCabinet", config, "Isaac Gym's hyperparameters for its arm and drawer")


def robots_humanoid() -> Recipe:
    """PPO on robots:Humanoid in 131,072,000 steps."""
    config = _isaac(
        total_timesteps=1000 * 4_096 * 32,
        num_envs=4_096,
        num_steps=32,
        num_minibatches=4,
        update_epochs=5,
        learning_rate=5e-4,
        vf_coef=4.0,
        max_grad_norm=1.0,
        network=_network(400, 200, 100),
    )
    return Recipe("ppo", "robots:Humanoid", config, "Isaac Gym's hyperparameters for its humanoid")


def robots_ingenuity() -> Recipe:
    """PPO on robots:Ingenuity in 32,768,000 steps."""
    config = _flying(total_timesteps=500 * 4_096 * 16, num_envs=4_096)
    return Recipe("ppo", "robots:Ingenuity", config, "Isaac Gym's hyperparameters for its helicopter")


def robots_quadcopter() -> Recipe:
    """PPO on robots:Quadcopter in 32,768,000 steps."""
    config = _flying(total_timesteps=500 * 8_192 * 8, num_envs=8_192, num_steps=8)
    return Recipe("ppo", "robots:Quadcopter", config, "Isaac Gym's hyperparameters for its quadcopter")


def robots_shadow_hand() -> Recipe:
    """PPO on robots:ShadowHand in 655,360,000 steps."""
    config = _isaac(
        total_timesteps=5000 * 16_384 * 8,
        num_envs=16_384,
        num_steps=8,
        num_minibatches=4,
        update_epochs=5,
        learning_rate=5e-4,
        desired_kl=0.016,
        vf_coef=4.0,
        max_grad_norm=1.0,
        network=_network(512, 512, 256, 128),
    )
    return Recipe("ppo", "robots:ShadowHand", config, "Isaac Gym's hyperparameters for its hand")


def _flying(**settings: Any) -> PPOConfig:
    common: dict[str, Any] = {
        "num_minibatches": 4,
        "update_epochs": 8,
        "learning_rate": 1e-3,
        "desired_kl": 0.016,
        "vf_coef": 2.0,
        "max_grad_norm": 1.0,
        "network": _network(256, 256, 128),
    }
    return _isaac(**common, **settings)


def _network(*sizes: int) -> NetworkConfig:
    return NetworkConfig(hidden_sizes=sizes, activation="elu", shared_torso=True)


def _isaac(**settings: Any) -> PPOConfig:
    """Returns hyperparameters with what the tasks have in common."""
    common: dict[str, Any] = {
        "num_steps": 16,
        "learning_rate": 3e-4,
        "anneal_lr": False,
        "desired_kl": 0.008,
        "min_learning_rate": 1e-6,
        "max_learning_rate": 1e-2,
        "bound_coef": 1e-4,
        "ent_coef": 0.0,
        "normalize_observations": True,
    }
    return PPOConfig(**{**common, **settings})


RECIPES = {
    "robots-ant": robots_ant,
    "robots-anymal": robots_anymal,
    "robots-ball-balance": robots_ball_balance,
    "robots-cartpole": robots_cartpole,
    "robots-franka-cabinet": robots_franka_cabinet,
    "robots-humanoid": robots_humanoid,
    "robots-ingenuity": robots_ingenuity,
    "robots-quadcopter": robots_quadcopter,
    "robots-shadow-hand": robots_shadow_hand,
}
