"""Returns of DQN, SAC and TD3 at published hyperparameters, five seeds each, beside the published returns.

    python benchmarks/replay_learning.py dqn-cartpole sac-pendulum td3-pendulum
    python benchmarks/replay_learning.py td3-half-cheetah --at-once 5 --runs runs/replay --seconds 560
    python benchmarks/replay_learning.py dqn-breakout --rejax .rejax/bin/python --result replay-learning-breakout

Every seed is a run in a process of its own. `--seconds` stops the runs after that time. The next call resumes
them; with `--accept-stopped` they count as they are, each with the steps that it has made. The return of a run is
the mean of its last 100 training episodes, which explore, as in CleanRL's curves. Where nothing is published, 100
episodes of the greedy policy are played too. A study with settings of Rejax is also trained by Rejax, which
evaluates DQN with 0.5 % of random actions, and so does this script then. `--rejax-from FILE` takes Rejax's side
from an earlier result. Writes results/replay-learning.json once all runs of the studies have finished.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, NamedTuple

import numpy as np
from measure import REJAX, foreign, lines_of, options, some_of, summary_of, write_result

from rollmill.gpus.machine_parts import MachinePart, divide_machine

SEEDS = list(range(1, 6))
REJAX_EPSILON = 0.005
"""Share of random actions with which Rejax evaluates DQN."""


class Study(NamedTuple):
    """A training, and the return that is published for it."""

    algorithm: str
    environment: str
    config: dict[str, Any]
    published: tuple[float, float] | None
    """Mean and standard deviation over seeds."""
    source: str
    rejax: dict[str, Any] | None = None
    """The same hyperparameters as settings of Rejax, which then trains as well."""


CLEANRL = "CleanRL's documentation, docs.cleanrl.dev/rl-algorithms/"
PENDULUM = {"total_timesteps": 20_000, "num_envs": 1, "gradient_steps": 1, "buffer_size": 20_000}
PENDULUM |= {"batch_size": 256, "learning_starts": 1_000, "learning_rate": 1e-3}
PENDULUM |= {"network": {"hidden_sizes": (64, 64), "activation": "relu"}}
CHEETAH = {"total_timesteps": 1_000_000, "num_envs": 8, "gradient_steps": 8, "buffer_size": 1_000_000}
CHEETAH |= {"batch_size": 256, "learning_rate": 3e-4}
CHEETAH |= {"network": {"hidden_sizes": (256, 256), "activation": "relu"}}
PUBLISHED = {"anneal_lr": False, "max_grad_norm": float("inf"), "tau": 1.0, "n_step": 1}
"""Hyperparameters of DQN that differ from the defaults, as published."""
CARTPOLE = PUBLISHED | {
    "total_timesteps": 500_000,
    "num_envs": 1,
    "num_steps": 10,
    "gradient_steps": 1,
    "buffer_size": 10_000,
}
CARTPOLE |= {"batch_size": 128, "learning_starts": 10_000, "learning_rate": 2.5e-4, "target_interval": 50}
CARTPOLE |= {"exploration_fraction": 0.5, "end_epsilon": 0.05, "double": False}
CARTPOLE |= {"network": {"hidden_sizes": (120, 84), "activation": "relu"}}
SAME = {"total_timesteps": 300_000, "num_envs": 1, "buffer_size": 100_000, "batch_size": 100}
SAME |= {"learning_rate": 5e-4, "exploration_fraction": 0.5, "gamma": 1.0}
"""Hyperparameters of Breakout with the same names on both sides."""
BREAKOUT = {
    **PUBLISHED,
    **SAME,
    "gradient_steps": 1,
    "learning_starts": 20_000,
    "target_interval": 1_000,
    "end_epsilon": 0.05,
}
BREAKOUT |= {"double": False, "network": {"torso": "mlp", "hidden_sizes": (64, 64), "activation": "tanh"}}
REJAX_BREAKOUT = {**SAME, "env": "Breakout-MinAtar", "agent_kwargs": {"activation": "tanh"}, "eval_freq": 50_000}
REJAX_BREAKOUT |= {"num_epochs": 1, "fill_buffer": 20_000, "max_grad_norm": 10, "target_update_freq": 1_000}
REJAX_BREAKOUT |= {"polyak": 0.0, "eps_end": 0.05, "ddqn": False}
SOLVED = "-250 and better is taken for solved"
SHORTER = "Rejax: benchmark/breakout_1m.yaml with fewer steps and without the convolution, which its release lacks"
STUDIES = {
    "dqn-cartpole": Study("dqn", "CartPole-v1", CARTPOLE, (488.69, 16.11), f"{CLEANRL}dqn"),
    "sac-pendulum": Study("sac", "Pendulum-v1", PENDULUM, None, SOLVED),
    "td3-pendulum": Study("td3", "Pendulum-v1", PENDULUM, None, SOLVED),
    "sac-half-cheetah": Study(
        "sac",
        "gymnasium:HalfCheetah-v5",
        CHEETAH | {"learning_starts": 5_000, "critic_learning_rate": 1e-3},
        (9634.89, 1423.73),
        f"{CLEANRL}sac, HalfCheetah-v4",
    ),
    "dqn-breakout": Study("dqn", "gymnax:Breakout-MinAtar", BREAKOUT, None, SHORTER, REJAX_BREAKOUT),
    "td3-half-cheetah": Study(
        "td3",
        "gymnasium:HalfCheetah-v5",
        CHEETAH | {"learning_starts": 25_000},
        (9583.22, 126.09),
        f"{CLEANRL}td3, HalfCheetah-v4",
    ),
}


def train_one(name: str, seed: int, directory: Path) -> None:
    """Trains one seed, or resumes it."""
    import rollmill

    if (directory / "config.json").exists():
        rollmill.resume(directory)
        return
    study = STUDIES[name]
    graph = getattr(rollmill, study.algorithm)(study.environment, study.config)
    rollmill.train(graph, seed=seed, run_dir=directory, checkpoint_seconds=120, keep_last=1, keep_best=0)


def train_all(runs: list[tuple[str, int]], directory: Path, *, at_once: int, seconds: float) -> None:
    """Trains seeds of the studies, some at once, and stops those that are not done after some seconds.

    Each has a part of the cores, and of a GPU, which they share under MPS where possible.
    """
    until, running = time.monotonic() + seconds, {}
    waiting = [(name, seed) for name, seed in runs if status_of(directory / f"{name}-{seed}") != "finished"]
    if not waiting:
        return
    with divide_machine(at_once, len(waiting), "auto") as parts:
        print(f"{len(waiting)} runs, {len(parts)} at a time, {parts.note}", flush=True)
        while (waiting or running) and time.monotonic() < until:
            for number in sorted(set(range(len(parts))) - running.keys())[: len(waiting)]:
                running[number] = started(*waiting.pop(0), directory, parts.each[number])
            running = {number: process for number, process in running.items() if process.poll() is None}
            time.sleep(0.5)
        for process in running.values():
            os.kill(process.pid, signal.SIGTERM)
        for process in running.values():
            process.wait()


def started(name: str, seed: int, directory: Path, part: MachinePart) -> subprocess.Popen:
    command = [sys.executable, __file__, "--one", name, str(seed), "--runs", str(directory)]
    if part.cores:
        command = ["taskset", "-c", ",".join(map(str, part.cores)), *command]
    own = {"env": os.environ | part.environment, "pass_fds": part.descriptors, "start_new_session": True}
    with (directory / f"{name}-{seed}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, **own)


def status_of(run: Path) -> str | None:
    return summary_of(run).get("status")


def result_of(name: str, chosen: Any) -> dict[str, Any] | None:
    """Returns the returns of all seeds; None while one is not finished, or with `--accept-stopped` not stopped."""
    study, runs = STUDIES[name], [chosen.runs / f"{name}-{seed}" for seed in chosen.seeds]
    if any(status_of(run) is None if chosen.accept_stopped else status_of(run) != "finished" for run in runs):
        return None
    summaries = list(map(summary_of, runs))
    returns = [summary["final_return"] for summary in summaries]
    versions = [json.loads((run / "versions.json").read_text()) for run in runs]
    return {
        "algorithm": study.algorithm,
        "environment": study.environment,
        "config": study.config,
        "seeds": chosen.seeds,
        "env_steps": [summary["env_steps"] for summary in summaries],
        "final_returns": returns,
        "mean": mean(returns),
        "standard_deviation": pstdev(returns),
        "greedy_returns": list(map(greedy_return, runs)) if study.published is None else None,
        "best_returns": [summary["best_return"] for summary in summaries],
        "published": study.published,
        "source": study.source,
        "returns_beside_rejax": list(map(return_as_rejax, runs)) if study.rejax else None,
        "rejax": earlier(name, chosen.rejax_from)
        if chosen.rejax_from
        else beside(study, chosen.seeds, chosen.rejax),
        "seconds": [summary["seconds"] for summary in summaries],
        "weights_sha256": [summary["weights_sha256"] for summary in summaries],
        "commits": [each["commits"]["rollmill"] for each in versions],
        "curves": list(map(curve_of, runs)),
    }


def beside(study: Study, seeds: Sequence[int], python: str | None) -> dict[str, Any] | None:
    """Trains the same seeds with Rejax."""
    if study.rejax is None or python is None:
        return None
    order = {"algorithm": study.algorithm.upper(), "settings": study.rejax, "seeds": seeds, "episodes": 100}
    curves = foreign(python, "rejax_side.py", order)
    final = [returns[-1] for returns in curves["returns"]]
    print(f"rejax: {mean(final):.2f}, {final}", flush=True)
    return {"settings": study.rejax, "final_returns": final, **curves}


def earlier(name: str, result: Path) -> dict[str, Any]:
    """Returns Rejax's side of an earlier result."""
    content = json.loads(result.read_text())
    return {**content["result"][name]["rejax"], "from": {key: content[key] for key in ("commit", "time")}}


def return_as_rejax(run: Path) -> float:
    """Returns the mean return of 100 episodes with as many random actions as Rejax evaluates with."""
    from rollmill.policies.loading import load_weights
    from rollmill.programs.evaluation.compiled import evaluate

    loaded = load_weights(run)
    weights = loaded.weights._replace(epsilon=np.float32(REJAX_EPSILON))
    return float(evaluate(loaded.graph, weights, episodes=100, stochastic=True).returns.mean())


def greedy_return(run: Path) -> float:
    import rollmill

    return float(rollmill.evaluate(run, episodes=100).returns.mean())


def curve_of(run: Path, points: int = 50) -> list[tuple[int, float]]:
    ended = [line for line in lines_of(run) if line["episode/return"] is not None]
    return [(line["env_steps"], line["episode/return"]) for line in ended[:: max(len(ended) // points, 1)]]


def main() -> None:
    chosen = options(
        __doc__,
        {"studies": some_of(STUDIES)},
        runs=Path("runs/replay-learning"),
        at_once=1,
        seconds=float("inf"),
        seeds=SEEDS,
        accept_stopped=False,
        rejax=(str, REJAX),
        rejax_from=(Path, "a result of this script, for Rejax's side"),
        result="replay-learning",
        one=([str], "a study and a seed: trains these alone, in this process"),
    )
    if chosen.one:
        name, seed = chosen.one
        train_one(name, int(seed), chosen.runs / f"{name}-{seed}")
        return
    chosen.runs.mkdir(parents=True, exist_ok=True)
    runs = [(name, seed) for name in chosen.studies for seed in chosen.seeds]
    train_all(runs, chosen.runs, at_once=chosen.at_once, seconds=chosen.seconds)
    done = {name: result for name in chosen.studies if (result := result_of(name, chosen)) is not None}
    for name, result in done.items():
        print(f"{name}: {result['mean']:.1f} +- {result['standard_deviation']:.1f}", result["final_returns"])
        print(f"  greedy: {result['greedy_returns']}, as Rejax: {result['returns_beside_rejax']}")
    if len(done) == len(chosen.studies):
        write_result(chosen.result, done, chosen.output)


if __name__ == "__main__":
    main()
