"""Bodies of requests as arrays, by every kind of space; and what is refused."""

import json

import jax
import numpy as np
import pytest
from gymnasium import spaces

from rollmill.serving.act_requests import ActRequestReader, RequestSchema
from wordings import raises

BOX = spaces.Box(-1, 1, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (2, 2), np.uint8)
NESTED = spaces.Dict({"a b": spaces.Discrete(3, start=1), "c": spaces.Tuple([IMAGE, spaces.MultiBinary(2)])})


def reader(space=BOX, *, mask=(), action_space=None, recurrent=False):
    action_space = action_space or spaces.Discrete(3)
    read = ActRequestReader(RequestSchema(space, action_space, mask, recurrent, max_batch=4))
    return lambda document: read(document if isinstance(document, bytes) else json.dumps(document).encode())


def test_one_observation_and_several():
    read = reader()
    one = read({"observation": [1, 2, 3, 4.5]})
    np.testing.assert_array_equal(one.observation, np.float32([[1, 2, 3, 4.5]]))
    assert one.single and one.rows == 1 and one.mask == () and one.observation.dtype == np.float32
    many = read({"observations": [[1, 2, 3, 4], [5, 6, 7, 8]]})
    np.testing.assert_array_equal(many.observation, np.float32([[1, 2, 3, 4], [5, 6, 7, 8]]))
    assert not many.single and many.rows == 2


def test_parts_of_dictionaries_and_tuples():
    part = {"a b": 3, "c": [[[1, 2], [3, 255]], [0, 1]]}
    found = reader(NESTED)({"observations": [part, part]}).observation
    np.testing.assert_array_equal(found["a b"], np.int32([3, 3]))
    np.testing.assert_array_equal(found["c"][0], np.uint8([[[1, 2], [3, 255]]] * 2))
    np.testing.assert_array_equal(found["c"][1], np.int8([[0, 1]] * 2))
    assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [np.int32, np.uint8, np.int8]


def test_all_actions_are_legal_unless_masks_are_given():
    read = reader(mask=jax.ShapeDtypeStruct((3,), bool))
    zeros = [0, 0, 0, 0]
    np.testing.assert_array_equal(read({"observation": zeros}).mask, [[True, True, True]])
    given = read({"observations": [zeros, zeros], "action_masks": [[True, False, False], [False, True, True]]})
    np.testing.assert_array_equal(given.mask, [[True, False, False], [False, True, True]])


def test_masks_of_several_agents():
    mask = {"wolf": jax.ShapeDtypeStruct((2, 3), bool)}
    read = reader(mask=mask, action_space=spaces.Dict({"wolf": spaces.MultiDiscrete([3, 3])}))
    given = [[True, False, True], [False, True, False]]
    found = read({"observation": [0, 0, 0, 0], "action_mask": {"wolf": given}})
    np.testing.assert_array_equal(found.mask["wolf"], [given])


def test_sessions_of_a_recurrent_policy():
    read = reader(recurrent=True)
    zeros = [0, 0, 0, 0]
    assert read({"observation": zeros}).sessions == [None]
    assert read({"observation": zeros, "session": "x", "restart": True})[2:4] == (["x"], True)
    assert read({"observations": [zeros, zeros]}).sessions == [None, None]
    assert read({"observations": [zeros, zeros], "sessions": ["x", None]}).sessions == ["x", None]


@pytest.mark.parametrize(
    ("document", "status", "message"),
    [
        (b"", 400, ("body-is-not-json",)),
        (b'{"observation": [1, 2, 3, NaN]}', 400, ("body-is-not-json", "invalid character")),
        (
            b'{"observation": [1, 2, 3, 1e999]}',
            400,
            ("body-does-not-fit-policy", "number out of range - at `$", "observation[3]`"),
        ),
        (b'{"observation": ' + b"[" * 100_000, 400, ("body-does-not-fit-policy", "expected `float`, got `array`")),
        (b"[1]", 400, ("body-does-not-fit-policy", "expected `object`, got `array`")),
        ({"observation": [1, 2, 3]}, 400, ("has-shape-one-has", "observation", "[3]", "[4]")),
        ({"observation": []}, 400, ("has-shape-one-has", "[0]", "[4]")),
        ({"observations": [[1, 2, 3, 4], [1]]}, 400, ("has-rows-unequal-lengths-one", "observations")),
        ({"observation": [1, 2, 3, 1e39]}, 400, ("holds-number-is-not-finite", "float32")),
        ({"observation": [1, 2, 3, True]}, 400, ("body-does-not-fit-policy", "expected `float`, got `bool`")),
        ({"observation": [1, 2, 3, None]}, 400, ("body-does-not-fit-policy", "expected `float`, got `null`")),
        ({"observations": []}, 400, ("observations-has-entries-1-to", "0", "4")),
        ({"observations": [[1, 2, 3, 4]] * 5}, 413, ("observations-has-entries-1-to", "5", "4")),
        ({}, 400, ("body-needs-either-observation-for",)),
        (
            {"observation": [1, 2, 3, 4], "observations": [[1, 2, 3, 4]]},
            400,
            ("body-needs-either-observation-for",),
        ),
        (
            {"observation": [1, 2, 3, 4], "action_mask": [True]},
            400,
            ("body-does-not-fit-policy", "unknown field `action_mask`"),
        ),
        (
            {"observation": [1, 2, 3, 4], "session": "x"},
            400,
            ("body-does-not-fit-policy", "unknown field `session`"),
        ),
    ],
)
def test_what_is_refused(document, status, message):
    with raises(*message) as refused:
        reader()(document)
    assert refused.value.status == status


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"a b": 0, "c": [[[0, 0], [0, 0]], [0, 0]]},
            ("holds-and-has-to-lie", "observation.a b", "0", "1", "3"),
        ),
        (
            {"a b": 4, "c": [[[0, 0], [0, 0]], [0, 0]]},
            ("holds-and-has-to-lie", "observation.a b", "4"),
        ),
        (
            {"a b": 1.5, "c": [[[0, 0], [0, 0]], [0, 0]]},
            ("body-does-not-fit-policy", "expected `int`, got `float`"),
        ),
        (
            {"a b": 1, "c": [[[0, 0], [0, 256]], [0, 0]]},
            ("does-not-fit-into", "observation.c[0]", "uint8"),
        ),
        (
            {"a b": 1, "c": [[[0, 0], [0, -1]], [0, 0]]},
            ("does-not-fit-into", "observation.c[0]", "uint8"),
        ),
        ({"a b": 1, "c": [[[0, 0], [0, 2**70]], [0, 0]]}, ("does-not-fit-into", "c")),
        (
            {"a b": 1, "c": [[[0, 0], [0, 0]], [0, 2]]},
            ("holds-and-has-to-lie", "observation.c[1]", "2"),
        ),
        (
            {"a b": 1, "c": [[[0, 0], [0, 0]]]},
            ("body-does-not-fit-policy", "expected `array` of length 2"),
        ),
        ({"a b": 1}, ("body-does-not-fit-policy", "missing required field `c`")),
        (
            {"a b": 1, "c": [[[0, 0], [0, 0]], [0, 0]], "d": 1},
            ("body-does-not-fit-policy", "unknown field `d`"),
        ),
    ],
)
def test_parts_that_no_element_has_are_refused(part, message):
    with raises(*message) as refused:
        reader(NESTED)({"observation": part})
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action_mask": [False, False, False]}, ("leaves-no-legal-action", "action_mask")),
        ({"action_mask": [True, True]}, ("has-shape-one-has", "action_mask", "[2]", "[3]")),
        ({"action_mask": [1, 1, 1]}, ("body-does-not-fit-policy", "expected `bool`, got `int`")),
        ({"action_masks": [[True, True, True]]}, ("does-not-go-with", "action_masks", "observation")),
        ({"sessions": ["x"]}, ("session-goes-with-observation-and",)),
        ({"session": 3}, ("body-does-not-fit-policy", "expected `str | null`, got `int`")),
        ({"restart": 1}, ("body-does-not-fit-policy", "expected `bool`, got `int`")),
    ],
)
def test_masks_and_sessions_that_do_not_fit_are_refused(fields, message):
    read = reader(mask=jax.ShapeDtypeStruct((3,), bool), recurrent=True)
    with raises(*message):
        read({"observation": [0, 0, 0, 0]} | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action_masks": [[True, True, True]]}, ("has-entries-and-there-are", "1", "2")),
        ({"sessions": ["x"]}, ("sessions-has-entries-and-there", "1", "2")),
        ({"sessions": ["x", "x"]}, ("sessions-names-session-twice-observations",)),
    ],
)
def test_lists_that_do_not_go_with_the_observations_are_refused(fields, message):
    read = reader(mask=jax.ShapeDtypeStruct((3,), bool), recurrent=True)
    with raises(*message):
        read({"observations": [[0, 0, 0, 0], [0, 0, 0, 0]]} | fields)


def test_padded_choices_do_not_count_as_legal():
    mask = jax.ShapeDtypeStruct((2, 3), bool)
    read = reader(mask=mask, action_space=spaces.MultiDiscrete([2, 3]))
    with raises("leaves-no-legal-action"):
        read({"observation": [0, 0, 0, 0], "action_mask": [[False, False, True], [True, True, True]]})
