from collections import OrderedDict

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.record.leaves import differences, from_host, leaf_types, to_host, tree_digest
from wordings import raises


def test_paths_are_dotted_names():
    tree = {"actor": ({"weight": jnp.zeros((2, 3))}, jax.random.key(0))}
    types = leaf_types(tree)
    assert {path: str(kind) for path, kind in types.items()} == {
        "actor.0.weight": "float32[2,3]",
        "actor.1": "key<threefry2x32>[]",
    }


def test_paths_that_would_coincide_are_told_apart():
    tree = {"a": {"b": jnp.zeros(1)}, "a.b": jnp.ones(2)}
    assert len(leaf_types(tree)) == len(to_host(tree)) == 2


def test_abstract_and_concrete_types_agree():
    tree = {"w": jnp.ones(3, jnp.bfloat16), "key": jax.random.key(1, impl="rbg")}
    assert leaf_types(tree) == leaf_types(eqx.filter_eval_shape(lambda: tree))


def test_digest_does_not_depend_on_insertion_order():
    a, b = jnp.arange(3), jnp.ones(2)
    digests = {
        tree_digest(OrderedDict(a=a, b=b)),
        tree_digest(OrderedDict(b=b, a=a)),
        tree_digest({"b": b, "a": a}),
    }
    assert len(digests) == 1


@pytest.mark.parametrize("bit", [0, 7, 31])
def test_digest_changes_with_one_bit(bit):
    values = np.zeros((2, 4), np.uint32)
    flipped = values.copy()
    flipped[1, 2] ^= np.uint32(1 << bit)
    assert tree_digest([values]) != tree_digest([flipped])


@pytest.mark.parametrize(
    "other",
    [
        {"b": np.zeros(4, np.float32)},
        {"a": np.zeros((2, 2), np.float32)},
        {"a": np.zeros(4, np.int32)},
        {"a": np.zeros(4, np.float32), "b": np.zeros(0, np.float32)},
    ],
    ids=["path", "shape", "dtype", "empty leaf"],
)
def test_digest_covers_path_dtype_and_shape(other):
    assert tree_digest({"a": np.zeros(4, np.float32)}) != tree_digest(other)


def test_digest_tells_keys():
    assert tree_digest(jax.random.key(0)) != tree_digest(jax.random.key(1))
    assert tree_digest(jax.random.key(0)) == tree_digest(jnp.copy(jax.random.key(0)))


def test_host_copies_share_no_memory():
    host, device = np.zeros(1000), jnp.zeros(1000)
    copies = to_host({"host": host, "device": device})
    assert not np.shares_memory(copies["host"], host)
    assert not np.shares_memory(copies["device"], np.asarray(device))


@pytest.mark.parametrize(
    ("leaf", "code"),
    [
        (jax.nn.relu, "state-holds-at-only-arrays"),
        ("text", "state-holds-at-only-arrays"),
        (1.5, "state-holds-at-only-arrays"),
        (np.array(["text"]), "state-holds-array-at-only"),
    ],
)
def test_a_leaf_that_is_no_array_of_numbers_is_refused(leaf, code):
    with raises(code, "net.0"):
        tree_digest({"net": [leaf]})


def test_differences_name_both_sides():
    stored = leaf_types({"a": jnp.zeros(3), "b": jnp.zeros(1), "c": jnp.zeros(2)})
    wanted = leaf_types({"a": jnp.zeros(3), "b": jnp.zeros(1, jnp.int32), "d": jnp.zeros(2)})
    assert differences(stored, wanted) == [
        "b: stored float32[1], expected int32[1]",
        "c: stored float32[2], expected nothing",
        "d: stored nothing, expected float32[2]",
    ]


def test_host_leaves_keep_64_bits():
    tree = {"count": np.arange(3) * 2**40, "scalar": np.float64(0.1)}
    assert tree_digest(from_host(to_host(tree), tree)) == tree_digest(tree)
