"""Hyperparameters that are data: no program contains them, and a learner that holds them learns by them."""

from dataclasses import replace
from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traced_programs import digests_of, programs_of

import rollmill
from rollmill.algorithms.hyperparameters import current_config, numbers_of
from rollmill.algorithms.ppo import PPOConfig
from rollmill.dataflow import Graph, iterate, with_hyperparameters
from rollmill.fusion import lower_gradients
from rollmill.programs.states import hyperparameters_of, start_state

REPLAYED = {"num_envs": 2, "num_steps": 4, "learning_starts": 32, "batch_size": 16, "buffer_size": 400}
SIZES = {
    "ppo": {"num_envs": 4, "num_steps": 8, "num_minibatches": 2},
    "a3c": {"num_envs": 4, "num_steps": 8},
    "impala": {"num_envs": 4, "num_steps": 8},
    "dqn": REPLAYED | {"n_step": 2},
    "sac": REPLAYED | {"target_entropy": -0.7},
    "td3": REPLAYED,
    "alphazero": {"num_envs": 2, "num_steps": 4, "num_minibatches": 2, "num_simulations": 2, "weight_decay": 0.01},
    "mappo": {"num_envs": 2, "num_steps": 4, "num_minibatches": 2, "pool_size": 2},
}
ENVIRONMENTS = {
    **dict.fromkeys(("ppo", "a3c", "impala", "dqn"), "CartPole-v1"),
    **dict.fromkeys(("sac", "td3"), "Pendulum-v1"),
    "alphazero": "TicTacToe-v0",
    "mappo": "TagContinuous-Small-v0",
}


def graph_of(algorithm: str, *, scale: float = 1.0, iterations: int = 8) -> Graph:
    """The graph of an algorithm, all numbers of which are multiplied."""
    sizes = SIZES[algorithm]
    network = {"network": rollmill.NetworkConfig(hidden_sizes=(4,))}
    settings = {**sizes, **network, "total_timesteps": iterations * sizes["num_envs"] * sizes["num_steps"]}
    make = getattr(rollmill, algorithm)
    plain = make(ENVIRONMENTS[algorithm], **settings)
    if scale == 1:
        return plain
    config = plain.settings["config"]
    numbers = {name: scale * value for name, value in plain.hyperparameters.items() if name in config}
    return make(ENVIRONMENTS[algorithm], **{**settings, **numbers})


plain_programs = cache(lambda algorithm: programs_of(graph_of(algorithm)))


@pytest.mark.parametrize("algorithm", SIZES)
def test_programs_contain_no_number(algorithm):
    first, other = graph_of(algorithm), graph_of(algorithm, scale=0.9, iterations=11)
    assert first.hyperparameters.keys() == other.hyperparameters.keys()
    assert all(first.hyperparameters[name] != other.hyperparameters[name] for name in first.hyperparameters)
    assert digests_of(plain_programs(algorithm)) == digests_of(programs_of(other))


@pytest.mark.parametrize("algorithm", SIZES)
def test_each_number_is_read(algorithm):
    _, iteration, state = plain_programs(algorithm)
    program = iteration.jaxpr
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    read = {id(atom) for equation in program.eqns for atom in equation.invars}
    unread = {
        name for name, var in zip(names, program.invars, strict=True) if "hyperp" in name and id(var) not in read
    }
    assert unread == set()


@pytest.mark.slow  # that programs are equal and read each number is tested above
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_a_learner_learns_by_the_numbers_that_it_holds(algorithm):
    plain, other = graph_of(algorithm), graph_of(algorithm, scale=0.5)
    own = start_state(other)
    lent = eqx.tree_at(
        lambda state: state.learner,
        start_state(plain),
        with_hyperparameters(own.learner, hyperparameters_of(other)),
    )
    step, expected = jax.jit(partial(iterate, plain)), jax.jit(partial(iterate, other))
    for _ in range(5):
        lent, own = step(lent)[0], expected(own)[0]
    for mine, theirs in zip(jax.tree.leaves(lent.learner), jax.tree.leaves(own.learner), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    unlike = start_state(plain)
    for _ in range(5):
        unlike = step(unlike)[0]
    pairs = zip(
        jax.tree.leaves(plain.weights(unlike.learner)), jax.tree.leaves(plain.weights(own.learner)), strict=True
    )
    assert not all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def test_numbers_are_the_finite_floats():
    config = PPOConfig(max_grad_norm=float("inf"), target_kl=0.02, normalize_rewards=True)
    numbers = numbers_of(config, planned_updates=7)
    expected = {"learning_rate", "gae_lambda", "clip_coef", "ent_coef", "vf_coef", "planned_updates"}
    assert numbers.keys() == expected
    assert numbers["planned_updates"] == 7 and numbers["clip_coef"] == 0.2


def test_a_current_configuration_has_the_held_numbers():
    config = PPOConfig()
    now = current_config(config, {"gamma": jnp.float32(0.5), "planned_updates": jnp.float32(3)})
    assert now.gamma == 0.5 and config.gamma == 0.99
    assert replace(config, gamma=0.5) == replace(now, gamma=0.5)


def test_kernels_read_evaluated_schedules():
    graph = rollmill.ppo("CartPole-v1", num_envs=2, num_steps=4, clip_coef="cosine:0.2:0.1")
    assert "cos" not in str(lower_gradients(graph).prologue.jaxpr)
