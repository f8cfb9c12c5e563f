"""R2D2's fragments against NumPy, on stored sequences with both kinds of episode ends and with legal actions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_sequences import assert_distinguishing, assert_two_devices_equal_one, drawn, louder, masked
from numpy_networks import CELLS, assert_slopes, in_float64

import rollmill
from rollmill.algorithms.r2d2 import rescale_values, undo_rescaling
from rollmill.algorithms.returns import n_step_returns
from rollmill.core.types import FINAL_MASK
from rollmill.dataflow import identity
from wordings import raises

E, T, LENGTH, BURN_IN, N = 4, 4, 3, 3, 16
GAMMA, N_STEP, SHARE = 0.9, 3, 0.8
SIZES = {
    "num_envs": E,
    "num_steps": T,
    "sequence_length": LENGTH * T,
    "burn_in": BURN_IN,
    "batch_size": N,
    "buffer_size": 8 * T * E,
    "learning_starts": LENGTH * T * E,
    "total_timesteps": 100 * E * T,
}


def network(torso):
    return rollmill.NetworkConfig(torso=torso, hidden_sizes=(4,), recurrent_size=3, activation="relu")


def values_by_hand(torso, weights, x, memory):
    """The values of all actions by a duelling network, and the next memory."""
    cell, count = CELLS[torso]
    encoder, unit, (value, value_bias, advantage, advantage_bias) = weights[:2], weights[2:-4], weights[-4:]
    assert len(unit) == count
    features, memory = cell(unit, np.maximum(x @ encoder[0] + encoder[1], 0), memory)
    advantages = features @ advantage + advantage_bias
    return features @ value + value_bias + advantages - advantages.mean(axis=-1, keepdims=True), memory


def h(x):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x


def h_inverse(x, eps=1e-3):
    return np.sign(x) * (((np.sqrt(1 + 4 * eps * (np.abs(x) + 1 + eps)) - 1) / (2 * eps)) ** 2 - 1)


class ByHand:
    """The loss of one minibatch, sequence by sequence and step by step."""

    def __init__(self, torso, learner, samples, *, rescale):
        self.h, self.h_inverse = (h, h_inverse) if rescale else (float, np.asarray)
        self.values = partial(values_by_hand, torso)
        self.network, self.target = in_float64(learner.network), in_float64(learner.target)
        self.steps = jax.tree.map(np.asarray, samples.steps)
        self.last = np.asarray(samples.observation, np.float64)
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(samples.start_memory)]
        self.memory = leaves[0] if torso == "gru" else np.stack(leaves)
        self.done = self.steps.terminated | self.steps.truncated
        self.refreshed = self.burnt_in(self.network), self.burnt_in(self.target)
        self.wanted = self.targets()

    def unroll(self, weights, memory, first, until):
        """Values of all actions and memories after the steps, from `first` on."""
        found, memories = [], []
        for t in range(first, until):
            if t > 0:
                memory = np.where(self.done[:, t - 1, None], 0, memory)
            value, memory = self.values(weights, self.steps.observation[:, t].astype(np.float64), memory)
            found.append(value)
            memories.append(memory)
        return found, memories

    def burnt_in(self, weights):
        return self.unroll(weights, self.memory, 0, BURN_IN)[1][-1]

    def targets(self):
        """Targets `[N, T]` of the steps after the burn-in, in rescaled units."""
        length, steps = LENGTH * T, self.steps
        after = {}
        for name, weights, memory in zip(
            ("online", "target"), (self.network, self.target), self.refreshed, strict=True
        ):
            memories = self.unroll(weights, memory, BURN_IN, length)[1]
            for t in range(BURN_IN, length):
                following = self.last if t == length - 1 else steps.observation[:, t + 1]
                seen = np.where(steps.truncated[:, t, None], steps.final_observation[:, t], following)
                after[name, t] = self.values(weights, seen.astype(np.float64), memories[t - BURN_IN])[0]
        wanted = np.zeros((N, length - BURN_IN))
        for i in range(N):
            for t in range(BURN_IN, length):
                total, factor, now = 0.0, 1.0, t
                while True:
                    total += factor * steps.reward[i, now]
                    factor *= GAMMA
                    if steps.terminated[i, now]:
                        break
                    if steps.truncated[i, now] or now == length - 1 or now + 1 - t == N_STEP:
                        legal = steps.info[FINAL_MASK][i, now]
                        best = np.where(legal, after["online", now][i], -np.inf).argmax() if legal.any() else 0
                        total += factor * self.h_inverse(after["target", now][i, best])
                        break
                    now += 1
                wanted[i, t - BURN_IN] = self.h(total)
        return wanted

    def errors(self, weights):
        """Target minus value. Only the steps after the burn-in depend on `weights`."""
        found, _ = self.unroll(weights, self.refreshed[0], BURN_IN, LENGTH * T)
        taken = [value[np.arange(N), self.steps.action[:, t]] for t, value in enumerate(found, start=BURN_IN)]
        return self.wanted - np.stack(taken, axis=1)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("lstm", "gru without rescaling")]


@pytest.fixture(scope="module", params=["gru", "lstm without rescaling", *SLOW])
def learning(request):
    """A graph, a learner whose target network is another one, and sequences from the experience store."""
    torso, _, plain = request.param.partition(" ")
    options = {"gamma": GAMMA, "n_step": N_STEP, "max_error_share": SHARE, "network": network(torso)}
    graph = rollmill.r2d2(masked(), **SIZES, **options, rescale_values=not plain)

    change = lambda learner: {
        name: louder(learner.network, seed) for seed, name in enumerate(("network", "target"))
    }
    rings, learner, sample = drawn(graph, change)
    return graph, rings, learner, sample, ByHand(torso, learner, sample.minibatch.samples, rescale=not plain)


def test_the_sequences_have_all_that_the_loss_distinguishes(learning):
    assert_distinguishing(learning[3].minibatch.samples.steps, BURN_IN, masks=True)


def test_the_loss_and_its_gradients_are_those_of_the_paper(learning):
    graph, _, learner, sample, by_hand = learning
    gradients, metrics = jax.jit(lambda minibatch: graph.gradients(learner, graph.condition(minibatch, identity)))(
        sample.minibatch
    )
    weight = np.linspace(0.5, 2.0, N)
    weight = (weight / weight.mean())[:, None]
    loss = lambda weights: np.mean(weight * 0.5 * by_hand.errors(weights) ** 2)
    np.testing.assert_allclose(metrics["losses/total"], loss(by_hand.network), rtol=1e-4)
    error = by_hand.errors(by_hand.network)
    np.testing.assert_allclose(metrics["losses/td_error"], np.abs(error).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["losses/q"], by_hand.h_inverse(by_hand.wanted - error).mean(), rtol=1e-4)
    assert_slopes(gradients, loss, by_hand.network)


def test_priorities_mix_the_largest_and_the_mean_error(learning):
    graph, rings, learner, sample, by_hand = learning
    error = np.abs(by_hand.errors(by_hand.network))
    right = SHARE * error.max(axis=1) + (1 - SHARE) * error.mean(axis=1)
    np.testing.assert_allclose(jax.jit(graph.replay.errors)(learner, sample.minibatch), right, rtol=1e-4)
    after = jax.jit(lambda rings: graph.replay.update(graph, rings, learner, sample))(rings)
    stored = after.priorities.values[sample.location.environment, 0, sample.location.row]
    np.testing.assert_allclose(stored, (right + 1e-6) ** 0.9, rtol=1e-4)


def test_rescaling_is_inverted_without_loss_of_digits():
    returns = np.concatenate([[0.0], np.logspace(-4, 5, 60)])
    returns = np.concatenate([-returns, returns])
    np.testing.assert_allclose(rescale_values(jnp.float32(returns)), h(returns), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(undo_rescaling(jnp.float32(h(returns))), returns, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 5, 50])
def test_returns_of_several_steps_end_with_the_episode_and_the_sequence(n):
    random = np.random.default_rng(n)
    reward, value, done = random.normal(size=12), random.normal(size=12), random.random(12) < 0.2
    right = []
    for t in range(12):
        k = next(k for k in range(1, 13) if k == n or t + k == 12 or done[t + k - 1])
        right.append(sum(0.9**j * reward[t + j] for j in range(k)) + 0.9**k * value[t + k - 1])
    returns = n_step_returns(jnp.float32(reward), jnp.float32(value), jnp.asarray(done), gamma=0.9, n=n)
    np.testing.assert_allclose(returns, right, rtol=1e-5)


# These programs compile faster than those of the default settings.
PLAIN = {"burn_in": 0, "gradient_steps": 1, "n_step": 1, "duelling": False, "rescale_values": False}


@pytest.mark.parametrize("options", [PLAIN, pytest.param({"gradient_steps": 2}, marks=pytest.mark.slow)])
def test_two_devices_give_the_numbers_of_one(options):
    sizes = {**SIZES, "total_timesteps": 12 * E * T, "network": network("gru"), **options}
    one = assert_two_devices_equal_one(rollmill.r2d2(masked(), **sizes), learning_iterations=10)
    priorities = one["rings.priorities.values"]
    assert np.sum((priorities > 0) & (priorities != 1)) >= E  # of sequences that were learned from


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "Pendulum-v1"}, ("needs-discrete-action-space-this", "r2d2", "ppo")),
        ({"network": "mlp"}, ("r2d2-needs-recurrent-network-got", "mlp", "dqn")),
        ({"network": lambda key, observations, actions: None}, ("this-algorithm-makes-own-networks",)),
        ({"sequence_length": 6}, ("sequence-length-must-be-multiple", "6", "4", "8")),
        ({"sequence_length": 2}, ("sequence-length-must-be-multiple", "2", "4")),
        ({"burn_in": 12}, ("burn-in-leaves-no-step", "12", "11")),
        ({"burn_in": -1}, ("out-of-bounds", "burn_in", "-1")),
        ({"buffer_size": 40}, ("buffer-size-holds-steps-each", "40", "12", "48")),
        ({"learning_starts": 10_000}, ("learning-starts-lies-after-end", "10000")),
        ({"max_error_share": 1.5}, ("out-of-bounds", "max_error_share", "1.5")),
        ({"num_shards": 3}, ("num-shards-does-not-divide-leave", "3")),
        ({"env": "TagGridWorld-Small-v0"}, ("has-several-agents-train-with",)),
    ],
)
def test_what_cannot_be_trained_is_refused(options, message):
    with raises(*message):
        rollmill.r2d2(**{"env": "CartPole-v1", **SIZES, **options})
