"""IMPALA's fragments against straightforward code, on rollouts that another policy collected."""

import json
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses_by_hand import assert_close, disturbed_network, normalise_by_hand, said_of, two_rollouts
from restless import restless

import rollmill
from one_time import run_once
from rollmill.algorithms.network_policy import NetworkPolicy, network_policy
from rollmill.algorithms.on_policy import ActorCriticLearner
from rollmill.dataflow import (
    Batch,
    Graph,
    Trajectory,
    collect,
    identity,
    init_state,
    iterate,
    learn,
    minibatch_gather,
)
from rollmill.envs import RunningStatistics
from rollmill.runs.specification import describe, rebuild_graph
from wordings import raises

E, T = 16, 5
NETWORKS = {
    "mlp": rollmill.NetworkConfig(hidden_sizes=(6, 5)),
    "gru": rollmill.NetworkConfig(torso="gru", hidden_sizes=(6,), recurrent_size=5),
}
SETTINGS = {"clip_rho": 1.4, "clip_c": 0.9, "vtrace_lambda": 0.8, "ent_coef": 0.05, "vf_coef": 0.7}


def configure(network="mlp", **overrides):
    small = {"num_envs": E, "num_steps": T, "total_timesteps": 10 * E * T, "normalize_observations": True}
    small |= {"normalize_values": True, "norm_adv": True}
    return rollmill.IMPALAConfig(**(small | overrides), network=NETWORKS[network])


def with_units(learner):
    """Statistics of targets that differ much from those after the next rollout."""
    units = RunningStatistics(jnp.float32(-3), jnp.float32(6), jnp.float32(100))
    return eqx.tree_at(lambda whole: whole.weights.values, learner, units)


class Rollout(NamedTuple):
    """A rollout that goes on from another, with what collected it and what learns from it."""

    config: Any
    graph: Graph
    policy: NetworkPolicy
    learner: ActorCriticLearner
    trajectory: Trajectory
    prepared: ActorCriticLearner
    """The learner with the statistics after the rollout."""
    minibatch: Batch


@pytest.fixture(scope="module", params=["mlp", pytest.param("gru", marks=pytest.mark.slow)])
def rollout(request):
    config = configure(request.param, **SETTINGS)
    graph = rollmill.impala(restless(), config)
    make = partial(rollmill.actor_critic, config=config.network)
    policy = network_policy(restless(), make, normalise_observations=True, normalise_values=True)

    def other(learner, seed):
        network = disturbed_network(learner.weights.network, seed)
        return eqx.tree_at(lambda whole: whole.weights.network, learner, network)

    state, trajectory, prepared, batch = two_rollouts(
        graph,
        jax.random.key(3),
        learns=lambda learner: with_units(other(learner, 2)),
        acts=lambda learner: other(learner, 1),
    )
    minibatch = minibatch_gather(batch, graph.loops)(jnp.arange(E, dtype=jnp.uint32))
    found = Rollout(config, graph, policy, state.learner, trajectory, prepared, minibatch)
    steps = found.trajectory.steps
    assert (steps.terminated[:-1]).any() and (steps.truncated & ~steps.terminated)[:-1].any()
    assert (steps.truncated & ~steps.terminated)[-1].any()
    return found


def deviation(statistics):
    return np.sqrt(float(statistics.variance) + 1e-8)


def vtrace_by_hand(rollout, statistics):
    """Targets, advantages and ratios `[T, E]`; all values are the learner's, and none the actor's.

    Values are those of the network in the units of rewards, by these statistics of targets.
    """
    config, steps, weights = rollout.config, rollout.trajectory.steps, rollout.learner.weights
    said, last_memory = eqx.filter_jit(partial(said_of, rollout))(weights)
    raw = lambda x: np.asarray(x, np.float64) * deviation(statistics) + float(statistics.mean)
    observation = normalise_by_hand(weights.observations, rollout.trajectory.observation)
    output_of = jax.vmap(lambda m, x: rollout.policy.forward(weights, m, x, ()).value)
    last = raw(output_of(last_memory, jnp.asarray(observation, jnp.float32)))
    value, final_value = raw(said.value), raw(said.final_value)
    ratio = np.exp(np.asarray(said.log_prob - steps.extras.log_prob))
    targets, advantages = np.zeros((T, E)), np.zeros((T, E))
    for e in range(E):
        for t in reversed(range(T)):
            following = next_value = value[t + 1, e] if t + 1 < T else float(last[e])
            if t + 1 < T:
                following = targets[t + 1, e]
            if steps.truncated[t, e]:
                following = next_value = final_value[t, e]
            if steps.terminated[t, e]:
                following = next_value = 0.0
            rho, reward = min(config.clip_rho, ratio[t, e]), float(steps.reward[t, e])
            c = config.vtrace_lambda * min(config.clip_c, ratio[t, e])
            delta = rho * (reward + config.gamma * next_value - value[t, e])
            targets[t, e] = value[t, e] + delta + config.gamma * c * (following - next_value)
            advantages[t, e] = rho * (reward + config.gamma * following - value[t, e])
    return targets, advantages, ratio


def test_gradients_are_those_of_a_loss_written_out(rollout):
    """The loss is the mean over steps; no gradient goes through targets, advantages or bootstraps."""
    config, learner = rollout.config, rollout.prepared
    before, after = rollout.learner.weights.values, learner.weights.values
    raw_targets, advantages, ratio = vtrace_by_hand(rollout, before)
    targets = (raw_targets - float(after.mean)) / deviation(after)
    rho = np.minimum(config.clip_rho, ratio)
    advantages = advantages - rho * advantages.mean() / rho.mean()  # the baseline has the ratio's weight
    advantages = advantages / advantages.std()
    assert (ratio > config.clip_rho).mean() > 0.1 and (ratio < config.clip_c).mean() > 0.1
    targets, advantages = jnp.asarray(targets, jnp.float32), jnp.asarray(advantages, jnp.float32)

    def loss_by_hand(network):
        said, _ = said_of(rollout, eqx.tree_at(lambda w: w.network, learner.weights, network))
        policy_loss = -(said.log_prob * advantages).mean()
        value_loss, entropy = 0.5 * ((said.value - targets) ** 2).mean(), said.entropy.mean()
        total = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        return total, {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy}

    slopes, metrics = eqx.filter_jit(rollout.graph.gradients)(learner, rollout.minibatch)
    (total, expected_metrics), expected = eqx.filter_jit(jax.value_and_grad(loss_by_hand, has_aux=True))(
        learner.weights.network
    )
    expected_metrics |= {
        "losses/total": total,
        "losses/approx_kl": (ratio - 1 - np.log(ratio)).mean(),
        "losses/rho": np.minimum(config.clip_rho, ratio).mean(),
    }
    losses = {name: metric for name, metric in metrics.items() if name.startswith("losses/")}
    assert_close(losses, expected_metrics, rtol=1e-3, atol=1e-4)
    assert_close(slopes, expected, rtol=1e-3, atol=1e-4)
    assert float(metrics["values/target"]) == pytest.approx(float(raw_targets.mean()), rel=1e-3)
    value = np.asarray(eqx.filter_jit(partial(said_of, rollout))(learner.weights)[0].value)
    error = raw_targets - value * deviation(before) - float(before.mean)
    assert float(metrics["values/error_square"]) == pytest.approx((error**2).mean(), rel=1e-3)


def test_statistics_of_targets_take_in_the_rollout_once(rollout):
    before, after = rollout.learner.weights.values, rollout.prepared.weights.values
    targets, _, _ = vtrace_by_hand(rollout, before)
    count, n = float(before.count), targets.size
    mean = (count * float(before.mean) + targets.sum()) / (count + n)
    square = count * (float(before.variance) + float(before.mean) ** 2) + (targets**2).sum()
    np.testing.assert_allclose(after.count, count + n)
    np.testing.assert_allclose(after.mean, mean, rtol=1e-3)
    np.testing.assert_allclose(after.variance, square / (count + n) - mean**2, rtol=1e-3)


def test_the_mean_over_equal_parts_is_the_gradient_of_the_whole(rollout):
    run = eqx.filter_jit(partial(rollout.graph.gradients, rollout.prepared))
    halves = [run(jax.tree.map(lambda x, i=i: x[i * E // 2 :][: E // 2], rollout.minibatch)) for i in range(2)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
    assert_close(mean, run(rollout.minibatch), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("network", ["mlp", pytest.param("gru", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_executed_synchronously_all_ratios_are_one(network):
    """In the first pass over the first minibatch; not after an update."""
    config = configure(network, update_epochs=2, learning_rate=0.05)
    graph = rollmill.impala(restless(), config)

    def run(state):
        _, once = iterate(graph._replace(loops=graph.loops._replace(epochs=1)), state)
        return once, iterate(graph, state)[1]

    state = init_state(graph, jax.random.key(0), jnp.arange(E, dtype=jnp.int32))
    once, twice = run_once(run, state)
    np.testing.assert_allclose(once["losses/rho"], 1.0, atol=1e-5)
    assert 0 <= once["losses/approx_kl"] < 1e-9 < 1e-4 < twice["losses/approx_kl"]


@pytest.mark.parametrize("network", ["mlp", pytest.param("gru", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_executed_synchronously_it_is_a3c(network):
    """The same weights after every iteration: V-trace with ratios of one, and returns up to the rollout's end."""
    sizes = {"num_envs": E, "num_steps": T, "total_timesteps": 10 * E * T, "normalize_rewards": True}
    sizes |= {"normalize_values": True, "norm_adv": True}
    graphs = [
        make_graph(restless(), **sizes, network=NETWORKS[network])
        for make_graph in (rollmill.a3c, rollmill.impala)
    ]
    runs = []
    for graph in graphs:
        state = init_state(graph, jax.random.key(0), jnp.arange(E, dtype=jnp.int32))
        weights, step = [], eqx.filter_jit(partial(iterate, graph))
        for _ in range(4):
            state, _ = step(state)
            weights.append(state.learner.weights.network)
        runs.append(weights)
    assert_close(*runs, rtol=1e-3, atol=1e-4)
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a - b)).max(), runs[0][0], runs[0][3])
    assert max(jax.tree.leaves(moved)) > 3e-3


# --- a behaviour that stays behind --------------------------------------------------------------------


class Fixed(eqx.Module):
    """Action 1 with a probability that the loss does not move, and one value for everything."""

    logit: jax.Array
    of_everything: jax.Array

    def initial_memory(self):
        return ()

    def __call__(self, observation, memory, action_mask=None):
        logits = jnp.stack([jnp.zeros(()), jax.lax.stop_gradient(self.logit)])
        return rollmill.Output(Choice(logits), self.of_everything, memory)

    def value(self, observation, memory):
        return self.of_everything


class Choice(eqx.Module):
    """One of two actions."""

    logits: jax.Array

    def sample_and_log_prob(self, key):
        action = self.sample(key)
        return action, self.log_prob(action)

    def sample(self, key):
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def log_prob(self, action):
        return jax.nn.log_softmax(self.logits)[action]

    def entropy(self):
        return jnp.zeros(())

    def mode(self):
        return jnp.argmax(self.logits).astype(jnp.int32)


def logit(probability):
    return jnp.float32(np.log(probability / (1 - probability)))


@pytest.mark.parametrize(
    ("clip_rho", "expected"),
    [
        # Action 1 pays 1, action 0 pays -1; the policy takes 1 with 0.8, the behaviour with 0.4.
        # With rho-bar = 1 the weights min(mu, pi) are 0.4 and 0.2: the value is (0.4 - 0.2) / 0.6.
        (1.0, 1 / 3),
        # With 1.5: min(0.6, 0.8) = 0.6 and min(0.9, 0.2) = 0.2.
        (1.5, 0.5),
        # Unclipped, the value is the policy's own, 0.8 - 0.2; the behaviour's would be -0.2.
        (float("inf"), 0.6),
    ],
)
def test_a_bandits_value_is_that_of_the_policy_in_between(clip_rho, expected):
    """Through all fragments: another policy collects throughout, as a straggling actor would."""
    config = rollmill.IMPALAConfig(
        num_envs=256,
        num_steps=4,
        total_timesteps=256 * 4 * 300,
        learning_rate=0.03,
        clip_rho=clip_rho,
        rms_eps=0.1,
        norm_adv=False,
        normalize_values=False,
    )
    make = lambda *_: Fixed(logit(0.8), jnp.float32(0.0))
    graph = rollmill.impala(rollmill.make("Probe-ActionReward-v0"), config, network=make)

    def iteration(carry, i):
        collector, learner = carry
        behind = eqx.tree_at(lambda w: w.network.logit, graph.weights(learner), logit(0.4))
        key = jax.random.fold_in(jax.random.key(0), i)
        collector, trajectory = collect(graph, behind, collector, key)
        learner, batch = graph.prepare(learner, trajectory, reduce=identity, replicas=1)
        learner, _ = learn(graph, learner, batch, key, collector.index)
        return (collector, learner), learner.weights.network.of_everything

    begin = init_state(graph, jax.random.key(0), jnp.arange(256, dtype=jnp.int32))
    run = eqx.filter_jit(lambda: jax.lax.scan(iteration, (begin.collector, begin.learner), jnp.arange(300)))
    (_, learner), values = run()
    np.testing.assert_allclose(np.mean(values[-100:]), expected, atol=0.02)
    assert learner.weights.network.logit == logit(0.8)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["impala", "a3c"])
def test_trajectories_of_old_weights_need_the_correction(algorithm):
    """CartPole from weights 8 iterations old: with V-trace all seeds learn; without it, many end below random."""
    lag, seeds = 8, jnp.arange(8)
    raw = {"norm_adv": False, "normalize_values": False}
    graph = getattr(rollmill, algorithm)(rollmill.make("CartPole-v1"), total_timesteps=400_000, **raw)

    def iteration(seed, carry, i):
        learner, collector, ring = carry
        key, slot = jax.random.fold_in(jax.random.key(seed), i), i % (lag + 1)
        old = jax.tree.map(lambda weights: weights[slot], ring)
        collector, trajectory = collect(graph, old, collector, key)
        learner, batch = graph.prepare(learner, trajectory, reduce=identity, replicas=1)
        learner, _ = learn(graph, learner, batch, key, collector.index)
        ring = jax.tree.map(lambda all_, new: all_.at[slot].set(new), ring, graph.weights(learner))
        ended = (trajectory.steps.terminated | trajectory.steps.truncated).astype(jnp.float32)
        return (learner, collector, ring), (jnp.sum(ended * trajectory.steps.info["episode_return"]), ended.sum())

    @jax.jit
    def final_return(seed):
        begin = init_state(graph, jax.random.key(seed), jnp.arange(graph.loops.num_envs, dtype=jnp.int32))
        weights = graph.weights(begin.learner)
        ring = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], lag + 1, axis=0), weights)
        count = jnp.arange(graph.loops.iterations)
        _, (returns, ended) = jax.lax.scan(partial(iteration, seed), (begin.learner, begin.collector, ring), count)
        return returns[-200:].sum() / ended[-200:].sum()

    found = np.sort([final_return(seed) for seed in seeds])
    assert found[0] > 300 if algorithm == "impala" else found[2] < 20, found


# --- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vtrace_lambda": 1.5}, ("out-of-bounds", "vtrace_lambda", "1.5", "lie between 0 and 1")),
        ({"clip_rho": 0.0}, ("expected-number", "clip_rho", "0.0", "greater than 0")),
        ({"clip_c": -1.0}, ("expected-number", "clip_c", "-1.0", "greater than 0")),
        ({"num_minibatches": 3}, ("do-not-divide-into-num", "16", "sequences (num_envs)", "3")),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings, message):
    with raises(*message):
        rollmill.impala(restless(), configure(**settings))


def test_an_optimiser_that_there_is_not():
    config = configure()
    object.__setattr__(config, "optimizer", "adamw")  # past the type check that only tests have
    with raises("unknown-name", "optimizer", "'adamw'", "Did you mean adam"):
        rollmill.impala(restless(), config)


@pytest.mark.parametrize("algorithm", ["a3c", "impala"])
def test_settings_survive_json_and_build_the_same_graph(algorithm):
    overrides = {"num_envs": 8, "num_steps": 4, "ent_coef": 0.25, "network": NETWORKS["gru"]}
    overrides |= {"optimizer": "adam", "clip_rho": float("inf")} if algorithm == "impala" else {"rms_eps": 0.5}
    graph = getattr(rollmill, algorithm)(rollmill.make("CartPole-v1"), **overrides)
    again = rebuild_graph(json.loads(json.dumps(describe(graph))))
    assert again.settings == graph.settings and again.loops == graph.loops
    assert again.settings["config"]["ent_coef"] == 0.25


@pytest.mark.slow
def test_the_optimiser_is_a_choice():
    """The first step is the rate, whatever the slope; without a correction, RMSProp's is larger by
    `1 / sqrt(1 - decay)`.
    """
    moved = {}
    for optimizer, corrected in (("adam", True), ("rmsprop", True), ("rmsprop", False)):
        rms = {"rms_decay": 0.75, "rms_eps": 1e-12, "rms_bias_correction": corrected}
        config = configure(optimizer=optimizer, learning_rate=0.01, **rms)
        graph = rollmill.impala(restless(), config)
        learner = run_once(graph.start_learner, jax.random.key(0))
        slopes = jax.tree.map(lambda w: jnp.full_like(w, 0.03), learner.weights.network)
        after = eqx.filter_jit(graph.update)(learner, slopes)
        moved[optimizer, corrected] = (
            after.weights.network.critic.bias - learner.weights.network.critic.bias
        ).item()
    np.testing.assert_allclose(moved["adam", True], -0.01, rtol=1e-3)
    np.testing.assert_allclose(moved["rmsprop", True], -0.01, rtol=1e-3)
    np.testing.assert_allclose(moved["rmsprop", False], -0.02, rtol=1e-3)
