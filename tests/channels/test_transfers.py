"""Transfers between host and GPU: values as they were, in few copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.channels import transfers
from rollmill.channels.transfers import LARGE_BYTES, to_device, to_host

TREE = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": [np.asarray([True, False]), np.float32(7), np.zeros((0, 3), np.float32)],
    "c": np.arange(LARGE_BYTES // 4, dtype=np.float32),
    "d": np.asarray([[1, 2]], np.uint32),
    "e": np.asarray([1.5, 2.5], jnp.bfloat16),
}


@pytest.fixture
def on_gpu(monkeypatch):
    """Lets arrays of JAX count as being on a GPU, and returns the number of arrays in each transfer."""
    counts = []
    put = jax.device_put
    monkeypatch.setattr(transfers, "is_on_gpu", lambda leaf: isinstance(leaf, jax.Array))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_put", lambda tree: counts.append(len(jax.tree.leaves(tree))) or put(tree))
    return counts


def assert_equal(tree, kind):
    for leaf, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(TREE), strict=True):
        assert isinstance(leaf, kind) and (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(np.asarray(leaf), expected)


def test_trees_are_copied_to_the_host_and_back(on_gpu):
    device = to_device(TREE)
    assert on_gpu == [5]  # float32, bool, uint32, bfloat16, and the large leaf alone
    assert_equal(device, jax.Array)
    assert_equal(to_host(device), np.ndarray)


def test_arrays_of_both_kinds_are_copied_to_the_host(on_gpu):
    assert_equal(to_host({**TREE, "a": jnp.asarray(TREE["a"])}), np.ndarray)


def test_nothing_is_packed_on_cpu_backends():
    assert to_device(TREE) is TREE
    tree = {"a": jnp.ones(3), "b": 2.0}
    host = to_host(tree)
    assert host["a"].ctypes.data == tree["a"].unsafe_buffer_pointer() and host["b"] == 2.0


def test_trees_without_leaves():
    assert to_host({}) == to_device({}) == {}
