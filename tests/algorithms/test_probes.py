"""Algorithms learn the probe environments to their known values and actions.

Every algorithm runs those probes that what is its own could get wrong; PPO runs all.
"""

import itertools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.algorithms.network_policy import network_policy
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead

NETWORK = rollmill.NetworkConfig(hidden_sizes=(16,))
ALGORITHMS = {
    "ppo": (rollmill.PPOConfig, rollmill.ppo, {"num_minibatches": 2}),
    "a3c": (rollmill.A3CConfig, rollmill.a3c, {}),
    "impala": (rollmill.IMPALAConfig, rollmill.impala, {"update_epochs": 2, "num_minibatches": 2}),
}
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def learn(env, *, algorithm="ppo", make_network=None, iterations=150, **overrides):
    """The policy and its weights after a short training, and the metrics of every iteration."""
    env = rollmill.make(env) if isinstance(env, str) else env
    make_config, make_graph, special = ALGORITHMS[algorithm]
    small = {
        "num_envs": 16,
        "num_steps": 8,
        "total_timesteps": iterations * 16 * 8,
        "learning_rate": 1e-2,
        "gamma": 0.9,
        "ent_coef": 0.0,
        "network": NETWORK,
    }
    config = make_config(**(small | special | overrides))
    graph = make_graph(env, config, network=make_network)
    program = lower(graph)
    state, rows = program.start(), []
    for window in dispatch_ahead(program, state, first=0, until=graph.loops.iterations):
        state = window.after
        rows += window.metrics
    assert len(rows) == iterations
    make = make_network or partial(rollmill.actor_critic, config=config.network)
    policy = network_policy(env, make, normalise_observations=config.normalize_observations)
    return policy, state.learner.weights, rows


def values(policy, weights, observations):
    """Values of a list of observations."""
    value = lambda observation: policy.value(weights, policy.start_memory(), observation)
    return np.asarray(eqx.filter_jit(jax.vmap(value))(jnp.asarray(observations, jnp.float32)))


def distributions(policy, weights, observations):
    """The parameters of the policy's distributions."""
    memory = policy.start_memory()
    forward = lambda seen: policy.forward(weights, memory, policy.normalise(weights, seen), ()).distribution
    return eqx.filter_jit(jax.vmap(forward))(jnp.asarray(observations, jnp.float32))


def probabilities(policy, weights, observations):
    return np.asarray(jax.nn.softmax(distributions(policy, weights, observations).logits))


def mean_return(rows, last=10):
    ended = sum(row["episodes/ended"] for row in rows[-last:])
    return sum(row["episodes/return_sum"] for row in rows[-last:]) / ended


@pytest.mark.slow
def test_constant_reward():
    policy, weights, rows = learn("Probe-ConstantReward-v0")
    np.testing.assert_allclose(values(policy, weights, [[0.0]]), [1.0], atol=0.02)
    assert rows[-1]["episodes/ended"] == 16 * 8 == rows[-1]["episodes/return_sum"]


@pytest.mark.slow
def test_observation_reward():
    policy, weights, _ = learn("Probe-ObservationReward-v0")
    np.testing.assert_allclose(values(policy, weights, [[-1.0], [1.0]]), [-1.0, 1.0], atol=0.05)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("ppo", {"gae_lambda": 0.0}), ("ppo", {"gae_lambda": 0.95}), ("a3c", {}), ("impala", {})],
    ids=str,
)
@pytest.mark.slow_beyond(1)
def test_discounted_reward(algorithm, settings):
    policy, weights, _ = learn("Probe-DiscountedReward-v0", algorithm=algorithm, gamma=0.5, **settings)
    np.testing.assert_allclose(values(policy, weights, [[0.0], [1.0]]), [0.5, 1.0], atol=0.03)


@pytest.mark.slow
def test_action_reward():
    policy, weights, rows = learn("Probe-ActionReward-v0")
    assert probabilities(policy, weights, [[0.0]])[0, 1] > 0.95
    assert mean_return(rows) > 0.9
    assert mean_return(rows[:1], 1) < 0.5  # it was learned


@every_algorithm
@pytest.mark.slow_beyond(1)
def test_action_observation(algorithm):
    policy, weights, rows = learn("Probe-ActionObservation-v0", algorithm=algorithm)
    likely = probabilities(policy, weights, [[-1.0], [1.0]])
    assert likely[0, 0] > 0.95 and likely[1, 1] > 0.95
    np.testing.assert_allclose(values(policy, weights, [[-1.0], [1.0]]), [1.0, 1.0], atol=0.1)
    assert mean_return(rows) > 0.9


@pytest.mark.parametrize(
    ("algorithm", "torso"),
    [
        *itertools.product(ALGORITHMS, ["mlp"]),
        *(pytest.param(name, "gru", marks=pytest.mark.slow) for name in ALGORITHMS),
    ],
)
@pytest.mark.slow_beyond(1)
def test_truncation_bootstraps_from_where_the_episode_was_cut(algorithm, torso):
    """The right value of observation 1 is 10; of observation 0, -10 + 0.9 x 10 = -1.

    Bootstrapping from the observation after the reset would give -15.4 for observation 1 (one-step
    returns), taking the cut for the end 2.5: both are refused by name below.
    """
    memory = {"recurrent_size": 16} if torso == "gru" else {}
    network = rollmill.NetworkConfig(hidden_sizes=(16,), torso=torso, **memory)
    settings = {"clip_vloss": False} if algorithm == "ppo" else {"norm_adv": False}
    policy, weights, _ = learn(
        "Probe-Truncation-v0",
        algorithm=algorithm,
        iterations=500,
        network=network,
        normalize_values=False,
        **settings,
    )
    memory, found = policy.start_memory(), []
    for shown in (0.0, 1.0, 1.0, 1.0, 1.0):  # as an episode shows them; the last is where it is cut
        output = policy.forward(weights, memory, jnp.full((1,), shown, jnp.float32), ())
        memory, found = output.memory, [*found, float(output.value)]
    assert all(abs(later + 15.4) > 10 and abs(later - 2.5) > 5 for later in found[1:])
    np.testing.assert_allclose(found, [-1.0, 10.0, 10.0, 10.0, 10.0], atol=0.7)


def test_wrong_bootstraps_would_be_noticed():
    """The fixed points of the two mistakes, from the probe's own numbers, lie far from 10."""
    gamma, cut_every = 0.9, 4
    # Of 3 steps that start from observation 1, one is cut: V = 1 + gamma (2/3 V + 1/3 W).
    solve = lambda wrong, slope: (1 + gamma / 3 * wrong) / (1 - gamma * 2 / 3 - gamma / 3 * slope)
    assert cut_every - 1 == 3
    np.testing.assert_allclose(solve(0.0, 0.0), 2.5)
    np.testing.assert_allclose(solve(-10.0, gamma), -15.384615, rtol=1e-6)
    np.testing.assert_allclose(solve(0.0, 1.0), 10.0)


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("impala", marks=pytest.mark.slow)])
def test_continuous_action(algorithm):
    policy, weights, rows = learn("Probe-ContinuousAction-v0", algorithm=algorithm, iterations=400)
    seen = np.linspace(-0.9, 0.9, 7)[:, None]
    np.testing.assert_allclose(distributions(policy, weights, seen).mean, seen, atol=0.15)
    assert mean_return(rows) > 0.9 > mean_return(rows[:1], 1)


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("impala", marks=pytest.mark.slow)])
def test_action_mask(algorithm):
    """An illegal action pays -1: the return of every episode of the training is 1."""
    policy, weights, rows = learn("Probe-ActionMask-v0", algorithm=algorithm, iterations=30, ent_coef=0.01)
    for row in rows:
        assert row["episodes/return_sum"] == row["episodes/ended"] == 16 * 8
        assert row["finite/gradients"] == 1
    np.testing.assert_allclose(values(policy, weights, [[0.0]]), [1.0], atol=0.1)
    # Two actions are legal: what the policy is unsure about is which of them.
    assert all(row["losses/entropy"] <= np.log(2) + 1e-4 for row in rows)


@pytest.mark.slow
def test_multi_discrete():
    policy, weights, rows = learn("Probe-MultiDiscrete-v0", iterations=300)
    seen = [[i, j] for i in range(2) for j in range(3)]
    mode = jax.vmap(lambda d: d.mode())(distributions(policy, weights, seen))
    np.testing.assert_array_equal(mode, seen)
    assert mean_return(rows) > 0.95 > 0.7 > mean_return(rows[:1], 1)


@pytest.mark.slow
def test_a_dictionary_of_observations():
    _, _, rows = learn("DictGoal-v0", iterations=200, gamma=0.97, num_steps=16, total_timesteps=200 * 16 * 16)
    assert mean_return(rows[:3]) < 1.0
    assert mean_return(rows) > 1.4


class Table(eqx.Module):
    """One value and two logits for each of the observations -1 and 1: an actor-critic of one's own."""

    logits: jax.Array
    values: jax.Array
    calls: jax.Array  # integers are no weights, and stay as they are

    def initial_memory(self):
        return ()

    def __call__(self, observation, memory, action_mask=None):
        return rollmill.Output(Coin(self._of(self.logits, observation)), self.value(observation, memory), memory)

    def value(self, observation, memory):
        return self._of(self.values, observation)

    def _of(self, table, observation):
        return jnp.where(observation[0] > 0, table[1], table[0])


class Coin(eqx.Module):
    """Action 1 with probability `sigmoid(logit)`: a distribution of one's own."""

    logit: jax.Array

    def sample(self, key):
        return jax.random.bernoulli(key, jax.nn.sigmoid(self.logit)).astype(jnp.int32)

    def sample_and_log_prob(self, key):
        action = self.sample(key)
        return action, self.log_prob(action)

    def log_prob(self, action):
        return jax.nn.log_sigmoid(jnp.where(action == 1, self.logit, -self.logit))

    def entropy(self):
        return jax.nn.softplus(self.logit) - self.logit * jax.nn.sigmoid(self.logit)

    def mode(self):
        return (self.logit > 0).astype(jnp.int32)


@pytest.mark.slow
def test_a_network_of_ones_own():
    make = lambda key, observation_space, action_space: Table(jnp.zeros(2), jnp.zeros(2), jnp.arange(3))
    policy, weights, rows = learn("Probe-ActionObservation-v0", make_network=make, learning_rate=0.05)
    assert weights.network.calls is None
    logits = np.asarray(weights.network.logits)
    assert logits[0] < -3 and logits[1] > 3
    np.testing.assert_allclose(values(policy, weights, [[-1.0], [1.0]]), [1.0, 1.0], atol=0.05)
    assert mean_return(rows) > 0.9
