import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollmill.core.spaces import sample
from rollmill.networks import flat_size, flatten
from wordings import raises


def check(space, observation, expected):
    vector = flatten(space, observation)
    assert vector.dtype == jnp.float32 and vector.shape == (flat_size(space),)
    np.testing.assert_allclose(vector, np.asarray(expected, np.float32), rtol=1e-6)


def test_discrete_counts_from_its_start():
    check(spaces.Discrete(4, start=-1), jnp.int32(1), [0, 0, 1, 0])


def test_multi_discrete_of_different_sizes_and_starts():
    space = spaces.MultiDiscrete([2, 3], start=[0, 5])
    check(space, jnp.array([1, 5]), [0, 1, 1, 0, 0])


def test_multi_discrete_of_rank_two():
    space = spaces.MultiDiscrete(np.array([[2, 3], [1, 2]]))
    check(space, jnp.array([[0, 2], [0, 1]]), [1, 0, 0, 0, 1, 1, 0, 1])


def test_multi_binary_and_box_are_cast_and_raveled():
    check(spaces.MultiBinary((2, 2)), jnp.array([[1, 0], [0, 1]], jnp.int8), [1, 0, 0, 1])
    check(spaces.Box(-9, 9, (2, 2), np.int32), jnp.array([[1, -2], [3, 4]]), [1, -2, 3, 4])
    check(spaces.Box(-1.0, 1.0, ()), jnp.float32(0.5), [0.5])


def test_only_the_full_range_of_bytes_is_scaled():
    check(spaces.Box(0, 255, (2,), np.uint8), jnp.array([255, 51], jnp.uint8), [1.0, 0.2])
    check(spaces.Box(0, 1, (2,), np.uint8), jnp.array([1, 0], jnp.uint8), [1.0, 0.0])


def test_nested_spaces_are_joined_in_their_order():
    parts = {"b": spaces.Tuple((spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,)))), "a": spaces.Discrete(3)}
    space = spaces.Dict(parts)
    observation = {"a": jnp.int32(2), "b": (jnp.int32(0), jnp.array([0.5, -0.5]))}
    joined = {"a": [0, 0, 1], "b": [1, 0, 0.5, -0.5]}
    check(space, observation, sum((joined[name] for name in space.spaces), []))


def test_agrees_with_gymnasium():
    space = spaces.Dict(
        {
            "box": spaces.Box(-1.0, 1.0, (2, 3)),
            "one": spaces.Discrete(5, start=2),
            "many": spaces.MultiDiscrete([2, 4, 3]),
            "bits": spaces.MultiBinary(4),
            "pair": spaces.Tuple((spaces.Discrete(2), spaces.Box(0.0, 1.0, (1,)))),
        }
    )
    for key in jax.random.split(jax.random.key(0), 5):
        observation = sample(key, space)
        expected = spaces.flatten(space, jax.tree.map(np.asarray, observation))
        check(space, observation, expected)


def test_a_batch_equals_a_loop():
    space = spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.Box(-1.0, 1.0, (2,))))
    batch = jax.vmap(lambda key: sample(key, space))(jax.random.split(jax.random.key(0), 4))
    vectors = jax.vmap(lambda observation: flatten(space, observation))(batch)
    for i in range(4):
        one = jax.tree.map(lambda x, i=i: x[i], batch)
        np.testing.assert_array_equal(vectors[i], flatten(space, one))


def test_a_space_without_a_fixed_shape_is_named():
    with raises("space-has-no-fixed-shape", "Text"):
        flat_size(spaces.Text(4))
