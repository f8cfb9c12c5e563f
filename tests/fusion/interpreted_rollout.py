"""Computes rollouts of large states by Triton's interpreter, as a program: the differences from the reference.

The two are compared after each of several rollouts, in which episodes end.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from interpreted import Buffer, interpreter_of
from large_environments import LARGE

import rollmill
from rollmill.dataflow import start
from rollmill.fusion import Launch, lower_rollout, run_reference
from rollmill.fusion.backends.triton import memory, rollout
from rollmill.fusion.kernels.leaves import to_raw
from rollmill.fusion.kernels.rollout import rollout_inputs, unpack

ENVS, STEPS, BLOCK = 24, 4, 16


def launched(kernel, arrays, folder):
    """The outputs of a kernel. Inputs that are changed in place are copied."""
    outputs = [np.zeros(struct.shape, struct.dtype) for struct in kernel.outputs]
    for n, output in kernel.aliases.items():
        outputs[output][:] = arrays[n]
    executor = interpreter_of(kernel, folder)
    buffers = [Buffer(np.ascontiguousarray(array)) for array in (*arrays, *outputs)]
    executor(*buffers, **kernel.constants)
    return [jnp.asarray(buffer.array) for buffer in buffers[len(arrays) :]]


def main():
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    rollout.BY_TRITON = memory.BY_TRITON._replace(few=10_000)  # no instructions of a GPU
    with jax.numpy_dtype_promotion("standard"):
        for name in names:
            network = rollmill.NetworkConfig(hidden_sizes=(8,))
            graph = rollmill.ppo(
                LARGE[name](length=3), num_envs=ENVS, num_steps=STEPS, num_minibatches=1, network=network
            )
            step = lower_rollout(graph)
            state = jax.jit(partial(start, graph))(jax.random.key(0), jnp.arange(ENVS, dtype=jnp.int32))
            weights, now = graph.weights(state.learner), to_raw(state.collector)
            reference = jax.jit(partial(run_reference, step, precision="highest"), static_argnums=3)
            for turn in range(2):
                inputs = rollout_inputs(step, weights, state.collector, jax.random.key(turn))
                uniforms, _, keys = inputs
                kernel, arrays = rollout.rollout_kernel(
                    step, uniforms, now, keys, STEPS, launch=Launch(BLOCK, 1), numerics="float32"
                )
                mine = unpack(step, uniforms, launched(kernel, arrays, folder), now, STEPS)
                right = reference(uniforms, now, keys, STEPS)
                apart = [
                    float(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max())
                    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True)
                ]
                print(name, turn, max(apart), flush=True)
                now = right[0]


if __name__ == "__main__":
    main()
