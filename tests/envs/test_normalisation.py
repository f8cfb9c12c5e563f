"""Running statistics against NumPy's over everything seen."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill import envs
from rollmill.core.spaces import struct
from rollmill.core.types import Environment, Timestep
from wordings import raises

STRUCT = {
    "box": jax.ShapeDtypeStruct((3,), jnp.float32),
    "choice": jax.ShapeDtypeStruct((), jnp.int32),
}


def batches(shapes, seed=0):
    rng = np.random.default_rng(seed)
    offset, width = np.array([100.0, -2.0, 0.0]), np.array([0.5, 3.0, 10.0])
    for number, shape in enumerate(shapes):
        values = offset + number + width * rng.standard_normal((*shape, 3))
        yield {
            "box": jnp.asarray(values, jnp.float32),
            "choice": jnp.asarray(rng.integers(0, 5, shape), jnp.int32),
        }


def test_uneven_batches_give_the_statistics_of_everything():
    seen = list(batches([(1, 1), (7, 3), (64, 2), (5, 1), (128, 8)]))
    statistics = envs.initial_statistics(STRUCT)
    for batch in seen:
        statistics = eqx.filter_jit(envs.update_statistics)(statistics, batch)
    everything = np.concatenate([np.asarray(batch["box"], np.float64).reshape(-1, 3) for batch in seen])
    assert statistics.count == pytest.approx(len(everything), abs=1e-2)
    np.testing.assert_allclose(statistics.mean["box"], everything.mean(axis=0), rtol=1e-5, atol=1e-4)
    # The initial variance 1 at mean 0 has the weight 1e-4 / 1178, which a mean of 100 makes 1e-3 of.
    prior = 1e-4 / len(everything) * everything.mean(axis=0) ** 2
    np.testing.assert_allclose(statistics.variance["box"], everything.var(axis=0) + prior, rtol=1e-4)


def test_statistics_start_at_mean_zero_and_variance_one():
    statistics = envs.initial_statistics(STRUCT)
    np.testing.assert_array_equal(statistics.mean["box"], np.zeros(3))
    np.testing.assert_array_equal(statistics.variance["box"], np.ones(3))
    assert statistics.mean["choice"] is None and statistics.variance["choice"] is None
    assert statistics.count == np.float32(1e-4)


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_batch_cut_over_replicas_gives_the_same_statistics(replicas):
    start = envs.update_statistics(envs.initial_statistics(STRUCT), next(batches([(9,)], seed=1)))
    (batch,) = batches([(16, 4)])
    whole = eqx.filter_jit(envs.update_statistics)(start, batch)

    def mean_over_replicas(tree):
        return jax.lax.pmean(tree, "replica")  # noqa: TID251, the machine word that execution passes in

    def update(part):
        return envs.update_statistics(start, part, reduce=mean_over_replicas, replicas=replicas)

    # Sorted, so that the parts have quite different means.
    parts = jax.tree.map(lambda x: jnp.sort(x, 0).reshape(replicas, 16 // replicas, *x.shape[1:]), batch)
    cut = eqx.filter_jit(jax.vmap(update, axis_name="replica"))(parts)
    for found, expected in zip(jax.tree.leaves(cut), jax.tree.leaves(whole), strict=True):
        for replica in range(replicas):
            np.testing.assert_allclose(found[replica], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_values_that_do_not_count_leave_no_trace(replicas):
    start = envs.update_statistics(envs.initial_statistics(STRUCT), next(batches([(9,)], seed=1)))
    (batch,) = batches([(16, 4)])
    counts = np.random.default_rng(0).random((16, 4)) < np.linspace(0, 0.9, 16)[:, None]  # fewer in the first half
    alone = envs.update_statistics(start, jax.tree.map(lambda x: x[counts], batch))
    update = partial(
        envs.update_statistics,
        start,
        reduce=partial(jax.lax.pmean, axis_name="replica"),  # noqa: TID251, the machine word of execution
        replicas=replicas,
    )
    parts = jax.tree.map(lambda x: x.reshape(replicas, 16 // replicas, *x.shape[1:]), (batch, counts))
    found = eqx.filter_jit(jax.vmap(lambda part, where: update(part, where=where), axis_name="replica"))(*parts)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours[0], theirs, rtol=1e-5, atol=1e-5)


def test_a_batch_of_which_nothing_counts_changes_nothing():
    start = envs.update_statistics(envs.initial_statistics(STRUCT), next(batches([(9,)], seed=1)))
    (batch,) = batches([(16, 4)])
    found = envs.update_statistics(start, batch, where=jnp.zeros((16, 4), bool))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(start), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_denormalise_undoes_normalise():
    statistics = envs.update_statistics(envs.initial_statistics(STRUCT), next(batches([(50,)], seed=1)))
    (batch,) = batches([(16, 4)])
    back = envs.denormalise(statistics, envs.normalise(statistics, batch, clip=np.inf))
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(batch), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_normalise_by_hand():
    statistics = envs.RunningStatistics(
        mean={"box": jnp.array([1.0, 2.0, 3.0]), "choice": None},
        variance={"box": jnp.array([4.0, 1.0, 0.25]), "choice": None},
        count=jnp.float32(10),
    )
    value = {"box": jnp.array([[3.0, 2.0, 2.0], [1.0, 99.0, -99.0]]), "choice": jnp.array([3, 4])}
    normal = envs.normalise(statistics, value)
    np.testing.assert_allclose(normal["box"], [[1, 0, -2], [0, 10, -10]], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(normal["choice"], [3, 4])
    tight = envs.normalise(statistics, value, clip=1.5)
    np.testing.assert_allclose(tight["box"], [[1, 0, -1.5], [0, 1.5, -1.5]], rtol=1e-5, atol=1e-6)
    scaled = envs.scale(statistics, value)
    np.testing.assert_allclose(scaled["box"], [[1.5, 2, 4], [0.5, 99, -198]], rtol=1e-5)
    np.testing.assert_array_equal(scaled["choice"], [3, 4])


def test_dtypes_are_kept():
    statistics = envs.initial_statistics(jax.ShapeDtypeStruct((2,), jnp.bfloat16))
    value = jnp.ones((5, 2), jnp.bfloat16)
    updated = envs.update_statistics(statistics, value)
    assert updated.mean.dtype == jnp.float32
    assert envs.normalise(updated, value).dtype == jnp.bfloat16
    assert envs.scale(updated, value).dtype == jnp.bfloat16


def test_scalars_and_values_without_floats():
    rewards = envs.update_statistics(
        envs.initial_statistics(jax.ShapeDtypeStruct((), jnp.float32), count=0.0),
        jnp.array([1.0, 2.0, 3.0, 6.0]),
    )
    assert rewards.mean == 3.0 and rewards.variance == 3.5 and rewards.count == 4.0
    discrete = envs.initial_statistics(jax.ShapeDtypeStruct((), jnp.int32))
    same = envs.update_statistics(discrete, jnp.arange(4))
    assert same.count == discrete.count
    np.testing.assert_array_equal(envs.normalise(same, jnp.arange(4)), np.arange(4))


def test_leaves_with_different_leading_axes_are_refused():
    statistics = envs.initial_statistics({"a": jnp.zeros(2), "b": jnp.zeros(())})
    with raises("batchs-leaves-have-different-leading", "[(3,), (4,)]"):
        envs.update_statistics(statistics, {"a": jnp.zeros((3, 2)), "b": jnp.zeros(4)})


def test_whole_numbers_are_normalised_but_categories_and_bytes_are_not():
    """Counts 0, 500, 1000: mean 500, variance 166,666.7, so that 1000 is sqrt(1.5) = 1.2247 deviations above."""
    space = spaces.Dict(
        {
            "counts": spaces.Box(0, 10**6, (1,), np.int64),
            "small": spaces.Box(-5, 5, (1,), np.int8),
            "image": spaces.Box(0, 255, (2, 2, 1), np.uint8),
            "planes": spaces.Box(0, 1, (2, 2, 1), np.uint8),
            "choice": spaces.Discrete(3),
            "choices": spaces.MultiDiscrete([2, 3]),
            "flags": spaces.MultiBinary(2),
            "number": spaces.Box(-1, 1, (), np.float32),
        }
    )
    shapes = envs.normalised_struct(space)
    statistics = envs.initial_statistics(shapes, count=1e-9)
    assert {name for name, mean in statistics.mean.items() if mean is not None} == {"counts", "small", "number"}
    of = lambda values, name: jnp.asarray(np.reshape(values, (-1, *space[name].shape)), struct(space)[name].dtype)
    batch = jax.tree.map(lambda leaf: jnp.zeros((3, *leaf.shape), leaf.dtype), struct(space))
    batch |= {"counts": of([0, 500, 1000], "counts"), "small": of([-1, 0, 1], "small")}
    statistics = envs.update_statistics(statistics, batch)
    np.testing.assert_allclose(statistics.mean["counts"], [500], rtol=1e-6)
    np.testing.assert_allclose(statistics.variance["counts"], [500_000 / 3], rtol=1e-5)
    seen = envs.normalise(statistics, batch)
    for name in ("counts", "small"):
        assert seen[name].dtype == jnp.float32
        np.testing.assert_allclose(seen[name].ravel(), [-1.2247449, 0, 1.2247449], rtol=1e-5)
    for name in ("image", "planes", "choice", "choices", "flags"):
        assert seen[name].dtype == batch[name].dtype and (seen[name] == batch[name]).all()


@pytest.mark.parametrize("algorithm", ["ppo", "a3c", "impala"])
def test_algorithms_normalise_whole_numbers(algorithm):
    def step(key, t, action, params):
        done = t >= 7
        return Timestep((1000 * t)[None], t + 1, jnp.float32(0), done, jnp.asarray(False), {})

    seen = spaces.Box(0, 10**6, (1,), np.int32)
    reset = lambda key, params: (jnp.zeros(1, jnp.int32), jnp.int32(0))
    env = Environment("Counts-v0", reset, step, seen, spaces.Discrete(2))
    graph = getattr(rollmill, algorithm)(
        env, num_envs=4, num_steps=4, total_timesteps=16, normalize_observations=True
    )
    learner = jax.eval_shape(graph.start_learner, jax.random.key(0))
    assert learner.weights.observations.mean.shape == (1,)
