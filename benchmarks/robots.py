"""PPO on a robot's task for a fixed time, with the curve of its return, on one device.

    python benchmarks/robots.py [--environment Ant] [--seconds 40] [--seeds 0 1 2] [--envs 4096] [--fusion off]
        [--recipe robots-ant]

Sizes are those of IsaacGymEnvs' Ant: 4,096 environments, 16 steps, two minibatches, four epochs, layers of 256,
128 and 64 with a shared torso, and a learning rate of 3e-4, which is constant here and follows the KL divergence
there; a recipe replaces them. A return is the mean of the training episodes that ended in an iteration. Writes
results/robots-NAME.json.
"""

import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from measure import options, write_result

import rollmill
from rollmill.dataflow import Graph
from rollmill.programs.compiled import lower
from rollmill.recipes import RECIPES

STEPS, ITERATIONS = 16, 4
"""Steps of a rollout, and iterations between two readings of the metrics."""


def graph_of(environment: str, num_envs: int, recipe: str | None) -> Graph:
    """Returns PPO with the hyperparameters of a recipe, or with those above."""
    env, steps = rollmill.make(f"robots:{environment}"), num_envs * STEPS * 10_000
    if recipe is not None:
        return rollmill.ppo(env, replace(RECIPES[recipe]().config, num_envs=num_envs, total_timesteps=steps))
    return rollmill.ppo(
        env,
        num_envs=num_envs,
        num_steps=STEPS,
        total_timesteps=steps,
        num_minibatches=2,
        update_epochs=4,
        learning_rate=3e-4,
        anneal_lr=False,
        ent_coef=0.0,
        vf_coef=1.0,
        max_grad_norm=1.0,
        normalize_observations=True,
        normalize_rewards=True,
        network=rollmill.NetworkConfig(hidden_sizes=(256, 128, 64), activation="swish", shared_torso=True),
    )


def train(graph: Graph, environment: str, seconds: float, seed: int, fusion: Any) -> dict[str, Any]:
    """Returns seconds, environment steps and mean return of a training, about every half second."""
    num_envs = graph.loops.num_envs
    begin = time.perf_counter()
    program = lower(graph, seeds=(seed,), fusion=fusion)
    compiled, state = time.perf_counter() - begin, program.start()
    begin, done, curve = time.perf_counter(), 0, []
    while (took := time.perf_counter() - begin) < seconds:
        for _ in range(ITERATIONS):
            state, values = program.advance(state, program.iterations_per_call)
        last = program.metrics_of_each(np.asarray(values), program.iterations_per_call)[-1]
        metrics = dict(zip(program.metric_names, last.reshape(-1).tolist(), strict=True))
        done += ITERATIONS * program.iterations_per_call * num_envs * STEPS
        ended = metrics["episodes/ended"]  # without an episode that ended there is no return
        if ended and (not curve or took > curve[-1][0] + 0.5):
            curve.append([took, done, metrics["episodes/return_sum"] / ended])
    jax.block_until_ready(state)
    rate = done / (time.perf_counter() - begin)
    final = f"{curve[-1][2]:.0f}" if curve else "unknown"
    print(f"{environment} seed {seed}: {rate / 1e6:.2f} M steps/s, return {final} after {done:,} steps")
    return {"seed": seed, "compile_seconds": compiled, "steps_per_second": rate, "curve": curve}


def main() -> None:
    chosen = options(
        __doc__, environment="Ant", seconds=40.0, seeds=[0], envs=4_096, fusion="off", recipe=str, name=str
    )
    graph = graph_of(chosen.environment, chosen.envs, chosen.recipe)
    runs = [train(graph, chosen.environment, chosen.seconds, seed, chosen.fusion) for seed in chosen.seeds]
    name = chosen.name or f"robots-{chosen.environment.lower()}"
    write_result(name, {"envs": chosen.envs, "recipe": chosen.recipe, "runs": runs}, chosen.output)


if __name__ == "__main__":
    main()
