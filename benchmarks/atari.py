"""PPO on an Atari game: the return of whole games, unclipped, over steps and seconds.

    python benchmarks/atari.py --seconds 550 --num-envs 64
    python benchmarks/atari.py --game Breakout --seconds 3000

Hyperparameters and network are those of the recipe `atari-pong`, but for the number of environments, the learning
rate and, with more environments, larger minibatches. One step is four frames. The policy draws its actions in
evaluations, as it does in training. The curve so far is written after each evaluation to
results/atari-GAME-PLATFORM.json, so that a run that is stopped keeps it. Needs ale-py.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from measure import RESULTS, write_result

import rollmill
from rollmill.hooks import PolicyEvaluated, TrainingEvent
from rollmill.recipes import RECIPES


def algorithm_of(options: argparse.Namespace) -> Any:
    """PPO with the recipe's hyperparameters, for as many environments as the options say."""
    published = RECIPES["atari-pong"]().config
    more = options.num_envs // published.num_envs
    config = replace(
        published,
        total_timesteps=options.total_timesteps,
        num_envs=options.num_envs,
        num_minibatches=published.num_minibatches * max(more // options.larger_minibatches, 1),
        learning_rate=options.learning_rate,
        anneal_lr=options.anneal,
    )
    return rollmill.ppo(f"ale:{options.game}", config)


class Curve:
    """A hook that writes the evaluations so far, and stops at a return or after some time."""

    def __init__(self, options: argparse.Namespace, settings: dict[str, Any]) -> None:
        self.options, self.settings, self.began = options, settings, time.perf_counter()
        self.points: list[dict[str, float]] = []

    def __call__(self, event: TrainingEvent) -> rollmill.Stop | None:
        """See `rollmill.hooks`."""
        elapsed = time.perf_counter() - self.began
        if isinstance(event, PolicyEvaluated):
            self.points.append(
                {
                    "steps": event.env_steps,
                    "seconds": event.seconds,
                    "return": event.row["evaluation/return"],
                    "return_min": event.row["evaluation/return_min"],
                    "return_max": event.row["evaluation/return_max"],
                }
            )
            print(f"{event.env_steps:,} steps, {event.seconds:.0f} s: {self.points[-1]['return']:.1f}", flush=True)
            self.write(elapsed)
            if self.options.stop_at is not None and self.points[-1]["return"] >= self.options.stop_at:
                return rollmill.Stop(f"the return reached {self.options.stop_at}")
        if elapsed > self.options.seconds:
            return rollmill.Stop(f"{self.options.seconds:.0f} seconds have passed")
        return None

    def write(self, elapsed: float) -> None:
        """Writes the curve so far."""
        steps_per_second = self.points[-1]["steps"] / self.points[-1]["seconds"]
        result = {
            "game": self.options.game,
            "settings": self.settings,
            "seconds_with_compilation": elapsed,
            "steps_per_second": steps_per_second,
            "curve": self.points,
        }
        name = f"atari-{self.options.game.lower()}-{jax.default_backend()}"
        write_result(name, result, directory=self.options.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="Pong")
    parser.add_argument("--seconds", type=float, default=550.0, help="at most, with compilation")
    parser.add_argument("--stop-at", type=float, help="mean return of an evaluation to stop at")
    parser.add_argument("--total-timesteps", type=int, default=10_000_000)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--larger-minibatches", type=int, default=2, help="times as large as the published ones")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--anneal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--workers", type=int, default=1, help="environment servers; 1: in the learner's process")
    parser.add_argument("--evaluate-every", type=int, default=500_000)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    algorithm = algorithm_of(options)
    placement = {"distribution": "environments", "workers": options.workers} if options.workers > 1 else {}
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    with tempfile.TemporaryDirectory() as folder:
        rollmill.train(
            algorithm,
            run_dir=Path(folder, "run"),
            seed=options.seed,
            quiet=True,
            tensorboard=False,
            evaluate_every=options.evaluate_every,
            evaluate_episodes=options.episodes,
            evaluate_stochastic=True,
            hooks=[Curve(options, settings)],
            **placement,
        )


if __name__ == "__main__":
    main()
