"""Trains with RLlib and prints how fast, as JSON; runs in a Python that has ray[rllib]==2.60.0 and PyTorch.

    .rllib/bin/python benchmarks/rllib_training.py '{"algorithm": "ppo", "environment": "CartPole-v1", ...}'

`distribution.py` writes the settings. Uses RLlib's new API stack; Rollmill's `num_steps` is the rollout fragment,
and one batch is `num_envs x num_steps` on both sides. The clock runs from the first result after `warm_up`
environment steps to the one after `total_timesteps`, or for some `seconds`. No logger of RLlib is active.
"""

import json
import os
import sys
import time
import warnings
from importlib.metadata import version
from typing import Any

warnings.filterwarnings("ignore")
SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
os.environ.update(RAY_DEDUP_LOGS="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", RAY_USAGE_STATS_ENABLED="0")
os.environ["OMP_NUM_THREADS"] = str(SETTINGS["torch_threads"])  # before PyTorch is imported, here and in workers

import ray  # noqa: E402
import torch  # noqa: E402
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig  # noqa: E402
from ray.rllib.algorithms.impala import IMPALAConfig  # noqa: E402
from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig  # noqa: E402

SECONDS_EACH = 1.0
"""Seconds of training between two results, so that making results costs RLlib little."""


def main() -> None:
    began = time.perf_counter()
    torch.set_num_threads(SETTINGS["torch_threads"])
    ray.init("local", num_cpus=8, include_dashboard=False, configure_logging=False, log_to_driver=False)
    algorithm = configuration(SETTINGS).build_algo()
    built = time.perf_counter() - began
    figures = measure(algorithm, SETTINGS)
    algorithm.stop()
    ray.shutdown()
    packages = {name: version(name) for name in ("ray", "torch", "gymnasium", "mujoco")}
    print(json.dumps({**figures, "startup_seconds": built, "versions": packages}))


def configuration(settings: dict[str, Any]) -> AlgorithmConfig:
    runners, envs = settings["num_env_runners"], settings["num_envs"]
    network = DefaultModelConfig(
        fcnet_hiddens=settings["hidden_sizes"],
        fcnet_activation=settings["activation"],
        head_fcnet_hiddens=[],
        vf_share_layers=settings["shared_torso"],
        free_log_std=settings["continuous"],
    )
    return (
        trained_by(settings)
        .environment(settings["environment"])
        .framework("torch")
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=envs // max(runners, 1),
            rollout_fragment_length=settings["num_steps"],
            gym_env_vectorize_mode=settings["vectorize_mode"],
        )
        .learners(num_learners=settings["num_learners"], num_gpus_per_learner=0)
        .rl_module(model_config=network)
        .reporting(min_time_s_per_iteration=SECONDS_EACH)
        .debugging(seed=settings["seed"], log_level="ERROR")
    )


def trained_by(settings: dict[str, Any]) -> AlgorithmConfig:
    batch = settings["num_envs"] * settings["num_steps"]
    common = {
        "train_batch_size_per_learner": batch,
        "lr": settings["learning_rate"],
        "gamma": settings["gamma"],
        "entropy_coeff": settings["ent_coef"],
        "vf_loss_coeff": settings["vf_coef"],
        "grad_clip": settings["max_grad_norm"],
        "grad_clip_by": "global_norm",
    }
    if settings["algorithm"] == "impala":
        return IMPALAConfig().training(**common)
    return PPOConfig().training(
        minibatch_size=batch // settings["num_minibatches"],
        num_epochs=settings["update_epochs"],
        lambda_=settings["gae_lambda"],
        clip_param=settings["clip_coef"],
        use_kl_loss=False,
        vf_clip_param=float("inf"),
        **common,
    )


def measure(algorithm: Any, settings: dict[str, Any]) -> dict[str, Any]:
    first = last = None
    while last is None or not over(first, last, settings):
        last = look(algorithm.train(), settings["update_epochs"])
        if first is None and last["env_steps"] >= settings["warm_up"]:
            first = last
    seconds = last["at"] - first["at"]
    return {
        "steps_per_second": (last["env_steps"] - first["env_steps"]) / seconds,
        "learned_per_second": (last["learned"] - first["learned"]) / seconds,
        "seconds": seconds,
        "env_steps": last["env_steps"],
        "final_return": last["return"],
    }


def look(result: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Returns the steps sampled, and the steps learned from, whatever the number of epochs."""
    runners, learners = result["env_runners"], result.get("learners", {})
    passed = learners.get("__all_modules__", {}).get("num_module_steps_trained_lifetime", 0)
    return {
        "at": time.perf_counter(),
        "env_steps": int(runners.get("num_env_steps_sampled_lifetime", 0)),
        "learned": float(passed) / epochs,
        "return": runners.get("episode_return_mean"),
    }


def over(first: dict[str, Any] | None, last: dict[str, Any], settings: dict[str, Any]) -> bool:
    if first is None or first is last:
        return False
    if settings["seconds"] is not None:
        return last["at"] - first["at"] >= settings["seconds"]
    return last["env_steps"] >= settings["total_timesteps"]


if __name__ == "__main__":
    main()
