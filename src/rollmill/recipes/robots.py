"""PPO on robots, with the hyperparameters that IsaacGymEnvs publishes for its tasks (cfg/train/*PPO.yaml there).

IsaacGymEnvs scales rewards before learning, whereas these recipes standardise values instead. At each minibatch,
the learning rate follows a one-sample estimate of the KL divergence, whereas IsaacGymEnvs uses the divergence of
Gaussians.
"""

from functools import partial
from typing import Any

from rollmill.algorithms import PPOConfig
from rollmill.networks import NetworkConfig
from rollmill.recipes.classic import Recipe


def _isaac(task: str, machine: str, sizes: tuple[int, ...], *, iterations: int, **settings: Any) -> Recipe:
    """Returns the recipe of a task, with the settings that the tasks have in common.

    `sizes` are those of the network's hidden layers. `machine` completes the sentence about its origin.
    """
    common: dict[str, Any] = {
        "num_envs": 4_096,
        "num_steps": 16,
        "learning_rate": 3e-4,
        "anneal_lr": False,
        "desired_kl": 0.008,
        "min_learning_rate": 1e-6,
        "max_learning_rate": 1e-2,
        "bound_coef": 1e-4,
        "ent_coef": 0.0,
        "vf_coef": 4.0,
        "max_grad_norm": 1.0,
        "normalize_observations": True,
        "network": NetworkConfig(hidden_sizes=sizes, activation="elu", shared_torso=True),
    }
    chosen = common | settings
    steps = iterations * chosen["num_envs"] * chosen["num_steps"]
    config = PPOConfig(total_timesteps=steps, **chosen)
    return Recipe("ppo", f"robots:{task}", config, f"Isaac Gym's hyperparameters for its {machine}")


_FLYING = {"num_minibatches": 4, "update_epochs": 8, "learning_rate": 1e-3, "desired_kl": 0.016, "vf_coef": 2.0}

RECIPES = {
    "robots-ant": partial(
        _isaac,
        "Ant",
        "ant",
        (256, 128, 64),
        iterations=500,
        num_minibatches=2,
        update_epochs=4,
        vf_coef=2.0,
        max_grad_norm=float("inf"),
    ),
    "robots-anymal": partial(
        _isaac,
        "Anymal",
        "quadruped",
        (256, 128, 64),
        iterations=1000,
        num_steps=24,
        num_minibatches=3,
        update_epochs=5,
        vf_coef=2.0,
        bound_coef=1e-3,
    ),
    "robots-ball-balance": partial(
        _isaac, "BallBalance", "tray and ball", (128, 64, 32), iterations=250, num_minibatches=8, update_epochs=8
    ),
    "robots-cartpole": partial(
        _isaac,
        "Cartpole",
        "cart and pole",
        (32, 32),
        iterations=100,
        num_envs=512,
        num_minibatches=1,
        update_epochs=8,
    ),
    "robots-franka-cabinet": partial(
        _isaac,
        "FrankaCabinet",
        "arm and drawer",
        (256, 128, 64),
        iterations=1500,
        num_minibatches=8,
        update_epochs=8,
        learning_rate=5e-4,
    ),
    "robots-humanoid": partial(
        _isaac,
        "Humanoid",
        "humanoid",
        (400, 200, 100),
        iterations=1000,
        num_steps=32,
        num_minibatches=4,
        update_epochs=5,
        learning_rate=5e-4,
    ),
    "robots-ingenuity": partial(_isaac, "Ingenuity", "helicopter", (256, 256, 128), iterations=500, **_FLYING),
    "robots-quadcopter": partial(
        _isaac, "Quadcopter", "quadcopter", (256, 256, 128), iterations=500, num_envs=8_192, num_steps=8, **_FLYING
    ),
    "robots-shadow-hand": partial(
        _isaac,
        "ShadowHand",
        "hand",
        (512, 512, 256, 128),
        iterations=5000,
        num_envs=16_384,
        num_steps=8,
        num_minibatches=4,
        update_epochs=5,
        learning_rate=5e-4,
        desired_kl=0.016,
    ),
}
