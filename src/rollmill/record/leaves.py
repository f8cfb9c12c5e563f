"""Converts pytrees of arrays to named host arrays and back, and computes their digests.

Nothing is pickled. Names, dtypes and shapes are strings, so two trees can be compared without building them. A
typed random key is stored as its key data, with a dtype such as `key<threefry2x32>`.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.core.errors import UsageError
from rollmill.core.types import is_key

KEY_DTYPE = re.compile(r"key<(.+)>")
NOT_NUMERIC = "OSUmM"  # kind codes of objects, strings and dates in NumPy


class LeafType(NamedTuple):
    """Dtype (by name) and shape of one leaf of a pytree. A leaf of random keys has the shape of the keys."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def leaf_types(tree: PyTree) -> dict[str, LeafType]:
    """Returns the dtype and shape of each leaf of a tree, by path. Leaves are arrays or `jax.ShapeDtypeStruct`s.

    Raises a `UsageError` if a leaf is not a numeric array.
    """
    return {path: _leaf_type(path, leaf) for path, leaf in _name_leaves(tree)}


def to_host(tree: PyTree) -> dict[str, np.ndarray]:
    """Copies all leaves of a tree to host memory, by path, at once. Random keys become their key data.

    On a CPU, `jax.device_get` returns arrays that share memory with JAX arrays, which the next step may overwrite.
    Such arrays are copied.
    """
    named = _name_leaves(tree)
    fetched = jax.device_get([jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf for _, leaf in named])
    return {path: _own_copy(leaf, value) for (path, leaf), value in zip(named, fetched, strict=True)}


def from_host(arrays: Mapping[str, np.ndarray], abstract: PyTree) -> PyTree:
    """Builds a tree with the structure of `abstract` from named host arrays.

    Leaves that are NumPy arrays in `abstract` remain NumPy arrays. All others become JAX arrays, with the sharding
    of the abstract leaf if it has one.
    """
    leaves = [_place(arrays[path], leaf) for path, leaf in _name_leaves(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def host_type(kind: LeafType) -> tuple[np.dtype, tuple[int, ...]]:
    """Returns the dtype and shape of the host array for a leaf. For random keys, these describe the key data."""
    if key := KEY_DTYPE.fullmatch(kind.dtype):
        one = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=key[1])))
        return np.dtype(one.dtype), (*kind.shape, *one.shape)
    return np.dtype(kind.dtype), kind.shape


def digest(types: Mapping[str, LeafType], arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the hexadecimal SHA-256 over the path, dtype, shape and bytes of every leaf, in path order."""
    sha = hashlib.sha256()
    for path in sorted(types):
        header = f"{path}\0{types[path]}\0{arrays[path].nbytes}\0"
        sha.update(header.encode())
        sha.update(np.ascontiguousarray(arrays[path]).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def tree_digest(tree: PyTree) -> str:
    """Returns a SHA-256 digest of a tree of arrays, over paths, dtypes, shapes and bits.

    The digest depends neither on devices nor on the order of dictionaries. Raises a `UsageError` if a leaf is not
    a numeric array.
    """
    return digest(leaf_types(tree), to_host(tree))


def differences(stored: Mapping[str, LeafType], wanted: Mapping[str, LeafType]) -> list[str]:
    """Describes how stored leaves differ from the wanted ones, with one line for each differing path, in path
    order.
    """
    paths = sorted(stored.keys() | wanted.keys())
    return [
        f"{path}: stored {stored.get(path, 'nothing')}, expected {wanted.get(path, 'nothing')}"
        for path in paths
        if stored.get(path) != wanted.get(path)
    ]


def _name_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "value" for path, _ in flat]
    # two paths can have the same short form, as in {1: ..., "1": ...}, but never the same long form
    if len(set(names)) < len(names):
        names = [jax.tree_util.keystr(path) for path, _ in flat]
    return list(zip(names, [leaf for _, leaf in flat], strict=True))


def _leaf_type(path: str, leaf: Any) -> LeafType:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise UsageError(
            f"the state contains a {type(leaf).__name__} at {path}, but only arrays can be stored. hint: make it "
            "a static field, or partition the state into arrays and the rest."
        )
    if is_key(leaf.dtype):
        return LeafType(f"key<{_key_kind(leaf)}>", tuple(leaf.shape))
    if np.dtype(leaf.dtype).kind in NOT_NUMERIC:
        raise UsageError(
            f"the state contains an array of {leaf.dtype} at {path}, but only numeric arrays can be stored."
        )
    return LeafType(np.dtype(leaf.dtype).name, tuple(leaf.shape))


def _key_kind(leaf: Any) -> str:
    kinds = []  # traced, because `key_impl` accepts arrays and tracers, but not ShapeDtypeStruct
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), leaf)
    return str(kinds[0])


def _own_copy(leaf: Any, value: Any) -> np.ndarray:
    is_copy = isinstance(leaf, jax.Array) and isinstance(value, np.ndarray) and value.flags.owndata
    return value if is_copy else np.array(value, copy=True)


def _place(array: np.ndarray, abstract: Any) -> Any:
    if isinstance(abstract, np.ndarray | np.generic):
        return array
    value = jax.device_put(array)
    if is_key(abstract.dtype):
        value = jax.random.wrap_key_data(value, impl=_key_kind(abstract))
    is_placed = abstract.committed if isinstance(abstract, jax.Array) else abstract.sharding is not None
    return jax.device_put(value, abstract.sharding) if is_placed else value
