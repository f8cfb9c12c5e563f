"""The two loops by value, on a graph whose every number can be said in advance."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting_graph import FIRST_MEMORY, counting_graph, episode_length

from rollmill.dataflow import COLLECT, State, collect, init_state, iterate, iteration_key, learn

GRAPH = counting_graph()
NUM_STEPS = GRAPH.loops.num_steps


def begin(graph, index=range(8), seed=0):
    return init_state(graph, jax.random.key(seed), jnp.asarray(list(index), jnp.int32))


compiled = {}


def compile_once(graph, name, function):
    """One compilation a graph and name; the graph is kept, so that its id stays its own."""
    return compiled.setdefault((id(graph), name), (graph, eqx.filter_jit(function)))[1]


def run_collect(graph, state, key):
    function = lambda state, key: collect(graph, graph.weights(state.learner), state.collector, key)
    return compile_once(graph, "collect", function)(state, key)


def run_iterate(graph, state, unroll=1):
    rollouts = partial(collect, unroll=unroll)
    return compile_once(graph, f"iterate {unroll}", lambda state: iterate(graph, state, collect_with=rollouts))(
        state
    )


def collected(graph=None, index=range(8), times=1):
    """The last of several rollouts in a row, and what is left after it."""
    graph = graph or GRAPH
    state = begin(graph, index)
    for i in range(times):
        collector, trajectory = run_collect(graph, state, jax.random.key(100 + i))
        state = State(collector, state.learner, state.key, state.iteration)
    return jax.device_get((collector, trajectory))


def numbers(tree):
    """Leaves as NumPy arrays, random keys as their data."""
    raw = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return [np.asarray(raw(leaf)) for leaf in jax.tree.leaves(tree)]


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(numbers(one), numbers(other), strict=True):
        np.testing.assert_array_equal(a, b)


# --- collect -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 3])
def test_every_number_of_a_rollout(times):
    """Steps are counted over rollouts: the second one goes on where the first stopped."""
    collector, trajectory = collected(times=times)
    steps = trajectory.steps
    returns = np.zeros(8)
    for s in range(NUM_STEPS * times):
        t = s - NUM_STEPS * (times - 1)  # the step's place in the last rollout
        for e in range(8):
            length = episode_length(e)
            count, over = s % length, s % length == length - 1
            reward = 10 * count + FIRST_MEMORY + count
            returns[e] += reward
            if t >= 0:
                np.testing.assert_array_equal(steps.observation[t, e], [e, count])
                np.testing.assert_array_equal(steps.action_mask[t, e], [count == 0, count > 0])
                np.testing.assert_array_equal(steps.final_observation[t, e], [e, count + 1])
                assert steps.action[t, e] == FIRST_MEMORY + count
                assert steps.final_memory[t, e] == FIRST_MEMORY + count + 1
                assert steps.reward[t, e] == reward
                assert steps.terminated[t, e] == (over and e % 2 == 0)
                assert steps.truncated[t, e] == (over and e % 2 == 1)
                assert steps.info["episode_return"][t, e] == returns[e]
                assert steps.info["episode_length"][t, e] == count + 1
            returns[e] = 0 if over else returns[e]
    count = NUM_STEPS * times % np.array([episode_length(e) for e in range(8)])
    np.testing.assert_array_equal(trajectory.observation, np.stack([np.arange(8), count], axis=1))
    np.testing.assert_array_equal(trajectory.memory, FIRST_MEMORY + count)
    before = NUM_STEPS * (times - 1) % np.array([episode_length(e) for e in range(8)])
    np.testing.assert_array_equal(trajectory.start_memory, FIRST_MEMORY + before)
    np.testing.assert_array_equal(collector.observation, trajectory.observation)
    np.testing.assert_array_equal(collector.memory, trajectory.memory)
    np.testing.assert_array_equal(collector.action_mask, np.stack([count == 0, count > 0], axis=1))


def test_what_the_algorithm_is_handed_does_not_hold_the_final_observation_twice():
    _, trajectory = collected()
    assert set(trajectory.steps.info) == {"episode_return", "episode_length", "noise"}


def test_random_numbers_belong_to_the_global_index():
    whole_collector, whole = collected()
    parts = [collected(index=index) for index in (range(4), range(4, 8))]
    assert_same(whole_collector, jax.tree.map(lambda *x: np.concatenate(x), *(c for c, _ in parts)))
    assert_same(whole.steps, jax.tree.map(lambda *x: np.concatenate(x, axis=1), *(t.steps for _, t in parts)))
    _, shuffled = collected(index=[6, 2, 7])
    assert_same(shuffled.steps, jax.tree.map(lambda x: x[:, [6, 2, 7]], whole.steps))


def test_no_two_random_numbers_are_alike():
    """Holds across environments, steps, policy and environment, starts, and iterations."""
    graph = GRAPH
    state = begin(graph)
    drawn = [numbers(state.collector.environment["start"])[0], numbers(state.learner["weight"])[0]]
    for _ in range(2):
        _, trajectory = run_collect(graph, state, iteration_key(state.key, state.iteration, COLLECT))
        drawn += [trajectory.steps.extras["noise"], trajectory.steps.info["noise"]]
        state, _ = run_iterate(graph, state)
    drawn = np.concatenate([np.asarray(numbers).ravel() for numbers in drawn])
    assert drawn.size == 8 + 1 + 4 * 40
    assert np.unique(drawn).size == drawn.size


def test_unrolling_changes_no_number():
    state = begin(GRAPH)
    assert_same(run_iterate(GRAPH, state), run_iterate(GRAPH, state, unroll=2))


# --- learn -------------------------------------------------------------------------------------------


def test_updates_follow_one_another_and_metrics_are_their_means():
    """Every minibatch holds the same environments' steps: the mean index is 3.5 in each."""
    graph = counting_graph(num_shards=8, num_steps=4)
    state, metrics = run_iterate(graph, begin(graph))
    assert int(state.learner["updates"]) == 6 and int(state.learner["prepared"]) == 1
    assert int(state.iteration) == 1
    np.testing.assert_allclose(metrics["mean_index"], 3.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["updates_before"], np.mean(range(6)))
    assert metrics["epochs"] == 3
    start_weight = numbers(begin(graph).learner["weight"])[0]
    np.testing.assert_allclose(state.learner["weight"], start_weight + 3.5 * sum(range(6)), rtol=1e-6)


@pytest.mark.parametrize(("limit", "epochs"), [(0, 1), (1, 2), (100, 3)])
def test_learning_ends_after_the_epoch_that_says_so(limit, epochs):
    """An epoch's last minibatch has seen 1, 3 and 5 updates."""
    graph = counting_graph(num_shards=8, num_steps=4, keep_learning=lambda m: m["updates_before"] <= limit)
    before = begin(graph)
    state, metrics = run_iterate(graph, before)
    updates = range(2 * epochs)
    assert int(state.learner["updates"]) == len(updates)
    np.testing.assert_allclose(state.learner["weight"], before.learner["weight"] + 3.5 * sum(updates), rtol=1e-6)
    assert metrics["epochs"] == epochs
    np.testing.assert_allclose(metrics["updates_before"], np.mean(updates))
    np.testing.assert_allclose(metrics["mean_index"], 3.5, rtol=1e-6)


def test_the_next_iteration_learns_again_after_one_that_ended_early():
    graph = counting_graph(num_minibatches=1, keep_learning=lambda m: m["updates_before"] > 100)
    state = begin(graph)
    for iteration in (1, 2, 3):
        state, metrics = run_iterate(graph, state)
        assert metrics["epochs"] == 1 and int(state.learner["updates"]) == iteration


def test_each_epoch_and_each_key_shuffles_anew():
    """The order of the last minibatch, told from its gradient, which becomes the weight."""
    _, trajectory = run_collect(GRAPH, begin(GRAPH), jax.random.key(1))
    learner = begin(GRAPH).learner
    order = lambda minibatch: jnp.vdot(minibatch.samples["observation"][:, 0], jnp.arange(20.0))
    watched = GRAPH._replace(
        gradients=lambda learner, minibatch: ({"weight": order(minibatch)}, {}),
        update=lambda learner, slopes: {**learner, "weight": slopes["weight"]},
    )
    _, batch = GRAPH.prepare(learner, trajectory, reduce=lambda tree: tree, replicas=1)

    def last_order(seed, epochs):
        graph = watched._replace(loops=watched.loops._replace(epochs=epochs))
        run = lambda key: learn(graph, learner, batch, key, jnp.arange(8, dtype=jnp.int32))[0]["weight"]
        return float(eqx.filter_jit(run)(jax.random.key(seed)))

    orders = [last_order(0, 1), last_order(0, 2), last_order(1, 1)]
    assert len(set(orders)) == 3
    assert orders[0] == last_order(0, 1)


# --- iterate -----------------------------------------------------------------------------------------


def test_the_same_state_gives_the_same_iteration_and_another_seed_another():
    graph = GRAPH
    one, other = (run_iterate(graph, begin(graph)) for _ in range(2))
    assert_same(one, other)
    different, _ = run_iterate(graph, begin(graph, seed=1))
    assert float(different.learner["weight"]) != float(one[0].learner["weight"])


def test_metrics_of_episodes():
    """In 7 steps, an even environment ends two episodes of 3 steps, an odd one three of 2."""
    graph = counting_graph(num_steps=7, num_minibatches=1)
    _, metrics = run_iterate(graph, begin(graph))
    even, odd = sum(10 * c + FIRST_MEMORY + c for c in range(3)), sum(10 * c + FIRST_MEMORY + c for c in range(2))
    assert metrics["episodes/ended"] == 4 * 2 + 4 * 3
    assert metrics["episodes/length_sum"] == 4 * 2 * 3 + 4 * 3 * 2
    assert metrics["episodes/return_sum"] == 4 * 2 * even + 4 * 3 * odd
    assert {metrics[f"finite/{name}"].item() for name in ("environment", "policy", "gradients", "update")} == {1}


def broken(graph, fragment, change):
    """The graph with the output of one of its fragments changed."""
    whole = getattr(graph, fragment)
    return graph._replace(**{fragment: lambda *args: change(whole(*args))})


@pytest.mark.parametrize(
    ("fragment", "change", "unaffected"),
    [
        ("environment", lambda t: t._replace(reward=t.reward * jnp.nan), {"policy", "gradients", "update"}),
        (
            "policy",
            lambda d: d._replace(extras={"x": jnp.float32(jnp.inf)}),
            {"environment", "gradients", "update"},
        ),
        ("gradients", lambda g: ({"weight": g[0]["weight"] * jnp.nan}, g[1]), {"environment", "policy"}),
        ("update", lambda s: {**s, "weight": s["weight"] * jnp.nan}, {"environment", "policy"}),
    ],
)
def test_metrics_say_which_fragment_was_not_finite(fragment, change, unaffected):
    graph = broken(counting_graph(), fragment, change)
    _, metrics = run_iterate(graph, begin(graph))
    assert metrics[f"finite/{fragment}"] < 1
    for name in unaffected:
        assert metrics[f"finite/{name}"] == 1, name


@pytest.mark.parametrize(("items", "places"), [("samples", 2), ("sequences", 4)])
@pytest.mark.slow_beyond(1)
def test_an_iteration_in_several_places_is_the_iteration_in_one(items, places):
    graph = counting_graph(minibatch_items=items, num_shards=4, num_steps=6 if items == "samples" else 5)
    if items == "sequences":
        of_first = lambda learner, batch: _mean_of_sequences(batch, learner)
        graph = graph._replace(gradients=of_first)
    state = begin(graph)
    together, metrics = run_iterate(graph, state)

    def one_place(collector):
        mean = partial(jax.lax.pmean, axis_name="place")  # noqa: TID251 - the test places
        after, metrics = iterate(graph, State(collector, state.learner, state.key, state.iteration), reduce=mean)
        return after.collector, after.learner, metrics

    split = jax.tree.map(lambda x: x.reshape(places, 8 // places, *x.shape[1:]), state.collector)
    collector, learner, placed = eqx.filter_jit(jax.vmap(one_place, axis_name="place"))(split)
    joined = jax.tree.map(lambda x: x.reshape(8, *x.shape[2:]), collector)
    assert_same(joined, together.collector)
    for of_places, of_one in ((learner, together.learner), (placed, metrics)):
        assert set(of_places) == set(of_one)
        for name in of_one:
            expected = np.full(places, of_one[name])
            np.testing.assert_allclose(of_places[name], expected, rtol=1e-6, err_msg=name)


def _mean_of_sequences(minibatch, learner):
    """A gradient in which sequences, steps and start memories each count differently."""
    index, count = minibatch.samples["observation"][..., 0], minibatch.samples["observation"][..., 1]
    weighted = (index + 0.5 * count) @ jnp.arange(1.0, 6.0)
    slope = jnp.mean(weighted * minibatch.sequences.astype(jnp.float32))
    return {"weight": slope * (1 + learner["updates"].astype(jnp.float32))}, {"slope": slope}
