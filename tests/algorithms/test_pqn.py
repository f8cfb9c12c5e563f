"""PQN's fragments against NumPy, on a rollout with both kinds of episode ends and with legal actions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from numpy_networks import assert_slopes, in_float64

import rollmill
from one_time import run_once
from rollmill.algorithms.epsilon_greedy import value_agent
from rollmill.algorithms.off_policy import functional_network
from rollmill.algorithms.pqn import _best
from rollmill.algorithms.value_distributions import Mean
from rollmill.core.types import FINAL_MASK
from rollmill.dataflow import Batch, collect, identity, init_state
from wordings import raises

E, T, GAMMA, LAMBDA = 8, 12, 0.9, 0.7
SIZES = {"num_envs": E, "num_steps": T, "num_minibatches": 4, "total_timesteps": 10 * E * T}
SMALL = {**SIZES, "network": rollmill.NetworkConfig(hidden_sizes=(5,), activation="relu", layer_norm=True)}


def masked():
    """CartPole that forbids to push against the way the cart is going; it falls or is stopped after nine steps."""
    legal = lambda state, params: jnp.stack([state.inner.velocity < 0.1, state.inner.velocity > -0.1])
    cartpole = rollmill.make("CartPole-v1")
    return rollmill.time_limit(cartpole._replace(action_mask=legal), 9)


def values_by_hand(weights, x):
    matrix, bias, scale, shift, head, head_bias = weights
    hidden = x @ matrix + bias
    hidden = hidden - hidden.mean(axis=-1, keepdims=True)
    hidden = hidden / np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + 1e-5) * scale + shift
    return np.maximum(hidden, 0) @ head + head_bias


@pytest.fixture(scope="module")
def rollout():
    graph = rollmill.pqn(masked(), **SMALL, gamma=GAMMA, td_lambda=LAMBDA)

    def run(key):
        state = init_state(graph, key, jnp.arange(E, dtype=jnp.int32))
        _, trajectory = collect(graph, graph.weights(state.learner), state.collector, jax.random.key(7))
        _, batch = graph.prepare(state.learner, trajectory, reduce=identity, replicas=1)
        return state.learner, trajectory, batch

    return graph, *run_once(run, jax.random.key(3))


def test_targets_are_lambda_returns_of_the_best_legal_actions(rollout):
    _, learner, trajectory, batch = rollout
    steps, weights = trajectory.steps, in_float64(learner.network)
    assert steps.terminated.any() and (steps.truncated & ~steps.terminated).any()
    assert not steps.action_mask.all() and not steps.info[FINAL_MASK].all()

    def best(x, mask):
        return np.where(np.asarray(mask), values_by_hand(weights, np.asarray(x, np.float64)), -np.inf).max(axis=-1)

    after = best(steps.final_observation, steps.info[FINAL_MASK])  # of the observation before any reset
    for e in range(E):
        later = None
        for t in reversed(range(T)):
            reward = float(steps.reward[t, e])
            if steps.terminated[t, e]:
                right = reward
            elif steps.truncated[t, e] or later is None:
                right = reward + GAMMA * after[t, e]
            else:
                right = reward + GAMMA * (LAMBDA * later + (1 - LAMBDA) * after[t, e])
            later = right
            np.testing.assert_allclose(batch.samples.target[t, e], right, rtol=1e-4, atol=1e-5)


class Fixed(eqx.Module):
    """Values that no observation changes."""

    values: jax.Array

    def __call__(self, observation):
        return self.values


def test_a_state_without_legal_actions_has_the_value_of_an_action():
    """As a final state may be, from which a truncated episode is bootstrapped."""
    outputs = functional_network(lambda key: Fixed(jnp.array([1.5, 4.0, -2.0])))
    agent, weights = (
        value_agent(outputs, Mean(False), spaces.Discrete(3, start=2)),
        outputs.init(jax.random.key(0)),
    )
    seen, none = jnp.zeros(2), jnp.zeros(3, bool)
    assert float(_best(agent, weights, none, seen)) == 1.5
    assert float(_best(agent, weights, none.at[2].set(True), seen)) == -2.0
    assert float(_best(agent, weights, (), seen)) == 4.0


def test_gradients_are_those_of_the_squared_error(rollout):
    graph, learner, _, batch = rollout
    samples = jax.tree.map(lambda leaf: leaf.reshape(E * T, *leaf.shape[2:])[::7], batch.samples)
    gradients, metrics = graph.gradients(learner, Batch(samples))
    seen, action = np.asarray(samples.observation, np.float64), np.asarray(samples.action)

    def loss(weights):
        value = values_by_hand(weights, seen)[np.arange(len(action)), action]
        return np.mean(0.5 * (np.asarray(samples.target, np.float64) - value) ** 2)

    assert_slopes(gradients, loss, in_float64(learner.network))
    np.testing.assert_allclose(metrics["losses/total"], loss(in_float64(learner.network)), rtol=1e-5)


def test_the_share_of_random_actions_follows_the_updates():
    graph = rollmill.pqn("CartPole-v1", **SMALL, exploration_fraction=0.5, end_epsilon=0.1)
    learner, shares = graph.start_learner(jax.random.key(0)), []
    zeros = jax.tree.map(jnp.zeros_like, learner.network)
    updates = graph.loops.iterations * graph.loops.epochs * graph.loops.num_minibatches
    for n in range(updates):
        if n % (updates // 4) == 0:
            shares.append(float(graph.weights(learner).epsilon))
        learner = jax.jit(graph.update)(learner, zeros) if n == 0 else _advance(learner)
    np.testing.assert_allclose(shares, [1.0, 0.55, 0.1, 0.1], rtol=1e-5)


def _advance(learner):
    counted = learner.progress._replace(whole=learner.progress.whole + 1)
    return type(learner)(learner.network, learner.optimiser, counted, learner.hyperparameters)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "Pendulum-v1"}, ("needs-discrete-action-space-this", "pqn", "ppo")),
        ({"network": "gru"}, ("torso-needs-whole-sequences-algorithms",)),
        ({"network": lambda key, observations, actions: None}, ("this-algorithm-makes-own-networks",)),
        ({"td_lambda": 1.5}, ("out-of-bounds", "td_lambda", "1.5")),
        ({"env": "TagGridWorld-Small-v0"}, ("has-several-agents-train-with",)),
    ],
)
def test_what_cannot_be_trained_is_refused(options, message):
    with raises(*message):
        rollmill.pqn(**{"env": "CartPole-v1", **SMALL, **options})
