"""Rollouts in one kernel beside `vmap` and `lax.scan` compiled by XLA, on one GPU, trajectory stored.

    python benchmarks/fusion_rollouts.py [--envs 4096 65536] [--environment CartPole-v1 Pendulum-v1]

A rollout is 128 steps of a 64-64 tanh policy, with shared torso where one agent acts, actions sampled; both sides
start from the same state with the same weights and keys and write the same trajectory. The kernel's launch is the
fastest of a few; sides take turns, and a figure is the median of several times. A time is that of eight calls of a
program of several rollouts in a row: one alone would be over before the next is launched.
Writes results/fusion-rollouts.json.
"""

import argparse
import itertools
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from measure import RESULTS, compiled, spread, timed_in_turns, write_result

import rollmill
from rollmill.dataflow import collect, start
from rollmill.fusion import Launch, fused_collect, rollouts_in_a_row, run_kernel

STEPS, ROLLOUTS = 128, 4
LAUNCHES = {
    4_096: [(16, 1), (16, 2), (32, 1), (32, 2), (64, 4)],
    65_536: [(32, 1), (32, 1, 128), (64, 2), (64, 2, 128), (128, 4), (128, 4, 168), (128, 4, 128)],
    262_144: [(32, 1), (32, 1, 128), (64, 2), (64, 2, 128), (128, 4), (128, 4, 168), (128, 4, 128)],
}
"""Environments of a block, warps, and the most registers of a thread, by the number of environments."""
EXACT = [(16, 2), (32, 4)]
"""Launches of the exact kernel, which is there to be compared number by number."""
NETWORK = rollmill.NetworkConfig(shared_torso=True)


def graph_of(environment: str, sizes: dict[str, int]):
    """PPO with one torso, or MAPPO, whose actor is 64-64 as well, where there are several agents."""
    env = rollmill.make(environment)
    if environment.startswith("Tag"):
        return rollmill.mappo(env, **sizes)
    return rollmill.ppo(env, **sizes, network=NETWORK)


def sides(environment: str, num_envs: int, numerics: list[str], only: list[int] | None) -> tuple[dict, tuple]:
    """Functions from weights, collector and key to a rollout, and what they are called with."""
    sizes = {"num_envs": num_envs, "num_steps": STEPS, "total_timesteps": num_envs * STEPS, "num_minibatches": 1}
    graph = graph_of(environment, sizes)
    state = jax.jit(partial(start, graph))(jax.random.key(0), jnp.arange(num_envs, dtype=jnp.int32))
    arguments = graph.weights(state.learner), state.collector, jax.random.key(1)
    functions = {("xla", unroll): partial(collect, graph, unroll=unroll) for unroll in (1, 4)}
    tried = {name: LAUNCHES[num_envs] if name != "float32" else EXACT for name in numerics}
    launches = [(name, launch) for name, each in tried.items() for launch in ([tuple(only)] if only else each)]
    for name, launch in launches:
        run = partial(run_kernel, launch=Launch(*launch), numerics=name)
        functions[name, launch] = partial(fused_collect, graph, run=run)
    return functions, arguments


def differences(one, other) -> dict[str, float]:
    """The share of numbers of two rollouts, leaf by leaf, that are not equal, to a relative 1e-4.

    Leaves that one of them lacks are not compared: the kernel adds values, and keeps no final observations then.
    """
    leaves = [dict(jax.tree.leaves_with_path(side)) for side in (one, other)]

    def unequal(x, y) -> float:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return float(np.mean(~np.isclose(x, y, rtol=1e-4, atol=1e-5)))

    shares = {path: unequal(leaf, leaves[1][path]) for path, leaf in leaves[0].items() if path in leaves[1]}
    return {jax.tree_util.keystr(path): share for path, share in shares.items() if share > 0}


def measure(environment: str, num_envs: int, numerics: list[str], only: list[int] | None) -> dict:
    functions, arguments = sides(environment, num_envs, numerics, only)
    several = {name: partial(rollouts_in_a_row, ROLLOUTS, function) for name, function in functions.items()}
    in_a_row = compiled(several, arguments)
    seconds = timed_in_turns(in_a_row, arguments)
    steps = num_envs * STEPS * ROLLOUTS
    result = {}
    for side in dict.fromkeys(name for name, _ in in_a_row):
        variants = {name: times for name, times in seconds.items() if name[0] == side}
        best = min(variants, key=lambda name: spread(variants[name])["median"])
        result[side] = spread([steps / t for t in variants[best]]) | {
            "variant": best[1],
            "medians": {str(name[1]): steps / spread(times)["median"] for name, times in variants.items()},
        }
        print(f"{environment} {num_envs} {side}: {result[side]['median'] / 1e6:.0f} M/s {result[side]['medians']}")
    for side in numerics:
        if side in result:
            result[side]["over_xla"] = result[side]["median"] / result["xla"]["median"]
    exact = next((function for (name, _), function in functions.items() if name == "float32"), None)
    if exact is not None:
        result["unequal"] = differences(*(jax.jit(one)(*arguments) for one in (exact, functions["xla", 1])))
        print("unequal", result["unequal"], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", nargs="+", default=["CartPole-v1"])
    parser.add_argument("--envs", nargs="+", type=int, default=[4_096])
    parser.add_argument("--numerics", nargs="+", default=["tf32", "bfloat16", "float32"])
    parser.add_argument("--launch", nargs="+", type=int, help="block, warps and registers: no other is tried")
    parser.add_argument("--name", default="fusion-rollouts")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = {}
    for environment, num_envs in itertools.product(arguments.environment, arguments.envs):
        found[f"{environment} {num_envs}"] = measure(environment, num_envs, arguments.numerics, arguments.launch)
        result = {"steps": STEPS, "in_a_row": ROLLOUTS, "rollouts": found}
        write_result(arguments.name, result, directory=arguments.output)


if __name__ == "__main__":
    main()
