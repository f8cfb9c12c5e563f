"""Large arrays of the state lie in memory: rollouts are those of XLA, and what is refused says why."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from large_environments import LARGE
from user_environments import after, task

import rollmill
from one_time import first_state
from rollmill.dataflow import collect, init_state
from rollmill.fusion import CannotFuse, Launch, cpu_backend, fused_collect, lower_rollout, run_reference
from rollmill.fusion.backends.triton.compile import compile_for
from rollmill.fusion.backends.triton.rollout import rollout_kernel
from rollmill.fusion.kernels.leaves import to_raw

STEPS = 32


@pytest.fixture(autouse=True)
def as_users():
    """Types are promoted as JAX does by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def graph_of(env, num_envs):
    network = rollmill.NetworkConfig(hidden_sizes=(8,))
    return rollmill.ppo(env, num_envs=num_envs, num_steps=STEPS, num_minibatches=1, network=network)


def assert_same_rollouts(env, run, *, num_envs):
    graph = graph_of(env, num_envs)
    step = lower_rollout(graph)
    state = first_state(graph, jax.random.key(0), jnp.arange(num_envs))
    assert any(leaf.writes for leaf in step.leaves_after)
    weights = graph.weights(state.learner)
    both = jax.jit(
        lambda one, other, key: (
            collect(graph, weights, one, key),
            fused_collect(graph, weights, other, key, run=run, step=step),
        )
    )
    right = mine = state.collector
    for turn in range(2):
        (right, by_xla), (mine, by_kernel) = both(right, mine, jax.random.key(turn))
        for one, other in zip(*map(jax.tree.leaves, ((right, by_xla), (mine, by_kernel))), strict=True):
            if np.issubdtype(one.dtype, np.floating):
                np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
            else:
                np.testing.assert_array_equal(other, one)
        assert np.asarray(by_xla.steps.terminated).any()


@pytest.mark.parametrize("name", ["cards", "diary"])
def test_rollouts_in_machine_code_are_those_of_xla(name):
    run = cpu_backend().rollouts.run((8,))
    assert_same_rollouts(LARGE[name](length=12), run, num_envs=12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine", "queue"])
def test_rollouts_with_maps_and_queues_are_those_of_xla(name):
    assert_same_rollouts(LARGE[name](length=12), cpu_backend().rollouts.run((8,)), num_envs=12)


def test_the_evaluator_computes_what_xla_does():
    assert_same_rollouts(LARGE["cards"](length=12), partial(run_reference, precision="highest"), num_envs=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_kernels_compile_for_a_gpu(name):
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")
    graph = graph_of(LARGE[name](), 24)
    step = lower_rollout(graph)
    state = jax.eval_shape(partial(init_state, graph), jax.random.key(0), jnp.arange(24))
    keys = jax.ShapeDtypeStruct((24, 2), jnp.uint32)
    task_ = step, step.prologue.shapes, to_raw(state.collector), keys, STEPS
    kernel, arrays = rollout_kernel(*task_, launch=Launch(16, 1), numerics="tf32")
    assert list(kernel.aliases.values()) == [0]
    assert "bar.sync" in compile_for(kernel, arrays, 90).asm["ptx"]


def test_an_array_made_of_its_neighbours_is_refused():
    def reset(key, params):
        state = jax.random.uniform(key, (40, 40))
        return state[0, :2], state

    def step(key, state, action, params):
        state = jnp.roll(state, 1, axis=1)
        return after(state[0, :2], state, 0.0, False)

    with pytest.raises(CannotFuse, match="with its own elements from other positions"):
        lower_rollout(graph_of(task("Neighbours", 2, 2, reset, step), 4))
