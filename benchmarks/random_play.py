"""Random play of board games, no learning: one fused kernel beside `vmap` and `lax.scan` compiled by XLA.

    python benchmarks/random_play.py [--environment ConnectFour-v0] [--envs 4096 65536] [--steps 64]

A move is uniform over the legal ones, and a game that ends starts again in the same step; one player makes the
moves of both sides. Both ways start from the same positions with the same keys, and their rewards and ends of
games are compared, number by number, before they are timed. They store the reward and the end of every step
(`results`), or all that a learner would read of it (`trajectory`): observation, legal actions and action as well.

The kernel's launch is the fastest of those that Rollmill tries; a figure is the median of several times, in moves
a second. A time is that of several calls of a program of several rollouts in a row: one alone would be over
before the next is launched. Writes results/random-play-cpu.json or random-play-gpu.json.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fusion_sides import collecting_graph
from measure import compiled, fastest, options, platform, some_of, timed_in_turns, write_result

from rollmill.core.machine import keep_freed_memory
from rollmill.dataflow import Collector, Decision, Graph, Step, Trajectory, collect, start_collector
from rollmill.envs.connect_four import connect_four
from rollmill.envs.tic_tac_toe import tic_tac_toe
from rollmill.fusion import (
    RolloutStep,
    backend_for,
    consecutive_rollouts,
    estimate_pressure,
    fused_collect,
    lower_rollout,
)
from rollmill.networks import MASKED_LOGIT, Categorical

ENVIRONMENTS = {"ConnectFour-v0": connect_four, "TicTacToe-v0": tic_tac_toe}
SIZES = {"cpu": [1_024, 4_096], "gpu": [4_096, 65_536]}
"""Games side by side."""
ROLLOUTS = {"cpu": 1, "gpu": 4}
"""Rollouts in a row, of a program."""
UNROLLED = (1, 4)
"""Steps that XLA compiles as one."""
RESULTS_ONLY, WHOLE = "results", "trajectory"
Rollout = Callable[[Any, Collector, Any], tuple[Collector, Trajectory]]


def uniform_move(weights: Any, key: Any, memory: Any, observation: Any, legal: Any) -> Decision:
    logits = jnp.where(legal, jnp.float32(0), jnp.float32(MASKED_LOGIT))
    return Decision(Categorical(logits).sample(key), (), ())


def results_alone(weights: Any, step: Step) -> Step:
    return step._replace(observation=(), action_mask=(), action=())


def random_play(environment: str, num_envs: int, num_steps: int, stored: str) -> Graph:
    """Returns a graph whose policy plays at random, for one player: policies for two search, outside of
    kernels.
    """
    env = ENVIRONMENTS[environment]()._replace(num_players=1, to_move=None)
    graph = collecting_graph(env, num_envs, num_steps, decide=uniform_move)
    return graph._replace(compute_values=results_alone if stored == RESULTS_ONLY else None)


def by_xla(
    graph: Graph, unroll: int, weights: Any, collector: Collector, key: Any
) -> tuple[Collector, Trajectory]:
    """Collects, and keeps as much of the steps as the kernel stores."""
    after, trajectory = collect(graph, weights, collector, key, unroll=unroll)
    if graph.compute_values is None:
        return after, trajectory
    stored = jax.vmap(jax.vmap(partial(graph.compute_values, weights)))
    return after, trajectory._replace(steps=stored(trajectory.steps))


def sides(
    graph: Graph, step: RolloutStep, launches: Sequence[Sequence[int]] | None
) -> dict[tuple[str, Any], Rollout]:
    backend = backend_for(jax.devices()[0], "tf32")
    tried = launches or backend.rollouts.launches(
        graph.loops.num_envs, estimate_pressure(step.program).num_operations
    )
    found: dict[tuple[str, Any], Rollout] = {
        ("xla", unroll): partial(by_xla, graph, unroll) for unroll in UNROLLED
    }
    for launch in map(tuple, tried):
        found["kernel", launch] = partial(fused_collect, graph, run=backend.rollouts.run(launch), step=step)
    return found


def check_parity(functions: dict[tuple[str, Any], Rollout], arguments: Sequence[Any]) -> dict[str, float]:
    """Compares rewards and ends of games of all ways for one rollout, and exits where one differs."""
    found = {name: function(*arguments)[1].steps for name, function in functions.items()}
    expected = found.pop(("xla", UNROLLED[0]))
    for name, steps in found.items():
        for leaf in ("reward", "terminated", "truncated"):
            if not np.array_equal(getattr(steps, leaf), getattr(expected, leaf)):
                raise SystemExit(f"{leaf} of {name} differs from XLA's.")
    reward = np.asarray(expected.reward)
    assert (reward >= 0).all(), "an illegal move was made"
    return {"games_ended": int(np.sum(expected.terminated)), "games_won": int((reward > 0).sum())}


def measure(environment: str, num_envs: int, stored: str, chosen: Any) -> dict[str, Any]:
    """Returns the moves a second of both sides, and the games of the comparison before."""
    graph = random_play(environment, num_envs, chosen.steps, stored)
    index = jnp.arange(num_envs, dtype=jnp.int32)
    arguments = (), jax.jit(partial(start_collector, graph))(jax.random.key(0), index), jax.random.key(1)
    step = lower_rollout(graph)
    functions = sides(graph, step, chosen.launch)
    result: dict[str, Any] = {"operations": estimate_pressure(step.program).num_operations}
    result["compared"] = check_parity(compiled(functions, arguments), arguments)
    several = {name: partial(consecutive_rollouts, chosen.rollouts, each) for name, each in functions.items()}
    seconds = timed_in_turns(compiled(several, arguments), arguments, repeats=chosen.repeats, calls=chosen.calls)
    moves = num_envs * chosen.steps * chosen.rollouts
    result |= {side: fastest(side, seconds, moves) for side in ("xla", "kernel")}
    result["over_xla"] = result["kernel"]["median"] / result["xla"]["median"]
    said = ", ".join(f"{side} {result[side]['median'] / 1e6:,.1f} M/s" for side in ("xla", "kernel"))
    print(f"{environment} {num_envs} {stored}: {said}, {result['over_xla']:.2f} x", flush=True)
    return result


def main() -> None:
    keep_freed_memory()  # as trainings do; both sides have it
    machine = platform()
    chosen = options(
        __doc__,
        environment=some_of(ENVIRONMENTS),
        envs=SIZES[machine],
        steps=64,
        stored=some_of((RESULTS_ONLY, WHOLE)),
        launch=([[int]], "a launch to try, instead of all"),
        rollouts=(ROLLOUTS[machine], "rollouts in a row"),
        repeats=7,
        calls=(8, "calls in a row that are timed as one"),
    )
    found: dict[str, Any] = {}
    for case in itertools.product(chosen.environment, chosen.envs, chosen.stored):
        found[" ".join(map(str, case))] = measure(*case, chosen)
        result = {"steps": chosen.steps, "in_a_row": chosen.rollouts, "play": found}
        write_result(f"random-play-{machine}", result, chosen.output)


if __name__ == "__main__":
    main()
