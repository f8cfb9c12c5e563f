"""The command `rollmill evaluate RUN`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from rollmill.api import evaluate_run, load_weights
from rollmill.cli.environment_options import EnvOptions, parse_env_options
from rollmill.cli.parsing import parse
from rollmill.cli.train import Imports, Trust


@dataclass(frozen=True)
class Evaluate:
    """Play whole episodes with the policy of a run."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Directory of the run."""
    episodes: int = 100
    """Episodes to play."""
    checkpoint: Literal["last", "best"] = "last"
    """The last checkpoint, or the one with the best return during training."""
    env: str | None = None
    """Another environment with the same spaces, such as gymnasium:CartPole-v1."""
    env_options: EnvOptions = ()
    seed: int = 0
    """Seed of the environments and, where it is stochastic, of the policy."""
    train_seed: int | None = None
    """Seed whose policy to evaluate, of a run that trained several. Default: the first."""
    stochastic: bool = False
    """Sample actions as in training, instead of taking the most likely one."""
    json: bool = False
    """Print the result as JSON."""
    trust: Trust = False
    """Let the run of this directory import the modules that it names, now and later; runs made here may anyway."""
    imports: Imports = ()
    """Module to import first, which registers the environment."""


def run(arguments: list[str]) -> int:
    """Plays the episodes and prints the mean return."""
    options = parse(Evaluate, arguments, prog="rollmill evaluate")
    loaded = load_weights(
        options.run,
        checkpoint=options.checkpoint,
        seed=options.train_seed,
        imports=options.imports,
        trust=options.trust,
    )
    episodes = evaluate_run(
        loaded,
        env=options.env,
        env_options=parse_env_options(options.env_options),
        episodes=options.episodes,
        seed=options.seed,
        stochastic=options.stochastic,
    )
    returns, lengths = episodes.returns, episodes.lengths
    result = {
        "environment": options.env or loaded.graph.settings["environment"],
        "iteration": loaded.iteration,
        "episodes": returns.size,
        "mean_return": float(np.mean(returns, dtype=np.float64)),
        "std_return": float(np.std(returns, dtype=np.float64)),
        "min_return": float(np.min(returns)),
        "max_return": float(np.max(returns)),
        "mean_length": float(np.mean(lengths)),
    }
    print(json.dumps(result) if options.json else _sentence(result))
    return 0


def _sentence(result: dict) -> str:
    return (
        f"{result['environment']}, {result['episodes']} episodes, iteration {result['iteration']}: mean return "
        f"{result['mean_return']:.5g} (std {result['std_return']:.4g}, min {result['min_return']:.5g}, max "
        f"{result['max_return']:.5g}), mean length {result['mean_length']:.5g}"
    )
