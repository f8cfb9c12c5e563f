"""PPO on Craftax beside its authors' PPO: steps per second, in turns in one run; and returns while learning.

    python benchmarks/craftax_training.py rollouts --num-envs 8192          # random actions, no network
    python benchmarks/craftax_training.py speed --ratios 16 1
    python benchmarks/craftax_training.py learn --learn-steps 1_000_000_000 --seconds 500

All sides have the network and the hyperparameters that the authors' `ppo.py` has by default. The peer is their
algorithm written anew (craftax_peer.py). Figures are environment steps per second of whole iterations without
compilation. Sides take turns, and each continues its training from turn to turn. `learn` trains by Rollmill alone.
A percentage is the mean return of the training episodes that ended, relative to the sum of the rewards of all
achievements. In Craftax-Classic, `rollouts` and `speed` also measure the built-in environment CraftaxClassic-v0,
and `learn --built-in` trains on it. Needs craftax==1.6.1.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import craftax_peer
import jax
import jax.numpy as jnp
import numpy as np
from craftax_peer import Settings
from gymnasium import spaces
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
from rollmill.programs.compiler_options import program_options

LARGEST_RETURN = {"Craftax-Classic-Symbolic-v1": 22.0, "Craftax-Symbolic-v1": 226.0}
"""Sum of the rewards of all achievements."""
CLASSIC, BUILT_IN = "Craftax-Classic-Symbolic-v1", "CraftaxClassic-v0"
"""An environment of Craftax, and the built-in environment with its rules."""
Turn = Callable[[], float]
"""Trains for some iterations, and returns the environment steps per second."""


def program_of(name: str, chosen: Any, settings: Settings, *, iterations: int, ratio: int, seed: int = 0) -> Any:
    same = ("num_envs", "num_steps", "num_minibatches", "learning_rate", "gamma", "gae_lambda", "max_grad_norm")
    graph = rollmill.ppo(
        rollmill.make(name, reset_ratio=ratio),
        total_timesteps=iterations * settings.num_envs * settings.num_steps,
        update_epochs=settings.epochs,
        clip_coef=settings.clip,
        ent_coef=settings.entropy,
        vf_coef=settings.value,
        network=rollmill.NetworkConfig(hidden_sizes=(settings.width,) * 3, activation="tanh"),
        **{name: getattr(settings, name) for name in same},
    )
    program = lower(graph, seeds=(seed,), unroll=chosen.unroll, fusion=chosen.fusion)
    print(f"{name}, reset_ratio={ratio}: compiled in {program.compile_seconds:.0f} s", *program.notes, flush=True)
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


def names_of(chosen: Any) -> list[str]:
    """Returns the environment of the package, and the built-in one with the same rules, if there is one."""
    return [f"craftax:{chosen.env}", *([BUILT_IN] if chosen.env == CLASSIC else [])]


def rollout_turn(name: str, chosen: Any, settings: Settings) -> Turn:
    """Returns rollouts with random actions, which read all observations and reset ended episodes."""
    made = rollmill.make(name, reset_ratio=chosen.ratios[0])
    assert isinstance(made, rollmill.Environment) and isinstance(made.action_space, spaces.Discrete)
    env, count = rollmill.auto_reset(made), int(made.action_space.n)
    num_envs, steps = settings.num_envs, chosen.iterations * settings.num_steps

    def one(carry: Any, key: Any) -> Any:
        state, total = carry
        action_key, step_key = jax.random.split(key)
        actions = jax.random.randint(action_key, (num_envs,), 0, count)
        keys = jax.random.split(step_key, num_envs)
        after = jax.vmap(env.step, in_axes=(0, 0, 0, None))(keys, state, actions, env.params)
        seen = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(after.observation))
        return (after.state, total + seen + jnp.sum(after.reward)), None

    begin = jax.jit(jax.vmap(env.reset, in_axes=(0, None)))
    _, state = begin(jax.random.split(jax.random.key(0), num_envs), env.params)
    carry, number, began = (state, jnp.zeros(())), 0, time.perf_counter()
    roll = jax.jit(lambda carry, key: jax.lax.scan(one, carry, jax.random.split(key, steps))[0], donate_argnums=0)
    roll = roll.lower(carry, jax.random.key(0)).compile(program_options())
    print(f"{name}: compiled in {time.perf_counter() - began:.0f} s", flush=True)

    def turn() -> float:
        nonlocal carry, number
        began = time.perf_counter()
        carry = jax.block_until_ready(roll(carry, jax.random.key(number)))
        number += 1
        return num_envs * steps / (time.perf_counter() - began)

    return turn


def rollouts(chosen: Any, settings: Settings) -> Iterator[dict[str, Any]]:
    sides = {name: rollout_turn(name, chosen, settings) for name in names_of(chosen)}
    figures = spreads(in_turns(sides, chosen.rounds, warm_up=1))
    over = ratios(figures, names_of(chosen)[-1])
    print({name: f"{of['median']:,.0f} steps/s" for name, of in figures.items()}, over, flush=True)
    ratio, steps = chosen.ratios[0], chosen.iterations * settings.num_steps
    yield {"steps": steps, "reset_ratio": ratio, "steps_per_second": figures, "ratios": over}


def speed(chosen: Any, settings: Settings) -> Iterator[dict[str, Any]]:
    batch, planned = settings.num_envs * settings.num_steps, chosen.iterations * (chosen.rounds + 1)
    sides: dict[str, Turn] = {}
    for ratio in chosen.ratios:
        for name in names_of(chosen):
            program = program_of(name, chosen, settings, iterations=planned, ratio=ratio)
            built_in = f"{BUILT_IN}, " if name == BUILT_IN else ""
            sides[f"rollmill, {built_in}reset_ratio={ratio}"] = training_turns(program, batch, chosen.iterations)
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
    name = BUILT_IN if chosen.built_in else f"craftax:{chosen.env}"
    program = program_of(name, chosen, settings, iterations=iterations, ratio=chosen.ratios[0], seed=chosen.seed)
    state, seconds, points = program.start(), 0.0, marks(iterations, chosen.points)
    metrics = {"ended": "episodes/ended", "return": "episodes/return_sum", "length": "episodes/length_sum"}
    for first, until in zip(points, points[1:], strict=False):
        began = time.perf_counter()
        state, rows = advance(program, state, first, until)
        seconds += time.perf_counter() - began
        totals = {short: float(sum(np.sum(row[metric]) for row in rows)) for short, metric in metrics.items()}
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
        {"part": one_of("rollouts", "speed", "learn")},
        env=one_of(*LARGEST_RETURN, default=CLASSIC),
        ratios=([16], "reset_ratio of Rollmill's sides, and the first for the peer"),
        unroll=1,
        fusion=one_of("auto", "off", default="off"),
        iterations=(16, "of one turn"),
        rounds=5,
        learn_steps=100_000_000,
        points=40,
        seed=0,
        built_in=False,
        seconds=(float("inf"), "limit of learning for each side"),
        num_envs=default.num_envs,
        num_steps=default.num_steps,
        width=default.width,
        suffix="",
    )
    sizes = {"num_envs": chosen.num_envs, "num_steps": chosen.num_steps, "width": chosen.width}
    settings = Settings(**sizes, reset_ratio=chosen.ratios[0])
    of = BUILT_IN if chosen.built_in else chosen.env.removesuffix("-Symbolic-v1")
    name = f"{of.lower()}-{chosen.part}-{platform()}{chosen.suffix}"
    for found in {"rollouts": rollouts, "speed": speed, "learn": learn}[chosen.part](chosen, settings):
        result = {"environment": chosen.env, "settings": settings._asdict(), **found}
        write_result(name, result, chosen.output)


if __name__ == "__main__":
    main()
