"""PPO on Craftax beside its authors' PPO: steps per second, in turns in one run; and returns while learning.

    python benchmarks/craftax_training.py speed --ratios 16 1
    python benchmarks/craftax_training.py learn --learn-steps 1_000_000_000 --seconds 500

All sides have the network and the hyperparameters that the authors' `ppo.py` has by default. The peer is their
algorithm written anew (craftax_peer.py). Figures are environment steps per second of whole iterations without
compilation. Sides take turns, and each continues its training from turn to turn. `learn` trains by Rollmill alone.
A percentage is the mean return of the training episodes that ended, relative to the sum of the rewards of all
achievements. Needs craftax==1.6.1.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import craftax_peer
import jax
import numpy as np
from craftax_peer import Settings
from measure import (
    advance,
    in_turns,
    marks,
    one_of,
    options,
    platform,
    ratios,
    spreads,
    training_turns,
    write_result,
)

import rollmill
from rollmill.programs.compiled import lower

LARGEST_RETURN = {"Craftax-Classic-Symbolic-v1": 22.0, "Craftax-Symbolic-v1": 226.0}
"""Sum of the rewards of all achievements."""
Turn = Callable[[], float]
"""Trains for some iterations, and returns the environment steps per second."""


def program_of(chosen: Any, settings: Settings, *, iterations: int, ratio: int, seed: int = 0) -> Any:
    same = ("num_envs", "num_steps", "num_minibatches", "learning_rate", "gamma", "gae_lambda", "max_grad_norm")
    graph = rollmill.ppo(
        rollmill.make(f"craftax:{chosen.env}", reset_ratio=ratio),
        total_timesteps=iterations * settings.num_envs * settings.num_steps,
        update_epochs=settings.epochs,
        clip_coef=settings.clip,
        ent_coef=settings.entropy,
        vf_coef=settings.value,
        network=rollmill.NetworkConfig(hidden_sizes=(settings.width,) * 3, activation="tanh"),
        **{name: getattr(settings, name) for name in same},
    )
    program = lower(graph, seeds=(seed,), unroll=chosen.unroll, fusion=chosen.fusion)
    print(
        f"rollmill, reset_ratio={ratio}: compiled in {program.compile_seconds:.0f} s", *program.notes, flush=True
    )
    return program


def peer_turn(chosen: Any, settings: Settings) -> Turn:
    planned, began = chosen.iterations * (chosen.rounds + 1), time.perf_counter()
    sizes = {"iterations_per_call": chosen.iterations, "planned_iterations": planned}
    peer = craftax_peer.build(chosen.env, settings, **sizes)
    print(f"peer: compiled in {time.perf_counter() - began:.0f} s", flush=True)
    carry = peer.start

    def turn() -> float:
        nonlocal carry
        began = time.perf_counter()
        carry, _ = jax.block_until_ready(peer.run(carry))
        return chosen.iterations * settings.num_envs * settings.num_steps / (time.perf_counter() - began)

    return turn


def speed(chosen: Any, settings: Settings) -> Iterator[dict[str, Any]]:
    batch, planned = settings.num_envs * settings.num_steps, chosen.iterations * (chosen.rounds + 1)
    sides: dict[str, Turn] = {}
    for ratio in chosen.ratios:
        program = program_of(chosen, settings, iterations=planned, ratio=ratio)
        sides[f"rollmill, reset_ratio={ratio}"] = training_turns(program, batch, chosen.iterations)
    first = next(iter(sides))
    sides["peer"] = peer_turn(chosen, settings)
    figures = spreads(in_turns(sides, chosen.rounds, warm_up=1))
    over = ratios(figures, first) | {f"{first} / {first}": 1.0}
    for name, of in figures.items():
        print(f"{name}: {of['median']:,.0f} steps/s; {first} is {over[f'{first} / {name}']:.2f} times as fast")
    how = {"iterations": chosen.iterations, "unroll": chosen.unroll, "fusion": chosen.fusion}
    yield {**how, "steps_per_second": figures, "ratios": over}


def point_of(name: str, steps: int, seconds: float, totals: dict[str, float]) -> dict[str, float]:
    """Returns one point of a curve, of the episodes that ended since the point before."""
    ended = max(totals["ended"], 1.0)
    mean, length = totals["return"] / ended, totals["length"] / ended
    percent = 100 * mean / LARGEST_RETURN[name]
    said = f"{steps:,} steps, {seconds:.0f} s, return {mean:.2f} ({percent:.1f} %), length {length:.0f}"
    print(said, flush=True)
    figures = {"return": mean, "percent": percent, "length": length, "episodes": totals["ended"]}
    return {"steps": steps, "seconds": seconds, **figures}


def points_of_training(chosen: Any, settings: Settings, iterations: int) -> Iterator[dict]:
    program = program_of(chosen, settings, iterations=iterations, ratio=chosen.ratios[0], seed=chosen.seed)
    state, seconds, points = program.start(), 0.0, marks(iterations, chosen.points)
    names = {"ended": "episodes/ended", "return": "episodes/return_sum", "length": "episodes/length_sum"}
    for first, until in zip(points, points[1:], strict=False):
        began = time.perf_counter()
        state, rows = advance(program, state, first, until)
        seconds += time.perf_counter() - began
        totals = {short: float(sum(np.sum(row[name]) for row in rows)) for short, name in names.items()}
        yield point_of(chosen.env, until * settings.num_envs * settings.num_steps, seconds, totals)


def learn(chosen: Any, settings: Settings) -> Iterator[dict[str, Any]]:
    """Yields the curve so far after each point, until the seconds are over."""
    iterations = chosen.learn_steps // (settings.num_envs * settings.num_steps)
    points: list[dict] = []
    protocol = {"seed": chosen.seed, "planned_steps": chosen.learn_steps}
    protocol["largest_return"] = LARGEST_RETURN[chosen.env]
    for point in points_of_training(chosen, settings, iterations):
        points.append(point)
        yield {**protocol, "curves": {"rollmill": points}}
        if point["seconds"] > chosen.seconds:
            break


def main() -> None:
    default = Settings()
    chosen = options(
        __doc__,
        {"part": one_of("speed", "learn")},
        env=one_of(*LARGEST_RETURN, default="Craftax-Classic-Symbolic-v1"),
        ratios=([16], "reset_ratio of Rollmill's sides"),
        unroll=1,
        fusion=one_of("auto", "off", default="off"),
        iterations=(16, "of one turn"),
        rounds=5,
        learn_steps=100_000_000,
        points=40,
        seed=0,
        seconds=(float("inf"), "limit of learning for each side"),
        num_envs=default.num_envs,
        num_steps=default.num_steps,
        width=default.width,
        suffix="",
    )
    settings = Settings(num_envs=chosen.num_envs, num_steps=chosen.num_steps, width=chosen.width)
    name = f"{chosen.env.removesuffix('-Symbolic-v1').lower()}-{chosen.part}-{platform()}{chosen.suffix}"
    for found in {"speed": speed, "learn": learn}[chosen.part](chosen, settings):
        result = {"environment": chosen.env, "settings": settings._asdict(), **found}
        write_result(name, result, chosen.output)


if __name__ == "__main__":
    main()
