"""PPO on Craftax beside its authors' PPO: steps per second, in turns in one run, and returns while learning.

    python benchmarks/craftax_training.py speed --ratios 16 1
    python benchmarks/craftax_training.py speed --authors PATH      # a clone of Craftax_Baselines, unmodified
    python benchmarks/craftax_training.py learn --learn-steps 1_000_000_000 --seconds 500

All sides have the network and the hyperparameters that the authors' `ppo.py` has by default. The peer is their
algorithm written anew (craftax_peer.py); with `--authors`, their own code runs besides, which needs distrax, flax,
orbax-checkpoint and wandb (imported, not used). Figures are environment steps per second of whole iterations,
compilation left out. Sides take turns, so that a machine whose speed drifts slows all of them alike; each goes on
with its training from turn to turn, but for the authors' code, whose every call is a training from the start. A
percentage is the mean return of the training episodes that ended, of the largest sum of the achievements' rewards.
Needs craftax==1.6.1.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import craftax_peer
import jax
import numpy as np
from craftax_peer import Settings
from measure import RESULTS, spread, write_result

import rollmill
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead

LARGEST_RETURN = {"Craftax-Classic-Symbolic-v1": 22.0, "Craftax-Symbolic-v1": 226.0}
"""Sum of the rewards of all achievements."""

Turn = Callable[[], float]
"""Trains for some iterations; returns the environment steps per second."""


def graph_of(name: str, settings: Settings, *, iterations: int, ratio: int) -> Any:
    network = rollmill.NetworkConfig(hidden_sizes=(settings.width,) * 3, activation="tanh")
    return rollmill.ppo(
        rollmill.make(f"craftax:{name}", reset_ratio=ratio),
        total_timesteps=iterations * settings.num_envs * settings.num_steps,
        num_envs=settings.num_envs,
        num_steps=settings.num_steps,
        update_epochs=settings.epochs,
        num_minibatches=settings.num_minibatches,
        learning_rate=settings.learning_rate,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        clip_coef=settings.clip,
        ent_coef=settings.entropy,
        vf_coef=settings.value,
        max_grad_norm=settings.max_grad_norm,
        network=network,
    )


def rollmill_turns(options: argparse.Namespace, settings: Settings, ratio: int) -> Iterator[float]:
    planned = options.iterations * (options.rounds + 1)
    graph = graph_of(options.env, settings, iterations=planned, ratio=ratio)
    program = lower(graph, unroll=options.unroll, fusion=options.fusion)
    print(
        f"rollmill, reset_ratio={ratio}: compiled in {program.compile_seconds:.0f} s", *program.notes, flush=True
    )
    state = program.start()
    for first in range(0, planned, options.iterations):
        began = time.perf_counter()
        for window in dispatch_ahead(program, state, first=first, until=first + options.iterations):
            state = window.after
        jax.block_until_ready(state)
        yield options.iterations * graph.loops.batch_size / (time.perf_counter() - began)


def peer_turns(options: argparse.Namespace, settings: Settings) -> Iterator[float]:
    sizes = {
        "iterations_per_call": options.iterations,
        "planned_iterations": options.iterations * (options.rounds + 1),
    }
    began = time.perf_counter()
    peer = craftax_peer.build(options.env, settings, **sizes)
    print(f"peer: compiled in {time.perf_counter() - began:.0f} s", flush=True)
    carry = peer.start
    while True:
        began = time.perf_counter()
        carry, _ = jax.block_until_ready(peer.run(carry))
        yield options.iterations * settings.num_envs * settings.num_steps / (time.perf_counter() - began)


def authors_turns(options: argparse.Namespace, settings: Settings) -> Iterator[float]:
    sys.path.insert(0, str(options.authors))
    import ppo  # type: ignore[import-not-found]

    steps = options.iterations * settings.num_envs * settings.num_steps
    config = {
        "ENV_NAME": options.env,
        "TOTAL_TIMESTEPS": steps,
        "NUM_ENVS": settings.num_envs,
        "NUM_STEPS": settings.num_steps,
        "UPDATE_EPOCHS": settings.epochs,
        "NUM_MINIBATCHES": settings.num_minibatches,
        "LAYER_SIZE": settings.width,
        "LR": settings.learning_rate,
        "ANNEAL_LR": True,
        "GAMMA": settings.gamma,
        "GAE_LAMBDA": settings.gae_lambda,
        "CLIP_EPS": settings.clip,
        "ENT_COEF": settings.entropy,
        "VF_COEF": settings.value,
        "MAX_GRAD_NORM": settings.max_grad_norm,
        "USE_OPTIMISTIC_RESETS": True,
        "OPTIMISTIC_RESET_RATIO": settings.reset_ratio,
        "TRAIN_ICM": False,
        "USE_E3B": False,
        "DEBUG": False,
        "USE_WANDB": False,
    }
    began = time.perf_counter()
    train = jax.jit(ppo.make_train(config)).lower(jax.random.PRNGKey(0)).compile()
    print(f"authors' code: compiled in {time.perf_counter() - began:.0f} s", flush=True)
    seed = 0
    while True:
        began = time.perf_counter()
        jax.block_until_ready(train(jax.random.PRNGKey(seed)))
        yield steps / (time.perf_counter() - began)
        seed += 1


def speed(options: argparse.Namespace, settings: Settings) -> dict:
    first = f"rollmill, reset_ratio={options.ratios[0]}"
    turns = {
        f"rollmill, reset_ratio={ratio}": rollmill_turns(options, settings, ratio) for ratio in options.ratios
    }
    turns["peer"] = peer_turns(options, settings)
    if options.authors:
        turns["authors' code"] = authors_turns(options, settings)
    for side in turns.values():
        next(side)  # compiles and warms up
    figures: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(options.rounds):
        for name, side in turns.items():
            figures[name].append(next(side))
    spreads = {name: spread(runs) for name, runs in figures.items()}
    ratios = {f"{first} / {name}": spreads[first]["median"] / of["median"] for name, of in spreads.items()}
    for name, of in spreads.items():
        print(f"{name}: {of['median']:,.0f} steps/s; {first} is {ratios[f'{first} / {name}']:.2f} times as fast")
    how = {"iterations": options.iterations, "unroll": options.unroll, "fusion": options.fusion}
    return {**how, "steps_per_second": spreads, "ratios": ratios}


def marks_of(iterations: int, points: int) -> list[int]:
    return np.unique(np.linspace(0, iterations, points + 1).round().astype(int)).tolist()


def point_of(side: str, name: str, steps: int, seconds: float, totals: dict[str, float]) -> dict[str, float]:
    """One point of a curve, of the episodes that ended since the point before."""
    ended = max(totals["ended"], 1.0)
    mean, length = totals["return"] / ended, totals["length"] / ended
    percent = 100 * mean / LARGEST_RETURN[name]
    print(
        f"{side}: {steps:,} steps, {seconds:.0f} s, return {mean:.2f} ({percent:.1f} %), length {length:.0f}",
        flush=True,
    )
    figures = {"return": mean, "percent": percent, "length": length, "episodes": totals["ended"]}
    return {"steps": steps, "seconds": seconds, **figures}


def learn_rollmill(options: argparse.Namespace, settings: Settings, iterations: int) -> Iterator[dict]:
    graph = graph_of(options.env, settings, iterations=iterations, ratio=options.ratios[0])
    program = lower(graph, seeds=(options.seed,), unroll=options.unroll, fusion=options.fusion)
    state, seconds = program.start(), 0.0
    marks = marks_of(iterations, options.points)
    for first, until in zip(marks, marks[1:], strict=False):
        began, rows = time.perf_counter(), []
        for window in dispatch_ahead(program, state, first=first, until=until):
            state = window.after
            rows += window.metrics
        seconds += time.perf_counter() - began
        names = {"ended": "episodes/ended", "return": "episodes/return_sum", "length": "episodes/length_sum"}
        totals = {short: float(sum(np.sum(row[name]) for row in rows)) for short, name in names.items()}
        yield point_of("rollmill", options.env, until * graph.loops.batch_size, seconds, totals)


def learn_peer(options: argparse.Namespace, settings: Settings, iterations: int) -> Iterator[dict]:
    each = max(iterations // options.points, 1)
    sizes = {"iterations_per_call": each, "planned_iterations": iterations}
    peer = craftax_peer.build(options.env, settings, **sizes, seed=options.seed)
    carry, seconds = peer.start, 0.0
    for number in range(1, iterations // each + 1):
        began = time.perf_counter()
        carry, metrics = jax.block_until_ready(peer.run(carry))
        seconds += time.perf_counter() - began
        totals = {name: float(metrics[name]) for name in ("ended", "return", "length")}
        steps = number * each * settings.num_envs * settings.num_steps
        yield point_of("peer", options.env, steps, seconds, totals)


SIDES = {"rollmill": learn_rollmill, "peer": learn_peer}


def learn(options: argparse.Namespace, settings: Settings) -> Iterator[dict]:
    """The curves so far, after each point; a side that has had its seconds is left where it is."""
    iterations = options.learn_steps // (settings.num_envs * settings.num_steps)
    curves: dict[str, list[dict]] = {}
    result = {
        "seed": options.seed,
        "planned_steps": options.learn_steps,
        "largest_return": LARGEST_RETURN[options.env],
        "curves": curves,
    }
    for side in options.sides:
        points = curves.setdefault(side, [])
        for point in SIDES[side](options, settings, iterations):
            points.append(point)
            yield result
            if point["seconds"] > options.seconds:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("speed", "learn"))
    parser.add_argument("--env", choices=tuple(LARGEST_RETURN), default="Craftax-Classic-Symbolic-v1")
    parser.add_argument(
        "--authors", type=Path, help="a clone of Craftax_Baselines, to measure its own code as well"
    )
    parser.add_argument("--ratios", type=int, nargs="+", default=[16], help="reset_ratio of Rollmill's sides")
    parser.add_argument("--unroll", type=int, default=1)
    parser.add_argument("--fusion", choices=("auto", "off"), default="off")
    parser.add_argument("--iterations", type=int, default=16, help="of one turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--learn-steps", type=int, default=100_000_000)
    parser.add_argument("--points", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="that learn")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of learning at most, for each side")
    parser.add_argument("--num-envs", type=int, default=Settings().num_envs)
    parser.add_argument("--num-steps", type=int, default=Settings().num_steps)
    parser.add_argument("--width", type=int, default=Settings().width)
    parser.add_argument("--suffix", default="", help="of the result's name")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    settings = Settings(num_envs=options.num_envs, num_steps=options.num_steps, width=options.width)
    short = options.env.removesuffix("-Symbolic-v1").lower()
    for found in [speed(options, settings)] if options.part == "speed" else learn(options, settings):
        result = {"environment": options.env, "settings": settings._asdict(), **found}
        name = f"{short}-{options.part}-{jax.default_backend()}{options.suffix}"
        write_result(name, result, directory=options.output)


if __name__ == "__main__":
    main()
