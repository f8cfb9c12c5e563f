"""The experience store of sequences, against plain lists of all rollouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.dataflow import ExperienceStore, PrioritisedReplay, Replay, SequenceReplay, collect, iterate, start
from wordings import raises

ENVS, STEPS, KEPT = 4, 3, 2


def graph_of(**changes):
    graph = rollmill.ppo("CartPole-v1", num_envs=ENVS, num_steps=STEPS, num_minibatches=1, num_shards=2)
    store = SequenceReplay(**{"sequences": KEPT, "num_steps": STEPS, "minibatch_size": 64, "learning_starts": 20})
    return graph._replace(replay=store._replace(**changes))


def rollouts(graph, count):
    """Trajectories of a training that does not learn."""
    state = start(graph, jax.random.key(0), jnp.arange(ENVS))
    collector, once = state.collector, jax.jit(lambda now, key: collect(graph, weights, now, key))
    weights = graph.weights(state.learner)
    for n in range(count):
        collector, trajectory = once(collector, jax.random.key(n))
        yield trajectory


def test_every_store_has_the_interface():
    dqn = rollmill.dqn("CartPole-v1", num_envs=4)
    prioritised = rollmill.dqn("CartPole-v1", num_envs=4, prioritised=True)
    assert isinstance(dqn.replay, Replay) and isinstance(prioritised.replay, PrioritisedReplay)
    assert all(isinstance(graph.replay, ExperienceStore) for graph in (dqn, prioritised, graph_of()))


def test_the_newest_rollouts_of_each_environment_are_drawn_whole_and_nothing_else():
    graph = graph_of()
    store, index, history = graph.replay, jnp.arange(ENVS), []
    contents = store.empty(graph, index)
    add = jax.jit(lambda contents, trajectory: store.add(graph, contents, trajectory))
    sample = jax.jit(lambda contents, key: store.sample(graph, contents, None, key, index).minibatch.samples)
    for n, trajectory in enumerate(rollouts(graph, 5)):
        contents = add(contents, trajectory)
        history.append(trajectory)
        # Learning starts after 20 steps: two rollouts of 12.
        assert bool(store.is_ready(contents, graph.loops)) == (n >= 1)
        assert float(store.fill(contents)) == min(n + 1, KEPT) / KEPT
        drawn = sample(contents, jax.random.key(n))
        kept = {}
        for past in history[-KEPT:]:
            for e in range(ENVS):
                kept[np.asarray(past.steps.observation[:, e]).tobytes()] = (past, e)
        seen = set()
        for i in range(64):
            bytes_ = np.asarray(drawn.steps.observation[i]).tobytes()
            past, e = kept[bytes_]
            seen.add(bytes_)
            np.testing.assert_array_equal(drawn.steps.action[i], past.steps.action[:, e])
            np.testing.assert_array_equal(drawn.steps.final_observation[i], past.steps.final_observation[:, e])
            np.testing.assert_array_equal(drawn.observation[i], past.observation[e])
        assert seen == set(kept)  # 64 draws of at most 8 sequences


@pytest.mark.parametrize(("starts", "first"), [(0, 12), (20, 20), (1000, KEPT * STEPS * ENVS)])
def test_learning_begins_at_the_latest_when_the_store_is_full(starts, first):
    graph = graph_of(learning_starts=starts)
    assert graph.replay.steps_before_learning(graph.loops) == first
    contents, ready = graph.replay.empty(graph, jnp.arange(ENVS)), []
    for trajectory in rollouts(graph, 3):
        contents = graph.replay.add(graph, contents, trajectory)
        ready.append(bool(graph.replay.is_ready(contents, graph.loops)))
    assert ready == [12 * n >= first for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_steps": 4}, ("num-steps-store-has-to", "4", "3")),
        (
            {"minibatch_size": 5},
            ("minibatch-size-store-is-not", "5", "2"),
        ),
    ],
)
def test_sizes_that_do_not_fit_the_graph_are_refused(sizes, message):
    graph = graph_of(**sizes)
    with raises(*message):
        graph.replay.empty(graph, jnp.arange(ENVS))


def test_halves_of_the_environments_draw_their_halves_of_a_minibatch():
    graph = graph_of(minibatch_size=8)
    store, index, key = graph.replay, jnp.arange(ENVS), jax.random.key(3)
    contents = store.empty(graph, index)
    for trajectory in rollouts(graph, 3):
        contents = store.add(graph, contents, trajectory)
    whole = store.sample(graph, contents, None, key, index).minibatch
    part_of = lambda part: jax.tree.map(lambda leaf: leaf[part], contents)
    halves = [
        store.sample(graph, part_of(part), None, key, index[part]).minibatch for part in (slice(0, 2), slice(2, 4))
    ]
    for one, two, both in zip(*map(jax.tree.leaves, (*halves, whole)), strict=True):
        assert (jnp.concatenate([one, two]) == both).all()


def test_a_learner_of_sequences_learns_once_enough_is_stored():
    dqn = rollmill.dqn(
        "CartPole-v1", num_envs=ENVS, num_steps=STEPS, batch_size=4, learning_starts=20, num_shards=2
    )
    constant = lambda learner, minibatch: (
        jax.tree.map(lambda leaf: jnp.full(leaf.shape, minibatch.samples.steps.reward.mean()), learner.network),
        {"losses/total": minibatch.samples.steps.reward.mean()},
    )
    unscaled = lambda minibatch, reduce: minibatch
    graph = dqn._replace(replay=graph_of(minibatch_size=4).replay, gradients=constant, condition=unscaled)
    state, once = start(graph, jax.random.key(0), jnp.arange(ENVS)), jax.jit(lambda state: iterate(graph, state))
    learned = []
    for _ in range(3):
        state, metrics = once(state)
        learned.append((float(metrics["epochs"]), float(metrics["losses/total"])))
    assert learned == [(0, 0), (1, 1), (1, 1)]  # CartPole pays 1 a step
