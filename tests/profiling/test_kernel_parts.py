"""A rollout kernel divided into policy and environment."""

import jax
import jax.numpy as jnp
import pytest

import rollmill
from one_time import run_once
from rollmill.dataflow import collect, init_state
from rollmill.fusion import backend_for
from rollmill.profiler.kernel_parts import (
    KernelParts,
    parts_of,
    rollout_parts,
    without_environment,
    without_policy,
)


@pytest.fixture(scope="module")
def graph():
    return rollmill.ppo("CartPole-v1", num_envs=32, num_steps=16, total_timesteps=32 * 16 * 8)


def rollout_of(graph):
    def roll(key):
        state = init_state(graph, key, jnp.arange(32, dtype=jnp.int32))
        return collect(graph, graph.weights(state.learner), state.collector, state.key)[1].steps

    return run_once(roll, jax.random.key(0))


def test_shares_follow_from_the_times_of_three_kernels():
    times = {"whole": 10.0, "without environment": 7.0, "without policy": 4.0}
    assert parts_of(times) == pytest.approx(KernelParts(environment=0.3, policy=0.6, rest=0.1))
    overlapping = {"whole": 10.0, "without environment": 4.0, "without policy": 2.0}
    assert sum(parts_of(overlapping)) == pytest.approx(1.0)
    noisy = {"whole": 10.0, "without environment": 10.5, "without policy": 9.0}
    assert parts_of(noisy).environment == 0.0 and sum(parts_of(noisy)) == pytest.approx(1.0)


def test_without_the_environment_nothing_moves_but_what_the_policy_sees(graph):
    steps = rollout_of(without_environment(graph))
    assert not steps.terminated.any() and not steps.reward.any()
    assert len(jnp.unique(steps.observation[1:])) > 1, "it follows from actions"


def test_without_the_policy_the_environment_gets_actions_that_follow_from_observations(graph):
    steps = rollout_of(without_policy(graph))
    assert jnp.array_equal(steps.action, (steps.observation.sum(-1) > 0).astype(steps.action.dtype))
    assert steps.reward.all()


@pytest.mark.slow
def test_a_kernel_is_divided(graph):
    pytest.importorskip("llvmlite", reason="the backends of kernels are an extra")
    parts = rollout_parts(graph, backend_for(jax.devices()[0], "float32"), (8, 0), 32)
    assert sum(parts) == pytest.approx(1.0) and min(parts) >= 0.0
