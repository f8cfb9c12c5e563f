"""Optimisers: one step by hand, and schedules that count what share of a minibatch an update is of."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rollmill
from rollmill.algorithms.optimisers import clipped_descent, descend, planned_rate, planned_updates
from rollmill.core.schedules import NumberSchedule
from wordings import raises

WEIGHTS = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}


def rates(share, updates, *, anneal_over=12):
    """The step size of each update, seen in how far plain descent moves under a gradient of one."""
    optimiser = clipped_descent(
        optax.identity(), learning_rate=0.5, max_grad_norm=float("inf"), anneal_over=anneal_over
    )
    slopes = jax.tree.map(jnp.ones_like, WEIGHTS)

    def step(carry, _):
        weights, state = descend(optimiser, *carry, slopes, share=share)
        return (weights, state), carry[0]["b"] - weights["b"]

    (_, state), moved = eqx.filter_jit(jax.lax.scan)(step, (WEIGHTS, optimiser.init(WEIGHTS)), length=updates)
    return np.asarray(moved), state


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_gradients_of_a_share_advance_the_schedule_by_that_share(workers):
    """12 planned updates, each in so many parts: after all of them the rate is zero, and not before."""
    found, _ = rates(1 / workers, 12 * workers + 2)
    expected = np.maximum(0, 0.5 * (1 - np.arange(12 * workers + 2) / (12 * workers)))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_shares_may_change_on_the_way():
    """Six updates from one worker, then 18 of three: half of the training each."""
    optimiser = clipped_descent(optax.identity(), learning_rate=0.5, max_grad_norm=1e9, anneal_over=12)
    weights, state = WEIGHTS, optimiser.init(WEIGHTS)
    zeros = jax.tree.map(jnp.zeros_like, WEIGHTS)
    for share in (1.0,) * 6 + (1 / 3,) * 18:
        weights, state = descend(optimiser, weights, state, zeros, share=share)
    annealing = state[-1]
    np.testing.assert_allclose(int(annealing.whole) + float(annealing.part), 12, atol=1e-5)


def test_small_shares_of_long_trainings_are_not_lost():
    """A float32 that counted alone would stand still at 16.7 million."""
    optimiser = clipped_descent(optax.identity(), learning_rate=1.0, max_grad_norm=1e9, anneal_over=2 * 10**8)
    begun = eqx.tree_at(lambda state: state[-1].whole, optimiser.init(WEIGHTS), jnp.int32(10**8))

    def step(state, _):
        return descend(optimiser, WEIGHTS, state, WEIGHTS, share=1 / 48)[1], None

    state, _ = eqx.filter_jit(jax.lax.scan)(step, begun, length=48 * 200)
    assert state[-1].whole == 10**8 + 200
    np.testing.assert_allclose(state[-1].part, 0.0, atol=1e-3)


def test_without_annealing_the_rate_stays():
    np.testing.assert_allclose(rates(1.0, 20, anneal_over=None)[0], np.full(20, 0.5), rtol=1e-6)


def test_rmsprop_on_clipped_gradients_by_hand():
    """`s = d s + (1 - d) g^2; w = w - rate g / sqrt(s + eps)`, g scaled down to norm 1."""
    optimiser = clipped_descent(
        optax.scale_by_rms(decay=0.9, eps=0.01), learning_rate=0.1, max_grad_norm=1.0, anneal_over=None
    )
    run = eqx.filter_jit(partial(descend, optimiser))
    weights, state = WEIGHTS, optimiser.init(WEIGHTS)
    by_hand, squares = np.array([1.0, 2.0, 3.0]), np.zeros(3)
    for gradient in ([3.0, 0.0, 4.0], [0.1, -0.2, 0.3], [0.0, 0.0, -8.0]):
        tree = {"a": jnp.array(gradient[:2], jnp.float32), "b": jnp.float32(gradient[2])}
        weights, state = run(weights, state, tree)
        g = np.array(gradient) / max(1.0, np.linalg.norm(gradient))
        squares = 0.9 * squares + 0.1 * g**2
        by_hand = by_hand - 0.1 * g / np.sqrt(squares + 0.01)
        np.testing.assert_allclose([*weights["a"], weights["b"]], by_hand, rtol=1e-5)


def test_weights_decay_by_hand():
    """`w = w - rate (g + decay w)`: a step that depends on the weights."""
    decay = optax.add_decayed_weights(0.2)
    optimiser = clipped_descent(decay, learning_rate=0.5, max_grad_norm=float("inf"), anneal_over=None)
    slopes = {"a": jnp.array([1.0, -1.0]), "b": jnp.float32(0.0)}
    weights, _ = eqx.filter_jit(partial(descend, optimiser))(WEIGHTS, optimiser.init(WEIGHTS), slopes)
    np.testing.assert_allclose([*weights["a"], weights["b"]], [0.4, 2.3, 2.7], rtol=1e-6)


def test_planned_updates_are_those_of_the_loops():
    graph = rollmill.ppo(
        rollmill.make("CartPole-v1"), num_envs=8, num_steps=4, total_timesteps=96, update_epochs=5
    )
    assert planned_updates(graph.loops) == 3 * 5 * 4


def test_a_schedule_as_text_lasts_all_planned_updates():
    loops = rollmill.ppo("CartPole-v1", num_envs=8, num_steps=8, total_timesteps=640).loops
    count = planned_updates(loops)
    assert count == 10 * 4 * 4
    rate = planned_rate(NumberSchedule("linear", 2, 1), loops, count)
    np.testing.assert_allclose([rate(n) for n in (0, count / 4, count, 2 * count)], [2, 1.75, 1, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "linear:1e-3",
            ("expected-number", "learning_rate", "'linear:1e-3'", "a number or a schedule: constant:VALUE"),
        ),
        ("cosine:1e-3:-1", ("expected-number", "learning_rate", "'cosine:1e-3:-1': -1.0", "at least 0")),
        ("linear:inf:0", ("must-be-schedule-finite-numbers", "learning_rate", "'linear:inf:0'")),
    ],
)
@pytest.mark.parametrize("build", [rollmill.ppo, rollmill.dqn, rollmill.impala])
def test_texts_that_are_no_learning_rates_are_refused(build, text, message):
    with raises(*message):
        build("CartPole-v1", learning_rate=text)
