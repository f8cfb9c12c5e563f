"""Rollouts in one kernel beside `vmap` and `lax.scan` compiled by XLA, on one GPU, trajectory stored.

    python benchmarks/fusion_rollouts.py [--envs 4096 65536] [--environment CartPole-v1 Pendulum-v1]

A rollout is 128 steps of a 64-64 tanh policy, with shared torso where one agent acts, actions sampled. Both sides
start from the same state with the same weights and keys, and write the same trajectory. The kernel's launch is the
fastest of a few; a figure is the median of several times. A time is that of eight calls of a program of several
rollouts in a row: one alone would be over before the next is launched. Writes results/fusion-rollouts.json.
"""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import compiled, fastest, options, timed_in_turns, write_result

import rollmill
from rollmill.dataflow import Graph, collect, init_state
from rollmill.fusion import Launch, consecutive_rollouts, fused_collect, run_kernel

STEPS, ROLLOUTS = 128, 4
MANY = [(32, 1), (32, 1, 128), (64, 2), (64, 2, 128), (128, 4), (128, 4, 168), (128, 4, 128)]
LAUNCHES = {4_096: [(16, 1), (16, 2), (32, 1), (32, 2), (64, 4)], 65_536: MANY, 262_144: MANY}
"""Environments of a block, warps, and the limit of a thread's registers, by the number of environments."""
EXACT = [(16, 2), (32, 4)]
"""Launches of the exact kernel, whose numbers are compared one by one."""


def graph_of(environment: str, num_envs: int) -> Graph:
    """Returns PPO with one torso, or MAPPO, whose actor is 64-64 as well, where there are several agents."""
    sizes = {"num_envs": num_envs, "num_steps": STEPS, "total_timesteps": num_envs * STEPS, "num_minibatches": 1}
    env = rollmill.make(environment)
    if environment.startswith("Tag"):
        return rollmill.mappo(env, **sizes)
    return rollmill.ppo(env, **sizes, network=rollmill.NetworkConfig(shared_torso=True))


def differences(one: Any, other: Any) -> dict[str, float]:
    """Returns the share of numbers of two rollouts, leaf by leaf, that differ by more than a relative 1e-4.

    Compares the leaves that both have: the kernel adds values, and then keeps no final observations.
    """
    first, second = (dict(jax.tree.leaves_with_path(side)) for side in (one, other))
    double = lambda leaf: np.asarray(leaf, np.float64)
    near = lambda path: np.isclose(double(first[path]), double(second[path]), rtol=1e-4, atol=1e-5)
    shares = {path: float(np.mean(~near(path))) for path in first if path in second}
    return {jax.tree_util.keystr(path): share for path, share in shares.items() if share > 0}


def measure(environment: str, num_envs: int, numerics: list[str], only: list[int] | None) -> dict[str, Any]:
    graph = graph_of(environment, num_envs)
    state = jax.jit(partial(init_state, graph))(jax.random.key(0), jnp.arange(num_envs, dtype=jnp.int32))
    arguments = graph.weights(state.learner), state.collector, jax.random.key(1)
    functions: dict[Any, Any] = {("xla", unroll): partial(collect, graph, unroll=unroll) for unroll in (1, 4)}
    for name in numerics:
        for launch in [tuple(only)] if only else EXACT if name == "float32" else LAUNCHES[num_envs]:
            run = partial(run_kernel, launch=Launch(*launch), numerics=name)
            functions[name, launch] = partial(fused_collect, graph, run=run)
    several = compiled(
        {name: partial(consecutive_rollouts, ROLLOUTS, each) for name, each in functions.items()}, arguments
    )
    seconds, steps = timed_in_turns(several, arguments), num_envs * STEPS * ROLLOUTS
    result: dict[str, Any] = {
        side: fastest(side, seconds, steps) for side in dict.fromkeys(side for side, _ in several)
    }
    for side, rates in result.items():
        print(f"{environment} {num_envs} {side}: {rates['median'] / 1e6:.0f} M/s {rates['medians']}")
        if side in numerics:
            rates["over_xla"] = rates["median"] / result["xla"]["median"]
    exact = next((function for (name, _), function in functions.items() if name == "float32"), None)
    if exact is not None:
        result["unequal"] = differences(*(jax.jit(one)(*arguments) for one in (exact, functions["xla", 1])))
        print("unequal", result["unequal"], flush=True)
    return result


def main() -> None:
    chosen = options(
        __doc__,
        environment=["CartPole-v1"],
        envs=[4_096],
        numerics=["tf32", "bfloat16", "float32"],
        launch=([int], "block, warps and registers: no other is tried"),
        name="fusion-rollouts",
    )
    found: dict[str, Any] = {}
    for environment, num_envs in itertools.product(chosen.environment, chosen.envs):
        found[f"{environment} {num_envs}"] = measure(environment, num_envs, chosen.numerics, chosen.launch)
        result = {"steps": STEPS, "in_a_row": ROLLOUTS, "rollouts": found}
        write_result(chosen.name, result, chosen.output)


if __name__ == "__main__":
    main()
