"""Returns of DQN, SAC and TD3 at published hyperparameters, five seeds each, beside the published returns.

    python benchmarks/replay_learning.py dqn-cartpole sac-pendulum td3-pendulum
    python benchmarks/replay_learning.py td3-half-cheetah --at-once 5 --runs runs/replay --seconds 560
    python benchmarks/replay_learning.py dqn-breakout --rejax .rejax/bin/python --result replay-learning-breakout

Every seed is a run of its own, in its own process; with `--seconds` runs are stopped then, and the next call goes
on with them, or with `--accept-stopped` they count as they are, each with the steps that it has made. The return
of a run is the mean of its last 100 training episodes, which explore, as in CleanRL's curves; where nothing is
published, also that of 100 episodes of the greedy policy, and where a study has settings of Rejax, Rejax's own at
as many steps. Rejax evaluates DQN with 0.5 % of random actions; beside it this side does as well. Writes
results/replay-learning.json once all runs of the studies have finished. `--rejax-from FILE` takes Rejax's side
from an earlier result instead of training it anew.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measure import rejax_curves, write_result

from rollmill.gpus.machine_parts import MachinePart, divide_machine

SEEDS = range(1, 6)


class Study(NamedTuple):
    """A training, and the return that is published for it."""

    algorithm: str
    environment: str
    config: dict[str, Any]
    published: tuple[float, float] | None
    """Mean and standard deviation over seeds."""
    source: str
    rejax: dict[str, Any] | None = None
    """The same hyperparameters as settings of Rejax, which then trains beside."""


REJAX_EPSILON = 0.005
"""Share of random actions with which Rejax evaluates DQN."""

CLEANRL = "CleanRL's documentation, docs.cleanrl.dev/rl-algorithms/"
WIDE = {"hidden_sizes": (256, 256), "activation": "relu"}
STUDIES = {
    "dqn-cartpole": Study(
        "dqn",
        "CartPole-v1",
        {
            "total_timesteps": 500_000,
            "num_envs": 1,
            "num_steps": 10,
            "gradient_steps": 1,
            "buffer_size": 10_000,
            "batch_size": 128,
            "learning_starts": 10_000,
            "learning_rate": 2.5e-4,
            "target_interval": 50,
            "exploration_fraction": 0.5,
            "end_epsilon": 0.05,
            "double": False,
            "network": {"hidden_sizes": (120, 84), "activation": "relu"},
        },
        (488.69, 16.11),
        CLEANRL + "dqn",
    ),
    "sac-pendulum": Study(
        "sac",
        "Pendulum-v1",
        {
            "total_timesteps": 20_000,
            "num_envs": 1,
            "gradient_steps": 1,
            "buffer_size": 20_000,
            "batch_size": 256,
            "learning_starts": 1_000,
            "learning_rate": 1e-3,
            "network": {"hidden_sizes": (64, 64), "activation": "relu"},
        },
        None,
        "-250 and better is taken for solved",
    ),
    "td3-pendulum": Study(
        "td3",
        "Pendulum-v1",
        {
            "total_timesteps": 20_000,
            "num_envs": 1,
            "gradient_steps": 1,
            "buffer_size": 20_000,
            "batch_size": 256,
            "learning_starts": 1_000,
            "learning_rate": 1e-3,
            "network": {"hidden_sizes": (64, 64), "activation": "relu"},
        },
        None,
        "-250 and better is taken for solved",
    ),
    "sac-half-cheetah": Study(
        "sac",
        "gymnasium:HalfCheetah-v5",
        {
            "total_timesteps": 1_000_000,
            "num_envs": 8,
            "gradient_steps": 8,
            "buffer_size": 1_000_000,
            "batch_size": 256,
            "learning_starts": 5_000,
            "learning_rate": 3e-4,
            "critic_learning_rate": 1e-3,
            "network": WIDE,
        },
        (9634.89, 1423.73),
        CLEANRL + "sac, HalfCheetah-v4",
    ),
    "dqn-breakout": Study(
        "dqn",
        "gymnax:Breakout-MinAtar",
        {
            "total_timesteps": 300_000,
            "num_envs": 1,
            "gradient_steps": 1,
            "buffer_size": 100_000,
            "batch_size": 100,
            "learning_starts": 20_000,
            "learning_rate": 5e-4,
            "target_interval": 1_000,
            "exploration_fraction": 0.5,
            "end_epsilon": 0.05,
            "gamma": 1.0,
            "double": False,
            "network": {"torso": "mlp", "hidden_sizes": (64, 64), "activation": "tanh"},
        },
        None,
        "Rejax: benchmark/breakout_1m.yaml with fewer steps and without the convolution, which its release lacks",
        {
            "env": "Breakout-MinAtar",
            "agent_kwargs": {"activation": "tanh"},
            "total_timesteps": 300_000,
            "eval_freq": 50_000,
            "num_envs": 1,
            "num_epochs": 1,
            "buffer_size": 100_000,
            "batch_size": 100,
            "fill_buffer": 20_000,
            "learning_rate": 5e-4,
            "max_grad_norm": 10,
            "target_update_freq": 1_000,
            "polyak": 0.0,
            "exploration_fraction": 0.5,
            "eps_end": 0.05,
            "gamma": 1.0,
            "ddqn": False,
        },
    ),
    "td3-half-cheetah": Study(
        "td3",
        "gymnasium:HalfCheetah-v5",
        {
            "total_timesteps": 1_000_000,
            "num_envs": 8,
            "gradient_steps": 8,
            "buffer_size": 1_000_000,
            "batch_size": 256,
            "learning_starts": 25_000,
            "learning_rate": 3e-4,
            "network": WIDE,
        },
        (9583.22, 126.09),
        CLEANRL + "td3, HalfCheetah-v4",
    ),
}


def train_one(name: str, seed: int, directory: Path) -> None:
    """Trains one seed, or goes on with it."""
    import rollmill

    if (directory / "config.json").exists():
        rollmill.resume(directory)
        return
    study = STUDIES[name]
    graph = getattr(rollmill, study.algorithm)(study.environment, study.config)
    rollmill.train(graph, seed=seed, run_dir=directory, checkpoint_seconds=120, keep_last=1, keep_best=0)


def train_all(names: list[str], seeds: list[int], directory: Path, *, at_once: int, seconds: float) -> None:
    """Trains seeds of the studies, some at once; stops those that are not done after some seconds.

    Each has a part of the cores, and of a GPU, which they share by MPS where it can be had.
    """
    until = time.monotonic() + seconds
    waiting = [(name, seed) for name in names for seed in seeds if not _finished(directory, name, seed)]
    if not waiting:
        return
    running: dict[int, subprocess.Popen] = {}
    with divide_machine(at_once, len(waiting), "auto") as parts:
        print(f"{len(waiting)} runs, {len(parts)} at a time, {parts.note}", flush=True)
        while (waiting or running) and time.monotonic() < until:
            for number in sorted(set(range(len(parts))) - running.keys())[: len(waiting)]:
                running[number] = _started(*waiting.pop(0), directory, parts.each[number])
            running = {number: process for number, process in running.items() if process.poll() is None}
            time.sleep(0.5)
        for process in running.values():
            os.kill(process.pid, signal.SIGTERM)
        for process in running.values():
            process.wait()


def _started(name: str, seed: int, directory: Path, part: MachinePart) -> subprocess.Popen:
    command = [sys.executable, __file__, "--one", name, str(seed), "--runs", str(directory)]
    if part.cores:
        command = ["taskset", "-c", ",".join(map(str, part.cores)), *command]
    with (directory / f"{name}-{seed}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | part.environment,
            pass_fds=part.descriptors,
        )


def _finished(directory: Path, name: str, seed: int, *, or_stopped: bool = False) -> dict[str, Any] | None:
    summary = directory / f"{name}-{seed}" / "summary.json"
    if not summary.exists():
        return None
    content = json.loads(summary.read_text())
    return content if or_stopped or content["status"] == "finished" else None


def result_of(
    name: str, seeds: Sequence[int], directory: Path, rejax: str | None, earlier: Path | None, *, or_stopped: bool
) -> dict[str, Any] | None:
    """The returns of all seeds; None while one is not finished, or else has not been stopped either."""
    study = STUDIES[name]
    summaries = [_finished(directory, name, seed, or_stopped=or_stopped) for seed in seeds]
    if any(summary is None for summary in summaries):
        return None
    returns = [summary["final_return"] for summary in summaries]
    mean = sum(returns) / len(returns)
    deviation = (sum((value - mean) ** 2 for value in returns) / len(returns)) ** 0.5
    return {
        "algorithm": study.algorithm,
        "environment": study.environment,
        "config": study.config,
        "seeds": list(seeds),
        "env_steps": [summary["env_steps"] for summary in summaries],
        "final_returns": returns,
        "mean": mean,
        "standard_deviation": deviation,
        "greedy_returns": [_greedy(directory / f"{name}-{seed}") for seed in seeds]
        if study.published is None
        else None,
        "best_returns": [summary["best_return"] for summary in summaries],
        "published": study.published,
        "source": study.source,
        "returns_beside_rejax": _as_rejax(study, seeds, directory, name),
        "rejax": _earlier(name, earlier) if earlier else _beside(study, seeds, rejax),
        "seconds": [summary["seconds"] for summary in summaries],
        "weights_sha256": [summary["weights_sha256"] for summary in summaries],
        "commits": [_commit(directory / f"{name}-{seed}") for seed in seeds],
        "curves": [_curve(directory / f"{name}-{seed}") for seed in seeds],
    }


def _beside(study: Study, seeds: Sequence[int], python: str | None) -> dict[str, Any] | None:
    """Rejax's training of the same seeds."""
    if study.rejax is None or python is None:
        return None
    curves = rejax_curves(python, study.algorithm.upper(), study.rejax, seeds=list(seeds), episodes=100)
    final = [returns[-1] for returns in curves["returns"]]
    print(f"rejax: {sum(final) / len(final):.2f}, {final}", flush=True)
    return {"settings": study.rejax, "final_returns": final, **curves}


def _earlier(name: str, result: Path) -> dict[str, Any]:
    """Rejax's side of an earlier result."""
    content = json.loads(result.read_text())
    return {**content["result"][name]["rejax"], "from": {key: content[key] for key in ("commit", "time")}}


def _as_rejax(study: Study, seeds: Sequence[int], directory: Path, name: str) -> list[float] | None:
    """Mean returns of 100 episodes of each seed, with as many random actions as Rejax evaluates with."""
    if study.rejax is None:
        return None
    return [_nearly_greedy(directory / f"{name}-{seed}") for seed in seeds]


def _nearly_greedy(run: Path) -> float:
    from rollmill.policies.policies import load_weights
    from rollmill.programs.evaluation.compiled import evaluate

    loaded = load_weights(run)
    weights = loaded.weights._replace(epsilon=np.float32(REJAX_EPSILON))
    return float(evaluate(loaded.graph, weights, episodes=100, stochastic=True).returns.mean())


def _greedy(run: Path) -> float:
    """The mean return of 100 episodes without exploration."""
    import rollmill

    return float(rollmill.evaluate(run, episodes=100).returns.mean())


def _commit(run: Path) -> str | None:
    """The commit that the run was started with."""
    return json.loads((run / "versions.json").read_text())["commits"]["rollmill"]


def _curve(run: Path, points: int = 50) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    known = [(line["env_steps"], line["episode/return"]) for line in lines if line["episode/return"] is not None]
    return known[:: max(len(known) // points, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, []])
    parser.add_argument("--runs", type=Path, default=Path("runs/replay-learning"))
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--accept-stopped", action="store_true")
    parser.add_argument("--rejax", help="a Python with rejax==0.1.3 and gymnax==0.0.9")
    parser.add_argument("--rejax-from", type=Path, help="a result of this script, for Rejax's side")
    parser.add_argument("--result", default="replay-learning")
    parser.add_argument("--directory", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", nargs=2)
    options = parser.parse_args()
    if options.one:
        name, seed = options.one
        train_one(name, int(seed), options.runs / f"{name}-{seed}")
        return
    names = options.studies or list(STUDIES)
    options.runs.mkdir(parents=True, exist_ok=True)
    train_all(names, options.seeds, options.runs, at_once=options.at_once, seconds=options.seconds)
    accept = {"or_stopped": options.accept_stopped}
    sides = (options.runs, options.rejax, options.rejax_from)
    results = {name: result_of(name, options.seeds, *sides, **accept) for name in names}
    done = {name: result for name, result in results.items() if result is not None}
    for name, result in done.items():
        print(f"{name}: {result['mean']:.1f} +- {result['standard_deviation']:.1f}", result["final_returns"])
        print(f"  greedy: {result['greedy_returns']}, as Rejax: {result['returns_beside_rejax']}")
    if len(done) == len(names):
        write_result(options.result, done, directory=options.directory)


if __name__ == "__main__":
    main()
