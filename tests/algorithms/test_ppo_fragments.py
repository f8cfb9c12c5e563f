"""PPO's fragments against straightforward code, on rollouts with both kinds of episode ends.

Shape letters: `T` steps, `E` environments, `N` samples.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses_by_hand import (
    LOOSE,
    assert_close,
    disturbed_network,
    first_rows,
    normalise_by_hand,
    two_rollouts,
    unroll_by_hand,
)
from restless import restless

import rollmill
from one_time import run_once
from rollmill.algorithms.network_policy import NetworkPolicy, network_policy
from rollmill.algorithms.on_policy import ActorCriticLearner, TrainingSamples, standardise_advantages
from rollmill.dataflow import Batch, Graph, State, Trajectory, identity, init_state, iterate, with_hyperparameters
from rollmill.programs.states import hyperparameters_of

E, T = 16, 5
NETWORKS = {
    "mlp": rollmill.NetworkConfig(hidden_sizes=(6, 5)),
    "gru": rollmill.NetworkConfig(torso="gru", hidden_sizes=(6,), recurrent_size=5),
}


def configure(network="mlp", **overrides):
    small = {
        "num_envs": E,
        "num_steps": T,
        "total_timesteps": 10 * E * T,
        "num_minibatches": 2,
        "learning_rate": 0.01,
    }
    return rollmill.PPOConfig(**(small | overrides), network=NETWORKS[network])


def policy_of(config):
    make = partial(rollmill.actor_critic, config=config.network)
    return network_policy(restless(), make, normalise_observations=config.normalize_observations)


class Rollout(NamedTuple):
    """A second rollout, with what came before and after it."""

    config: Any
    graph: Graph
    policy: NetworkPolicy
    before: State
    trajectory: Trajectory
    learner: ActorCriticLearner
    batch: Batch


@pytest.fixture(scope="module", params=["mlp", pytest.param("gru", marks=pytest.mark.slow)])
def rollout(request):
    config = configure(request.param, normalize_observations=True, normalize_rewards=True, normalize_values=True)
    graph = rollmill.ppo(restless(), config)

    louder = lambda learner: eqx.tree_at(
        lambda whole: whole.weights.network, learner, disturbed_network(learner.weights.network)
    )
    rolled = two_rollouts(graph, jax.random.key(3), learns=louder, acts=louder)
    found = Rollout(config, graph, policy_of(config), *rolled)
    steps = found.trajectory.steps
    only = np.asarray(steps.terminated) & ~np.asarray(steps.truncated)
    cut = np.asarray(steps.truncated) & ~np.asarray(steps.terminated)
    both = np.asarray(steps.terminated & steps.truncated)
    assert all(kind[:-1].any() for kind in (only, cut, both)) and cut[-1].any(), "the rollout shows too little"
    return found


def said_of(rollout, weights=None):
    """Outputs for the rollout's observations, normalised by the statistics from before it."""
    policy, (steps, start_memory, *_) = rollout.policy, rollout.trajectory
    old = rollout.before.learner.weights
    seen, final = (
        jnp.asarray(normalise_by_hand(old.observations, x), jnp.float32)
        for x in (steps.observation, steps.final_observation)
    )
    run = partial(unroll_by_hand, policy, old if weights is None else weights)
    lifted = jax.vmap(run, in_axes=(1, 1, 1, 1, 0), out_axes=(1, 0))
    return eqx.filter_jit(lifted)(seen, steps.action, final, steps.terminated | steps.truncated, start_memory)


# --- the rollout and its preparation ------------------------------------------------------------------


@pytest.mark.slow_beyond(1)
def test_learning_starts_from_a_ratio_of_one(rollout):
    """The learner computes the probabilities stored while collecting: across ends, from the last rollout too."""
    if rollout.policy.recurrent:
        moved = [np.any(np.asarray(m) != 0, axis=1) for m in jax.tree.leaves(rollout.trajectory.start_memory)]
        assert np.any(moved[0]) and not np.all(moved[0])  # some episodes go on from the rollout before
    said, _ = said_of(rollout)
    np.testing.assert_allclose(said.log_prob, rollout.trajectory.steps.extras.log_prob, atol=1e-5)
    np.testing.assert_allclose(said.log_prob, rollout.batch.samples.log_prob, atol=1e-5)
    whole = first_rows(rollout, E * T if rollout.graph.loops.minibatch_items == "samples" else E)
    _, metrics = eqx.filter_jit(lambda m: rollout.graph.gradients(rollout.learner, m))(whole)
    assert metrics["losses/clip_fraction"] == 0
    assert 0 <= metrics["losses/approx_kl"] < 1e-10


@pytest.mark.slow
def test_the_ratio_would_not_be_one_under_the_statistics_after_the_rollout(rollout):
    """So it matters that they stay as they are within an iteration."""
    later = rollout.learner.weights.observations
    drift = normalise_by_hand(later, rollout.trajectory.steps.observation) - np.asarray(
        rollout.batch.samples.observation
    )
    assert np.abs(drift).max() > 0.01
    expected = normalise_by_hand(rollout.before.learner.weights.observations, rollout.trajectory.steps.observation)
    np.testing.assert_allclose(rollout.batch.samples.observation, expected, rtol=1e-4, atol=1e-5)


def raw_by_hand(rollout, value):
    """Values in the units of rewards, by the statistics from before the rollout."""
    statistics = rollout.before.learner.weights.values
    return np.asarray(value, np.float64) * np.sqrt(float(statistics.variance) + 1e-8) + float(statistics.mean)


def test_values_are_those_of_the_network_step_by_step(rollout):
    said, _ = said_of(rollout)
    np.testing.assert_allclose(rollout.batch.samples.value, said.value, **LOOSE)


def test_values_told_outside_are_in_the_units_of_rewards(rollout):
    weights, (steps, start_memory, *_) = rollout.before.learner.weights, rollout.trajectory
    told = jax.jit(jax.vmap(partial(rollout.graph.outputs.value, weights)))(
        start_memory, jax.tree.map(lambda leaf: leaf[0], steps.observation)
    )
    expected = raw_by_hand(rollout, said_of(rollout)[0].value)[0]
    assert np.abs(expected - np.asarray(said_of(rollout)[0].value)[0]).min() > 0.1, "the units are nearly equal"
    np.testing.assert_allclose(told, expected, rtol=1e-3, atol=1e-4)


def test_advantages_and_targets_are_those_of_plain_loops(rollout):
    steps, config = rollout.trajectory.steps, rollout.config
    said, last_memory = said_of(rollout)
    for ours, by_hand in zip(
        jax.tree.leaves(rollout.trajectory.memory), jax.tree.leaves(last_memory), strict=True
    ):
        np.testing.assert_allclose(ours, by_hand, **LOOSE)
    weights = rollout.before.learner.weights
    observation = normalise_by_hand(weights.observations, rollout.trajectory.observation)
    output_of = eqx.filter_jit(jax.vmap(lambda m, x: rollout.policy.forward(weights, m, x, ()).value))
    last_value = raw_by_hand(rollout, output_of(last_memory, jnp.asarray(observation, jnp.float32)))
    variance = np.asarray(rollout.learner.returns.variance)
    reward = np.asarray(steps.reward, np.float64) / np.sqrt(variance + 1e-8)
    value, final_value = raw_by_hand(rollout, said.value), raw_by_hand(rollout, said.final_value)
    advantage = np.zeros((T, E))
    for e in range(E):
        following = 0.0
        for t in reversed(range(T)):
            next_value = value[t + 1, e] if t + 1 < T else last_value[e]
            if steps.truncated[t, e]:
                next_value = final_value[t, e]
            if steps.terminated[t, e]:
                next_value = 0.0
            if steps.terminated[t, e] or steps.truncated[t, e]:
                following = 0.0
            delta = reward[t, e] + config.gamma * next_value - value[t, e]
            following = delta + config.gamma * config.gae_lambda * following
            advantage[t, e] = following
    count, mean, variance = merged(rollout.before.learner.weights.values, (advantage + value).ravel())
    after, samples = rollout.learner.weights.values, rollout.batch.samples
    np.testing.assert_allclose((after.count, after.mean, after.variance), (count, mean, variance), rtol=1e-3)
    deviation = np.sqrt(variance + 1e-8)
    np.testing.assert_allclose(samples.advantage, advantage, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(samples.target, (advantage + value - mean) / deviation, rtol=1e-3, atol=1e-3)


def test_moments_of_values_are_in_the_units_of_rewards(rollout):
    found = rollout.graph.report(rollout.learner, rollout.batch)
    statistics, samples = rollout.learner.weights.values, rollout.batch.samples
    raw = lambda x: np.asarray(x, np.float64) * np.sqrt(float(statistics.variance)) + float(statistics.mean)
    np.testing.assert_allclose(found["values/target"], raw(samples.target).mean(), rtol=1e-4)
    error = raw(samples.target) - raw(samples.value)
    np.testing.assert_allclose(found["values/error_square"], (error**2).mean(), rtol=1e-4)


def test_metrics_hold_what_statistics_of_values_take_in(rollout):
    """So that asynchronous workers need send nothing else."""
    metrics = rollout.graph.report(rollout.learner, rollout.batch)
    found = rollout.graph.merge_metrics(rollout.before.learner, metrics, share=1.0)
    assert_close(found.weights.values, rollout.learner.weights.values, rtol=1e-3, atol=1e-4)
    half = rollout.graph.merge_metrics(rollout.before.learner, metrics, share=0.5)
    before = rollout.before.learner.weights.values
    np.testing.assert_allclose(half.weights.values.count - before.count, E * T / 2)


def merged(before, values):
    """Count, mean and variance after these values, from those before (all values as one sum)."""
    values = np.asarray(values, np.float64)
    count, n = float(before.count), len(values)
    total = count * np.asarray(before.mean) + values.sum(axis=0)
    squares = count * (np.asarray(before.variance) + np.asarray(before.mean) ** 2) + (values**2).sum(axis=0)
    mean = total / (count + n)
    return count + n, mean, squares / (count + n) - mean**2


def test_statistics_take_in_the_rollout_once(rollout):
    before, after = rollout.before.learner, rollout.learner
    steps = rollout.trajectory.steps
    seen = np.asarray(steps.observation).reshape(T * E, 2)
    pairs = [
        (after.weights.observations, merged(before.weights.observations, seen)),
        (after.returns, merged(before.returns, np.asarray(steps.info["discounted_return"]).ravel())),
    ]
    for statistics, (count, mean, variance) in pairs:
        np.testing.assert_allclose(statistics.count, count)
        np.testing.assert_allclose(statistics.mean, mean, rtol=1e-4)
        np.testing.assert_allclose(statistics.variance, variance, rtol=1e-3)
    for ours, theirs in zip(
        jax.tree.leaves(after.weights.network), jax.tree.leaves(before.weights.network), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_discounted_returns_start_anew_where_an_episode_ends(rollout):
    steps, gamma = rollout.trajectory.steps, rollout.config.gamma
    found, reward = np.asarray(steps.info["discounted_return"]), np.asarray(steps.reward)
    for t in range(1, T):
        done = np.asarray(steps.terminated[t - 1]) | np.asarray(steps.truncated[t - 1])
        running = np.where(done, 0, gamma * found[t - 1])
        np.testing.assert_allclose(found[t], running + reward[t], rtol=1e-4, atol=1e-4)


# --- gradients ----------------------------------------------------------------------------------------


def mlp_by_hand(torso, x):
    for layer in torso.mlp.layers:
        x = jnp.tanh(
            jnp.einsum("ni,io->no", x, layer.weight) + jnp.broadcast_to(layer.bias, (len(x), len(layer.bias)))
        )
    return x


def loss_by_hand(config, log_prob, entropy, value, samples):
    """As CleanRL writes it; any leading axes."""
    ratio = jnp.exp(log_prob - samples.log_prob)
    first = -samples.advantage * ratio
    second = -samples.advantage * jnp.clip(ratio, 1 - config.clip_coef, 1 + config.clip_coef)
    policy_loss = jnp.maximum(first, second).mean()
    value_loss = (value - samples.target) ** 2
    if config.clip_vloss:
        near = samples.value + jnp.clip(value - samples.value, -config.clip_coef, config.clip_coef)
        value_loss = jnp.maximum(value_loss, (near - samples.target) ** 2)
    value_loss, entropy = 0.5 * value_loss.mean(), entropy.mean()
    return policy_loss - config.ent_coef * entropy + config.vf_coef * value_loss, {
        "losses/policy": policy_loss,
        "losses/value": value_loss,
        "losses/entropy": entropy,
        "losses/clip_fraction": (jnp.abs(ratio - 1) > config.clip_coef).astype(jnp.float32).mean(),
        "losses/approx_kl": ((ratio - 1) - jnp.log(ratio)).mean(),
    }


def mlp_loss_by_hand(config, network, samples):
    logits = mlp_by_hand(network.actor_torso, samples.observation)
    logits = jnp.einsum("ni,io->no", logits, network.actor.layer.weight) + network.actor.layer.bias[None]
    value = mlp_by_hand(network.critic_torso, samples.observation)
    value = jnp.einsum("ni,i->n", value, network.critic.weight[:, 0]) + network.critic.bias[0]
    probability = jnp.exp(logits) / jnp.exp(logits).sum(axis=1, keepdims=True)
    log_prob = jnp.log(probability[jnp.arange(len(logits)), samples.action])
    entropy = -(probability * jnp.log(probability)).sum(axis=1)
    return loss_by_hand(config, log_prob, entropy, value, samples)


def disturbed(batch, seed=0):
    """Old log-probabilities, values and targets moved, so that every kind of clipping takes place."""
    samples = batch.samples
    keys = jax.random.split(jax.random.key(seed), 4)
    noise = [0.5 * jax.random.normal(key, samples.log_prob.shape) for key in keys]
    return batch._replace(
        samples=samples._replace(
            log_prob=samples.log_prob + noise[0],
            value=samples.value + noise[1],
            target=samples.target + noise[2],
            advantage=samples.advantage + noise[3],
        )
    )


def with_network(learner, network):
    return eqx.tree_at(lambda whole: whole.weights.network, learner, network)


def whole_of(rollout):
    return disturbed(first_rows(rollout, E * T if rollout.graph.loops.minibatch_items == "samples" else E))


@pytest.mark.slow_beyond(1)
def test_gradients_are_those_of_a_loss_written_out(rollout):
    network = disturbed_network(rollout.learner.weights.network)
    learner, minibatch = with_network(rollout.learner, network), whole_of(rollout)

    def by_hand(network, config):
        if not rollout.policy.recurrent:
            return mlp_loss_by_hand(config, network, minibatch.samples)
        samples, memory = minibatch  # the memory carried along each of the N sequences
        done = (rollout.trajectory.steps.terminated | rollout.trajectory.steps.truncated).swapaxes(0, 1)
        weights = eqx.tree_at(lambda w: w.network, learner.weights, network)
        run = jax.vmap(partial(unroll_by_hand, rollout.policy, weights))
        said, _ = run(samples.observation, samples.action, samples.observation, done, memory)
        return loss_by_hand(config, said.log_prob, said.entropy, said.value, samples)

    for clip_vloss in (True,) if rollout.policy.recurrent else (True, False):
        config = replace(rollout.config, clip_vloss=clip_vloss, ent_coef=0.05, vf_coef=0.7)
        graph = rollmill.ppo(restless(), config)
        learner = with_hyperparameters(learner, hyperparameters_of(graph))
        slopes, metrics = eqx.filter_jit(graph.gradients)(learner, minibatch)
        loss_and_slope = jax.value_and_grad(partial(by_hand, config=config), has_aux=True)
        (loss, expected_metrics), expected = eqx.filter_jit(loss_and_slope)(network)
        assert 0.1 < expected_metrics["losses/clip_fraction"] < 0.95
        assert_close(slopes, expected)
        assert_close(metrics, {**expected_metrics, "losses/total": loss})


@pytest.mark.slow_beyond(1)
def test_the_mean_over_equal_parts_is_the_gradient_of_the_whole(rollout):
    network = disturbed_network(rollout.learner.weights.network)
    learner, minibatch = with_network(rollout.learner, network), whole_of(rollout)
    run = eqx.filter_jit(lambda m: rollout.graph.gradients(learner, m))
    size = len(jax.tree.leaves(minibatch.samples)[0])
    cuts = [jax.tree.map(lambda x, i=i: x[i * size // 2 : (i + 1) * size // 2], minibatch) for i in range(2)]
    halves = [run(half) for half in cuts]
    assert_close(jax.tree.map(lambda a, b: (a + b) / 2, *halves), run(minibatch), rtol=1e-4, atol=1e-6)
    differ = [np.abs(np.asarray(a - b)).max() for a, b in zip(*map(jax.tree.leaves, halves), strict=True)]
    assert max(differ) > 1e-3


def test_advantages_are_standardised_over_the_whole_minibatch(rollout):
    minibatch = whole_of(rollout)
    advantage = np.asarray(minibatch.samples.advantage, np.float64)
    whole = standardise_advantages(minibatch, identity).samples
    expected = (advantage - advantage.mean()) / advantage.std()
    np.testing.assert_allclose(whole.advantage, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(whole.target, minibatch.samples.target)
    halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), minibatch)
    mean = partial(jax.lax.pmean, axis_name="half")  # noqa: TID251 - the test places
    placed = jax.vmap(lambda half: standardise_advantages(half, mean).samples.advantage, axis_name="half")(halves)
    np.testing.assert_allclose(np.asarray(placed).reshape(advantage.shape), expected, rtol=1e-4, atol=1e-5)


def test_equal_advantages_stay_finite():
    samples = TrainingSamples(*[jnp.ones(4)] * 8)
    found = standardise_advantages(Batch(samples), identity).samples.advantage
    np.testing.assert_array_equal(found, np.zeros(4))


# --- update -------------------------------------------------------------------------------------------


def learner_and_update(config):
    graph = rollmill.ppo(restless(), config)
    learner = run_once(graph.start_learner, jax.random.key(0))
    return learner, eqx.filter_jit(graph.update)


def fill(learner, value):
    return jax.tree.map(lambda w: jnp.full_like(w, value), learner.weights.network)


@pytest.mark.parametrize("anneal", [True, False])
@pytest.mark.slow_beyond(1)
def test_the_step_size_falls_linearly_to_nothing(anneal):
    """Adam's step under a constant gradient g is its rate times g / (g + eps), at every update.

    3 iterations of 2 epochs of 2 minibatches: the last of 12 updates has a twelfth of the rate, and one
    more would change nothing.
    """
    config = configure(total_timesteps=3 * E * T, update_epochs=2, anneal_lr=anneal, learning_rate=0.01)
    learner, update = learner_and_update(config)
    slope = 1e-3  # so small that the global norm is not cut
    moved = []
    for _ in range(13):
        after = update(learner, fill(learner, slope))
        deltas = jax.tree.map(lambda a, b: np.asarray(a - b), after.weights.network, learner.weights.network)
        moved.append(np.mean([delta.mean() for delta in jax.tree.leaves(deltas)]))
        learner = after
    rate = 0.01 * (1 - np.arange(13) / 12) if anneal else np.full(13, 0.01)
    np.testing.assert_allclose(moved, -rate * slope / (slope + 1e-5), rtol=2e-3, atol=1e-8)


@pytest.mark.parametrize(("norm", "limit", "kept"), [(1e-4, 2e-5, 2e-5), (1e-5, 2e-5, 1e-5)])
def test_gradients_are_scaled_down_to_the_largest_norm(norm, limit, kept):
    """Seen in Adam's first step, `rate g / (|g| + 1e-5)`, since g is about as small as its epsilon."""
    config = configure(max_grad_norm=limit, anneal_lr=False, learning_rate=0.1)
    learner, update = learner_and_update(config)
    zeros = fill(learner, 0.0)
    slopes = eqx.tree_at(lambda n: n.critic.bias, zeros, jnp.full((1,), norm, jnp.float32))
    after = update(learner, slopes)
    step = np.asarray(after.weights.network.critic.bias - learner.weights.network.critic.bias)
    np.testing.assert_allclose(step, -0.1 * kept / (kept + 1e-5), rtol=1e-4)
    np.testing.assert_array_equal(after.weights.network.critic.weight, learner.weights.network.critic.weight)


def test_an_update_leaves_the_statistics_alone(rollout):
    update = eqx.filter_jit(rollout.graph.update)
    after = update(rollout.learner, fill(rollout.learner, 0.1))
    assert_close(after.weights.observations, rollout.learner.weights.observations, rtol=0)
    assert_close(after.weights.values, rollout.learner.weights.values, rtol=0)
    assert_close(after.returns, rollout.learner.returns, rtol=0)
    assert not np.array_equal(after.weights.network.critic.bias, rollout.learner.weights.network.critic.bias)


@pytest.mark.slow
def test_learning_ends_above_the_target_divergence():
    """The ratio is no longer one after an update: a target of zero allows one epoch of the three."""
    graph = rollmill.ppo(restless(), configure(target_kl=0.0, update_epochs=3, learning_rate=0.05))
    state = init_state(graph, jax.random.key(0), jnp.arange(E, dtype=jnp.int32))
    after, metrics = eqx.filter_jit(lambda state: iterate(graph, state))(state)
    assert metrics["epochs"] == 1
    assert after.learner.optimiser[1].count == 2  # the updates of one epoch
    assert graph.keep_learning({"losses/approx_kl": jnp.float32(0.0)})
    assert not graph.keep_learning({"losses/approx_kl": jnp.float32(1e-6)})
    assert rollmill.ppo(restless(), configure()).keep_learning is None
