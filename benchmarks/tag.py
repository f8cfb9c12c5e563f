"""Tag with random actions: Rollmill's environments beside WarpDrive's NumPy environments, in one run.

    python benchmarks/tag.py cpu     # make benchmark-tag
    python benchmarks/tag.py gpu

Figures are environment steps per second, in which every agent acts, episodes that end begin anew, and the
observations and rewards of every step are written. Compilation and, for WarpDrive, drawing the actions are left
out. Sides take turns, so that a machine whose speed drifts slows all of them alike; figures per second of CPU
time, of all cores together, hardly depend on what else runs on the machine. WarpDrive's NumPy environment is
one environment on one CPU core; its CUDA kernels are not measured here.
"""

import sys
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import jax
import numpy as np
from measure import in_turns, one_of, options, require, spreads, write_result

import rollmill
from rollmill.core.spaces import sample

GRID, FIELD = "TagGridWorld-v0", "TagContinuous-v0"
SCAN = 10
"""Steps of one compiled call."""


class Game(NamedTuple):
    environment: str
    num_taggers: int
    num_runners: int
    copies: dict[str, tuple[int, ...]]
    """Numbers of copies at once, on each machine."""


GAMES = (
    Game(GRID, 4, 1, {"cpu": (1, 256, 4096), "gpu": (4096, 65536)}),
    Game(FIELD, 10, 100, {"cpu": (1, 16, 128), "gpu": (256, 4096)}),
    Game(FIELD, 100, 900, {"cpu": (1, 8), "gpu": (64, 512)}),
)
FIELD_OPTIONS = {"grid_length": 20.0, "episode_length": 500, "seed": 0, "max_acceleration": 0.1}
FIELD_OPTIONS |= {"min_acceleration": -0.1, "max_turn": 2.356, "min_turn": -2.356, "num_acceleration_levels": 20}
FIELD_OPTIONS |= {"num_turn_levels": 20, "use_full_observation": False, "num_other_agents_observed": 10}
FIELD_OPTIONS |= {"tagging_distance": 0.02, "tag_reward_for_tagger": 10.0, "tag_penalty_for_runner": -10.0}


class Speed(NamedTuple):
    """Environment steps per second on the clock, and of CPU time."""

    clock: float
    cpu: float


def run_for(seconds: float, advance: Callable[[int], int], *, least: int = 1) -> Speed:
    """Calls `advance` for some seconds and at least so often; it returns the environment steps that it made."""
    clock, cpu, calls, steps = time.perf_counter(), time.process_time(), 0, 0
    while time.perf_counter() - clock < seconds or calls < least:
        steps += advance(calls)
        calls += 1
    return Speed(steps / (time.perf_counter() - clock), steps / (time.process_time() - cpu))


def own(game: Game, num_envs: int) -> Callable[[float], Speed]:
    """Returns a function that runs it for so many seconds."""
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

    def some(call: int) -> int:
        nonlocal carry
        carry = jax.block_until_ready(advance(carry, jax.random.fold_in(key, call)))
        return SCAN * num_envs

    return lambda seconds: run_for(seconds, some)


def warp_drive(game: Game) -> Callable[[float], Speed]:
    """Returns a function that runs it for so many seconds, and for at least two steps."""
    # These environments use the spaces of gym alone.
    sys.modules.setdefault("gym", types.ModuleType("gym")).__dict__["spaces"] = gymnasium.spaces
    if game.environment == GRID:
        from example_envs.tag_gridworld.tag_gridworld import TagGridWorld

        env, choices = TagGridWorld(game.num_taggers, grid_length=100, episode_length=100, seed=0), [5]
    else:
        from example_envs.tag_continuous.tag_continuous import TagContinuous

        env, choices = TagContinuous(game.num_taggers, game.num_runners, **FIELD_OPTIONS), [[21, 21]]
    env.reset()
    shape = (64, game.num_taggers + game.num_runners, *np.shape(choices)[1:])
    drawn = np.random.default_rng(0).integers(np.broadcast_to(choices[0], shape))
    actions = [dict(enumerate(row)) for row in drawn]

    def step(call: int) -> int:
        *_, done, _ = env.step(actions[call % len(actions)])
        if done["__all__"]:
            env.reset()
        return 1

    return lambda seconds: run_for(seconds, step, least=2)


def compare(game: Game, chosen: Any) -> dict[str, Any]:
    sides = {"WarpDrive, NumPy": warp_drive(game)}
    sides |= {f"Rollmill, {num_envs} at once": own(game, num_envs) for num_envs in game.copies[chosen.machine]}
    runs = in_turns({name: partial(side, chosen.seconds) for name, side in sides.items()}, chosen.rounds)
    clock = spreads({name: [speed.clock for speed in speeds] for name, speeds in runs.items()})
    cpu = spreads({name: [speed.cpu for speed in speeds] for name, speeds in runs.items()})
    print(f"{game.environment}, {game.num_taggers} taggers and {game.num_runners} runners")
    for name in sides:
        rates = f"{clock[name]['median']:12,.1f} steps/s {cpu[name]['median']:12,.1f} per CPU second"
        print(f"  {name:24} {rates}", flush=True)
    described = {"environment": game.environment, "taggers": game.num_taggers, "runners": game.num_runners}
    return {**described, "steps_per_second": clock, "steps_per_cpu_second": cpu}


def main() -> None:
    machine = {"machine": one_of("cpu", "gpu")}
    chosen = options(__doc__, machine, rounds=3, seconds=(1.0, "of each side in each round"))
    require(chosen.machine)
    write_result(f"tag-{chosen.machine}", {"rows": [compare(game, chosen) for game in GAMES]}, chosen.output)


if __name__ == "__main__":
    main()
