"""PPO's options for robots: an adapted learning rate, a loss on means beyond bounds, a fixed deviation."""

import shutil
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from one_time import first_state
from rollmill.algorithms.losses import bound_loss
from rollmill.algorithms.on_policy import adapt_rate
from rollmill.dataflow import iterate
from rollmill.planning.choose import choose_plan
from rollmill.planning.placement import PlacementOptions
from rollmill.record.metrics import read_metrics
from wordings import raises

TINY = rollmill.NetworkConfig(hidden_sizes=(8,), activation="elu", learn_std=False, initial_log_std=-0.5)
FIXED_BY_STATE = rollmill.NetworkConfig(learn_std=False, state_dependent_std=True)
SMALL = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 128}
ADAPTIVE = {"learning_rate": 1e-3, "anneal_lr": False, "desired_kl": 1e-3, "max_learning_rate": 5e-3}


def robots_ppo(**changes):
    return rollmill.ppo("Pendulum-v1", **SMALL | ADAPTIVE | {"network": TINY, "bound_coef": 1e-2} | changes)


@pytest.fixture(scope="module")
def learner():
    return robots_ppo().start_learner(jax.random.key(0))


@pytest.mark.parametrize(
    ("kl", "rate_scale", "expected"),
    [
        (2.1e-3, 1.0, 1 / 1.5),
        (1.9e-3, 2.0, 2.0),
        (6e-4, 2.0, 2.0),
        (4e-4, 2.0, 3.0),
        (1e-9, 2.0, 2.0),  # of the first minibatch, in which the policy is the rollout's
        (1e-4, 4.0, 5.0),  # at the highest rate
        (1.0, 0.011, 0.01),  # and at the lowest
    ],
)
def test_the_rate_follows_the_divergence(learner, kl, rate_scale, expected):
    found = adapt_rate(replace(learner, rate_scale=jnp.float32(rate_scale)), {"losses/approx_kl": jnp.float32(kl)})
    assert float(found.rate_scale) == pytest.approx(expected, rel=1e-6)


def test_updates_take_the_adapted_rate_and_leave_the_deviation():
    graph = robots_ppo()
    state = first_state(graph, jax.random.key(0), jnp.arange(4, dtype=jnp.int32))
    step = jax.jit(partial(iterate, graph))
    rates = []
    for _ in range(4):
        state, metrics = step(state)
        rates.append(float(metrics["learning_rate"]))
        assert np.isfinite(metrics["losses/bounds"])
    assert rates[0] == pytest.approx(1e-3) and len(set(rates)) > 1
    assert float(state.learner.rate_scale) != 1.0
    std = state.learner.weights.network.actor.log_std.weight
    np.testing.assert_array_equal(std, np.full(1, -0.5, np.float32))
    bias = lambda learner: np.asarray(learner.weights.network.critic.bias)
    ones = jax.tree.map(jnp.ones_like, state.learner.weights.network)
    update = jax.jit(graph.update)
    # The last one is above the highest rate, 5 times the first one, as after the bounds were changed.
    moved = [
        bias(update(replace(state.learner, rate_scale=jnp.float32(rate_scale)), ones)) - bias(state.learner)
        for rate_scale in (1, 2, 50)
    ]
    np.testing.assert_allclose(moved[1:], [2 * moved[0], 5 * moved[0]], rtol=1e-4)


@pytest.mark.slow
def test_a_run_that_was_stopped_is_one_that_was_not(tmp_path):
    run_dir, sizes = (
        tmp_path / "run",
        {"checkpoint_iterations": 1, "keep_last": 9, "quiet": True, "tensorboard": False},
    )
    whole = rollmill.train(robots_ppo(), run_dir=run_dir, **sizes)
    for checkpoint in (run_dir / "checkpoints").iterdir():
        if int(checkpoint.name) > 2:
            shutil.rmtree(checkpoint)
    (run_dir / "summary.json").unlink()
    resumed = rollmill.resume(run_dir, quiet=True)
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    rates = [line["learning_rate"] for line in read_metrics(run_dir / "metrics.jsonl")]
    assert len(set(rates)) > 1


def test_an_update_without_metrics_is_refused():
    with raises("sends-gradients-to-update-and"):
        choose_plan(robots_ppo(), PlacementOptions(distribution="central"))


def test_means_beyond_bounds_by_hand():
    low, high = np.float32([-1.1, -2.2]), np.float32([1.1, 2.2])
    assert float(bound_loss(jnp.float32([1.6, -3.2]), low, high)) == pytest.approx(0.25 + 1.0)
    assert float(bound_loss(jnp.float32([1.0, -2.1]), low, high)) == 0.0


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ("CartPole-v1", {"bound_coef": 0.1}, ("bound-coef-is-for-means",)),
        (
            "Pendulum-v1",
            {"bound_coef": 0.1, "network": rollmill.NetworkConfig(squash_actions=True)},
            ("bound-coef-is-for-means",),
        ),
        ("CartPole-v1", {"desired_kl": 0.01}, ("desired-kl-adapts-learning-rate",)),
        ("CartPole-v1", {"kl_factor": 2.0}, ("without-desired-kl-adapt-nothing", "kl_factor")),
        ("CartPole-v1", ADAPTIVE | {"learning_rate": 0.1}, ("learning-rate-has-to-be", "0.005")),
        ("Pendulum-v1", {"network": FIXED_BY_STATE}, ("state-dependent-std-true-is",)),
    ],
)
def test_what_cannot_be_adapted_or_bounded_is_refused(environment, options, message):
    with raises(*message):
        rollmill.ppo(environment, **SMALL | options)
