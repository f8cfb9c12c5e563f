r"""Whether fused kernels compute what XLA computes, on one GPU; steps also on a CPU, by machine code.

    python benchmarks/fusion_parity.py [--environment CartPole-v1 ...] [--as-long CartPole-v1 ...]
    python benchmarks/fusion_parity.py --functions
    PYTHONPATH=tests/fusion python benchmarks/fusion_parity.py --import edge_environments --as-long \
        --environment InvalidNumbers-v0 GrowingAngle-v0 SmallRegisters-v0 --name fusion-parity-edges

Steps: from every state that 64 environments pass through in 200 steps, one step by XLA and one by the kernel, both
with exact products. Integers and flags are compared exactly, floats to a relative 1e-5 (or an absolute 1e-6). The
result has the share of the numbers of each leaf that differ. The same again for policies with memory, in kernels
that are written as those of very long programs. Resuming: a training with fused kernels, beside one that is
stopped halfway, read to the host and continued by a program compiled anew. Writes results/fusion-parity.json.

`--functions`: every primitive with a rule, in the functions of tests/fusion/synthetic_functions.py, each under
`vmap` and as a kernel with exact products. XLA is told to round to 16 bits where a function says so, which it
otherwise may leave out. Writes results/fusion-functions.json.
"""

import importlib
import os
import sys

if "--functions" in sys.argv:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import HERE, advance, options, platform, write_result

import rollmill
from rollmill.dataflow import collect, init_state, step_all
from rollmill.fusion import Launch, fused_collect, run_kernel
from rollmill.fusion.backends.cpu.launches import cpu_backend
from rollmill.fusion.opt import segments
from rollmill.programs.compiled import lower
from rollmill.record.leaves import to_host

ENVS, STEPS = 64, 200
LAUNCHES = {"rollouts": (32, 2), "gradients": (264, 64, 4)}
ENVIRONMENTS = ["CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", "Pendulum-v1"]
ENVIRONMENTS += ["TMaze-v0", "Probe-ActionMask-v0", "Probe-MultiDiscrete-v0", "TagGridWorld-v0"]
GRU = rollmill.NetworkConfig(torso="gru", hidden_sizes=(32,), recurrent_size=32)


def steps(environment: str, **settings: Any) -> dict[str, float]:
    """Returns the share of numbers that differ, for each leaf where any does."""
    env = rollmill.make(environment)
    algorithm = rollmill.mappo if env.agents else rollmill.ppo
    graph = algorithm(env, num_envs=ENVS, num_steps=1, num_minibatches=1, **settings)
    state = jax.jit(partial(init_state, graph))(jax.random.key(3), jnp.arange(ENVS, dtype=jnp.int32))
    weights = graph.weights(state.learner)
    on_gpu = platform() == "gpu"
    by_kernel = partial(run_kernel, launch=Launch(64, 4), numerics="float32")
    run = by_kernel if on_gpu else lambda *own, **named: cpu_backend().rollouts.run((16,))(*own, **named)

    def step(now, t):
        return step_all(graph, weights, now, jax.random.key(5), t)[0], now

    @jax.jit
    def both(collector, key):
        _, passed = jax.lax.scan(step, collector, jnp.arange(STEPS))
        each = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), passed)
        return fused_collect(graph, weights, each, key, run=run), collect(graph, weights, each, key)

    with jax.default_matmul_precision("highest"):
        fused, plain = jax.device_get(jax.tree.map(readable, both(state.collector, jax.random.key(7))))
    pairs = zip(jax.tree.leaves_with_path(fused), jax.tree.leaves(plain), strict=True)
    shares = {jax.tree_util.keystr(path): unequal(one, other) for (path, one), other in pairs}
    return {path: share for path, share in shares.items() if share > 0}


def readable(leaf: Any) -> Any:
    """Returns a leaf, or the data of its keys."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def unequal(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the share of numbers that differ."""
    if not jnp.issubdtype(one.dtype, jnp.floating):
        return float(np.mean(one != other))
    one, other = one.astype(np.float64), other.astype(np.float64)
    return float(np.mean(~np.isclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)))


def resumed() -> bool:
    """Returns whether a fused training that is continued ends with the same bits as one that never stopped."""
    sizes = {"num_envs": 1024, "num_steps": 64, "total_timesteps": 1024 * 64 * 20}
    graph = rollmill.ppo(rollmill.make("CartPole-v1"), **sizes)
    program = lower(graph, fusion="full", launches={"device": jax.devices()[0].device_kind, **LAUNCHES})
    middle, _ = advance(program, program.start(), 0, 10)
    host = jax.tree.map(np.asarray, jax.tree.map(readable, middle))
    is_key = lambda like: jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    restored = lambda leaf, like: jax.random.wrap_key_data(leaf) if is_key(like) else leaf
    wrapped = jax.tree.map(restored, host, program.state)
    whole = to_host(advance(program, program.start(), 0, 20)[0])
    again = lower(graph, fusion="full", launches=program.launches)
    continued = to_host(advance(again, again.place(wrapped), 10, 20)[0])
    return all(np.array_equal(continued[name], whole[name]) for name in whole)


def functions() -> dict[str, Any]:
    """Returns the share of numbers that differ in each function of the tests."""
    sys.path.insert(0, str(HERE.parent / "tests" / "fusion"))
    from fused_runs import both
    from kernel_runs import evaluate_by_kernel
    from synthetic_functions import FUNCTIONS

    def compare(name: str) -> dict[str, Any]:
        function, uniform, each = FUNCTIONS[name]
        with jax.default_matmul_precision("highest"):
            sides = both(function, each, uniform, evaluate=evaluate_by_kernel)
        leaves = ([np.asarray(readable(leaf)) for leaf in jax.tree.leaves(tree)] for tree in sides)
        pairs = list(zip(*leaves, strict=True))
        shares = {n: unequal(*pair) for n, pair in enumerate(pairs) if pair[0].size}
        found = {n: share for n, share in shares.items() if share}
        print(name, "differs in", found or "nothing", flush=True)
        return {"numbers": sum(int(one.size) for one, _ in pairs), "unequal": found}

    with ThreadPoolExecutor() as pool:
        return dict(zip(FUNCTIONS, pool.map(compare, FUNCTIONS), strict=True))


def main() -> None:
    chosen = options(
        __doc__,
        **{"import": ([str], "modules that register environments")},
        environment=ENVIRONMENTS,
        as_long=(["CartPole-v1", "Acrobot-v1"], "environments of policies with memory"),
        functions=(False, "compare the functions of all primitives instead"),
        name="fusion-parity",
    )
    if chosen.functions:
        write_result("fusion-functions", {"functions": functions()}, chosen.output)
        return
    imports = getattr(chosen, "import") or []
    for name in imports:
        importlib.import_module(name)
    found: dict[str, Any] = {"steps": {}, "as_long": {}}
    if platform() == "gpu" and not imports:
        found["resumed_exactly"] = resumed()
        print("resumed exactly:", found["resumed_exactly"], flush=True)
    for name in chosen.environment:
        found["steps"][name] = steps(name)
        print(name, "differs in", found["steps"][name] or "nothing", flush=True)
        write_result(chosen.name, found, chosen.output)
    segments.MAX_NODES = min(segments.MAX_NODES, 0)
    for name in chosen.as_long:
        found["as_long"][name] = steps(name, network=GRU)
        print(name, "as a long program, differs in", found["as_long"][name] or "nothing", flush=True)
        write_result(chosen.name, found, chosen.output)


if __name__ == "__main__":
    main()
