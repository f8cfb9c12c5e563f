"""DQN, SAC and TD3: values that are known, moves of target networks, and what is refused."""

import os
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from one_time import run_once
from rollmill.algorithms.dqn import DQNLearner
from rollmill.algorithms.off_policy import StepCounts, scale_weights
from rollmill.dataflow import Batch, Transitions, identity
from rollmill.networks import NetworkConfig
from rollmill.programs import memory_needs
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.programs.evaluation.compiled import evaluate
from rollmill.programs.states import begin_learner
from wordings import raises

SMALL = {
    "num_envs": 8,
    "buffer_size": 8 * 500,
    "batch_size": 64,
    "learning_starts": 256,
    "learning_rate": 3e-3,
    "network": NetworkConfig(hidden_sizes=(32,), activation="relu"),
}
ALGORITHMS = {"dqn": rollmill.dqn, "sac": rollmill.sac, "td3": rollmill.td3}


def trained(graph):
    program = lower(graph)
    rows = []
    for window in dispatch_ahead(program, program.start(), first=0, until=graph.loops.iterations, span=50):
        rows += window.metrics
    return window.after, rows


def dqn_values(graph, state, observation):
    """The network's values, by the policy's own arithmetic: those of a greedy step cannot be seen otherwise."""
    network = graph.gradients.loss.args[0].args[0].values
    return network(state.learner.network, observation)


@pytest.mark.parametrize(
    ("environment", "gamma", "expected"),
    [
        ("Probe-ConstantReward-v0", 0.9, {0.0: 1.0}),
        ("Probe-ObservationReward-v0", 0.9, {1.0: 1.0, -1.0: -1.0}),
        ("Probe-DiscountedReward-v0", 0.5, {0.0: 0.5, 1.0: 1.0}),
    ],
)
@pytest.mark.slow
def test_values_of_dqn_are_returns(environment, gamma, expected):
    env = rollmill.make(environment)
    graph = rollmill.dqn(
        env, **SMALL, total_timesteps=8 * 600, gamma=gamma, target_interval=20, end_epsilon=0.5, start_epsilon=0.5
    )
    state, rows = trained(graph)
    for observed, value in expected.items():
        observation = jnp.full(env.observation_space.shape, observed, env.observation_space.dtype)
        np.testing.assert_allclose(dqn_values(graph, state, observation).max(), value, atol=0.1)
    assert rows[-1]["finite/gradients"] == 1 and 0 < rows[0]["epochs"] < 50


OPTIONS = [
    {"prioritised": True},
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"duelling": True, "n_step": 3}, marks=pytest.mark.slow),
    pytest.param({"huber": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_dqn_learns_which_action_is_rewarded(options):
    env = rollmill.make("Probe-ActionObservation-v0")
    graph = rollmill.dqn(env, **SMALL, **options, total_timesteps=8 * 600, target_interval=20)
    state, _ = trained(graph)
    returns = evaluate(graph, graph.weights(state.learner), episodes=64, seed=0).returns
    assert returns.min() == returns.max() == 1


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sac", pytest.param("td3", marks=pytest.mark.slow)])
def test_continuous_actions_find_their_best(algorithm):
    graph = ALGORITHMS[algorithm](
        rollmill.make("Probe-ContinuousAction-v0"), **SMALL, total_timesteps=8 * 800, gradient_steps=2
    )
    state, _ = trained(graph)
    returns = evaluate(graph, graph.weights(state.learner), episodes=64, seed=0).returns
    assert returns.mean() > -0.05


@pytest.mark.slow
def test_sac_learns_which_action_is_rewarded():
    graph = rollmill.sac(
        rollmill.make("Probe-ActionObservation-v0"), **SMALL, total_timesteps=8 * 800, gradient_steps=2
    )
    state, _ = trained(graph)
    assert evaluate(graph, graph.weights(state.learner), episodes=64, seed=0).returns.min() == 1


# --- sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "sizes", "updates"),
    [
        *((name, {"num_envs": 1}, 1) for name in ALGORITHMS),
        *((name, {}, 8) for name in ("sac", "td3")),
        *((name, {"num_envs": 4, "num_steps": 3}, 12) for name in ("sac", "td3")),
        ("dqn", {}, 2),  # 8 steps, an update for every four
        ("dqn", {"num_envs": 4, "num_steps": 6}, 6),
        ("dqn", {"num_envs": 2, "num_steps": 1}, 1),
        *((name, {"num_envs": 1, "gradient_steps": 8}, 8) for name in ALGORITHMS),
        *((name, {"num_envs": 4, "gradient_steps": 1}, 1) for name in ALGORITHMS),
    ],
)
def test_updates_follow_from_the_steps_collected_unless_they_are_set(algorithm, sizes, updates):
    environment = "CartPole-v1" if algorithm == "dqn" else "Pendulum-v1"
    graph = ALGORITHMS[algorithm](environment, **SMALL | sizes)
    assert graph.loops.num_minibatches * graph.loops.epochs == updates


@pytest.mark.slow
def test_an_iteration_makes_the_updates_that_follow_from_its_steps():
    """Six steps an iteration, of which the first two fill the memory: 4 iterations of 6 updates."""
    sizes = {"num_envs": 2, "num_steps": 3, "learning_starts": 16, "batch_size": 8, "total_timesteps": 36}
    state, _ = trained(rollmill.sac("Pendulum-v1", **SMALL | sizes))
    assert int(state.learner.progress.updates) == 24


# --- parts --------------------------------------------------------------------------------------------


def test_the_target_network_moves_when_it_is_due():
    graph = rollmill.dqn("CartPole-v1", **SMALL, target_interval=3, tau=0.25)
    learner, update = run_once(graph.start_learner, jax.random.key(0)), jax.jit(graph.update)
    gradients = jax.tree.map(np.ones_like, learner.network)
    for n in range(1, 7):
        before, learner = learner, update(learner, gradients)
        slow, fast, old = (jax.tree.leaves(tree)[0] for tree in (learner.target, learner.network, before.target))
        expected = old + 0.25 * (fast - old) if n % 3 == 0 else old
        np.testing.assert_allclose(slow, expected, rtol=1e-6)
    assert isinstance(learner, DQNLearner) and learner.progress.updates == 6


def test_the_actor_of_td3_moves_at_each_second_update():
    graph = rollmill.td3("Pendulum-v1", **SMALL)
    learner, update = begin_learner(graph, jax.random.key(0)), jax.jit(graph.update)
    gradients = jax.tree.map(np.ones_like, learner.networks)
    moved = []
    for _ in range(4):
        before, learner = learner, update(learner, gradients)
        moved.append(not np.array_equal(*(jax.tree.leaves(x.networks.actor)[0] for x in (before, learner))))
        assert not np.array_equal(*(jax.tree.leaves(x.networks.critics)[0] for x in (before, learner)))
    assert moved == [False, True, False, True]


@pytest.mark.slow
def test_the_temperature_falls_while_the_entropy_is_above_its_target():
    transitions = Transitions(
        observation=jnp.zeros((4, 3)),
        action_mask=(),
        action=jnp.zeros((4, 1)),
        reward=jnp.zeros(4),
        discount=jnp.zeros(4),
        next_observation=jnp.zeros((4, 3)),
        next_action_mask=(),
        weight=jnp.ones(4),
        key=jax.random.split(jax.random.key(0), 4),
    )
    for target, falls in ((-100.0, True), (100.0, False)):
        graph = rollmill.sac("Pendulum-v1", **SMALL, target_entropy=target)
        learner = graph.start_learner(jax.random.key(0))
        gradients, _ = graph.gradients(learner, Batch(transitions))
        after = graph.update(learner, gradients)
        assert (after.networks.log_temperature < learner.networks.log_temperature) == falls


def still(space):
    """An environment of these actions, in which nothing happens."""
    reset = lambda key, params: (jnp.zeros(3), jnp.int32(0))
    step = lambda key, t, action, params: rollmill.Timestep(
        jnp.zeros(3), t + 1, jnp.float32(0), t >= 7, jnp.asarray(False), {}
    )
    return rollmill.Environment("Still-v0", reset, step, spaces.Box(-1, 1, (3,), np.float32), space)


def sac_losses(space, transitions, **options):
    """The metrics of a minibatch, and the slope of the loss of the temperature, which begins at 1."""
    graph = rollmill.sac(still(space), **SMALL, **options)
    learner = begin_learner(graph, jax.random.key(0))
    gradients, metrics = jax.jit(graph.gradients)(learner, Batch(transitions))
    return {name: float(value) for name, value in metrics.items()}, float(gradients.log_temperature)


def four_transitions(action, mask=()):
    return Transitions(
        observation=np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3),
        action_mask=mask,
        action=action,
        reward=np.zeros(4, np.float32),
        discount=np.zeros(4, np.float32),
        next_observation=np.zeros((4, 3), np.float32),
        next_action_mask=mask,
        weight=np.ones(4, np.float32),
        key=jax.random.split(jax.random.key(0), 4),
    )


ZEROS = np.zeros((4, 2), np.float32)


@pytest.mark.parametrize("half", [0.05, pytest.param(1000.0, marks=pytest.mark.slow)])
def test_entropies_and_their_target_do_not_depend_on_the_unit_of_actions(half):
    """Of two actions: the target is -2, and entropies are those of actions between -1 and 1, at most 2 log 2."""
    box = spaces.Box(-half, half, (2,), np.float32)
    metrics, slope = sac_losses(box, four_transitions(ZEROS))
    unit, unit_slope = sac_losses(spaces.Box(-1, 1, (2,), np.float32), four_transitions(ZEROS))
    np.testing.assert_allclose(metrics["losses/entropy"], unit["losses/entropy"], rtol=1e-4)
    np.testing.assert_allclose([slope, unit_slope], unit["losses/entropy"] + 2, rtol=1e-4)
    assert -5 < unit["losses/entropy"] < 5


def test_bounds_of_different_widths_have_one_target():
    """log(0.5 * 0.1) + log(0.5 * 2000) = 3.912 is what the entropy in the actions' own units would be more."""
    box = spaces.Box(np.float32([-0.05, -1000]), np.float32([0.05, 1000]), dtype=np.float32)
    metrics, slope = sac_losses(box, four_transitions(ZEROS))
    unit, _ = sac_losses(spaces.Box(-1, 1, (2,), np.float32), four_transitions(ZEROS))
    np.testing.assert_allclose(metrics["losses/entropy"], unit["losses/entropy"], rtol=1e-4)
    np.testing.assert_allclose(slope, unit["losses/entropy"] + 2, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "legal", "target"),
    [
        ({}, None, 0.89 * np.log(9)),
        pytest.param({}, [9, 9, 9, 9], 0.89 * np.log(9), marks=pytest.mark.slow),
        pytest.param({}, [2, 2, 2, 2], 0.89 * np.log(2), marks=pytest.mark.slow),
        ({}, [1, 2, 4, 9], 0.89 * (np.log(1) + np.log(2) + np.log(4) + np.log(9)) / 4),
        ({"target_entropy": 0.3}, [2, 2, 2, 2], 0.3),
    ],
)
def test_the_target_entropy_of_discrete_actions_is_that_of_the_legal_ones(options, legal, target):
    mask = () if legal is None else np.arange(9) < np.array(legal)[:, None]
    metrics, slope = sac_losses(spaces.Discrete(9), four_transitions(np.zeros(4, np.int32), mask), **options)
    np.testing.assert_allclose(slope, metrics["losses/entropy"] - target, atol=1e-5)
    assert metrics["losses/entropy"] <= np.mean(np.log(legal or 9)) + 1e-5


def test_exploration_falls_with_the_steps_of_all_environments():
    graph = rollmill.dqn("CartPole-v1", **SMALL, total_timesteps=10_000, exploration_fraction=0.5, end_epsilon=0.1)
    learner = begin_learner(graph, jax.random.key(0))
    epsilon = []
    for steps in (0, 2_500, 5_000, 9_000):
        now = replace(learner, progress=StepCounts(jnp.int32(steps), jnp.int32(0)))
        epsilon.append(float(graph.weights(now).epsilon))
    np.testing.assert_allclose(epsilon, [1.0, 0.55, 0.1, 0.1], rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["dqn", "sac", "td3"])
@pytest.mark.slow
def test_the_learning_rate_is_logged(algorithm):
    """That of an iteration's first update; the first iteration of the ten makes none, and so changes nothing."""
    environment = "CartPole-v1" if algorithm == "dqn" else "Pendulum-v1"
    sizes = {"num_steps": 16, "learning_starts": 256, "gradient_steps": 2, "total_timesteps": 10 * 128}
    graph = ALGORITHMS[algorithm](environment, **{**SMALL, **sizes, "learning_rate": 0.5, "anneal_lr": True})
    (row,) = trained(graph)[1]  # sums over the iterations
    expected = [0.5, *(0.5 * (1 - updates / 18) for updates in range(0, 18, 2))]
    np.testing.assert_allclose(row["learning_rate"], sum(expected), rtol=1e-5)


def test_weights_of_a_minibatch_have_the_mean_one():
    transitions = Transitions(*([jnp.zeros(4)] * 9))._replace(weight=jnp.arange(4.0))
    scaled = scale_weights(Batch(transitions), identity).samples.weight
    np.testing.assert_allclose(scaled, np.arange(4) / 1.5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(rollmill.dqn, "Pendulum-v1"), ("needs-discrete-action-space-this", "dqn", "sac")),
        (partial(rollmill.td3, "CartPole-v1"), ("needs-box-continuous-actions-this", "td3", "dqn")),
        (partial(rollmill.sac, "Probe-MultiDiscrete-v0"), ("sac-needs-discrete-action-space",)),
        (partial(rollmill.dqn, "TagGridWorld-Small-v0"), ("has-several-agents-train-with",)),
        (
            lambda: rollmill.sac(still(spaces.Box(np.zeros(2, np.float32), np.float32([0, 1])))),
            ("sac-needs-actions-between-two",),
        ),
        (partial(rollmill.sac, "CartPole-v1", buffer_size=8), ("buffer-size-keeps-steps-each", "1", "32")),
        (partial(rollmill.sac, "CartPole-v1", buffer_size=2**31), ("buffer-size-is-more-than",)),
        (partial(rollmill.sac, "CartPole-v1", batch_size=6000), ("batch-size-is-larger-than-learning", "5000")),
        (partial(rollmill.dqn, "CartPole-v1", learning_starts=10**7), ("learning-starts-lies-after-end",)),
        (partial(rollmill.dqn, "CartPole-v1", network="gru"), ("torso-needs-whole-sequences-algorithms",)),
        (
            partial(rollmill.dqn, "CartPole-v1", num_shards=3),
            ("num-shards-does-not-divide-leave", "3", "num_envs", "8"),
        ),
        (partial(rollmill.dqn, "CartPole-v1", tau=2.0), ("out-of-bounds", "tau", "2.0")),
    ],
)
def test_what_cannot_be_trained_is_refused(build, message):
    with raises(*message):
        build()


def test_a_replay_memory_too_large_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_needs, "memory_bytes", lambda: 25_276_510_208)
    graph = rollmill.sac("Pendulum-v1", buffer_size=2 * 10**9)
    with raises("replay-memory-steps-takes-and-has", "GiB", "361093002"):
        rollmill.train(graph, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("environment", "is_left"), [("gymnasium:Pendulum-v1", True), ("Pendulum-v1", False)])
def test_the_memory_of_devices_is_left_to_the_workers_of_host_environments(environment, is_left, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    rollmill.sac(environment, num_envs=1)
    assert os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None) == ("false" if is_left else None)
