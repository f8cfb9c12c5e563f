"""Learning rates end where their schedules say, whatever is skipped on the way."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rollmill
from one_time import run_once
from rollmill.algorithms.optimisers import Annealing, at_iteration_end, check_schedule, rate_now
from rollmill.dataflow import init_state, iterate
from rollmill.networks import NetworkConfig
from wordings import raises

TINY = NetworkConfig(hidden_sizes=(4,))
REPLAY = {
    **{"num_envs": 8, "batch_size": 8, "buffer_size": 800, "learning_starts": 64, "network": TINY},
    **{"total_timesteps": 13 * 8, "num_shards": 1, "gradient_steps": 1},
}


def rates(graph):
    """The learning rate of each iteration, and the state at the end."""
    begin = jax.jit(lambda key: init_state(graph, key, jnp.arange(graph.loops.num_envs)))
    state, seen = begin(jax.random.key(0)), []
    once = jax.jit(lambda state: iterate(graph, state))
    for _ in range(graph.loops.iterations):
        state, metrics = once(state)
        seen.append(float(metrics["learning_rate"]))
    return seen, state


def counts(tree):
    is_count = lambda node: isinstance(node, Annealing)
    return [node for node in jax.tree.leaves(tree, is_leaf=is_count) if is_count(node)]


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        pytest.param(1.0, [1.0, 0.75, 0.5, 0.25], marks=pytest.mark.slow),
        ("linear:1:0.2", [1.0, 0.8, 0.6, 0.4]),
    ],
)
def test_epochs_that_target_kl_skips_count_as_made(rate, expected):
    """After the first of three epochs the divergence exceeds 1e-12 in each iteration."""
    graph = rollmill.ppo(
        "CartPole-v1",
        **{"num_envs": 8, "num_steps": 4, "total_timesteps": 4 * 32, "update_epochs": 3, "num_minibatches": 2},
        **{"learning_rate": rate, "target_kl": 1e-12, "network": TINY},
    )
    seen, state = rates(graph)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
    assert [int(count.whole) for count in counts(state.learner)] == [24]


def test_updates_move_to_the_end_of_their_iteration():
    zero = jnp.float32(0)
    each = jax.vmap(lambda whole: Annealing(whole, zero))(jnp.array([0, 1, 16]))
    moved = at_iteration_end({"one": Annealing(jnp.int32(17), zero), "each": each}, 16)
    assert int(moved["one"].whole) == 32 and moved["each"].whole.tolist() == [0, 16, 16]


@pytest.mark.parametrize("algorithm", ["mappo", pytest.param("ippo", marks=pytest.mark.slow)])
def test_agents_skip_epochs_too(algorithm):
    graph = getattr(rollmill, algorithm)(
        "TagGridWorld-Small-v0",
        **{"num_envs": 8, "num_steps": 4, "total_timesteps": 64, "target_kl": 0.1, "network": TINY},
        **{"update_epochs": 3, "num_minibatches": 2, "anneal_lr": True},
    )
    learner = run_once(graph.start_learner, jax.random.key(0))
    begun = jax.tree.map(
        lambda node: Annealing(node.whole + 2, node.part) if isinstance(node, Annealing) else node,
        learner,
        is_leaf=lambda node: isinstance(node, Annealing),
    )
    assert counts(begun) and all((count.whole == 6).all() for count in counts(graph.end_iteration(begun)))


def test_a_constant_rate_needs_no_end_of_an_iteration():
    graph = rollmill.ppo("CartPole-v1", target_kl=0.1, anneal_lr=False)
    assert graph.end_iteration is None and graph.keep_learning is not None


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("dqn", {"anneal_lr": True}),
        ("sac", {"anneal_lr": True, "gradient_steps": 1}),
        ("td3", {"anneal_lr": True, "gradient_steps": 3, "policy_delay": 2}),
        ("dqn", {"learning_rate": "linear:1:0"}),
    ],
)
def test_iterations_that_learn_nothing_are_no_part_of_a_schedule(algorithm, options):
    """Learning begins in iteration 8 of 13, so that six iterations learn."""
    environment = "CartPole-v1" if algorithm == "dqn" else "Pendulum-v1"
    graph = getattr(rollmill, algorithm)(environment, **REPLAY | {"learning_rate": 1.0} | options)
    learner = graph.start_learner(jax.random.key(0))
    steps = options.get("gradient_steps", 1)
    rate_after = lambda updates: float(graph.report(_advanced(learner, updates), None)["learning_rate"])
    actor_every = options.get("policy_delay", 1)
    for iterations, expected in ((0, 1.0), (3, 0.5), (6, 0.0)):
        made = iterations * steps // actor_every
        np.testing.assert_allclose(rate_after(made), expected, atol=0.06 if actor_every > 1 else 1e-6)
    assert rate_after(6 * steps // actor_every) == 0


def _advanced(learner, updates):
    is_count = lambda node: isinstance(node, Annealing)
    move = lambda node: Annealing(node.whole + updates, node.part) if is_count(node) else node
    return jax.tree.map(move, learner, is_leaf=is_count)


def test_the_rate_of_a_replay_training_ends_at_zero():
    seen, state = rates(rollmill.dqn("CartPole-v1", **REPLAY, learning_rate=1.0, anneal_lr=True))
    np.testing.assert_allclose(seen, [1] * 8 + [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6], rtol=1e-6)
    assert float(rate_now(lambda updates: 1 - updates / 6, state.learner.optimiser)) == 0
    assert eqx.tree_equal(counts(state.learner)[0].whole, jnp.int32(6))


UPDATES = 5120


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda progress: 3e-4 * progress, ("learning-rate-is-function-number", "0")),
        (lambda progress: 1e-5 + 3e-4 * progress, ("learning-rate-is-function-number", "1e-05")),
        (lambda progress: 1e-5 + progress**2, ("learning-rate-is-function-number", "1e-05")),
        (lambda updates: 1e-3 - updates, ("learning-rate-is-function-gives",)),
        (lambda updates: 1e-3 / (updates - UPDATES), ("learning-rate-is-function-gives",)),
        (optax.linear_schedule(0.0, 1e-3, UPDATES), ("learning-rate-is-function-number", "0", "0.001")),
        (lambda updates: "fast", ("learning-rate-is-function-does-not",)),
    ],
)
def test_functions_of_the_remaining_progress_are_refused(schedule, message):
    with raises(*message):
        check_schedule(schedule, UPDATES)


@pytest.mark.parametrize(
    "schedule",
    [
        optax.constant_schedule(3e-4),
        optax.cosine_decay_schedule(3e-4, 1000),
        optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, UPDATES),
        optax.linear_schedule(0.0, 1e-3, 500),
        optax.exponential_decay(1e-3, 100, 0.9),
        lambda updates: 2.0,
    ],
)
def test_schedules_of_optax_are_taken(schedule):
    check_schedule(schedule, UPDATES)


def test_a_schedule_of_more_updates_than_are_counted_is_refused():
    with raises("total-timesteps-makes-updates-and"):
        check_schedule(optax.constant_schedule(1e-3), 2**31)
