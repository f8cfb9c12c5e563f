"""PPO on MuJoCo Playground beside the PPO of Brax, which its authors train with: returns over steps and seconds.

    python benchmarks/playground_training.py CartpoleBalance CheetahRun
    python benchmarks/playground_training.py CartpoleBalance --sides rollmill --total-timesteps 10_000_000

Both sides have the hyperparameters that Playground publishes for Brax's PPO (`mujoco_playground.config`): number of
environments, samples of an iteration, epochs, minibatches, learning rate, discount, entropy bonus, scaling of
rewards, normalised observations, no limit of the gradients' norm; both clip ratios at 0.3. They differ where the
algorithms do: Brax estimates advantages over 30 steps, Rollmill over all steps of an iteration; Brax's critic is
larger than its policy. Brax's seconds are those of its own clock (`training/walltime`), which includes the
compilation of its training; Rollmill's leave out compilation and evaluations. A return is the sum of unscaled rewards,
the mean over 128 whole episodes of the deterministic policy. Needs playground==0.2.0 and brax==0.14.2.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
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


def train_rollmill(name: str, settings: Any, options: argparse.Namespace) -> Curve:
    """Rollmill's training with the same sizes of iterations, minibatches and updates."""
    samples = settings.batch_size * settings.num_minibatches * settings.unroll_length
    env = rollmill.make(f"playground:{name}", transforms=[f"reward-scale:{settings.reward_scaling}"])
    algorithm = rollmill.ppo(
        env,
        total_timesteps=settings.num_timesteps,
        num_envs=settings.num_envs,
        num_steps=samples // settings.num_envs,
        update_epochs=settings.num_updates_per_batch,
        num_minibatches=settings.num_minibatches,
        learning_rate=settings.learning_rate,
        anneal_lr=False,
        gamma=settings.discounting,
        ent_coef=settings.entropy_cost,
        clip_coef=0.3,
        clip_vloss=False,
        max_grad_norm=1.0,
        normalize_observations=settings.normalize_observations,
        network=rollmill.NetworkConfig(
            hidden_sizes=options.hidden_sizes, activation="swish", state_dependent_std=False
        ),
    )
    points: Curve = []

    def evaluated(event: TrainingEvent) -> None:
        if isinstance(event, PolicyEvaluated):
            mean = event.row["evaluation/return"] / settings.reward_scaling
            points.append(point_of("rollmill", name, event.env_steps, event.seconds, mean))

    with tempfile.TemporaryDirectory() as folder:
        rollmill.train(
            algorithm,
            run_dir=Path(folder, "run"),
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
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=(128, 128, 128))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.hidden_sizes = tuple(options.hidden_sizes)
    for task in options.tasks:
        settings = published_settings(task, options.total_timesteps)
        result: dict[str, Any] = {"task": task, "settings": settings.to_dict(), "seed": options.seed, "curves": {}}
        for side in options.sides:
            began = time.perf_counter()
            result["curves"][side] = SIDES[side](task, settings, options)
            result[f"{side}_seconds_with_compilation"] = time.perf_counter() - began
            name = f"playground-{task.lower()}-{jax.default_backend()}"
            write_result(name, result, directory=options.output)


if __name__ == "__main__":
    main()
