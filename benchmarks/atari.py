"""PPO on an Atari game: the return of whole games, unclipped, over steps and seconds.

    python benchmarks/atari.py --seconds 550 --num-envs 64
    python benchmarks/atari.py --game Breakout --seconds 3000

Hyperparameters and network are those of the recipe `atari-pong`, except for the number of environments, the
learning rate and, with more environments, larger minibatches. One step is four frames. Evaluations draw actions,
as the training does. Writes the curve so far to results/atari-GAME-PLATFORM.json after each evaluation. Needs
ale-py.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import options, platform, write_result

import rollmill
from rollmill.hooks import PolicyEvaluated, TrainingEvent
from rollmill.recipes import RECIPES


def algorithm_of(chosen: Any) -> Any:
    """Returns PPO with the recipe's hyperparameters for the chosen number of environments."""
    published = RECIPES["atari-pong"]().config
    larger = max(chosen.num_envs // published.num_envs // chosen.larger_minibatches, 1)
    config = replace(
        published,
        total_timesteps=chosen.total_timesteps,
        num_envs=chosen.num_envs,
        num_minibatches=published.num_minibatches * larger,
        learning_rate=chosen.learning_rate,
        anneal_lr=chosen.anneal,
    )
    return rollmill.ppo(f"ale:{chosen.game}", config)


class Curve:
    """Hook that writes the evaluations so far, and stops at a return or after some time."""

    def __init__(self, chosen: Any) -> None:
        self.chosen, self.began = chosen, time.perf_counter()
        self.points: list[dict[str, float]] = []

    def __call__(self, event: TrainingEvent) -> rollmill.Stop | None:
        """See `rollmill.hooks`."""
        elapsed = time.perf_counter() - self.began
        if isinstance(event, PolicyEvaluated):
            returns = {name: event.row[f"evaluation/{name}"] for name in ("return", "return_min", "return_max")}
            self.points.append({"steps": event.env_steps, "seconds": event.seconds, **returns})
            print(f"{event.env_steps:,} steps, {event.seconds:.0f} s: {returns['return']:.1f}", flush=True)
            self.write(elapsed)
            if self.chosen.stop_at is not None and returns["return"] >= self.chosen.stop_at:
                return rollmill.Stop(f"the return reached {self.chosen.stop_at}")
        over = elapsed > self.chosen.seconds
        return rollmill.Stop(f"{self.chosen.seconds:.0f} seconds have passed") if over else None

    def write(self, elapsed: float) -> None:
        result = {
            "game": self.chosen.game,
            "settings": {name: value for name, value in vars(self.chosen).items() if name != "output"},
            "seconds_with_compilation": elapsed,
            "steps_per_second": self.points[-1]["steps"] / self.points[-1]["seconds"],
            "curve": self.points,
        }
        write_result(f"atari-{self.chosen.game.lower()}-{platform()}", result, self.chosen.output)


def main() -> None:
    chosen = options(
        __doc__,
        game="Pong",
        seconds=(550.0, "limit, compilation included"),
        stop_at=(float, "mean return of an evaluation to stop at"),
        total_timesteps=10_000_000,
        num_envs=64,
        larger_minibatches=(2, "times as large as the published ones"),
        learning_rate=5e-4,
        anneal=True,
        workers=(1, "environment servers; 1: in the learner's process"),
        evaluate_every=500_000,
        episodes=8,
        seed=1,
    )
    placement = {"distribution": "environments", "workers": chosen.workers} if chosen.workers > 1 else {}
    evaluation = {"evaluate_every": chosen.evaluate_every, "evaluate_episodes": chosen.episodes}
    quiet = {"quiet": True, "tensorboard": False, "seed": chosen.seed}
    with tempfile.TemporaryDirectory() as folder:
        own = {"run_dir": Path(folder, "run"), "hooks": [Curve(chosen)], "evaluate_stochastic": True}
        rollmill.train(algorithm_of(chosen), **own, **evaluation, **quiet, **placement)


if __name__ == "__main__":
    main()
