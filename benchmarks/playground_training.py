"""PPO on MuJoCo Playground beside the PPO of Brax, with which its authors train: returns over steps and seconds.

    python benchmarks/playground_training.py CartpoleBalance CheetahRun
    python benchmarks/playground_training.py CartpoleBalance --sides rollmill --total-timesteps 10_000_000

Brax has the hyperparameters that Playground publishes for it (`mujoco_playground.config`). Rollmill has the same
number of environments, steps and discount, and otherwise its own: shorter iterations, fewer epochs, an annealed
learning rate, scaled rewards. Brax's seconds are those of its own clock (`training/walltime`), which includes the
compilation of its training. Rollmill's leave out compilation and evaluations. A return is the sum of unscaled
rewards, the mean over 128 whole episodes of the deterministic policy. Needs playground==0.2.0 and brax==0.14.2.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from brax.training.agents.ppo import train as brax_ppo
from measure import options, platform, some_of, write_result
from mujoco_playground import registry, wrapper
from mujoco_playground.config import dm_control_suite_params

import rollmill
from rollmill.hooks import PolicyEvaluated, TrainingEvent

EPISODES = 128
Curve = list[dict[str, float]]


def published_settings(name: str, total_timesteps: int) -> Any:
    """Returns Playground's hyperparameters of Brax's PPO for a task."""
    settings = dm_control_suite_params.brax_ppo_config(name)
    with settings.unlocked():
        settings.num_timesteps = total_timesteps
    return settings


def train_brax(name: str, settings: Any, chosen: Any) -> Curve:
    """Trains with Brax, evaluated as often as Playground's settings say."""
    if not hasattr(jax, "device_put_replicated"):  # Brax 0.14.2 calls it, and newer versions of JAX lack it
        add_axis = lambda leaf: jnp.asarray(leaf)[None]
        jax.device_put_replicated = lambda tree, devices: jax.device_put(jax.tree.map(add_axis, tree), devices[0])
    points: Curve = []

    def progress(steps: int, metrics: dict[str, Any]) -> None:
        seconds = metrics.get("training/walltime", 0.0)  # missing before the first iteration
        points.append(point_of("brax", name, int(steps), float(seconds), float(metrics["eval/episode_reward"])))

    brax_ppo.train(
        environment=registry.load(name, config_overrides={"impl": "jax"}),
        progress_fn=progress,
        seed=chosen.seed,
        num_eval_envs=EPISODES,
        deterministic_eval=True,
        wrap_env_fn=wrapper.wrap_for_brax_training,
        **{key: value for key, value in settings.items() if key != "network_factory"},
    )
    return points


def train_rollmill(name: str, settings: Any, chosen: Any) -> Curve:
    layers = {"hidden_sizes": tuple(chosen.hidden_sizes), "activation": "swish", "squash_actions": True}
    same = ("num_steps", "update_epochs", "num_minibatches", "learning_rate", "ent_coef")
    algorithm = rollmill.ppo(
        f"playground:{name}",
        total_timesteps=settings.num_timesteps,
        num_envs=settings.num_envs,
        gamma=settings.discounting,
        max_grad_norm=1.0,
        normalize_observations=True,
        normalize_rewards=True,
        network=rollmill.NetworkConfig(**layers),
        **{each: getattr(chosen, each) for each in same},
    )
    points: Curve = []

    def evaluated(event: TrainingEvent) -> None:
        if isinstance(event, PolicyEvaluated):
            mean = event.row["evaluation/return"]
            points.append(point_of("rollmill", name, event.env_steps, event.seconds, mean))

    every = settings.num_timesteps // settings.num_evals
    how = {"seed": chosen.seed, "quiet": True, "tensorboard": False, "hooks": [evaluated]}
    with tempfile.TemporaryDirectory() as folder:
        run = chosen.runs / name if chosen.runs else Path(folder, "run")
        rollmill.train(algorithm, run_dir=run, evaluate_every=every, evaluate_episodes=EPISODES, **how)
    return points


def point_of(side: str, name: str, steps: int, seconds: float, mean: float) -> dict[str, float]:
    print(f"{side}, {name}: {steps:,} steps, {seconds:.0f} s, return {mean:.1f}", flush=True)
    return {"steps": steps, "seconds": seconds, "return": mean}


SIDES = {"rollmill": train_rollmill, "brax": train_brax}


def main() -> None:
    chosen = options(
        __doc__,
        {"tasks": [str]},
        sides=some_of(SIDES),
        total_timesteps=60_000_000,
        num_steps=128,
        update_epochs=4,
        num_minibatches=16,
        runs=(Path, "folder that keeps Rollmill's run"),
        hidden_sizes=[128, 128, 128],
        learning_rate=3e-4,
        ent_coef=1e-2,
        seed=1,
    )
    for task in chosen.tasks:
        settings = published_settings(task, chosen.total_timesteps)
        result: dict[str, Any] = {"task": task, "settings": settings.to_dict(), "seed": chosen.seed, "curves": {}}
        sides = "" if len(chosen.sides) == len(SIDES) else f"-{chosen.sides[0]}"
        for side in chosen.sides:
            began = time.perf_counter()
            result["curves"][side] = SIDES[side](task, settings, chosen)
            result[f"{side}_seconds_with_compilation"] = time.perf_counter() - began
            write_result(f"playground-{task.lower()}{sides}-{platform()}", result, chosen.output)


if __name__ == "__main__":
    main()
