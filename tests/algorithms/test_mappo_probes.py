"""MAPPO and IPPO learn environments of several agents to their known values and actions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from agents_envs import crafts, numbered, opposed, unseen_clock
from rollmill.algorithms.agent_views import view_agents
from rollmill.envs import denormalise
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead


def learn(env, *, algorithm=rollmill.mappo, iterations=80, **overrides):
    """The graph and the learner after a short training, and the last metrics."""
    small = {
        "num_envs": 16,
        "num_steps": 8,
        "total_timesteps": iterations * 16 * 8,
        "num_minibatches": 2,
        "learning_rate": 1e-2,
        "gamma": 0.9,
        "ent_coef": 0.0,
        "network": rollmill.NetworkConfig(hidden_sizes=(16,)),
    }
    graph = algorithm(env, **(small | overrides))
    program = lower(graph)
    state = program.start()
    for window in dispatch_ahead(program, state, first=0, until=graph.loops.iterations):
        state = window.after
    return graph, state.learner, window.metrics[-1]


def returns(metrics):
    return {name.removeprefix("returns/"): float(x) for name, x in metrics.items() if name.startswith("returns/")}


@pytest.mark.slow
def test_kinds_with_their_own_spaces_learn_their_own_actions():
    graph, learner, metrics = learn(crafts())
    found = returns(metrics)
    assert list(found) == ["clerk", "packer", "painter", "reader"]
    assert found["clerk"] == 1.0  # by the mask alone
    assert found["reader"] > 0.95 and found["packer"] > 0.9 and found["painter"] > 0.8  # which explore still
    shown = {
        "reader": jnp.asarray([[-1.0], [1.0]]),
        "painter": {"hue": jnp.asarray([[0.5]])},
        "packer": jnp.asarray([[1.0, 2.0], [0.0, 1.0]]),
        "clerk": jnp.zeros((3, 1)),
    }
    decided = eqx.filter_jit(graph.greedy)(learner.weights, jax.random.key(0), (), shown, ())
    np.testing.assert_array_equal(decided.action["reader"], [0, 1])
    np.testing.assert_array_equal(decided.action["packer"], [[1, 2], [0, 1]])
    np.testing.assert_allclose(decided.action["painter"], [[0.5]], atol=0.2)


@pytest.mark.slow
def test_kinds_that_share_parameters_act_alike_unless_they_are_numbered():
    how = {"iterations": 60, "sharing": {"left": "both", "right": "both"}, "algorithm": rollmill.ippo}
    alike, told = (returns(learn(opposed(), agent_ids=ids, **how)[2]) for ids in (False, True))
    assert abs(sum(alike.values())) < 0.5  # what one gains the other loses, whatever the policy
    assert min(told.values()) > 0.9


@pytest.mark.slow
def test_agents_of_one_kind_may_have_parameters_of_their_own():
    how = {"iterations": 60, "sharing": {"agent": "independent"}, "algorithm": rollmill.ippo}
    assert returns(learn(numbered(), **how)[2])["agent"] > 0.9  # a third, where they act alike


def values(graph, learner, env, *, step):
    """Values of the two agents of `unseen_clock` after so many steps, in the unit of rewards."""
    viewed = view_agents(env, critic="central" if graph.settings["algorithm"] == "mappo" else "own")
    key = jax.random.key(0)
    view, state = viewed.reset(key, ())
    for _ in range(step):
        view, state, *_ = viewed.step(key, state, {"agent": jnp.zeros(2, jnp.int32)}, ())
    learn_from = graph.prepare.args[0]
    said = learn_from.values(learner.weights.networks, learn_from.normalise(learner.weights, view), ())["agent"]
    return np.asarray(said if learner.targets is None else denormalise(learner.targets["agent"], said))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.slow
def test_the_centralised_critic_sees_what_agents_do_not_to_the_last(normalize):
    """A final state that lost its central features would be worth what the first state is."""
    env = unseen_clock()
    how = {
        "iterations": 150,
        "gae_lambda": 0.5,
        "normalize_values": normalize,
        "normalize_observations": normalize,
    }
    graph, learner, metrics = learn(env, **how)
    np.testing.assert_allclose(values(graph, learner, env, step=0), -10 + 0.9 * 10, atol=0.5)
    np.testing.assert_allclose(values(graph, learner, env, step=2), 10, atol=0.5)
    assert metrics["returns/agent"] == -10 + 3
