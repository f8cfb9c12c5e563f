"""Earlier weights as opponents: who plays by which weights, and who learns, by value."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from agents_envs import crowd
from rollmill.algorithms.opponent_pool import (
    KindsWithOpponents,
    draw_opponents,
    next_opponents,
    no_opponents,
    start_pool,
)
from rollmill.core.errors import UsageError
from rollmill.dataflow import collect, identity, init_state
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from wordings import raises

E = 4
BOTH = KindsWithOpponents(("a", "b"), {"a": "a", "b": "b"}, ())
SMALL = {"num_envs": E, "num_steps": 2, "total_timesteps": 12 * 2 * E, "num_minibatches": 1, "update_epochs": 1}


def graph_with(**options):
    network = rollmill.NetworkConfig(hidden_sizes=(4,))
    return rollmill.ippo(crowd(), **SMALL, network=network, learning_rate=0.1, anneal_lr=False, **options)


def numbered(number):
    return {name: {"w": jnp.full((2,), float(number))} for name in ("a", "b")}


def quickly(function):
    """Compiles without optimising, which would take longer than all that these tests compute."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def test_the_pool_keeps_the_newest_weights_and_draws_all_of_them():
    pool, drawn = start_pool(numbered(0), BOTH, jax.random.key(0), size=3), set()
    opponents = no_opponents(numbered(0), BOTH)
    step = jax.jit(lambda pool, networks, played: next_opponents(pool, networks, played, BOTH, every=2, share=1.0))
    for iteration in range(1, 41):
        played = opponents
        pool, opponents = step(pool, numbered(iteration), played)
        assert pool.played == played.playing
        playing = {name for name, plays in opponents.playing.items() if plays}
        if iteration == 1:
            assert not playing  # there is nobody yet
            continue
        (kind,) = playing
        newest = iteration // 2 * 2
        number = float(opponents.networks["a"]["w"][0])
        assert number in {newest, newest - 2, newest - 4} - {0}
        drawn.add((kind, int(newest - number)))
    assert drawn == {(kind, age) for kind in "ab" for age in (0, 2, 4)}


def test_the_share_of_iterations_with_an_opponent():
    networks = numbered(1)

    def step(carry, _):
        carry = next_opponents(carry[0], networks, carry[1], BOTH, every=1, share=0.25)
        return carry, sum(plays.astype(jnp.int32) for plays in carry[1].playing.values())

    begin = start_pool(networks, BOTH, jax.random.key(1), size=1), no_opponents(networks, BOTH)
    played = jax.jit(lambda: jax.lax.scan(step, begin, length=400)[1].sum())()
    assert int(played) == pytest.approx(100, abs=30)


def test_a_kind_that_plays_by_earlier_weights_learns_nothing_and_the_others_do():
    graph = graph_with(pool_size=2, pool_every=1, pool_share=1.0)
    index = jnp.arange(E, dtype=jnp.int32)
    begun = jax.eval_shape(lambda: init_state(graph, jax.random.key(3), index))
    rollout = lambda state: collect(graph, graph.weights(state.learner), state.collector, state.key)[1]
    # A rollout in which every agent is active, and nothing else matters.
    steps = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), jax.eval_shape(rollout, begun))

    def learn(learner):
        prepared, batch = graph.prepare(learner, steps, reduce=identity, replicas=1)
        share = jax.tree.map(jnp.mean, batch.samples.weight)
        gradients = {
            name: jax.tree.map(partial(jnp.full_like, fill_value=share[name]), network)
            for name, network in learner.weights.networks.items()
        }
        return graph.update(prepared, gradients), share

    learner, program, idle = graph.start_learner(jax.random.key(3)), quickly(learn), []
    for _ in range(8):
        after, weight = program(learner)
        playing = [name for name, plays in learner.weights.opponents.playing.items() if plays]
        same = jax.tree.map(np.array_equal, learner.weights.networks, after.weights.networks)
        idle.append([name for name, leaves in same.items() if all(jax.tree.leaves(leaves))])
        assert idle[-1] == playing == [name for name, share in weight.items() if share == 0]
        assert all(share in (0, 1) for share in weight.values())
        learner = after
    assert idle[0] == [] and {tuple(names) for names in idle[1:]} == {("keeper",), ("walker",)}


def test_a_training_changes_the_weights_of_the_kinds_that_play_by_the_newest():
    program = lower(graph_with(pool_size=2, pool_every=1, pool_share=1.0))
    state, idle = program.start(), []
    for _ in range(6):
        before = jax.device_get(state.learner.weights)
        state, _ = program.advance(state)
        after = jax.device_get(state.learner.weights)
        same = jax.tree.map(np.array_equal, before.networks, after.networks)
        idle.append([name for name, leaves in same.items() if all(jax.tree.leaves(leaves))])
        assert idle[-1] == [name for name, plays in before.opponents.playing.items() if plays]
    assert any(idle)


def test_only_the_policy_of_a_training_acts_by_earlier_weights():
    graph = graph_with(pool_size=1)

    def decisions():
        weights, other = (graph.weights(graph.start_learner(jax.random.key(n))) for n in (0, 1))
        kinds = KindsWithOpponents((), {"walker": "walker", "keeper": "keeper"}, ())
        opponents = replace(
            no_opponents(other.networks, kinds),
            playing={"walker": jnp.asarray(True), "keeper": jnp.asarray(False)},
        )
        mixed = {**weights.networks, "walker": other.networks["walker"]}
        cases = {
            "in training": (graph.policy, replace(weights, opponents=opponents)),
            "mixed": (graph.policy, replace(weights, networks=mixed)),
            "in use": (graph.deployed_policy(stochastic=True), replace(weights, opponents=opponents)),
            "newest": (graph.policy, weights),
        }
        view = graph.start_environment(jax.random.key(2), jnp.int32(0))[1]
        return {name: policy(given, jax.random.key(5), (), view, ()) for name, (policy, given) in cases.items()}

    found = quickly(decisions)()
    for one, other in (("in training", "mixed"), ("in use", "newest")):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found[one], found[other])
    assert not np.allclose(found["mixed"].extras.log_prob["walker"], found["newest"].extras.log_prob["walker"])
    without = graph_with()
    assert (
        without.deployed_policy(stochastic=True) is without.policy
        and without.deployed_policy(stochastic=False) is without.greedy
    )


def test_only_the_roles_of_the_pool_play_and_frozen_ones_keep_the_weights_that_they_began_with():
    kinds = KindsWithOpponents(("b",), {"b": "b"}, ("b",))
    pool = start_pool(numbered(0), kinds, jax.random.key(0), size=4)
    assert set(pool.networks) == set(pool.kept) == {"b"}
    assert not draw_opponents(pool, kinds, share=1.0).playing["b"]  # nothing is in the pool
    places = {"b": {"w": jnp.broadcast_to(jnp.arange(4.0)[:, None], (4, 2))}}
    pool, drawn = replace(pool, networks=places, kept={"b": jnp.int32(3)}), set()
    opponents = no_opponents(numbered(0), kinds)
    step = jax.jit(
        lambda pool, networks, played: next_opponents(pool, networks, played, kinds, every=1, share=1.0)
    )
    for iteration in range(30):
        pool, opponents = step(pool, numbered(100 + iteration), opponents)
        assert set(opponents.playing) == {"b"} and opponents.playing["b"]
        drawn.add(float(opponents.networks["b"]["w"][0]))
    assert drawn == {0.0, 1.0, 2.0} and int(pool.kept["b"]) == 3 and int(pool.count) == 30


def test_a_kind_without_weights_in_the_pool_is_not_drawn():
    pool = start_pool(numbered(0), BOTH, jax.random.key(3), size=2)
    pool = replace(pool, kept={"a": jnp.int32(0), "b": jnp.int32(1)})
    for count in range(8):
        playing = draw_opponents(replace(pool, count=jnp.int32(count)), BOTH, share=1.0).playing
        assert playing["b"] and not playing["a"]


def test_pool_roles_names_the_kinds_that_play_by_earlier_weights():
    graph = graph_with(pool_size=2, pool_roles=("keeper",))
    learner = jax.eval_shape(graph.start_learner, jax.random.key(0))
    assert set(learner.weights.opponents.playing) == set(learner.pool.networks) == {"keeper"}
    both = jax.eval_shape(graph_with(pool_size=2).start_learner, jax.random.key(0))
    assert set(both.pool.networks) == {"walker", "keeper"}


def test_a_pool_needs_a_kind_that_learns_meanwhile():
    with raises("no-other-kind-agents-would", "--pool-roles keeper --pool-from RUN"):
        graph_with(pool_size=2, frozen=("keeper",))
    with raises("no-other-kind-agents-would", "while walker acts"):
        graph_with(pool_size=2, frozen=("keeper",), pool_roles=("keeper", "walker"))
    with raises("unknown-name", "kepper"):
        graph_with(pool_size=2, pool_roles=("kepper",))
    with raises("out-of-bounds", "pool_size=-1", kind=UsageError):
        graph_with(pool_size=-1)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"pool_share": 0.5}, "pool_share=0.5"),
        ({"pool_every": 3}, "pool_every=3"),
        ({"pool_roles": ("keeper",)}, "pool_roles=keeper"),
    ],
)
def test_options_of_a_pool_are_refused_without_one(options, shown):
    with raises("has-no-effect-without-pool", shown):
        graph_with(**options)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["rollout", "full"])
def test_kernels_play_and_learn_by_the_numbers_of_xla(fusion):
    def trained(fusion):
        sizes = {"num_envs": 8, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 6 * 64}
        graph = rollmill.mappo("TagGridWorld-Small-v0", **sizes, pool_size=2, pool_every=1, pool_share=0.9)
        program, played = lower(graph, fusion=fusion), False
        for window in dispatch_ahead(program, program.start(), first=0, until=graph.loops.iterations):
            learner = window.after.learner
            played |= any(map(bool, learner.pool.played.values()))
        assert played
        return learner.weights.networks

    compare = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(compare, trained(fusion), trained("off"))
