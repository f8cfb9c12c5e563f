"""Agents with a memory under MAPPO and IPPO, against PPO's and against straightforward code.

Shape letters: `T` steps, `E` environments, `N` sequences of a minibatch, `A` agents of a kind.
"""

import shutil
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_rollouts import check_two_devices, collect_rollout, run
from losses_by_hand import assert_close, first_rows

import rollmill
from agents_envs import crowd, lone, numbered
from rollmill.core.errors import CannotFuse
from rollmill.dataflow import (
    collect,
    identity,
    init_state,
)
from rollmill.fusion.kernels.gradients import kernel_gradients
from rollmill.fusion.kernels.rollout import lower_rollout
from rollmill.networks import AgentNetwork
from wordings import raises

E, T = 8, 6
SMALL = {
    "num_envs": E,
    "num_steps": T,
    "total_timesteps": 4 * E * T,
    "num_minibatches": 2,
    "learning_rate": 1e-3,
}
GRU = rollmill.NetworkConfig(torso="gru", hidden_sizes=(5,), recurrent_size=4)
LSTM = rollmill.NetworkConfig(torso="lstm", hidden_sizes=(5,), recurrent_size=4)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"network": GRU}, id="gru"),
        pytest.param({"network": LSTM}, id="lstm", marks=pytest.mark.slow),
        pytest.param(
            {
                "network": rollmill.NetworkConfig(
                    torso="gru", hidden_sizes=(5,), recurrent_size=4, shared_torso=True
                )
            },
            id="one torso",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_lone_agent_with_a_memory_learns_what_ppo_learns(how):
    env = rollmill.make("CartPole-v1")
    theirs, their_rows = run(rollmill.ppo(env, **SMALL, **how, normalize_values=False))
    ours, our_rows = run(rollmill.ippo(lone(env), **SMALL, **how, normalize_values=False))
    for a, b in zip(jax.tree.leaves(ours.weights.networks), jax.tree.leaves(theirs.weights.network), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(our_rows, their_rows, strict=True):
        for metric in b:
            np.testing.assert_allclose(a[metric], b[metric], rtol=1e-3, atol=1e-5, err_msg=metric)


# --- a rollout in which agents go out, by hand --------------------------------------------------------


@pytest.fixture(scope="module")
def rollout():
    graph = rollmill.mappo(crowd(), **SMALL, network=GRU, norm_adv=False)
    found = collect_rollout(graph)
    steps = found.trajectory.steps
    assert (steps.terminated | steps.truncated)[:-1].any(), "no episode ends within the rollout"
    assert any(leaf.any() for leaf in jax.tree.leaves(found.trajectory.start_memory)), "no memory lasts"
    return found


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def remembered(torso, x, hidden):
    """The unit's next state, by the formulae of Cho et al. (2014)."""
    (layer,) = torso.encoder.mlp.layers
    x = np.tanh(x @ layer.weight + layer.bias)
    (x_r, x_z, x_n), (h_r, h_z, h_n) = (
        np.split(x @ torso.cell.input_weight + torso.cell.bias, 3, axis=-1),
        np.split(hidden @ torso.cell.hidden_weight, 3, axis=-1),
    )
    forget, keep = sigmoid(x_r + h_r), sigmoid(x_z + h_z)
    return (1 - keep) * np.tanh(x_n + forget * (h_n + torso.cell.candidate_bias)) + keep * hidden


def shown_to_critics(view):
    """All observations, zeros for inactive agents, then who is active; for ONE environment step."""
    parts = [np.where(view.active[name][:, None], view.agents[name], 0).ravel() for name in ("walker", "keeper")]
    return np.concatenate([*parts, view.active["walker"], view.active["keeper"]])


def decided(network, name, view, action, memory):
    """Log-probabilities, entropies and values of a kind's agents in ONE environment step, and their memories."""
    actor_memory, critic_memory = memory
    seen = view.agents[name]
    everything = np.broadcast_to(shown_to_critics(view), (len(seen), shown_to_critics(view).size))
    actor_memory = remembered(network.actor_torso, seen, actor_memory)
    critic_memory = remembered(network.critic_torso, np.concatenate([seen, everything], axis=1), critic_memory)
    value = (critic_memory @ network.critic.weight + network.critic.bias)[:, 0]
    if name == "walker":
        logits = actor_memory @ network.actor.layer.weight + network.actor.layer.bias
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        log_prob, entropy = log_probs[np.arange(3), action], -(np.exp(log_probs) * log_probs).sum(axis=1)
    else:
        mean = actor_memory @ network.actor.mean.weight + network.actor.mean.bias
        log_std = network.actor.log_std.weight
        z = (action - mean) / np.exp(log_std)
        log_prob = -(0.5 * z**2 + log_std + 0.5 * np.log(2 * np.pi)).sum(axis=1)
        entropy = np.full(1, (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum())
    return log_prob, entropy, value, (actor_memory, critic_memory)


def replayed(rollout, networks, name, env):
    """What a kind's agents of ONE environment decide, step by step, `[T, A]` each."""
    steps = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64)[:, env], rollout.trajectory.steps._replace(info=())
    )
    memory = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64)[env], rollout.trajectory.start_memory[name])
    outputs = []
    for t in range(T):
        view = jax.tree.map(lambda leaf, t=t: leaf[t], steps.observation)
        view = view._replace(active={kind: active.astype(bool) for kind, active in view.active.items()})
        action = steps.action[name][t]
        action = action.astype(int) if name == "walker" else action
        *now, memory = decided(networks[name], name, view, action, memory)
        outputs.append(now)
        if steps.terminated[t] or steps.truncated[t]:
            memory = jax.tree.map(np.zeros_like, memory)
    return [np.stack(column) for column in zip(*outputs, strict=True)]


def double(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


@pytest.mark.parametrize("name", ["walker", "keeper"])
def test_decisions_follow_from_all_that_was_shown_since_the_episode_began(rollout, name):
    networks, extras = double(rollout.before.learner.weights.networks), rollout.trajectory.steps.extras
    for env in range(E):
        log_prob, _, value = replayed(rollout, networks, name, env)
        np.testing.assert_allclose(extras.log_prob[name][:, env], log_prob, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(extras.value[name][:, env], value, rtol=1e-4, atol=1e-4)


def loss_by_hand(rollout, networks):
    """The loss of the whole batch: of each kind the mean over its active agents, summed."""
    total, config = 0.0, {"clip": 0.2, "values": 0.5, "entropy": 0.01}
    for name in ("walker", "keeper"):
        samples, active = double(rollout.batch.samples.agents[name]), double(rollout.batch.samples.weight[name])
        losses = np.zeros((T, E, samples.advantage.shape[-1]))
        for env in range(E):
            log_prob, entropy, value = replayed(rollout, networks, name, env)
            ratio, advantage = np.exp(log_prob - samples.log_prob[:, env]), samples.advantage[:, env]
            bounded = np.clip(ratio, 1 - config["clip"], 1 + config["clip"])
            old, target = samples.value[:, env], samples.target[:, env]
            near = old + np.clip(value - old, -config["clip"], config["clip"])
            losses[:, env] = (
                -np.minimum(ratio * advantage, bounded * advantage)
                + config["values"] * 0.5 * np.maximum((value - target) ** 2, (near - target) ** 2)
                - config["entropy"] * entropy
            )
        total += (active * losses).sum() / active.sum()
    return total


def test_gradients_flow_back_through_memories_as_differences_say(rollout):
    """The slope of the loss by hand along random directions, through time and both memories of each agent."""
    networks = jax.tree.map(lambda leaf: leaf * 1.03, rollout.before.learner.weights.networks)
    learner = eqx.tree_at(lambda learner: learner.weights.networks, rollout.learner, networks)
    whole = first_rows(rollout, E)
    conditioned = partial(rollout.graph.condition, reduce=identity)
    gradients, metrics = eqx.filter_jit(lambda b: rollout.graph.gradients(learner, conditioned(b)))(whole)
    networks, rng = double(networks), np.random.default_rng(0)
    np.testing.assert_allclose(metrics["losses/total"], loss_by_hand(rollout, networks), rtol=1e-4)
    for _ in range(4):
        along = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), networks)
        moved = [jax.tree.map(lambda w, d, e=e: w + e * d, networks, along) for e in (1e-5, -1e-5)]
        expected = (loss_by_hand(rollout, moved[0]) - loss_by_hand(rollout, moved[1])) / 2e-5
        slope = sum(np.vdot(d, g) for d, g in zip(jax.tree.leaves(along), jax.tree.leaves(gradients), strict=True))
        np.testing.assert_allclose(slope, expected, rtol=2e-3, atol=2e-4)


def test_advantages_look_ahead_by_the_memory_after_the_last_step(rollout):
    """Only the last step is bootstrapped from the next view: its value needs the memory after the rollout."""
    weights, trajectory = rollout.before.learner.weights, rollout.trajectory
    policy, end = rollout.policy, trajectory.memory
    value = lambda view, memory: policy.values(weights.networks, view, memory)
    ours = jax.jit(jax.vmap(value))(trajectory.observation, end)
    steps, samples = trajectory.steps, rollout.batch.samples
    statistics = rollout.before.learner.targets["keeper"]
    raw = lambda value: value * np.sqrt(statistics.variance + 1e-8) + statistics.mean
    lasts = np.asarray(~(steps.terminated | steps.truncated)[-1])
    expected = steps.reward["keeper"][-1] + 0.99 * raw(ours["keeper"]) - raw(samples.agents["keeper"].value[-1])
    assert lasts.any()
    np.testing.assert_allclose(
        samples.agents["keeper"].advantage[-1][lasts], np.asarray(expected)[lasts], rtol=1e-3, atol=1e-3
    )


def test_agents_of_their_own_have_memories_of_their_own(rollout):
    """Independent agents with equal weights decide as agents that share them."""
    how = SMALL | {"network": GRU}
    shared, own = (
        rollmill.ippo(numbered(), **how),
        rollmill.ippo(numbered(), **how, sharing={"agent": "independent"}),
    )

    @eqx.filter_jit
    def decide(key):
        state = init_state(shared, key, jnp.arange(E, dtype=jnp.int32))
        weights = shared.weights(state.learner)
        copies = {
            name: jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), net) for name, net in weights.networks.items()
        }
        spread = eqx.tree_at(
            lambda w: w.networks, own.weights(init_state(own, key, state.collector.index).learner), copies
        )
        return tuple(
            collect(graph, w, state.collector, jax.random.key(1))[1].steps
            for graph, w in ((shared, weights), (own, spread))
        )

    one, other = decide(jax.random.key(0))
    assert_close(other.extras, one.extras, rtol=1e-5, atol=1e-6)
    assert_close(other.final_memory, one.final_memory, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # faster tests split sequences (dataflow) and agents' unequal parts (MAPPO) in this way
def test_two_devices_give_the_numbers_of_one_with_memories():
    graph = rollmill.mappo(crowd(), **SMALL, network=GRU, normalize_observations=True)
    check_two_devices(graph)


@pytest.mark.slow
def test_a_run_with_memories_is_resumed_with_the_same_bits_and_evaluated(tmp_path):
    rollmill.register("Crowd", crowd, overwrite=True)
    graph = rollmill.ippo("Crowd", **SMALL, network=GRU)
    quiet = {"quiet": True, "tensorboard": False}
    run = rollmill.train(graph, run_dir=tmp_path / "run", checkpoint_iterations=1, keep_last=4, **quiet)
    newest = max((run.directory / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    shutil.rmtree(newest)
    (run.directory / "summary.json").unlink()
    again = rollmill.resume(run.directory, quiet=True)
    assert again.summary["weights_sha256"] == run.summary["weights_sha256"]
    assert len(rollmill.evaluate(run.directory, episodes=4).returns) == 4


def test_kernels_leave_agents_with_memories_to_xla():
    graph = rollmill.ippo(crowd(), **SMALL, network=GRU)
    with pytest.raises(CannotFuse, match="several agents with recurrent networks"):
        lower_rollout(graph)
    with pytest.raises(CannotFuse, match="several agents with recurrent networks"):
        kernel_gradients(graph)


# --- networks of one's own, and refusals --------------------------------------------------------------


class Forgetful(eqx.Module):
    """A network with a memory that cannot advance actor and critic together."""

    inner: AgentNetwork

    def initial_memory(self):
        return self.inner.initial_memory()

    def policy(self, observation, memory, action_mask=None):
        return self.inner.policy(observation, memory, action_mask)

    def value(self, observation, memory):
        return self.inner.value(observation, memory)


def forgetful(key, observation_space, action_space, critic_space):
    return Forgetful(rollmill.actor_critic(key, observation_space, action_space, GRU, critic_space=critic_space))


def test_what_does_not_go_with_a_memory_is_refused():
    with raises("network-has-memory-so-needs", "walker"):
        rollmill.mappo(crowd(), **SMALL, network=forgetful)
    with raises("pool-size-needs-networks-without", "pool_size=2"):
        rollmill.mappo(crowd(), **SMALL, network=GRU, pool_size=2)
    with raises("do-not-divide-into-num", "8", "sequences (num_envs)", "num_minibatches=3"):
        rollmill.mappo(crowd(), **(SMALL | {"num_minibatches": 3}), network=GRU)
