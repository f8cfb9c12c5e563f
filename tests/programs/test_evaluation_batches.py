"""Evaluations of many episodes go in batches of one size; and of few, by a kernel, as without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import rollmill
from rollmill.core.types import Environment, Timestep
from rollmill.fusion import CannotFuse, cpu_backend
from rollmill.programs.evaluation import compiled, fused
from rollmill.programs.evaluation.compiled import evaluate, evaluator
from wordings import raises


@pytest.fixture(scope="module")
def trained():
    graph = rollmill.ppo("CartPole-v1", num_envs=4, num_steps=8, total_timesteps=64, num_minibatches=1)
    return graph, graph.weights(graph.start_learner(jax.random.key(0)))


def test_batches_begin_with_the_episodes_of_one_batch(trained, monkeypatch):
    whole = evaluate(*trained, episodes=4)
    monkeypatch.setattr(compiled, "MAX_AT_ONCE", 4)
    many = evaluate(*trained, episodes=10)
    assert many.returns.shape == many.lengths.shape == (10,)
    np.testing.assert_array_equal(many.returns[:4], whole.returns)
    assert len(set(map(tuple, (many.returns[:4], many.returns[4:8])))) == 2  # other episodes, not the same again


def test_a_memory_may_begin_with_numbers_of_python(trained):
    graph, weights = trained
    act = graph.policy
    counting = graph._replace(
        start_memory=lambda: (0, False),
        policy=lambda *args: act(*args)._replace(memory=(args[2][0] + 1, jnp.logical_not(args[2][1]))),
    )
    expected = evaluate(graph, weights, episodes=4, stochastic=True)
    found = evaluate(counting, weights, episodes=4, stochastic=True)
    np.testing.assert_array_equal(found.returns, expected.returns)


def test_how_often_is_looked_changes_no_result(trained, monkeypatch):
    at_each_step = evaluate(*trained, episodes=6)
    monkeypatch.setattr(compiled, "LOOKS_AT_EACH_STEP", ())
    by_chunks = evaluate(*trained, episodes=6)
    np.testing.assert_array_equal(by_chunks.returns, at_each_step.returns)
    np.testing.assert_array_equal(by_chunks.lengths, at_each_step.lengths)
    assert at_each_step.lengths.max() % compiled.CHUNK  # the last episode ended between two looks


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.slow_beyond(1)
def test_a_kernel_plays_the_same_episodes(trained, monkeypatch, stochastic):
    graph, weights = trained
    calls, collect = [], fused.fused_collect
    monkeypatch.setattr(fused, "fused_collect", lambda *a, **k: calls.append(1) or collect(*a, **k))
    by_steps = evaluate(graph, weights, episodes=4, seed=3, stochastic=stochastic)
    assert not calls
    play = evaluator(graph, weights, episodes=4, seed=3, stochastic=stochastic, backend=cpu_backend())
    assert calls
    by_kernel = play(weights)
    np.testing.assert_array_equal(by_kernel.returns, by_steps.returns)
    np.testing.assert_array_equal(by_kernel.lengths, by_steps.lengths)


def test_more_episodes_than_environments_are_played_by_steps(trained, monkeypatch):
    graph, weights = trained
    monkeypatch.delattr(fused, "fused_collect")
    play = evaluator(graph, weights, episodes=6, backend=cpu_backend())
    assert play(weights).returns.shape == (6,)


def test_steps_that_no_kernel_can_compute_are_computed_by_xla():
    def reset(key, params):
        return jnp.zeros(3), jnp.float32(0)

    def step(key, state, action, params):
        values = jnp.linalg.eigvalsh(jnp.eye(3) + state)  # the compiler has no rule for it
        return Timestep(values, state + 1, values[0], state >= 40, jnp.bool_(False), {})

    env = Environment("Eigenvalues", reset, step, Box(-np.inf, np.inf, (3,)), Discrete(2))
    graph = rollmill.ppo(env, num_envs=4, num_steps=8, total_timesteps=64, num_minibatches=1)
    weights = graph.weights(graph.start_learner(jax.random.key(0)))
    lengths = evaluator(graph, weights, episodes=2, backend=cpu_backend())(weights).lengths
    np.testing.assert_array_equal(lengths, [41, 41])


def test_no_evaluation_waits_for_a_kernel_that_compiles_for_minutes(trained):
    backend = cpu_backend()._replace(compile_seconds=lambda pressure: 61.0)
    with raises("compiling-kernel-for-evaluations-would", "61", "60", kind=CannotFuse):
        fused.fused_steps(trained[0], backend, 4)


def test_more_episodes_than_say_anything_are_refused(trained):
    with raises("episodes-is-more-than-hint", "1000000000", "10000000"):
        evaluate(*trained, episodes=1_000_000_000)
