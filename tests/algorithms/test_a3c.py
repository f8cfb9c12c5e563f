"""A3C's fragments against straightforward code, on rollouts with both kinds of episode ends."""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses_by_hand import assert_close, disturbed_network, first_rows, said_of, two_rollouts
from restless import restless

import rollmill
from one_time import run_once
from rollmill.algorithms.network_policy import NetworkPolicy, network_policy
from rollmill.algorithms.on_policy import ActorCriticLearner
from rollmill.dataflow import Batch, Graph, Trajectory
from wordings import raises

E, T = 16, 5
NETWORKS = {
    "mlp": rollmill.NetworkConfig(hidden_sizes=(6, 5)),
    "gru": rollmill.NetworkConfig(torso="gru", hidden_sizes=(6,), recurrent_size=5),
}


def configure(network="mlp", **overrides):
    small = {"num_envs": E, "num_steps": T, "total_timesteps": 10 * E * T, "normalize_observations": True}
    return rollmill.A3CConfig(**(small | overrides), network=NETWORKS[network])


class Rollout(NamedTuple):
    """A rollout of the second iteration by a policy that is far from uniform."""

    config: Any
    graph: Graph
    policy: NetworkPolicy
    learner: ActorCriticLearner
    trajectory: Trajectory
    batch: Batch


@pytest.fixture(scope="module", params=["mlp", pytest.param("gru", marks=pytest.mark.slow)])
def rollout(request):
    config = configure(request.param, ent_coef=0.05, vf_coef=0.7, norm_adv=False, normalize_values=False)
    graph = rollmill.a3c(restless(), config)
    make = partial(rollmill.actor_critic, config=config.network)
    policy = network_policy(restless(), make, normalise_observations=True)

    louder = lambda learner: eqx.tree_at(
        lambda whole: whole.weights.network, learner, disturbed_network(learner.weights.network)
    )
    state, trajectory, _, batch = two_rollouts(graph, jax.random.key(3), learns=louder, acts=louder)
    found = Rollout(config, graph, policy, state.learner, trajectory, batch)
    steps = found.trajectory.steps
    assert (steps.terminated[:-1]).any() and (steps.truncated & ~steps.terminated)[:-1].any()
    return found


def returns_by_hand(rollout):
    """Mnih et al., algorithm S3: R = r + gamma R, backwards from the value of where the rollout was cut."""
    steps, weights = rollout.trajectory.steps, rollout.learner.weights
    said, last_memory = eqx.filter_jit(partial(said_of, rollout))(weights)
    last = jax.vmap(partial(rollout.policy.value, weights))(last_memory, rollout.trajectory.observation)
    running, returns = np.asarray(last, np.float64), np.zeros((T, E))
    for t in reversed(range(T)):
        running = np.where(steps.truncated[t], said.final_value[t], running)
        running = np.where(steps.terminated[t], 0.0, running)
        running = np.asarray(steps.reward[t]) + rollout.config.gamma * running
        returns[t] = running
    return returns, np.asarray(said.value)


@pytest.mark.slow
def test_targets_are_the_returns_up_to_the_end_of_the_rollout(rollout):
    returns, value = returns_by_hand(rollout)
    np.testing.assert_allclose(rollout.batch.samples.target, returns, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(rollout.batch.samples.advantage, returns - value, rtol=1e-3, atol=1e-3)


def test_gradients_are_those_of_a_loss_written_out(rollout):
    """The loss is the mean over samples; no gradient goes through the advantages or the returns."""
    config, learner = rollout.config, rollout.learner
    returns, value = returns_by_hand(rollout)
    returns, advantage = (jnp.asarray(x, jnp.float32) for x in (returns, returns - value))

    def loss_by_hand(network):
        said, _ = said_of(rollout, eqx.tree_at(lambda w: w.network, learner.weights, network))
        policy_loss = -(said.log_prob * advantage).mean()
        value_loss, entropy = 0.5 * ((said.value - returns) ** 2).mean(), said.entropy.mean()
        total = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        return total, {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy}

    minibatch = first_rows(rollout, E if rollout.policy.recurrent else E * T)
    slopes, metrics = eqx.filter_jit(rollout.graph.gradients)(learner, minibatch)
    (total, expected_metrics), expected = eqx.filter_jit(jax.value_and_grad(loss_by_hand, has_aux=True))(
        learner.weights.network
    )
    assert_close(metrics, {**expected_metrics, "losses/total": total}, rtol=1e-3, atol=1e-4)
    assert_close(slopes, expected, rtol=1e-3, atol=1e-4)


def test_an_iteration_makes_one_update_from_the_whole_rollout():
    graph = rollmill.a3c(restless(), configure())
    assert (graph.loops.epochs, graph.loops.num_minibatches, graph.loops.minibatch_items) == (1, 1, "samples")
    assert rollmill.a3c(restless(), configure("gru")).loops.minibatch_items == "sequences"


def test_the_statistics_of_rmsprop_are_shared():
    """One step by hand: they live in the learner, and whoever's gradients come next are scaled by them."""
    config = configure(max_grad_norm=1e9, learning_rate=0.1, anneal_lr=False, rms_decay=0.5, rms_eps=0.25)
    graph = rollmill.a3c(restless(), config)
    learner = run_once(graph.start_learner, jax.random.key(0))
    update = eqx.filter_jit(partial(graph.update, share=0.5))
    squares = 0.0
    for slope in (2.0, -1.0):  # of two workers, one after the other
        slopes = jax.tree.map(lambda w, slope=slope: jnp.full_like(w, slope), learner.weights.network)
        after = update(learner, slopes)
        squares = 0.5 * squares + 0.5 * slope**2
        moved = after.weights.network.critic.bias - learner.weights.network.critic.bias
        np.testing.assert_allclose(moved, -0.1 * slope / np.sqrt(squares + 0.25), rtol=1e-5)
        learner = after


def test_workers_that_update_one_by_one_anneal_as_planned():
    """Three iterations of four workers: the rate falls to zero after twelve updates, not after three."""
    graph = rollmill.a3c(restless(), configure(total_timesteps=3 * E * T, learning_rate=0.1))
    learner = run_once(graph.start_learner, jax.random.key(0))
    update = eqx.filter_jit(partial(graph.update, share=0.25))
    slopes = jax.tree.map(lambda w: jnp.full_like(w, 0.1), learner.weights.network)
    moved = []
    for _ in range(13):
        after = update(learner, slopes)
        moved.append(np.abs(after.weights.network.critic.bias - learner.weights.network.critic.bias).item())
        learner = after
    assert all(move > 0 for move in moved[:12]) and moved[12] == 0


@pytest.mark.parametrize("field", ["gamma", "gae_lambda", "rms_decay"])
def test_fractions_are_checked(field):
    with raises("out-of-bounds", field, "1.5", "lie between 0 and 1"):
        rollmill.a3c(restless(), configure(**{field: 1.5}))
