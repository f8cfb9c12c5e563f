"""The bonus for rare observations against NumPy, on a rollout with both kinds of episode ends."""

import shutil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_networks import assert_slopes, dense, in_float64

import rollmill
from one_time import run_once
from rollmill.dataflow import Batch, collect, identity, init_state
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from wordings import raises

CARTPOLE: Any = rollmill.make("CartPole-v1")
E, T, GAMMA, COEF = 8, 12, 0.9, 0.5
SIZES = {"num_envs": E, "num_steps": T, "num_minibatches": 4, "total_timesteps": 4 * E * T, "gamma": GAMMA}


def graph_of(**given):
    return rollmill.ppo(rollmill.time_limit(CARTPOLE, 9), **{**SIZES, "rnd_coef": COEF, **given})


@pytest.fixture(scope="module")
def rollout():
    graph, plain = graph_of(), graph_of(rnd_coef=None, normalize_observations=True)

    def run(key):
        state = init_state(graph, key, jnp.arange(E, dtype=jnp.int32))
        _, trajectory = collect(graph, graph.weights(state.learner), state.collector, jax.random.key(7))
        learner, batch = graph.prepare(state.learner, trajectory, reduce=identity, replicas=1)
        return state.learner, trajectory, learner, batch

    @jax.jit
    def without(learner, trajectory):
        return plain.prepare(learner, trajectory, reduce=identity, replicas=1)[1]

    begun, trajectory, learner, batch = run_once(run, jax.random.key(3))
    return graph, begun, trajectory, learner, batch, without


def errors_by_hand(own, x):
    wanted, predicted = (dense(in_float64(network), x) for network in (own.target, own.predictor))
    return np.mean((predicted - wanted) ** 2, axis=-1)


def test_the_bonus_is_the_error_on_the_observation_that_was_reached(rollout):
    _, begun, trajectory, learner, batch, without = rollout
    steps = trajectory.steps
    done = np.asarray(steps.terminated | steps.truncated)
    assert np.asarray(steps.terminated).any() and np.asarray(steps.truncated & ~steps.terminated).any()
    following = np.concatenate([np.asarray(steps.observation)[1:], np.asarray(trajectory.observation)[None]])
    reached = np.where(done[..., None], np.asarray(steps.final_observation), following).astype(np.float64)
    # Statistics of observations are those before this rollout: mean 0 and variance 1.
    errors = errors_by_hand(begun.novelty, np.clip(reached, -10, 10))
    sums, later = np.zeros_like(errors), np.zeros(E)
    for t in reversed(range(T)):
        later = errors[t] + GAMMA * later
        sums[t] = later
    np.testing.assert_allclose(float(learner.novelty.returns.mean), sums.mean(), rtol=1e-3)
    deviation = float(np.sqrt(learner.novelty.returns.variance))
    np.testing.assert_allclose(deviation, sums.std(), rtol=1e-3)
    paid = steps._replace(reward=steps.reward + jnp.asarray(COEF * errors / deviation, jnp.float32))
    right = without(eqx.tree_at(lambda held: held.novelty, begun, None), trajectory._replace(steps=paid))
    np.testing.assert_allclose(batch.samples.advantage, right.samples.advantage, rtol=1e-3, atol=1e-4)
    plain = without(eqx.tree_at(lambda held: held.novelty, begun, None), trajectory)
    assert np.abs(np.asarray(batch.samples.advantage - plain.samples.advantage)).max() > 0.1


def test_the_predictor_learns_its_error_and_the_policy_as_before(rollout):
    graph, _, _, learner, batch, _ = rollout
    samples = jax.tree.map(lambda leaf: leaf.reshape(E * T, *leaf.shape[2:])[::7], batch.samples)
    (policy, predictor), metrics = jax.jit(graph.gradients)(learner, Batch(samples))
    seen, own = np.asarray(samples.observation, np.float64), learner.novelty
    wanted = dense(in_float64(own.target), seen)
    last = in_float64(own.predictor)[-2:]  # differences of the head alone, which are few

    def loss(head):
        return np.mean((dense([*in_float64(own.predictor)[:-2], *head], seen) - wanted) ** 2)

    assert_slopes(in_float64(predictor)[-2:], loss, last)
    np.testing.assert_allclose(metrics["losses/novelty"], loss(last), rtol=1e-4)
    plain = graph_of(rnd_coef=None, normalize_observations=True)
    alone, _ = jax.jit(plain.gradients)(eqx.tree_at(lambda held: held.novelty, learner, None), Batch(samples))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6), policy, alone)


def trained(**options):
    graph = graph_of()
    program = lower(graph, **options)
    for window in dispatch_ahead(program, program.start(), first=0, until=graph.loops.iterations):
        after = window.after
    return after.learner


def test_the_target_stays_and_the_predictor_comes_closer(rollout):
    _, begun, *_ = rollout
    learner, seen = trained(), np.random.default_rng(0).normal(size=(64, 4))
    assert errors_by_hand(learner.novelty, seen).mean() < 0.9 * errors_by_hand(begun.novelty, seen).mean()
    first = jax.eval_shape(graph_of().start_learner, jax.random.key(0)).novelty
    assert jax.tree.structure(first) == jax.tree.structure(learner.novelty)


@pytest.mark.slow
def test_two_devices_give_the_numbers_of_one():
    one, two = (trained(devices=jax.devices()[:n]) for n in (1, 2))
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    jax.tree.map(compare, (one.weights, one.novelty), (two.weights, two.novelty))


@pytest.mark.slow
def test_rollouts_in_a_kernel_and_several_seeds_give_the_numbers_of_one_program():
    one, kernels = trained(seeds=(1,)), trained(seeds=(1,), fusion="rollout")
    lane = jax.tree.map(lambda leaf: leaf[1], trained(seeds=(0, 1)))
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    for other in (kernels, lane):
        jax.tree.map(compare, (one.weights, one.novelty), (other.weights, other.novelty))


@pytest.mark.slow
def test_a_resumed_training_has_the_weights_of_one_that_never_stopped(tmp_path):
    def run(name, **options):
        graph = rollmill.ppo("CartPole-v1", **SIZES, rnd_coef=COEF)
        return rollmill.train(graph, run_dir=tmp_path / name, checkpoint_iterations=2, quiet=True, **options)

    whole = run("whole")
    shutil.copytree(whole.directory, tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed/checkpoints/4")
    (tmp_path / "killed/summary.json").unlink()
    again = rollmill.resume(tmp_path / "killed", quiet=True)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    actors = run("actors", distribution="single-learner-coarse", place="threads", actors=2)
    mine, right = (rollmill.load(each.directory).weights for each in (actors, whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), mine, right)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "gru"}, "rnd-coef-is-for-policies"),
        ({"normalize_rewards": True}, "rnd-coef-scales-bonus-itself"),
        ({"rnd_coef": -1.0}, "out-of-bounds"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, message):
    with raises(message):
        graph_of(**options)
