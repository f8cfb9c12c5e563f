"""Hyperparameters that change with the share of the training: their values, and what stays out of programs."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from traced_programs import digests_of, programs_of

import rollmill
from rollmill.algorithms.hyperparameters import current_hyperparameters, follows_schedules, numbers_of
from rollmill.algorithms.optimisers import Annealing
from rollmill.algorithms.ppo import PPOConfig
from rollmill.core.schedules import NumberSchedule
from rollmill.dataflow import Graph, flow, init_state, iterate, with_hyperparameters
from rollmill.programs.states import hyperparameters_of, start_state
from wordings import raises

REPLAYED = {"num_envs": 2, "num_steps": 4, "learning_starts": 16, "batch_size": 8, "buffer_size": 400}
TINY = rollmill.NetworkConfig(hidden_sizes=(4,))
CASES = {
    "ppo": ("CartPole-v1", {"num_envs": 4, "num_steps": 8}, ("gamma", "gae_lambda", "clip_coef", "ent_coef")),
    "a3c": ("CartPole-v1", {"num_envs": 4, "num_steps": 8}, ("vf_coef", "rms_decay", "max_grad_norm")),
    "impala": ("CartPole-v1", {"num_envs": 4, "num_steps": 8}, ("clip_rho", "vtrace_lambda", "ent_coef")),
    "dqn": ("CartPole-v1", REPLAYED | {"gradient_steps": 1}, ("gamma", "tau", "end_epsilon", "adam_eps")),
    "sac": ("Pendulum-v1", REPLAYED | {"gradient_steps": 1}, ("gamma", "tau", "critic_learning_rate")),
    "td3": ("Pendulum-v1", REPLAYED | {"gradient_steps": 1}, ("exploration_noise", "target_noise", "tau")),
    "alphazero": ("TicTacToe-v0", {"num_envs": 2, "num_steps": 4, "num_simulations": 2}, ("td_lambda", "vf_coef")),
    "mappo": ("TagContinuous-Small-v0", {"num_envs": 2, "num_steps": 4}, ("gamma", "clip_coef", "ent_coef")),
}
"""Environment, sizes and numbers with a schedule of each algorithm."""


def graph_of(algorithm: str, *, iterations: int = 4, **numbers) -> Graph:
    """A graph that makes one update an iteration."""
    environment, sizes, _ = CASES[algorithm]
    steps = sizes["num_envs"] * sizes["num_steps"]
    once = {name: 1 for name in ("update_epochs", "num_minibatches") if algorithm not in ("a3c", *REPLAY)}
    settings = {**sizes, **once, "network": TINY, "total_timesteps": iterations * steps, "anneal_lr": False}
    return getattr(rollmill, algorithm)(environment, **settings, **numbers)


REPLAY = ("dqn", "sac", "td3")


def schedules(algorithm: str, first: float = 0.4, last: float = 0.8) -> dict[str, str]:
    return {name: f"linear:{first}:{last}" for name in CASES[algorithm][2]}


QUICK = ("ppo", "a3c", "dqn", "sac")


@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_programs_contain_no_end_of_a_schedule(algorithm):
    """`test_hyperparameters.py` looks for numbers in the programs of all algorithms."""
    first = graph_of(algorithm, **schedules(algorithm))
    other = graph_of(algorithm, iterations=7, **schedules(algorithm, 0.7, 0.3))
    assert digests_of(programs_of(first)) == digests_of(programs_of(other))


@pytest.mark.slow  # a faster test has several updates in an iteration
@pytest.mark.parametrize("algorithm", ["ppo", "td3", "impala", "mappo"])
def test_an_update_reads_the_value_of_its_share_of_the_training(algorithm):
    """With one update an iteration, each equals one by constants that are set before it."""
    names, waiting = CASES[algorithm][2], 1 if algorithm in REPLAY else 0  # iterations before learning
    graph, constant = graph_of(algorithm, **schedules(algorithm)), graph_of(algorithm, **dict.fromkeys(names, 0.4))
    moved, expected = start_state(graph), start_state(constant)
    step, plain = jax.jit(partial(iterate, graph)), jax.jit(partial(iterate, constant))
    for iteration in range(4):
        value = 0.4 + 0.4 * max(iteration - waiting, 0) / (4 - waiting)
        held = hyperparameters_of(constant) | dict.fromkeys(names, np.asarray(value, np.float32))
        lent = replace(expected, learner=with_hyperparameters(expected.learner, held))
        (moved, metrics), (expected, _) = step(moved), plain(lent)
        for name in names:
            assert metrics[f"schedules/{name}"] == pytest.approx(value, rel=1e-6)
    pairs = zip(*(jax.tree.leaves(own_weights(graph, state)) for state in (moved, expected)), strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-7)


def test_all_updates_of_an_iteration_read_the_value_with_which_it_begins():
    sizes = {"num_envs": 4, "num_steps": 8, "update_epochs": 2, "num_minibatches": 2, "network": TINY}
    make = partial(rollmill.ppo, "CartPole-v1", **sizes, total_timesteps=128, anneal_lr=False)
    ends = {"ent_coef": (0.8, 0), "clip_coef": (0.4, 0.2), "gamma": (0.9, 0.5), "gae_lambda": (0.95, 0.55)}
    graph = make(**{name: f"linear:{first}:{last}" for name, (first, last) in ends.items()})
    constant = make(**{name: first for name, (first, _) in ends.items()})
    moved, expected = start_state(graph), start_state(constant)
    step, plain = jax.jit(partial(iterate, graph)), jax.jit(partial(iterate, constant))
    for iteration in range(3):
        now = {name: first + (last - first) * iteration / 4 for name, (first, last) in ends.items()}
        held = hyperparameters_of(constant) | {name: np.asarray(value, np.float32) for name, value in now.items()}
        lent = replace(expected, learner=with_hyperparameters(expected.learner, held))
        (moved, metrics), (expected, _) = step(moved), plain(lent)
        for name, value in now.items():
            assert metrics[f"schedules/{name}"] == pytest.approx(value, rel=1e-6)
    assert int(moved.learner.progress.whole) == 12
    assert moved.learner.hyperparameters.keys() == graph.hyperparameters.keys()
    for mine, theirs in zip(own_weights(graph, moved), own_weights(constant, expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-7)


def cosines_in_loops(jaxpr, inside: bool = False) -> int:
    """Counts the cosines of loops."""
    count = 0
    for equation in jaxpr.eqns:
        within = inside or equation.primitive.name in ("scan", "while")
        count += inside and equation.primitive.name == "cos"
        count += sum(cosines_in_loops(part, within) for part in jaxprs_in_params(equation.params))
    return count


@pytest.mark.parametrize("algorithm", ["ppo", "dqn", "sac"])
def test_schedules_are_evaluated_outside_of_loops(algorithm):
    names, counts = [name for name in CASES[algorithm][2] if name != "critic_learning_rate"], []
    for numbers in ({}, {name: "cosine:0.4:0.2" for name in names}):
        graph = graph_of(algorithm, **numbers)
        begin = lambda graph=graph: init_state(graph, jax.random.key(0), jnp.arange(graph.loops.num_envs))
        program = jax.make_jaxpr(partial(iterate, graph))(jax.eval_shape(begin))
        counts.append(cosines_in_loops(program.jaxpr))
    assert counts[0] == counts[1]


def own_weights(graph: Graph, state) -> list:
    """The arrays of the policy's weights."""
    return [leaf for leaf in jax.tree.leaves(graph.weights(state.learner)) if leaf.ndim]


def test_a_schedule_is_held_as_its_ends():
    config = PPOConfig(ent_coef="linear:0.02:0", gamma="constant:0.9", clip_coef="cosine:0.3:0.1")
    numbers = numbers_of(config, planned_updates=8)
    assert numbers["ent_coef"] == 0.02 and numbers["ent_coef:linear"] == 0
    assert numbers["clip_coef"] == 0.3 and numbers["clip_coef:cosine"] == 0.1
    assert numbers["gamma"] == 0.9 and "gamma:constant" not in numbers
    assert follows_schedules(numbers) and not follows_schedules(numbers_of(PPOConfig(learning_rate="linear:1:0")))


def test_the_value_now_follows_from_the_updates():
    graph = graph_of("ppo", iterations=8, ent_coef="linear:0.02:0", clip_coef="cosine:0.3:0.1")
    learner = start_state(graph).learner
    now = current_hyperparameters(replace(learner, progress=Annealing(jnp.int32(1), jnp.float32(1))))
    assert float(now["ent_coef"]) == pytest.approx(0.015, rel=1e-6)
    assert float(now["clip_coef"]) == pytest.approx(0.2 + 0.1 * np.cos(np.pi / 4), rel=1e-6)
    assert float(NumberSchedule("constant", 0.5, 0.5).at(0.7)) == 0.5


def test_workers_get_the_count_of_updates_with_the_parameters():
    """Where the update is a group of its own, gradients follow schedules by a count that comes from there."""
    plain, scheduled = (flow(graph_of("ppo", **numbers)) for numbers in ({}, schedules("ppo")))
    assert len(scheduled.parameters) == len(plain.parameters) + 2


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            {"ent_coef": "linear:0.01"},
            ("expected-number", "ent_coef", "'linear:0.01'", "a number or a schedule: constant:VALUE"),
        ),
        (
            {"gamma": "linear:0.9:1.5"},
            ("document-out-of-bounds", "gamma='linear:0.9:1.5'", "1.5", "lie between 0 and 1"),
        ),
        (
            {"clip_coef": "cosine:0:0.2"},
            ("expected-number", "clip_coef", "'cosine:0:0.2': 0.0", "greater than 0 and finite"),
        ),
        (
            {"max_grad_norm": "linear:inf:1"},
            ("must-be-schedule-finite-numbers", "max_grad_norm", "'linear:inf:1'"),
        ),
        (
            {"gamma": "linear:0.9:1", "normalize_rewards": True},
            ("gamma-cannot-be-schedule-with", "'linear:0.9:1'"),
        ),
    ],
)
def test_other_schedules_are_refused_by_name_and_limit(numbers, message):
    with raises(*message):
        graph_of("ppo", **numbers)
