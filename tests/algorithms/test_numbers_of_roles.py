"""Learning rates, discount factors, entropy bonuses and frozen weights of single roles of agents, by value."""

from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from agents_envs import crowd
from one_time import run_once
from rollmill.algorithms.hyperparameters import as_data
from rollmill.cli.main import main
from rollmill.core.text_values import read_value
from rollmill.dataflow import collect, identity, init_state, minibatch_gather

E, T = 8, 6
SMALL = {"num_envs": E, "num_steps": T, "total_timesteps": 4 * E * T, "num_minibatches": 2, "gamma": 0.9}
NETWORK = rollmill.NetworkConfig(hidden_sizes=(5,))


def graph_with(**options):
    return rollmill.ippo(crowd(), **(SMALL | options), network=NETWORK, normalize_observations=True)


ROLES = {
    **{"gammas": {"walker": 0.5}, "ent_coefs": {"walker": 0.5}},
    **{"learning_rates": {"walker": 0.25}, "frozen": ("keeper",)},
}


class Learned(NamedTuple):
    """A learner before and after the preparation of a rollout, the samples, and the gradients of all of them."""

    before: Any
    learner: Any
    batch: Any
    gradients: Any


def rollout_of(graph):
    """A rollout by the first weights, which all graphs here have."""

    def roll(key):
        state = init_state(graph, key, jnp.arange(E, dtype=jnp.int32))
        return collect(graph, graph.weights(state.learner), state.collector, key)[1]

    return run_once(roll, jax.random.key(2))


def learned_by(graph, trajectory, *learners):
    """Learns from a rollout with the numbers that each learner holds, by one program."""

    def learn(trajectory, numbers, key):
        before = replace(graph.start_learner(key), hyperparameters=numbers)
        after, batch = graph.prepare(before, trajectory, reduce=identity, replicas=1)
        rows = minibatch_gather(batch, graph.loops)(jnp.arange(E * T, dtype=jnp.uint32))
        return Learned(before, after, batch, graph.gradients(after, graph.condition(rows, identity))[0])

    program = eqx.filter_jit(learn)
    return [program(trajectory, numbers, jax.random.key(2)) for numbers in learners]


@pytest.fixture(scope="module")
def sides():
    """What roles of their own learn, and what is learned with the common numbers, and with theirs for all."""
    roles, common = graph_with(**ROLES), graph_with()
    trajectory = rollout_of(common)
    (own,) = learned_by(roles, trajectory, as_data(roles.hyperparameters))
    for_all = {**common.hyperparameters, "gamma": 0.5, "ent_coef": 0.5}
    return roles, own, *learned_by(common, trajectory, as_data(common.hyperparameters), as_data(for_all))


def equal(ours, theirs):
    return all(map(np.array_equal, jax.tree.leaves(ours), jax.tree.leaves(theirs)))


def test_a_kind_has_a_discount_factor_of_its_own(sides):
    own, common, low = (side.batch.samples.agents for side in sides[1:])
    assert equal(own["walker"].advantage, low["walker"].advantage)
    assert equal(own["keeper"].advantage, common["keeper"].advantage)
    assert not np.allclose(low["walker"].advantage, common["walker"].advantage)


def test_a_kind_has_an_entropy_bonus_of_its_own(sides):
    own, common, more = (side.gradients for side in sides[1:])
    close = lambda ours, theirs: all(
        np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True)
    )
    assert close(own["walker"], more["walker"]) and close(own["keeper"], common["keeper"])
    assert not close(more["walker"], common["walker"])


def test_a_set_learns_at_its_own_rate_or_stays_as_it_is(sides):
    graph, own, *_ = sides
    agents, before = own.learner.weights.agents, own.before.weights.agents
    assert equal(agents["keeper"], before["keeper"]) and not equal(agents["walker"], before["walker"])
    networks = own.learner.weights.networks
    after = eqx.filter_jit(graph.update)(own.learner, jax.tree.map(jnp.ones_like, networks))
    assert equal(after.weights.networks["keeper"], networks["keeper"])
    leaves = jax.tree.leaves(networks["walker"])
    slope = 0.5 / np.sqrt(sum(leaf.size for leaf in leaves))  # of norm max_grad_norm; Adam divides it by itself
    for old, new in zip(leaves, jax.tree.leaves(after.weights.networks["walker"]), strict=True):
        np.testing.assert_allclose(new - old, -0.25 * slope / (slope + 1e-5), rtol=1e-4)
    updates = graph.loops.iterations * graph.loops.epochs * graph.loops.num_minibatches
    rates = graph.report(after, own.batch)
    assert rates["learning_rate/walker"] == pytest.approx(0.25 * (1 - 1 / updates))
    assert rates["learning_rate"] == pytest.approx(0.001 * (1 - 1 / updates))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--learning-rates tagger -1", "learning_rates.tagger=-1.0 must be at least 0"),
        ("--learning-rates tagger x", "--learning-rates x must be a number"),
        ("--learning-rates tagger", "takes 2 values, got 1"),
        (
            "--learning-rates tagger 1e-3 --learning-rate linear:1e-3:0",
            "cannot be combined with the schedule learning_rate=linear:1e-3:0",
        ),
        ("--gammas tagger 2", "gammas.tagger=2.0 must lie between 0 and 1"),
        ("--ent-coefs runners 1", "unknown kind of agents in ent_coefs 'runners'. Did you mean runner?"),
        ("--frozen walker", "unknown parameter set in frozen 'walker'"),
        ("--frozen tagger runner", "leaves no parameter set to learn"),
        (
            "--sharing tagger all runner all --frozen tagger",
            "unknown parameter set in frozen 'tagger'. Known: all.",
        ),
    ],
)
def test_roles_that_do_not_fit_are_refused_in_words(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "ippo", "TagGridWorld-Small-v0", *words.split()])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_names_and_values_are_read_from_words():
    assert read_value("--rates", dict[str, float], ["a", "2e-3", "b", "1"]) == {"a": 2e-3, "b": 1.0}
    assert read_value("--rates", dict[str, float], ['{"a": 1}']) == {"a": 1.0}
