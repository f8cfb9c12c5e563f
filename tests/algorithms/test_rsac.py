"""Recurrent SAC's losses against NumPy, on stored sequences with both kinds of episode ends and legal actions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_sequences import assert_distinguishing, assert_two_devices_equal_one, drawn, louder, masked
from numpy_networks import CELLS, assert_slopes, dense, in_float64

import rollmill
from rollmill.core.types import FINAL_MASK
from rollmill.dataflow import identity
from wordings import raises

E, T, LENGTH, BURN_IN, N = 4, 4, 3, 3, 16
GAMMA = 0.9
SIZES = {
    "num_envs": E,
    "num_steps": T,
    "sequence_length": LENGTH * T,
    "burn_in": BURN_IN,
    "batch_size": N,
    "buffer_size": 8 * T * E,
    "learning_starts": LENGTH * T * E,
    "total_timesteps": 100 * E * T,
    "gamma": GAMMA,
}


def network(torso):
    return rollmill.NetworkConfig(torso=torso, hidden_sizes=(4,), recurrent_size=3, activation="relu")


def upright():
    """Pendulum whose episodes end in the upper quarter, or are stopped after nine steps."""
    pendulum = rollmill.make("Pendulum-v1")

    def step(key, state, action, params):
        after = pendulum.step(key, state, action, params)
        return after._replace(terminated=after.observation[0] > 0.7)

    return rollmill.time_limit(pendulum._replace(step=step), 9)


class ByHand:
    """The losses of one minibatch, step by step."""

    def __init__(self, torso, learner, samples, *, discrete):
        self.cell, self.count = CELLS[torso]
        self.discrete = discrete
        self.base = in_float64(learner.networks)
        self.steps, self.last = jax.tree.map(np.asarray, samples.steps), np.asarray(samples.observation)
        self.weight, self.done = np.asarray(samples.weight), self.steps.terminated | self.steps.truncated
        memory = samples.start_memory
        self.memory = [self.stored(torso, each) for each in (memory.actor, *memory.critics)]
        self.noise = self.drawn_noise(samples.key)
        actor, critics, _ = self.divided(self.base)
        self.refreshed = [
            self.unroll(weights, memory, 0, BURN_IN)[1][-1]
            for weights, memory in zip((actor, *critics), self.memory, strict=True)
        ]
        self.fixed = [self.features(critic, n + 1)[0] for n, critic in enumerate(critics)]
        self.wanted = self.targets([in_float64(critic) for critic in learner.targets])
        self.excess = self.losses(self.base)["entropy"] - self.target_entropy()

    @staticmethod
    def stored(torso, memory):
        leaves = in_float64(memory)
        return leaves[0] if torso == "gru" else np.stack(leaves)

    @staticmethod
    def drawn_noise(keys):
        """Standard normal numbers `[N, T]` of the actions after each step, and of those before it."""
        of_steps = jax.vmap(lambda key: jax.random.split(key, LENGTH * T - BURN_IN))(keys)
        each = jax.vmap(jax.vmap(jax.random.split))(of_steps)
        noise = jax.vmap(jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (1,)))))(each)
        return np.asarray(noise[..., 0, 0], np.float64), np.asarray(noise[..., 1, 0], np.float64)

    def divided(self, weights):
        """The weights of the actor, of each critic, and the logarithm of the temperature."""
        each = self.count + (4 if self.discrete else 6)
        actor = self.count + (4 if self.discrete else 6)
        return weights[:actor], (weights[actor : actor + each], weights[actor + each : -1]), weights[-1]

    def advance(self, weights, seen, memory):
        """The features of a network, and its next memory."""
        encoded = np.maximum(seen.astype(np.float64) @ weights[0] + weights[1], 0)
        return self.cell(weights[2 : 2 + self.count], encoded, memory)

    def unroll(self, weights, memory, first, until):
        found, memories = [], []
        for t in range(first, until):
            if t > 0:
                memory = np.where(self.done[:, t - 1, None], 0, memory)
            features, memory = self.advance(weights, self.steps.observation[:, t], memory)
            found.append(features)
            memories.append(memory)
        return np.stack(found, axis=1), memories

    def features(self, weights, n):
        """Features `[N, T, F]` of network `n` after the burn-in, and its memories."""
        return self.unroll(weights, self.refreshed[n], BURN_IN, LENGTH * T)

    def features_after(self, weights, memories):
        """Features after each step, before any reset."""
        found = []
        for t in range(BURN_IN, LENGTH * T):
            following = self.last if t == LENGTH * T - 1 else self.steps.observation[:, t + 1]
            seen = np.where(self.steps.truncated[:, t, None], self.steps.final_observation[:, t], following)
            found.append(self.advance(weights, seen, memories[t - BURN_IN])[0])
        return np.stack(found, axis=1)

    def policy(self, weights, features, mask, noise):
        """Probabilities of all actions, or a sampled action, and the entropy."""
        head = weights[2 + self.count :]
        if self.discrete:
            logits = np.where(mask, features @ head[0] + head[1], -np.inf)
            exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
            probabilities = exponentials / exponentials.sum(axis=-1, keepdims=True)
            logs = np.log(np.where(probabilities > 0, probabilities, 1))
            return probabilities, -np.sum(probabilities * logs, axis=-1)
        mean = (features @ head[0] + head[1])[..., 0]
        log_std = np.clip((features @ head[2] + head[3])[..., 0], -5, 2)
        x = mean + np.exp(log_std) * noise
        log_density = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
        return 2 * np.tanh(x), -(log_density - np.log(1 - np.tanh(x) ** 2))  # as if bounds were -1 and 1

    def values(self, weights, features, action=None):
        """The value of a continuous action, or of all discrete ones."""
        head = weights[2 + self.count :]
        if self.discrete:
            return features @ head[0] + head[1]
        return dense(head, np.concatenate([action[..., None], features], axis=-1))[..., 0]

    def expected(self, critics, features, choice):
        """The lower value of a sampled action, or of an action that is still to be drawn."""
        if self.discrete:
            lower = np.minimum(*(self.values(*each) for each in zip(critics, features, strict=True)))
            return np.sum(choice * lower, axis=-1)
        return np.minimum(*(self.values(*each, choice) for each in zip(critics, features, strict=True)))

    def masks(self):
        if not self.discrete:
            return None, None
        return self.steps.action_mask[:, BURN_IN:], self.steps.info[FINAL_MASK][:, BURN_IN:]

    def targets(self, target_critics):
        actor, _, log_temperature = self.divided(self.base)
        after = self.features_after(actor, self.features(actor, 0)[1])
        choice, entropy = self.policy(actor, after, self.masks()[1], self.noise[0])
        features = []
        for critic, memory in zip(target_critics, self.memory[1:], strict=True):
            memory = self.unroll(critic, memory, 0, BURN_IN)[1][-1]
            features.append(self.features_after(critic, self.unroll(critic, memory, BURN_IN, LENGTH * T)[1]))
        value = self.expected(target_critics, features, choice) + np.exp(log_temperature) * entropy
        goes_on = ~self.steps.terminated[:, BURN_IN:]
        return self.steps.reward[:, BURN_IN:] + GAMMA * goes_on * value

    def target_entropy(self):
        return 0.89 * np.log(self.masks()[0].sum(axis=-1)) if self.discrete else -1.0

    def losses(self, weights):
        """Losses `[N, T]` of the critics and the actor, with the policy's entropy and value."""
        actor, critics, _ = self.divided(weights)
        _, base_critics, base_temperature = self.divided(self.base)
        taken = self.steps.action[:, BURN_IN:]
        squares = np.zeros(taken.shape[:2])
        for n, critic in enumerate(critics):
            features = self.features(critic, n + 1)[0]
            if self.discrete:
                value = np.take_along_axis(self.values(critic, features), taken[..., None].astype(int), -1)[..., 0]
            else:
                value = self.values(critic, features, taken[..., 0].astype(np.float64))
            squares = squares + (value - self.wanted) ** 2
        choice, entropy = self.policy(actor, self.features(actor, 0)[0], self.masks()[0], self.noise[1])
        value = self.expected(base_critics, self.fixed, choice)
        return {
            "critic": self.weight[:, None] * 0.5 * squares,
            "policy": -value - np.exp(base_temperature) * entropy,
            "entropy": entropy,
            "q": value,
        }

    def total(self, weights):
        losses = self.losses(weights)
        temperature = np.exp(self.divided(weights)[2]) * self.excess
        return np.mean(losses["critic"] + losses["policy"] + temperature)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("lstm", "gru discrete")]


@pytest.fixture(scope="module", params=["gru", "lstm discrete", *SLOW])
def learning(request):
    """A graph, a learner with target critics of their own, sequences from the store, and the losses by hand."""
    torso, _, discrete = request.param.partition(" ")
    graph = rollmill.rsac(masked() if discrete else upright(), **SIZES, network=network(torso))
    change = lambda learner: {
        "networks": learner.networks._replace(
            actor=louder(learner.networks.actor, 0),
            critics=louder(learner.networks.critics, 1),
            log_temperature=jnp.float32(-0.4),
        ),
        "targets": louder(learner.targets, 2),
    }
    _, learner, sample = drawn(graph, change)
    by_hand = ByHand(torso, learner, sample.minibatch.samples, discrete=bool(discrete))
    return graph, learner, sample, by_hand


def test_the_sequences_have_all_that_the_loss_distinguishes(learning):
    samples, by_hand = learning[2].minibatch.samples, learning[3]
    assert_distinguishing(samples.steps, BURN_IN, masks=by_hand.discrete)
    assert all(np.abs(memory).max() > 0.01 for memory in by_hand.memory)
    assert not np.allclose(*by_hand.memory[1:])


def test_the_losses_and_their_gradients_are_those_of_the_paper(learning):
    graph, learner, sample, by_hand = learning
    gradients, metrics = jax.jit(lambda minibatch: graph.gradients(learner, graph.condition(minibatch, identity)))(
        sample.minibatch
    )
    losses = by_hand.losses(by_hand.base)
    for name, right in losses.items():
        np.testing.assert_allclose(metrics[f"losses/{name}"], right.mean(), rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(metrics["losses/total"], by_hand.total(by_hand.base), rtol=1e-4)
    assert_slopes(gradients, by_hand.total, in_float64(learner.networks))


def test_target_critics_follow_by_a_fraction(learning):
    graph, learner, sample, _ = learning
    update = lambda minibatch: graph.update(learner, graph.gradients(learner, minibatch)[0])
    after = jax.jit(update)(sample.minibatch)
    right = jax.tree.map(lambda old, new: old + 0.02 * (new - old), learner.targets, after.networks.critics)
    for mine, slow in zip(jax.tree.leaves(after.targets), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(mine, slow, rtol=1e-5, atol=1e-7)
    assert int(after.progress.updates) == 1


def test_the_policy_advances_the_memories_of_actor_and_critics(learning):
    graph, learner, _, by_hand = learning
    weights, memory = graph.weights(learner), graph.start_memory()
    observation = jnp.linspace(-0.5, 0.5, len(by_hand.last[0]))
    mask = jnp.ones(2, bool) if by_hand.discrete else ()
    key = jax.random.key(0)
    explored = jax.jit(graph.policy)(weights, key, memory, observation, mask)
    actor, critics, _ = by_hand.divided(by_hand.base)
    for mine, network in zip((explored.memory.actor, *explored.memory.critics), (actor, *critics), strict=True):
        first = np.zeros_like(by_hand.memory[0][..., 0, :])
        right = by_hand.advance(network, np.asarray(observation), first)[1]
        np.testing.assert_allclose(np.stack(jax.tree.leaves(mine)).squeeze(), right, rtol=1e-4, atol=1e-6)
    greedy = jax.jit(graph.greedy)(weights, key, memory, observation, mask)
    jax.tree.map(np.testing.assert_array_equal, greedy.memory, explored.memory._replace(critics=memory.critics))


@pytest.mark.slow
@pytest.mark.parametrize("environment", [upright, masked])
def test_two_devices_give_the_numbers_of_one(environment):
    sizes = {**SIZES, "total_timesteps": 12 * E * T, "gradient_steps": 2, "network": network("gru")}
    assert_two_devices_equal_one(rollmill.rsac(environment(), **sizes), learning_iterations=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "Probe-MultiDiscrete-v0"}, ("sac-needs-discrete-action-space", "rsac")),
        ({"network": "mlp"}, ("r2d2-needs-recurrent-network-got", "rsac", "mlp", "with sac")),
        ({"sequence_length": 6}, ("sequence-length-must-be-multiple", "6", "4", "8")),
        ({"burn_in": 12}, ("burn-in-leaves-no-step", "12", "11")),
        ({"buffer_size": 40}, ("buffer-size-holds-steps-each", "40", "12", "48")),
        ({"learning_starts": 10_000}, ("learning-starts-lies-after-end", "10000")),
        ({"num_shards": 3}, ("num-shards-does-not-divide-leave", "3")),
        ({"env": "TagGridWorld-Small-v0"}, ("has-several-agents-train-with",)),
    ],
)
def test_what_cannot_be_trained_is_refused(options, message):
    with raises(*message):
        rollmill.rsac(**{"env": "Pendulum-v1", **SIZES, **options})
