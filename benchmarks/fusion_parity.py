r"""Whether fused kernels compute what XLA computes, on one GPU; steps also on a CPU, by machine code.

    python benchmarks/fusion_parity.py [--environment CartPole-v1 ...] [--as-long CartPole-v1 ...]
    PYTHONPATH=tests/fusion python benchmarks/fusion_parity.py --import edge_environments --as-long \
        --environment InvalidNumbers-v0 GrowingAngle-v0 SmallRegisters-v0 --name fusion-parity-edges

Steps: from every state that 64 environments pass through in 200 steps, one step by XLA and one by the kernel, both
with exact products. Integers and flags are compared exactly, floats to a relative 1e-5; the result says which
share of the numbers of each leaf differs. The same again for policies with memory, in kernels that are written as
those of very long programs are. Resuming: a training with fused kernels, against one that is stopped halfway, read
to the host and continued by a program compiled anew. Writes results/fusion-parity.json.
"""

import argparse
import importlib
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import RESULTS, write_result

import rollmill
from rollmill.dataflow import collect, start, step_all
from rollmill.fusion import Launch, fused_collect, run_kernel
from rollmill.fusion.backends.cpu.launches import machine_code
from rollmill.fusion.opt import segments
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.record.leaves import to_host

ENVS, STEPS = 64, 200
LAUNCHES = {"rollouts": (32, 2), "gradients": (264, 64, 4)}
ENVIRONMENTS = [
    "CartPole-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Acrobot-v1",
    "Pendulum-v1",
    "TMaze-v0",
    "Probe-ActionMask-v0",
    "Probe-MultiDiscrete-v0",
    "TagGridWorld-v0",
]


GRU = rollmill.NetworkConfig(torso="gru", hidden_sizes=(32,), recurrent_size=32)


def steps(environment: str, **options: Any) -> dict[str, float]:
    """The share of numbers that differ, leaf by leaf, where any does."""
    env = rollmill.make(environment)
    algorithm = rollmill.mappo if env.agents else rollmill.ppo
    graph = algorithm(env, num_envs=ENVS, num_steps=1, num_minibatches=1, **options)
    state = jax.jit(partial(start, graph))(jax.random.key(3), jnp.arange(ENVS, dtype=jnp.int32))
    weights = graph.weights(state.learner)

    def step(now, t):
        return step_all(graph, weights, now, jax.random.key(5), t)[0], now

    @jax.jit
    def both(collector, key):
        _, passed = jax.lax.scan(step, collector, jnp.arange(STEPS))
        each = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), passed)
        on_gpu = jax.default_backend() == "gpu"
        run = partial(run_kernel, launch=Launch(64, 4), numerics="float32") if on_gpu else run_code
        return fused_collect(graph, weights, each, key, run=run), collect(graph, weights, each, key)

    with jax.default_matmul_precision("highest"):
        fused, plain = jax.device_get(jax.tree.map(readable, both(state.collector, jax.random.key(7))))
    pairs = zip(jax.tree.leaves_with_path(fused), jax.tree.leaves(plain), strict=True)
    shares = {jax.tree_util.keystr(path): unequal(one, other) for (path, one), other in pairs}
    return {path: share for path, share in shares.items() if share > 0}


def run_code(*arguments: Any, **named: Any) -> Any:
    """A rollout in machine code, 16 environments at once."""
    return machine_code().rollouts.run((16,))(*arguments, **named)


def readable(leaf: Any) -> Any:
    """A leaf, or the data of its keys."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def unequal(one: np.ndarray, other: np.ndarray) -> float:
    """The share of numbers that differ."""
    if not jnp.issubdtype(one.dtype, jnp.floating):
        return float(np.mean(one != other))
    one, other = one.astype(np.float64), other.astype(np.float64)
    return float(np.mean(~np.isclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)))


def resumed() -> bool:
    """Whether a fused training that is continued ends with the same bits as one that never stopped."""
    sizes = {"num_envs": 1024, "num_steps": 64, "total_timesteps": 1024 * 64 * 20}
    graph = rollmill.ppo(rollmill.make("CartPole-v1"), **sizes)
    program = lower(graph, fusion="full", launches={"device": jax.devices()[0].device_kind, **LAUNCHES})
    states = {w.last: w.after for w in dispatch_ahead(program, program.start(), first=0, until=20, strides=(10,))}
    again = lower(graph, fusion="full", launches=program.launches)
    host = jax.tree.map(np.asarray, jax.tree.map(readable, states[10]))
    wrapped = jax.tree.map(_restored, host, program.state)
    *_, last = dispatch_ahead(again, again.place(wrapped), first=10, until=20)
    one, other = to_host(last.after), to_host(states[20])
    return all(np.array_equal(one[name], other[name]) for name in other)


def _restored(leaf: np.ndarray, like: Any) -> Any:
    return jax.random.wrap_key_data(leaf) if jnp.issubdtype(like.dtype, jax.dtypes.prng_key) else leaf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", nargs="+", default=ENVIRONMENTS)
    parser.add_argument(
        "--import", nargs="*", default=[], dest="imports", help="modules that register environments"
    )
    parser.add_argument("--as-long", nargs="*", default=["CartPole-v1", "Acrobot-v1"])
    parser.add_argument("--name", default="fusion-parity")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name in options.imports:
        importlib.import_module(name)
    found: dict[str, Any] = {"steps": {}, "as_long": {}}
    if jax.default_backend() == "gpu" and not options.imports:
        found["resumed_exactly"] = resumed()
        print("resumed exactly:", found["resumed_exactly"], flush=True)
    for name in options.environment:
        found["steps"][name] = steps(name)
        print(name, "differs in", found["steps"][name] or "nothing", flush=True)
        write_result(options.name, found, directory=options.output)
    segments.MOST_NODES = 0
    for name in options.as_long:
        found["as_long"][name] = steps(name, network=GRU)
        print(name, "as a long program, differs in", found["as_long"][name] or "nothing", flush=True)
        write_result(options.name, found, directory=options.output)


if __name__ == "__main__":
    main()
