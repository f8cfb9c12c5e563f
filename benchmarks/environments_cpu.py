"""CartPole-v1 with random actions on a CPU, no learning: gymnax beside Rollmill by XLA and as machine code.

    python benchmarks/environments_cpu.py

A rollout is 128 steps. Every side resets by itself and writes observation, action, reward and the end of episodes
of every step and environment. A figure is the median of several rollouts, in environment steps a second. Writes
results/environments-cpu.json.
"""

from functools import partial
from importlib.metadata import version
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
from fusion_sides import collecting_graph
from measure import compiled, options, spread, timed_in_turns, write_result

import rollmill
from rollmill.core.machine import keep_freed_memory
from rollmill.dataflow import collect, start_collector
from rollmill.fusion import backend_for, fused_collect

STEPS, SIZES = 128, (256, 1_024, 2_048, 4_096, 16_384)
TURNS = 101
"""So many that other work of the machine disturbs a median little."""


def gymnax_rollout(num_envs: int) -> tuple[Any, Any]:
    """Returns the step of gymnax under `vmap` and `lax.scan`, and its first state."""
    env, params = gymnax.make("CartPole-v1")
    reset = jax.vmap(env.reset, in_axes=(0, None))
    step = jax.vmap(env.step, in_axes=(0, 0, 0, None))

    def one(held: Any, key: Any) -> Any:
        observation, state = held
        action_key, step_key = jax.random.split(key)
        action = jax.random.randint(action_key, (num_envs,), 0, 2)
        after, state, reward, *ends, _ = step(jax.random.split(step_key, num_envs), state, action, params)
        return (after, state), (observation, action, reward, *ends)

    rollout = lambda held, key: jax.lax.scan(one, held, jax.random.split(key, STEPS))
    return rollout, jax.jit(reset)(jax.random.split(jax.random.key(0), num_envs), params)


def measure(num_envs: int) -> dict[str, dict]:
    graph = collecting_graph(rollmill.make("CartPole-v1"), num_envs, STEPS)
    backend = backend_for(jax.devices()[0], "float32")
    run = backend.rollouts.run(backend.rollouts.launches(num_envs, 0)[0])
    index, key = jnp.arange(num_envs, dtype=jnp.int32), jax.random.key(1)
    collector = jax.jit(partial(start_collector, graph))(jax.random.key(0), index)
    theirs, held = gymnax_rollout(num_envs)
    sides = {
        "gymnax": (theirs, (held, key)),
        "rollmill, XLA": (partial(collect, graph, ()), (collector, key)),
        "rollmill, machine code": (partial(fused_collect, graph, (), run=run), (collector, key)),
    }
    ready = {name: partial(compiled({name: f}, own)[name], *own) for name, (f, own) in sides.items()}
    seconds = timed_in_turns(ready, (), repeats=TURNS, calls=1)
    return {name: spread([num_envs * STEPS / each for each in times]) for name, times in seconds.items()}


def main() -> None:
    keep_freed_memory()  # as trainings do; all sides here have it
    chosen, sizes = options(__doc__), {}
    for num_envs in SIZES:
        sizes[num_envs] = measure(num_envs)
        said = ", ".join(f"{name} {figure['median'] / 1e6:,.1f} M/s" for name, figure in sizes[num_envs].items())
        print(f"{num_envs} environments: {said}", flush=True)
    best = {name: max(figures[name]["median"] for figures in sizes.values()) for name in sizes[SIZES[0]]}
    ratio = best["rollmill, machine code"] / best["gymnax"]
    print(f"machine code over gymnax, each at its best size: {ratio:.1f} x")
    result = {"steps": STEPS, "sizes": sizes, "best": best, "machine code over gymnax": ratio}
    write_result("environments-cpu", result | {"gymnax": version("gymnax")}, chosen.output)


if __name__ == "__main__":
    main()
