"""Tag with random actions: Rollmill's environments beside WarpDrive's NumPy environments, in one run.

    python benchmarks/tag.py cpu     # make benchmark-tag
    python benchmarks/tag.py gpu

Figures are environment steps per second, in which every agent acts, episodes that end begin anew, and the
observations and rewards of every step are written. Compilation and, for WarpDrive, drawing the actions are left
out. Sides take turns, so that a machine whose speed drifts slows all of them alike; figures per second of CPU
time, of all cores together, hardly depend on what else runs on the machine. WarpDrive's NumPy environment is
one environment on one CPU core; its CUDA kernels are not measured here.
"""

import argparse
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gymnasium
import jax
import numpy as np
from measure import RESULTS, spread, write_result

import rollmill
from rollmill.core.spaces import sample

GRID, FIELD = "TagGridWorld-v0", "TagContinuous-v0"
SCAN = 10
"""Steps of one compiled call."""


class Game(NamedTuple):
    environment: str
    num_taggers: int
    num_runners: int
    on_cpu: tuple[int, ...]
    """In how many copies at once it is tried."""
    on_gpu: tuple[int, ...]

    @property
    def num_agents(self) -> int:
        """Taggers and runners."""
        return self.num_taggers + self.num_runners


GAMES = (
    Game(GRID, 4, 1, on_cpu=(1, 256, 4096), on_gpu=(4096, 65536)),
    Game(FIELD, 10, 100, on_cpu=(1, 16, 128), on_gpu=(256, 4096)),
    Game(FIELD, 100, 900, on_cpu=(1, 8), on_gpu=(64, 512)),
)


class Speed(NamedTuple):
    """Environment steps per second on the clock, and of CPU time."""

    clock: float
    cpu: float


class Stopwatch:
    """Begins when it is made."""

    def __init__(self):
        self.clock, self.cpu = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.clock

    def speed(self, steps: int) -> Speed:
        """The speed of so many steps until now."""
        return Speed(steps / self.seconds, steps / (time.process_time() - self.cpu))


def own(game: Game, num_envs: int) -> Callable[[float], Speed]:
    """A function that runs it for so many seconds."""
    made = rollmill.make(game.environment, num_taggers=game.num_taggers, num_runners=game.num_runners)
    env = rollmill.vectorise(rollmill.auto_reset(made), num_envs)
    draw = jax.vmap(lambda key: sample(key, env.action_space))

    def step(state, key):
        action_key, step_key = jax.random.split(key)
        action = draw(jax.random.split(action_key, num_envs))
        timestep = env.step(jax.random.split(step_key, num_envs), state, action, env.params)
        # In the loop's carry, all that the step returns is computed and written.
        return timestep.state, (timestep.observation, timestep.reward, timestep.terminated)

    def advance(carry, key):
        return jax.lax.scan(lambda carry, k: (step(carry[0], k), None), carry, jax.random.split(key, SCAN))[0]

    key = jax.random.key(0)
    carry = jax.jit(lambda key: step(env.reset(jax.random.split(key, num_envs), env.params)[1], key))(key)
    advance = jax.jit(advance).lower(carry, key).compile()

    def measured(seconds: float) -> Speed:
        nonlocal carry
        calls, watch = 0, Stopwatch()
        while watch.seconds < seconds:
            carry = jax.block_until_ready(advance(carry, jax.random.fold_in(key, calls)))
            calls += 1
        return watch.speed(calls * SCAN * num_envs)

    return measured


def warp_drive(game: Game) -> Callable[[float], Speed]:
    """A function that runs it for so many seconds, and for at least two steps."""
    # Of gym, these environments take the spaces alone.
    sys.modules.setdefault("gym", types.ModuleType("gym")).__dict__["spaces"] = gymnasium.spaces
    env = _grid(game) if game.environment == GRID else _field(game)
    choices = [5] if game.environment == GRID else [[21, 21]]
    env.reset()

    def measured(seconds: float) -> Speed:
        shape = (64, game.num_agents, *np.shape(choices)[1:])
        drawn = np.random.default_rng(0).integers(np.broadcast_to(choices[0], shape))
        actions = [dict(enumerate(row)) for row in drawn]
        steps, watch = 0, Stopwatch()
        while watch.seconds < seconds or steps < 2:
            *_, done, _ = env.step(actions[steps % len(actions)])
            steps += 1
            if done["__all__"]:
                env.reset()
        return watch.speed(steps)

    return measured


def _grid(game: Game):
    from example_envs.tag_gridworld.tag_gridworld import TagGridWorld

    return TagGridWorld(game.num_taggers, grid_length=100, episode_length=100, seed=0)


def _field(game: Game):
    from example_envs.tag_continuous.tag_continuous import TagContinuous

    return TagContinuous(
        game.num_taggers,
        game.num_runners,
        grid_length=20.0,
        episode_length=500,
        seed=0,
        max_acceleration=0.1,
        min_acceleration=-0.1,
        max_turn=2.356,
        min_turn=-2.356,
        num_acceleration_levels=20,
        num_turn_levels=20,
        use_full_observation=False,
        num_other_agents_observed=10,
        tagging_distance=0.02,
        tag_reward_for_tagger=10.0,
        tag_penalty_for_runner=-10.0,
    )


def compare(game: Game, sizes: tuple[int, ...], *, rounds: int, seconds: float) -> dict:
    sides = {"WarpDrive, NumPy": warp_drive(game)}
    sides |= {f"Rollmill, {num_envs} at once": own(game, num_envs) for num_envs in sizes}
    runs = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measured in sides.items():
            runs[name].append(measured(seconds))
    clock = {name: spread([speed.clock for speed in speeds]) for name, speeds in runs.items()}
    cpu = {name: spread([speed.cpu for speed in speeds]) for name, speeds in runs.items()}
    print(f"{game.environment}, {game.num_taggers} taggers and {game.num_runners} runners")
    for name in sides:
        print(
            f"  {name:24} {clock[name]['median']:12,.1f} steps/s {cpu[name]['median']:12,.1f} per CPU second",
            flush=True,
        )
    described = {"environment": game.environment, "taggers": game.num_taggers, "runners": game.num_runners}
    return {**described, "steps_per_second": clock, "steps_per_cpu_second": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", choices=("cpu", "gpu"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each side in each round")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if jax.default_backend() != options.machine:
        raise SystemExit(f"JAX runs on {jax.default_backend()}, not on {options.machine}.")
    rows = [
        compare(game, getattr(game, f"on_{options.machine}"), rounds=options.rounds, seconds=options.seconds)
        for game in GAMES
    ]
    write_result(f"tag-{options.machine}", {"rows": rows}, directory=options.output)


if __name__ == "__main__":
    main()
