"""The experience store of sequences, against plain lists of all rollouts."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.core.types import is_key
from rollmill.dataflow import (
    ExperienceStore,
    PrioritisedReplay,
    PrioritisedSequences,
    Replay,
    SequenceReplay,
    collect,
    init_state,
    iterate,
)
from rollmill.dataflow.lost_environments import end_running_episodes
from rollmill.programs.states import start_state
from wordings import raises

ENVS, STEPS, KEPT = 4, 3, 2


def graph_of(**changes):
    graph = rollmill.ppo("CartPole-v1", num_envs=ENVS, num_steps=STEPS, num_minibatches=1, num_shards=2)
    store = SequenceReplay(**{"rollouts": KEPT, "num_steps": STEPS, "minibatch_size": 64, "learning_starts": 20})
    return graph._replace(replay=store._replace(**changes))


def play(graph, count):
    """Trajectories of a training that does not learn."""
    state = start_state(graph)
    collector, weights = state.collector, graph.weights(state.learner)
    once = jax.jit(lambda now, key: collect(graph, weights, now, key))
    trajectories = []
    for n in range(count):
        collector, trajectory = once(collector, jax.random.key(n))
        trajectories.append(trajectory)
    return trajectories


@cache
def eight_rollouts():
    """Those of `graph_of`, whichever its store, which do not change them."""
    return play(graph_of(), 8)


def test_every_store_has_the_interface():
    dqn = rollmill.dqn("CartPole-v1", num_envs=4)
    by_priority = rollmill.dqn("CartPole-v1", num_envs=4, prioritised=True)
    assert isinstance(dqn.replay, Replay) and isinstance(by_priority.replay, PrioritisedReplay)
    stores = (
        dqn.replay,
        by_priority.replay,
        graph_of().replay,
        PrioritisedSequences(graph_of().replay, 1, 1, errors),
    )
    assert all(isinstance(store, ExperienceStore) for store in stores)


def test_the_newest_rollouts_of_each_environment_are_drawn_whole_and_nothing_else():
    graph = graph_of()
    store, index, history = graph.replay, jnp.arange(ENVS), []
    contents = store.empty(graph, index)
    add = jax.jit(lambda contents, trajectory: store.add(graph, contents, trajectory))
    sample = jax.jit(lambda contents, key: store.sample(graph, contents, None, key, index).minibatch.samples)
    for n, trajectory in enumerate(eight_rollouts()[:5]):
        contents = add(contents, trajectory)
        history.append(trajectory)
        # Learning starts after 20 steps: two rollouts of 12.
        assert bool(store.is_ready(contents, graph.loops)) == (n >= 1)
        assert float(store.fill_fraction(contents)) == min(n + 1, KEPT) / KEPT
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
    for trajectory in eight_rollouts()[:3]:
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
        ({"length": 4}, ("store-keeps-rollouts-each-environment", "2", "4")),
    ],
)
def test_sizes_that_do_not_fit_the_graph_are_refused(sizes, message):
    graph = graph_of(**sizes)
    with raises(*message):
        graph.replay.empty(graph, jnp.arange(ENVS))


def test_halves_of_the_environments_draw_their_halves_of_a_minibatch():
    graph = graph_of(minibatch_size=8)
    store, index, key = graph.replay, jnp.arange(ENVS), jax.random.key(3)
    contents = stored(store, graph, eight_rollouts()[:3])
    sample = jax.jit(lambda contents, index: store.sample(graph, contents, None, key, index).minibatch)
    whole = sample(contents, index)
    part_of = lambda part: jax.tree.map(lambda leaf: leaf[part], contents)
    halves = [sample(part_of(part), index[part]) for part in (slice(0, 2), slice(2, 4))]
    for one, two, both in zip(*map(jax.tree.leaves, (*halves, whole)), strict=True):
        np.testing.assert_array_equal(np.concatenate([bits_of(one), bits_of(two)]), bits_of(both))


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
    state, once = (
        init_state(graph, jax.random.key(0), jnp.arange(ENVS)),
        jax.jit(lambda state: iterate(graph, state)),
    )
    learned = []
    for _ in range(3):
        state, metrics = once(state)
        learned.append((float(metrics["epochs"]), float(metrics["losses/total"])))
    assert learned == [(0, 0), (1, 1), (1, 1)]  # CartPole pays 1 a step


# --- sequences of several rollouts, with priorities ---------------------------------------------------

LENGTH, LONG = 3, 5


def errors(learner, minibatch):
    """An error that tells sequences apart: the sum of their first observation."""
    return jnp.abs(minibatch.samples.steps.observation[:, 0].sum(axis=-1))


def prioritised(store):
    return PrioritisedSequences(store, priority_exponent=0.7, weight_exponent=0.5, errors=errors)


def stored(store, graph, history):
    """The store's contents after some rollouts."""
    contents = store.empty(graph, jnp.arange(ENVS))
    add = jax.jit(lambda contents, trajectory: store.add(graph, contents, trajectory))
    for trajectory in history:
        contents = add(contents, trajectory)
    return contents


def bits_of(leaf):
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf)


def drawn_from(store, graph):
    return jax.jit(lambda contents, key: store.sample(graph, contents, None, key, jnp.arange(ENVS)))


def sequences_of(history):
    """All sequences that the store holds, by their observations: environment, first rollout and steps."""
    found, kept = {}, history[-LONG:]
    for e in range(ENVS):
        for first in range(len(kept) - LENGTH + 1):
            whole = [past.steps for past in kept[first : first + LENGTH]]
            join = lambda *leaves, e=e: np.concatenate([leaf[:, e] for leaf in leaves])
            steps = jax.tree.map(join, *whole)
            found[steps.observation.tobytes()] = (e, len(history) - len(kept) + first, steps)
    return found


COVERED = {(LENGTH, False), (LONG, True), (LONG + 3, False)}


@pytest.mark.parametrize(
    ("count", "by_priority"),
    [
        pytest.param(*case, marks=() if case in COVERED else pytest.mark.slow)
        for case in itertools.product((LENGTH, LONG, LONG + 3), (False, True))
    ],
)
def test_sequences_of_several_rollouts_begin_with_any_and_are_in_order(by_priority, count):
    graph = graph_of(rollouts=LONG, length=LENGTH, minibatch_size=128)
    store = prioritised(graph.replay) if by_priority else graph.replay
    history = eight_rollouts()[:count]
    contents = stored(store, graph, history)
    drawn = drawn_from(store, graph)(contents, jax.random.key(1)).minibatch.samples
    right, seen = sequences_of(history), set()
    for i in range(128):
        which = np.asarray(drawn.steps.observation[i]).tobytes()
        seen.add(which)
        e, first, steps = right[which]
        for name in ("action", "reward", "terminated", "truncated", "final_observation"):
            np.testing.assert_array_equal(getattr(drawn.steps, name)[i], getattr(steps, name))
        np.testing.assert_array_equal(drawn.observation[i], history[first + LENGTH - 1].observation[e])
    assert seen == set(right) and len(right) == ENVS * (min(count, LONG) - LENGTH + 1)
    assert drawn.steps.final_memory == () and drawn.steps.info == {}
    np.testing.assert_array_equal(drawn.weight, 1)  # of equal priorities


def test_episodes_of_lost_environments_end_with_the_newest_rollout():
    graph, history = graph_of(rollouts=LONG, length=LENGTH, minibatch_size=128), eight_rollouts()[: LONG + 1]
    contents = jax.jit(partial(end_running_episodes, graph))(stored(graph.replay, graph, history))
    drawn = drawn_from(graph.replay, graph)(contents, jax.random.key(1)).minibatch.samples
    right, ended = sequences_of(history), 0
    for i in range(128):
        e, first, steps = right[np.asarray(drawn.steps.observation[i]).tobytes()]
        truncated, final = steps.truncated.copy(), steps.final_observation.copy()
        if first + LENGTH == len(history) and not (steps.terminated[-1] or truncated[-1]):
            truncated[-1], final[-1] = True, history[-1].observation[e]
            ended += 1
        np.testing.assert_array_equal(drawn.steps.truncated[i], truncated)
        np.testing.assert_array_equal(drawn.steps.final_observation[i], final)
        for name in ("action", "reward", "terminated"):
            np.testing.assert_array_equal(getattr(drawn.steps, name)[i], getattr(steps, name))
    assert ended


def test_the_memory_of_a_sequence_is_that_before_its_first_step():
    graph = graph_of(rollouts=LONG, length=LENGTH)
    recurrent = rollmill.ppo(
        "CartPole-v1",
        num_envs=ENVS,
        num_steps=STEPS,
        num_minibatches=1,
        num_shards=2,
        network=rollmill.NetworkConfig(torso="gru", hidden_sizes=(4,), recurrent_size=4),
    )._replace(replay=graph.replay)
    history = play(recurrent, LONG + 2)
    contents = stored(graph.replay, recurrent, history)
    drawn = drawn_from(graph.replay, recurrent)(contents, jax.random.key(1)).minibatch.samples
    right, zero = sequences_of(history), 0
    for i in range(64):
        e, first, _ = right[np.asarray(drawn.steps.observation[i]).tobytes()]
        memory = jax.tree.map(lambda leaf, i=i: leaf[i], drawn.start_memory)
        expected = jax.tree.map(lambda leaf, e=e: leaf[e], history[first].start_memory)
        jax.tree.map(np.testing.assert_array_equal, memory, expected)
        zero += not any(np.any(leaf) for leaf in jax.tree.leaves(memory))
    assert zero < 32  # where an episode begins with the rollout


def test_sequences_are_drawn_in_proportion_to_their_errors():
    graph = graph_of(rollouts=LONG, length=LENGTH, minibatch_size=64)
    store = prioritised(graph.replay)
    history = eight_rollouts()[: LONG + 3]
    contents = stored(store, graph, history)
    right, size, draw = sequences_of(history), {}, drawn_from(store, graph)
    learn = jax.jit(lambda contents, sample: store.update(graph, contents, None, sample))
    for n in range(4):  # until every sequence has its own priority
        contents = learn(contents, draw(contents, jax.random.key(n)))
    for which, (e, _, steps) in right.items():
        size[which] = (e, (abs(float(np.sum(steps.observation[0]))) + 1e-6) ** 0.7)
    seen, weights = dict.fromkeys(right, 0), {}
    for n in range(100):
        samples = draw(contents, jax.random.key(10 + n)).minibatch.samples
        for observation, weight in zip(np.asarray(samples.steps.observation), samples.weight, strict=True):
            seen[observation.tobytes()] += 1
            weights[observation.tobytes()] = float(weight)
    for shard in ((0, 1), (2, 3)):  # half of a minibatch comes from each
        inside = {which: value for which, (e, value) in size.items() if e in shard}
        total = sum(inside.values())
        for which, value in inside.items():
            share = value / total
            assert abs(seen[which] / 3200 - share) < 5 * (share / 3200) ** 0.5 + 0.01
            np.testing.assert_allclose(weights[which], (len(inside) * share) ** -0.5, rtol=1e-4)


def test_a_new_sequence_has_the_highest_priority_and_an_old_one_none():
    graph = graph_of(rollouts=LONG, length=LENGTH, minibatch_size=64)
    store = prioritised(graph.replay)
    contents = stored(store, graph, eight_rollouts()[:LONG])
    sample = drawn_from(store, graph)(contents, jax.random.key(0))
    contents = jax.jit(partial(store.update, graph))(contents, None, sample)
    before = np.asarray(contents.priorities.values).reshape(ENVS, -1)
    contents = store.add(graph, contents, eight_rollouts()[0])
    after = np.asarray(contents.priorities.values).reshape(ENVS, -1)
    # Rollout 6 of 5 rows is in row 0; the sequences of rollouts 2, 3 and 4 can be drawn.
    highest = np.repeat(np.maximum(before, 1).reshape(2, -1).max(axis=1), 2)
    np.testing.assert_array_equal(after[:, 3], highest)
    np.testing.assert_array_equal(after[:, [0, 4]], 0)
    np.testing.assert_array_equal(after[:, [1, 2]], before[:, [1, 2]])
    np.testing.assert_allclose(contents.priorities.sums[:, 0], after.sum(axis=1), rtol=1e-6)


def test_halves_of_the_environments_draw_their_halves_by_priority():
    graph = graph_of(rollouts=LONG, length=LENGTH, minibatch_size=8)
    store, index, key = prioritised(graph.replay), jnp.arange(ENVS), jax.random.key(3)
    contents = stored(store, graph, eight_rollouts()[: LONG + 1])
    sample = jax.jit(lambda contents, index: store.sample(graph, contents, None, key, index))
    contents = jax.jit(partial(store.update, graph))(contents, None, sample(contents, index))
    whole = sample(contents, index).minibatch
    part_of = lambda part: jax.tree.map(lambda leaf: leaf[part], contents)
    halves = [sample(part_of(part), index[part]).minibatch for part in (slice(0, 2), slice(2, 4))]
    for one, two, both in zip(*map(jax.tree.leaves, (*halves, whole)), strict=True):
        np.testing.assert_array_equal(np.concatenate([bits_of(one), bits_of(two)]), bits_of(both))
