"""The programs of a replica that computes gradients by a kernel of a GPU, which need not be here."""

from functools import partial

import jax
import numpy as np
import pytest

import rollmill
from one_time import first_state
from rollmill.dataflow import collect, flow, plain_minibatch_loop
from rollmill.fusion import GradientLaunch, fused_minibatch_loop, lower_gradients, run_gradients_reference
from rollmill.fusion.backends.triton.compile import compile_for
from rollmill.fusion.backends.triton.gradients import gradient_kernel
from rollmill.workers.replica.learner import CutLearner

ENVS = 4
"""Environments of this replica, which is one of two."""


@pytest.mark.slow_beyond(1)
def test_a_learner_of_several_replicas_has_the_gradient_kernel_of_a_gpu():
    pytest.importorskip("triton")
    sizes = {"num_envs": 2 * ENVS, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2}
    network = rollmill.NetworkConfig(hidden_sizes=(16,))
    graph = rollmill.ppo("CartPole-v1", **sizes, total_timesteps=128, network=network)
    kernels, reduced = [], []

    def run(step, minibatch):
        kernel, arrays = gradient_kernel(step, minibatch, launch=GradientLaunch(1, 16, 2), numerics="tf32")
        kernels.append((kernel, [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]))
        return run_gradients_reference(step, minibatch, precision="highest")

    def mean(tree):
        reduced.append([leaf.shape for leaf in jax.tree.leaves(tree)])
        return jax.tree.map(np.asarray, tree)

    key, index = jax.random.key(1), np.arange(ENVS, dtype=np.int32)
    state = first_state(graph, key, index)
    _, trajectory = jax.jit(partial(collect, graph))(graph.weights(state.learner), state.collector, key)
    fused = partial(fused_minibatch_loop, run=run, step=lower_gradients(graph))
    learn = lambda make: CutLearner(graph, flow(graph), key, index, make, reduce=mean)(
        state.learner, (), trajectory, 0
    )
    (mine, _, row), count = learn(fused), len(reduced)
    (right, _, plain_row), plain_count = learn(plain_minibatch_loop), len(reduced) - count
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert row.keys() == plain_row.keys()
    # Statistics of the four minibatches of all epochs are reduced at once, and not each by itself.
    assert count == plain_count - 3
    assert len(kernels) == 1 and compile_for(*kernels[0], 90).asm["cubin"]
