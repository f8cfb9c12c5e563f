"""DQN and SAC on two cores: environment steps a second of Rollmill beside Rejax 0.1.3, in one run.

    python benchmarks/replay_training.py --rejax .rejax/bin/python

Both sides have the same environment, networks, memory, minibatches and number of updates an environment step, at
the hyperparameters that Rejax publishes for its algorithms. Sides take turns; a figure is that of a whole training
with evaluations and compilation left out, and ratios are of medians. Rollmill computes its
metrics besides (errors, losses, returns), once an iteration, and the host reads their sums every `log_every`th.
Writes results/replay-training-cpu.json.
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
from measure import RESULTS, rejax_figures, spread, write_result

import rollmill
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead

LOG_EVERY = 1_000
"""Iterations whose metrics are summed on the device, as `rollmill train` does by default for such small ones."""


class Study(NamedTuple):
    """A training, in the words of both sides."""

    algorithm: str
    environment: str
    config: dict[str, Any]
    settings: dict[str, Any]
    """Settings of Rejax."""


STUDIES = {
    "dqn-cartpole": Study(
        "dqn",
        "CartPole-v1",
        {
            "num_envs": 10,
            "gradient_steps": 5,
            "buffer_size": 50_000,
            "learning_starts": 5_000,
            "batch_size": 100,
            "learning_rate": 1e-3,
            "tau": 0.02,
            "target_interval": 5,
            "duelling": True,
            "network": {"hidden_sizes": (64, 64), "activation": "swish"},
        },
        {
            "num_envs": 10,
            "num_epochs": 5,
            "buffer_size": 50_000,
            "fill_buffer": 5_000,
            "batch_size": 100,
            "learning_rate": 1e-3,
            "polyak": 0.98,
            "agent": "DuelingQNetwork",
            "agent_kwargs": {"activation": "swish"},
            "exploration_fraction": 0.5,
        },
    ),
    "sac-pendulum": Study(
        "sac",
        "Pendulum-v1",
        {
            "num_envs": 1,
            "gradient_steps": 1,
            "buffer_size": 10_000,
            "learning_starts": 256,
            "batch_size": 256,
            "learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
            "tau": 0.02,
            "network": {"hidden_sizes": (64, 64), "activation": "swish"},
        },
        {
            "num_envs": 1,
            "num_epochs": 1,
            "buffer_size": 10_000,
            "fill_buffer": 256,
            "batch_size": 256,
            "learning_rate": 1e-3,
            "polyak": 0.98,
            "agent_kwargs": {"activation": "swish"},
        },
    ),
}


def rollmill_figures(study: Study, *, iterations: int, repeats: int) -> list[float]:
    """Steps per second of whole trainings, the first of which is left out: it compiles."""
    steps = study.config["num_envs"] * iterations
    graph = getattr(rollmill, study.algorithm)(study.environment, study.config, total_timesteps=steps)
    program = lower(graph)
    figures = []
    for _ in range(repeats + 1):
        state, began = program.start(), time.perf_counter()
        for window in dispatch_ahead(program, state, first=0, until=iterations, span=LOG_EVERY):
            state = window.after
        jax.block_until_ready(state)
        figures.append(steps / (time.perf_counter() - began))
    return figures[1:]


def compare(name: str, *, iterations: int, rounds: int, rejax: str) -> dict[str, Any]:
    """A study of both sides in turns."""
    study = STUDIES[name]
    settings = study.settings | {
        "env": study.environment,
        "total_timesteps": study.settings["num_envs"] * iterations,
    }
    sides: dict[str, list[float]] = {"rollmill": [], "rejax": []}
    for _ in range(rounds):
        sides["rollmill"] += rollmill_figures(study, iterations=iterations, repeats=3)
        sides["rejax"] += rejax_figures(rejax, study.algorithm.upper(), settings, repeats=3)
    figures = {side: spread(runs) for side, runs in sides.items()}
    ratio = figures["rollmill"]["median"] / figures["rejax"]["median"]
    each = ", ".join(f"{side} {figure['median']:,.0f} steps/s" for side, figure in figures.items())
    print(f"{name}: {each}, {ratio:.2f} times", flush=True)
    return {
        "environment": study.environment,
        "config": study.config,
        "rejax_settings": settings,
        "steps_per_second": figures,
        "ratio": ratio,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, []])
    parser.add_argument("--rejax", required=True, help="a Python with rejax==0.1.3 and gymnax==0.0.9")
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    how = {"iterations": options.iterations, "rounds": options.rounds, "rejax": options.rejax}
    rows = {name: compare(name, **how) for name in options.studies or STUDIES}
    write_result("replay-training-cpu", rows, directory=options.output)


if __name__ == "__main__":
    main()
