"""The first checkpoint of a run with workers holds the state with which the workers begin, bit for bit."""

import os
import subprocess
import sys

SCRIPT = """
import jax
import numpy as np

import rollmill
from rollmill.core.types import is_key
from rollmill.programs import compiler_options
from rollmill.programs.compiled import lower, state_shapes
from rollmill.workers.coordination.starts import initial_host_state
from rollmill.workers.replica.mesh import begun

network = rollmill.NetworkConfig(hidden_sizes=(8,))
sizes = {"num_envs": 6, "num_steps": 4, "num_minibatches": 1, "num_shards": 2, "total_timesteps": 240}
graph = rollmill.ppo("CartPole-v1", network=network, **sizes)
key = jax.random.key(np.uint32(3))
quickly = compiler_options.start_options()  # of the iteration, which does not run
program = lower(graph, seeds=(3,), devices=jax.devices()[:2], compiler_options=quickly)
bits = lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf)
kept = jax.tree.leaves_with_path(initial_host_state(graph, state_shapes(graph), key))
held = jax.tree.leaves(begun(program, graph, key))
differs = lambda pair: not np.array_equal(bits(pair[0][1]), bits(pair[1]))
print([jax.tree_util.keystr(path) for (path, _), _ in filter(differs, zip(kept, held, strict=True))])
"""


def test_a_mesh_begins_with_the_state_of_the_first_checkpoint():
    # The programs of the tests are compiled without optimisations, which hides differences.
    variables = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    variables |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    script = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(script, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
