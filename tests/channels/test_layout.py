"""Trees through flat buffers: every dtype, by value; what is refused."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rollmill.channels.layout import Layout, fresh_buffer
from rollmill.core.errors import UsageError
from wordings import raises

DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "int32",
    "uint32",
    "int64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
]


class Pair(NamedTuple):
    first: object
    second: object


@st.composite
def trees(draw):
    leaves = []
    for dtype in draw(st.lists(st.sampled_from(DTYPES), max_size=6)):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        count = int(np.prod(shape, dtype=int))
        values = np.array(draw(st.lists(st.integers(0, 100), min_size=count, max_size=count)), np.float32)
        leaves.append(values.reshape(shape).astype(jnp.dtype(dtype)))
    half = len(leaves) // 2
    return {"a": tuple(leaves[:half]), "b": leaves[half:]}


@settings(max_examples=60, deadline=None)
@given(trees())
def test_a_tree_comes_back_by_value_from_bytes_alone(tree):
    layout = Layout.of(tree)
    buffer = fresh_buffer(layout.nbytes)
    layout.pack(tree, buffer)
    copied = bytearray(buffer.tobytes())
    back = layout.unflatten(layout.flat_views(copied))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for sent, got in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape
        assert got.tobytes() == sent.tobytes()


@settings(max_examples=60, deadline=None)
@given(trees())
def test_leaves_are_aligned_and_do_not_overlap(tree):
    layout = Layout.of(tree)
    end = 0
    for leaf in layout.leaves:
        assert leaf.offset % 64 == 0 and leaf.offset >= end
        end = leaf.offset + leaf.nbytes
    assert end <= layout.nbytes and layout.nbytes % 64 == 0
    assert fresh_buffer(layout.nbytes + 1).ctypes.data % 64 == 0


def test_abstract_concrete_and_jax_trees_have_one_layout():
    concrete = Pair(np.zeros((2, 3), np.float32), {"x": np.int32(1)})
    on_device = jax.tree.map(jnp.asarray, concrete)
    abstract = jax.eval_shape(lambda: on_device)
    assert Layout.of(concrete) == Layout.of(abstract) == Layout.of(on_device)
    assert Layout.of(concrete).digest == Layout.of(abstract).digest
    assert [leaf.name for leaf in Layout.of(concrete).leaves] == ["first", "second.x"]


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.zeros((3, 2), np.float32)},
        {"a": np.zeros((2, 3), np.int32)},
        {"b": np.zeros((2, 3), np.float32)},
        {"a": np.zeros((2, 3), np.float32), "c": np.zeros(())},
    ],
)
def test_other_shapes_dtypes_and_names_have_another_digest(other):
    assert Layout.of(other).digest != Layout.of({"a": np.zeros((2, 3), np.float32)}).digest


def test_jax_arrays_and_strided_arrays_are_packed_by_value():
    strided = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3]
    tree = {"device": jnp.arange(5, dtype=jnp.bfloat16), "strided": strided, "scalar": jnp.int32(7)}
    layout = Layout.of(tree)
    buffer = fresh_buffer(layout.nbytes)
    layout.pack(tree, buffer)
    back = layout.unflatten(layout.flat_views(buffer))
    np.testing.assert_array_equal(back["device"].astype(np.float32), np.arange(5, dtype=np.float32))
    np.testing.assert_array_equal(back["strided"], [[0, 3], [12, 15]])
    assert back["scalar"] == 7 and back["scalar"].shape == ()


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        (jax.random.key(0), ("is-typed-random-key-channels",)),
        (np.array(["text"]), ("is-array-channels-carry-numbers",)),
        (np.zeros(3, ">f4"), ("is-array-channels-carry-numbers",)),
        (1.5, ("is-channels-carry-arrays-make", "float")),
    ],
)
def test_what_is_no_array_of_numbers_is_refused_by_name(leaf, says):
    with raises(*says) as told:
        Layout.of({"outer": {"leaf": leaf}})
    assert "outer.leaf" in str(told.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": np.zeros((1, 3), np.float32)},  # would be broadcast
        {"a": np.zeros((2, 3), np.float64)},
        {"b": np.zeros((2, 3), np.float32)},
        [np.zeros((2, 3), np.float32)],
    ],
)
def test_nothing_is_broadcast_converted_or_renamed(tree):
    layout = Layout.of({"a": np.zeros((2, 3), np.float32)})
    with pytest.raises(UsageError):
        layout.pack(tree, fresh_buffer(layout.nbytes))
