"""PPO on MuJoCo Playground beside the PPO of Brax, which its authors train with: returns over steps and seconds.

    python benchmarks/playground_training.py CartpoleBalance CheetahRun
    python benchmarks/playground_training.py CartpoleBalance --sides rollmill --total-timesteps 10_000_000

Brax has the hyperparameters that Playground publishes for it (`mujoco_playground.config`). Rollmill has the same
number of environments, steps and discount, and hyperparameters of its own besides: shorter iterations, fewer
epochs, an annealed learning rate, scaled rewards. Brax's seconds are those of its own clock (`training/walltime`),
which includes the compilation of its training; Rollmill's leave out compilation and evaluations. A return is the
sum of unscaled rewards, the mean over 128 whole episodes of the deterministic policy. Needs playground==0.2.0 and
brax==0.14.2.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from brax.training.agents.ppo import train as brax_ppo
from measure import RESULTS, write_result
from mujoco_playground import registry, wrapper
from mujoco_playground.config import dm_control_suite_params

import rollmill
from rollmill.hooks import PolicyEvaluated, TrainingEvent

EPISODES = 128
Curve = list[dict[str, float]]


def published_settings(name: str, total_timesteps: int) -> Any:
    """Playground's hyperparameters of Brax's PPO for a task."""
    settings = dm_control_suite_params.brax_ppo_config(name)
    with settings.unlocked():
        settings.num_timesteps = total_timesteps
    return settings


def train_brax(name: str, settings: Any, options: argparse.Namespace) -> Curve:
    """Brax's training, evaluated as often as Playground's settings say."""
    if not hasattr(jax, "device_put_replicated"):  # Brax 0.14.2 calls what newer versions of JAX lack
        jax.device_put_replicated = _replicated
    points: Curve = []

    def progress(steps: int, metrics: dict[str, Any]) -> None:
        seconds = metrics.get("training/walltime", 0.0)  # missing before the first iteration
        points.append(point_of("brax", name, int(steps), float(seconds), float(metrics["eval/episode_reward"])))

    brax_ppo.train(
        environment=registry.load(name, config_overrides={"impl": "jax"}),
        progress_fn=progress,
        seed=options.seed,
        num_eval_envs=EPISODES,
        deterministic_eval=True,
        wrap_env_fn=wrapper.wrap_for_brax_training,
        **{key: value for key, value in settings.items() if key != "network_factory"},
    )
    return points


def _replicated(tree: Any, devices: Sequence[jax.Device]) -> Any:
    """The result of `jax.device_put_replicated` on one device: leaves with one more axis."""
    return jax.device_put(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree), devices[0])


def train_rollmill(name: str, settings: Any, options: argparse.Namespace) -> Curve:
    """Rollmill's training."""
    algorithm = rollmill.ppo(
        f"playground:{name}",
        total_timesteps=settings.num_timesteps,
        num_envs=settings.num_envs,
        num_steps=options.num_steps,
        update_epochs=options.update_epochs,
        num_minibatches=options.num_minibatches,
        learning_rate=options.learning_rate,
        gamma=settings.discounting,
        ent_coef=options.ent_coef,
        max_grad_norm=1.0,
        normalize_observations=True,
        normalize_rewards=True,
        network=rollmill.NetworkConfig(hidden_sizes=options.hidden_sizes, activation="swish", squash_actions=True),
    )
    points: Curve = []

    def evaluated(event: TrainingEvent) -> None:
        if isinstance(event, PolicyEvaluated):
            mean = event.row["evaluation/return"]
            points.append(point_of("rollmill", name, event.env_steps, event.seconds, mean))

    with tempfile.TemporaryDirectory() as folder:
        rollmill.train(
            algorithm,
            run_dir=options.runs / name if options.runs else Path(folder, "run"),
            seed=options.seed,
            quiet=True,
            tensorboard=False,
            evaluate_every=settings.num_timesteps // settings.num_evals,
            evaluate_episodes=EPISODES,
            hooks=[evaluated],
        )
    return points


def point_of(side: str, name: str, steps: int, seconds: float, mean: float) -> dict[str, float]:
    print(f"{side}, {name}: {steps:,} steps, {seconds:.0f} s, return {mean:.1f}", flush=True)
    return {"steps": steps, "seconds": seconds, "return": mean}


SIDES: dict[str, Callable[[str, Any, argparse.Namespace], Curve]] = {
    "rollmill": train_rollmill,
    "brax": train_brax,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--total-timesteps", type=int, default=60_000_000)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--update-epochs", type=int, default=4)
    parser.add_argument("--num-minibatches", type=int, default=16)
    parser.add_argument("--runs", type=Path, help="where Rollmill's run stays")
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=(128, 128, 128))
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--ent-coef", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.hidden_sizes = tuple(options.hidden_sizes)
    for task in options.tasks:
        settings = published_settings(task, options.total_timesteps)
        result: dict[str, Any] = {"task": task, "settings": settings.to_dict(), "seed": options.seed, "curves": {}}
        sides = "" if len(options.sides) == len(SIDES) else f"-{options.sides[0]}"
        name = f"playground-{task.lower()}{sides}-{jax.default_backend()}"
        for side in options.sides:
            began = time.perf_counter()
            result["curves"][side] = SIDES[side](task, settings, options)
            result[f"{side}_seconds_with_compilation"] = time.perf_counter() - began
            write_result(name, result, directory=options.output)


if __name__ == "__main__":
    main()
