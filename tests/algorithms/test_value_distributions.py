"""DQN with distributions of returns, C51 and quantiles, against NumPy."""

import itertools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_networks import assert_slopes, dense, in_float64

import rollmill
from rollmill.algorithms.value_distributions import CategoricalReturns, Mean, Quantiles, value_head
from rollmill.dataflow import Batch, Transitions
from rollmill.programs.states import begin_learner
from rollmill.recipes import RECIPES
from wordings import raises

SMALL = {
    "num_envs": 4,
    "buffer_size": 400,
    "batch_size": 8,
    "learning_starts": 16,
    "total_timesteps": 400,
    "network": rollmill.NetworkConfig(hidden_sizes=(4,), activation="relu"),
}
KINDS = {"c51": {"num_atoms": 6, "min_value": -3.0, "max_value": 4.0}, "quantiles": {"num_atoms": 5}}
COUNT, ACTIONS = 6, 2


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


# --- the losses, as the papers' algorithms have them -------------------------------------------------------------


def projected_by_hand(probabilities, reward, discount, low, high):
    """Bellemare et al., algorithm 1."""
    size = len(probabilities)
    gap, mass = (high - low) / (size - 1), np.zeros(size)
    for n, probability in enumerate(probabilities):
        place = (np.clip(reward + discount * (low + n * gap), low, high) - low) / gap
        below, above = int(np.floor(place)), int(np.ceil(place))
        if below == above:
            mass[below] += probability
        else:
            mass[below] += probability * (above - place)
            mass[above] += probability * (place - below)
    return mass


def quantile_loss_by_hand(values, targets):
    """Dabney et al., algorithm 1."""
    total = 0.0
    for n, value in enumerate(values):
        level = (2 * n + 1) / (2 * len(values))
        for target in targets:
            error = target - value
            huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
            total += abs(level - (error < 0)) * huber / len(targets)
    return total


def divergence(target, logits):
    log_target = np.log(np.maximum(target, 1e-30))
    return float(np.sum(target * (log_target - np.log(softmax(logits)))))


def loss_by_hand(kind, options, outputs, next_outputs, reward, discount):
    if kind == "quantiles":
        return quantile_loss_by_hand(outputs, reward + discount * next_outputs)
    target = projected_by_hand(softmax(next_outputs), reward, discount, options["min_value"], options["max_value"])
    return divergence(target, outputs)


def means_by_hand(kind, options, outputs):
    if kind == "quantiles":
        return outputs.mean(axis=-1)
    return softmax(outputs) @ np.linspace(options["min_value"], options["max_value"], options["num_atoms"])


def outputs_by_hand(weights, x, duelling, atoms):
    if not duelling:
        return dense(weights, x).reshape(len(x), ACTIONS, atoms)
    features = np.maximum(dense(weights[:2], x), 0)
    value, advantage = dense(weights[2:4], features), dense(weights[4:], features)
    advantage = advantage.reshape(len(x), ACTIONS, atoms)
    return value[:, None, :] + advantage - advantage.mean(axis=1, keepdims=True)


def transitions():
    draw = np.random.default_rng(4).normal
    normal = lambda *shape: draw(size=(COUNT, *shape)).astype(np.float32)
    return Transitions(
        observation=normal(4),
        action_mask=(),
        action=np.int32([0, 1, 1, 0, 1, 0]),
        reward=2 * normal(),
        discount=np.float32([0.9, 0.0, 0.9, 0.8, 0.9, 0.9]),
        next_observation=normal(4),
        next_action_mask=np.array([[True, True], [True, True], [False, True], [True, False]] + [[True, True]] * 2),
        weight=np.float32([1.0, 0.5, 1.5, 1.0, 1.0, 1.0]),
        key=jax.random.split(jax.random.key(0), COUNT),
    )


CASES = [
    pytest.param(*case, marks=() if case[1:] == (True, True) else pytest.mark.slow)
    for case in itertools.product(KINDS, (True, False), (True, False))
]


@pytest.mark.parametrize(("kind", "duelling", "double"), CASES)
def test_gradients_are_those_of_the_papers_losses(kind, duelling, double):
    options = KINDS[kind]
    chosen = {"value_distribution": kind, "duelling": duelling, "double": double, "prioritised": True}
    graph = rollmill.dqn("CartPole-v1", **SMALL, **chosen, **options)
    learner, sample = begin_learner(graph, jax.random.key(0)), transitions()
    shift = lambda x: x + np.float32(0.5 * np.sin(3 + np.arange(x.size)).reshape(x.shape))
    shifted = jax.tree.map(shift, learner.network)
    learner = eqx.tree_at(lambda whole: whole.target, learner, shifted)
    gradients, metrics = jax.jit(graph.gradients)(learner, Batch(sample))
    (network, target), atoms = map(in_float64, (learner.network, learner.target)), options["num_atoms"]
    seen, after = (np.asarray(x, np.float64) for x in (sample.observation, sample.next_observation))
    of = partial(outputs_by_hand, duelling=duelling, atoms=atoms)
    next_outputs = of(target, after)
    choosing = means_by_hand(kind, options, of(network, after) if double else next_outputs)
    best = np.where(np.asarray(sample.next_action_mask), choosing, -np.inf).argmax(axis=1)

    def losses(weights):
        outputs = of(weights, seen)
        return [
            loss_by_hand(
                kind,
                options,
                outputs[n, int(sample.action[n])],
                next_outputs[n, best[n]],
                float(sample.reward[n]),
                float(sample.discount[n]),
            )
            for n in range(COUNT)
        ]

    assert_slopes(gradients, lambda weights: np.mean(np.asarray(sample.weight) * losses(weights)), network)
    np.testing.assert_allclose(metrics["losses/td_error"], np.mean(losses(network)), rtol=1e-4)
    np.testing.assert_allclose(graph.replay.errors(learner, Batch(sample)), losses(network), rtol=1e-3, atol=1e-5)
    means = means_by_hand(kind, options, of(network, seen))
    values = jax.vmap(partial(graph.outputs.q_values, graph.weights(learner)))(sample.observation)
    np.testing.assert_allclose(values, means, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        metrics["losses/q"], means[np.arange(COUNT), np.asarray(sample.action)].mean(), rtol=1e-4
    )


def test_a_perfect_distribution_has_no_loss():
    """Also at the ends of the range, where targets are clipped, and for returns between atoms."""
    head = CategoricalReturns(5, -2.0, 2.0)
    for reward, right in ((1.0, [0, 0, 0, 1, 0]), (0.25, [0, 0, 0.75, 0.25, 0]), (9.0, [0, 0, 0, 0, 1])):
        logits = jnp.log(jnp.asarray(right, jnp.float32) + 1e-12)
        compared = head.compare(logits, jnp.zeros(5), jnp.float32(reward), jnp.float32(0))
        np.testing.assert_allclose(compared.loss, 0, atol=1e-5)


def test_targets_beyond_the_range_of_returns_are_told():
    head, probabilities = CategoricalReturns(5, -2.0, 2.0), jnp.asarray([0.1, 0.2, 0.3, 0.15, 0.25])
    for reward, discount, clipped in (
        (0.0, 1.0, 0.0),
        (1.0, 1.0, 0.25),
        (1.5, 1.0, 0.4),
        (-1.0, 1.0, 0.1),
        (1.0, 0.5, 0),
    ):
        numbers = jnp.log(probabilities), jnp.float32(reward), jnp.float32(discount)
        compared = head.compare(jnp.zeros(5), *numbers)
        np.testing.assert_allclose(compared.clipped, clipped, atol=1e-6)
    assert Quantiles(5).compare(jnp.zeros(5), *numbers).clipped is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_distribution": "c52"}, ("unknown-setting", "c52", "c51")),
        ({"value_distribution": "c51", "num_atoms": 1}, ("out-of-bounds", "num_atoms", "1")),
        ({"value_distribution": "c51", "huber": True}, ("is-not-read-with-value", "huber")),
        ({"value_distribution": "quantiles", "max_value": 3.0}, ("is-not-read-with-value", "max_value", "c51")),
        ({"num_atoms": 9}, ("is-not-read-with-value", "num_atoms", "quantiles")),
        ({"value_distribution": "c51", "min_value": 200.0}, ("min-value-has-to-be", "200", "100")),
        ({"value_distribution": "c51", "min_value": float("nan")}, ("out-of-bounds", "min_value")),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with raises(*message):
        rollmill.dqn("CartPole-v1", **SMALL, **options)


def test_each_kind_has_its_head():
    head = partial(value_head, huber=False, atoms=None, low=None, high=None)
    assert head("c51") == CategoricalReturns(51, -100.0, 100.0)
    assert (head("quantiles"), head("none")) == (Quantiles(51), Mean(False))


def test_the_recipe_of_rainbow_has_its_parts():
    config = RECIPES["rainbow"]().config
    assert config.double and config.duelling and config.prioritised and config.n_step == 3
    assert config.value_distribution == "c51"
