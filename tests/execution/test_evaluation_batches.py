"""Evaluations of many episodes go in batches of one size."""

import jax
import numpy as np
import pytest

import rollmill
from rollmill.core.errors import UsageError
from rollmill.execution import evaluate, evaluation


@pytest.fixture(scope="module")
def trained():
    graph = rollmill.ppo("CartPole-v1", num_envs=4, num_steps=8, total_timesteps=64, num_minibatches=1)
    return graph, graph.weights(graph.start_learner(jax.random.key(0)))


def test_batches_begin_with_the_episodes_of_one_batch(trained, monkeypatch):
    whole = evaluate(*trained, episodes=4)
    monkeypatch.setattr(evaluation, "MAX_AT_ONCE", 4)
    many = evaluate(*trained, episodes=10)
    assert many.returns.shape == many.lengths.shape == (10,)
    np.testing.assert_array_equal(many.returns[:4], whole.returns)
    assert len(set(map(tuple, (many.returns[:4], many.returns[4:8])))) == 2  # other episodes, not the same again


def test_the_number_of_steps_at_once_changes_no_result(trained, monkeypatch):
    one_by_one = evaluate(*trained, episodes=6)
    monkeypatch.setattr(evaluation, "STEPS_AT_ONCE", {jax.default_backend(): 16})
    at_once = evaluate(*trained, episodes=6)
    np.testing.assert_array_equal(at_once.returns, one_by_one.returns)
    np.testing.assert_array_equal(at_once.lengths, one_by_one.lengths)
    assert one_by_one.lengths.max() % 16  # the last episode ended between two looks


def test_more_episodes_than_say_anything_are_refused(trained):
    with pytest.raises(UsageError, match="episodes=1000000000 is more than 10000000. hint:"):
        evaluate(*trained, episodes=1_000_000_000)
