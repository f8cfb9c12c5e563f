"""Counts that grow as long as a training lasts: beyond 2^31 and 2^32, or refused."""

import importlib.util
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.algorithms.off_policy import StepCounts, count_update, initial_progress
from rollmill.core.errors import UsageError
from rollmill.dataflow import Trajectory, empty_experience, identity
from rollmill.networks import NetworkConfig
from wordings import raises

ENVS = 1024
SIZES = {
    "num_envs": ENVS,
    "num_steps": 1,
    "buffer_size": 64 * ENVS,
    "batch_size": ENVS,
    "learning_starts": 20_000,
    "network": NetworkConfig(hidden_sizes=(4,)),
}
UNPLANNED = {"anneal_lr": False, "exploration_fraction": 0.5}
"""More updates than an annealed learning rate counts."""


def after(graph, steps):
    """The learner when an iteration has brought it to this many environment steps."""
    wraps, rest = divmod(steps - ENVS, 2**32)
    progress = StepCounts(jnp.uint32(rest), jnp.uint32(0), jnp.uint32(wraps))
    learner = eqx.tree_at(lambda learner: learner.progress, graph.start_learner(jax.random.key(0)), progress)
    return graph.prepare(learner, Trajectory((), (), (), ()), reduce=identity, replicas=1)[0]


def test_exploration_falls_beyond_the_steps_that_32_bits_count():
    """From 1 to 0.05 over 5e9 steps: 2^31 of them are 0.4294967 of the way, 2^32 are 0.8589935."""
    graph = rollmill.dqn("CartPole-v1", total_timesteps=10_000_000_000, **SIZES, **UNPLANNED)
    epsilon = [float(graph.weights(after(graph, steps)).epsilon) for steps in (ENVS, 2**31, 2**32, 2**32 + 2**31)]
    np.testing.assert_allclose(epsilon, [1, 1 - 0.95 * 0.4294967, 1 - 0.95 * 0.8589935, 0.05], rtol=1e-6)


@pytest.mark.parametrize("algorithm", [rollmill.sac, rollmill.td3])
def test_actions_do_not_become_random_again(algorithm):
    graph = algorithm("Pendulum-v1", total_timesteps=10_000_000_000, **SIZES)
    is_random = [
        bool(graph.weights(after(graph, steps)).is_random) for steps in (19 * ENVS, 20 * ENVS, 2**31, 2**32, 2**33)
    ]
    assert is_random == [True, False, False, False, False]


@pytest.mark.parametrize("limit", [1, 20_000, 2**31, 2**32, 2**32 + 7, 2**40])
def test_steps_are_compared_as_two_words(limit):
    for steps in (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 6, 2**32 + 7, 2**41):
        wraps, rest = divmod(steps, 2**32)
        progress = StepCounts(jnp.uint32(rest), jnp.uint32(0), jnp.uint32(wraps))
        assert bool(progress.is_before(limit)) == (steps < limit)


@pytest.mark.parametrize("interval", [2, 500, 65_537])
def test_intervals_of_updates_go_on_where_the_count_starts_again(interval):
    """The largest multiple below 2^32 is due, and so is the one an interval later."""
    begin = 2**32 // interval * interval - 2
    progress = eqx.tree_at(lambda counts: counts.updates, initial_progress(), jnp.asarray(begin, jnp.uint32))
    due = []
    for n in range(1, interval + 4 if interval < 1000 else 8):
        progress = count_update(progress, interval=interval)
        due += [n] if int(progress.updates) % interval == 0 else []
    assert due == ([2, *range(2 + interval, interval + 4, interval)] if interval < 1000 else [2])


def test_learning_goes_on_where_an_environment_has_made_many_steps():
    graph = rollmill.dqn("CartPole-v1", total_timesteps=10_000_000_000, **SIZES, **UNPLANNED)
    rings = empty_experience(graph, jnp.arange(ENVS))
    filled = [
        bool(graph.replay.is_ready(eqx.tree_at(lambda ring: ring.steps, rings, rings.steps + each), graph.loops))
        for each in (19, 20, 2**21, 2**22, 2**31 - 1)
    ]
    assert filled == [False, True, True, True, True]  # 20,000 / 1,024 = 19.5 steps of each


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"total_timesteps": 2**40, "num_envs": 8, "batch_size": 8},
            f"{2**37} iterations.*more than the limit of {2**31 - 1}.*hint: use total_timesteps={(2**31 - 1) * 8}",
        ),
        ({"target_interval": 2**31}, f"target_interval={2**31} exceeds the limit of"),
        (
            {"num_envs": 1, "buffer_size": 2**30, "batch_size": 8, "total_timesteps": 2**30},
            f"{2**30} steps in each of num_envs=1 .*more than the limit of {2**29}",
        ),
        (
            {"num_envs": 2, "num_steps": 4, "learning_starts": 2**31, "batch_size": 8, "total_timesteps": 2**32},
            f"learning_starts={2**31} means {2**30} steps in each.*hint: use learning_starts={2**30} or less",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(sizes, message):
    with pytest.raises(UsageError, match=message):
        rollmill.dqn("CartPole-v1", **SIZES | {"total_timesteps": 2**31} | sizes)


def test_iterations_of_any_algorithm_are_counted():
    with raises("total-timesteps-makes-iterations-num", 2**40, 2**37):
        rollmill.ppo("CartPole-v1", num_envs=8, num_steps=1, total_timesteps=2**40, num_minibatches=1)


@pytest.mark.slow
def test_a_training_goes_on_beyond_all_limits():
    """The small form of the benchmark: counts begin just below 2^31 and below the limit of the rings."""
    file = Path(__file__).parents[2] / "benchmarks/long_counts.py"
    spec = importlib.util.spec_from_file_location("long_counts", file)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(file.parent))
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "long_counts", module)
        spec.loader.exec_module(module)
        checks = module.run(module.SMALL)["checks"]
    assert len(checks) == 10 and all(checks.values()), checks
