"""A pytree of arrays as a flat table of named host arrays, and back; digests of it.

Nothing here is ever pickled: names, dtypes and shapes are text, so that two trees can be compared
without building either. A typed random key is held as its key data, its kind as `key<threefry2x32>`.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rollmill.core.errors import UsageError

KEY_DTYPE = re.compile(r"key<(.+)>")
NOT_NUMERIC = "OSUmM"  # numpy's kinds of objects, text and dates


class LeafType(NamedTuple):
    """Name of the dtype and shape of one leaf; the shape of a key leaf is that of the keys."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def leaf_types(tree: PyTree) -> dict[str, LeafType]:
    """Path of each leaf -> its type; `tree` may be concrete or made of `jax.ShapeDtypeStruct`.

    Raises:
        UsageError: a leaf is no array of numbers.
    """
    return {path: _leaf_type(path, leaf) for path, leaf in _named_leaves(tree)}


def to_host(tree: PyTree) -> dict[str, np.ndarray]:
    """Path of each leaf -> a host array that nobody else writes; keys become their key data.

    One `jax.device_get` fetches all leaves. On a CPU its results share memory with the arrays,
    which the next step may take over (donation), so those are copied.
    """
    named = _named_leaves(tree)
    fetched = jax.device_get([jax.random.key_data(leaf) if _is_key(leaf) else leaf for _, leaf in named])
    return {path: _owned(leaf, value) for (path, leaf), value in zip(named, fetched, strict=True)}


def from_host(arrays: Mapping[str, np.ndarray], abstract: PyTree) -> PyTree:
    """The tree shaped like `abstract`, its leaves taken from `arrays` by path.

    A leaf whose abstract one is a numpy array stays one; the others become JAX arrays, placed by
    the abstract leaf's sharding where it has one.
    """
    leaves = [_place(arrays[path], leaf) for path, leaf in _named_leaves(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def host_type(kind: LeafType) -> tuple[np.dtype, tuple[int, ...]]:
    """Dtype and shape of the host array of a leaf, for a key that of its key data."""
    if key := KEY_DTYPE.fullmatch(kind.dtype):
        one = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=key[1])))
        return np.dtype(one.dtype), (*kind.shape, *one.shape)
    return np.dtype(kind.dtype), kind.shape


def digest(types: Mapping[str, LeafType], arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256, in hexadecimal, over path, dtype, shape and bytes of every leaf in path order."""
    sha = hashlib.sha256()
    for path in sorted(types):
        header = f"{path}\0{types[path]}\0{arrays[path].nbytes}\0"
        sha.update(header.encode())
        sha.update(np.ascontiguousarray(arrays[path]).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def tree_digest(tree: PyTree) -> str:
    """SHA-256 of a tree of arrays, in hexadecimal: equal for equal paths, dtypes, shapes and bits.

    It does not depend on where the arrays lie, nor on the order in which a dict was filled.

    Raises:
        UsageError: a leaf is no array of numbers.
    """
    return digest(leaf_types(tree), to_host(tree))


def differences(stored: Mapping[str, LeafType], wanted: Mapping[str, LeafType]) -> list[str]:
    """One line for each path whose type differs, in path order; empty where the two agree."""
    paths = sorted(stored.keys() | wanted.keys())
    return [
        f"{path}: stored {stored.get(path, 'nothing')}, expected {wanted.get(path, 'nothing')}"
        for path in paths
        if stored.get(path) != wanted.get(path)
    ]


def _named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "value" for path, _ in flat]
    if len(set(names)) < len(names):  # such as {1: ..., "1": ...}: the longer form tells them apart
        names = [jax.tree_util.keystr(path) for path, _ in flat]
    return list(zip(names, [leaf for _, leaf in flat], strict=True))


def _leaf_type(path: str, leaf: Any) -> LeafType:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise UsageError(
            f"the state holds a {type(leaf).__name__} at {path}, only arrays can be stored: "
            "make it a static field, or partition the state into arrays and the rest."
        )
    if _is_key(leaf):
        return LeafType(f"key<{_key_kind(leaf)}>", tuple(leaf.shape))
    if np.dtype(leaf.dtype).kind in NOT_NUMERIC:
        raise UsageError(f"the state holds an array of {leaf.dtype} at {path}, only numbers can be stored.")
    return LeafType(np.dtype(leaf.dtype).name, tuple(leaf.shape))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_kind(leaf: Any) -> str:
    kinds = []  # `key_impl` takes arrays and tracers, no ShapeDtypeStruct
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), leaf)
    return str(kinds[0])


def _owned(leaf: Any, value: Any) -> np.ndarray:
    private = isinstance(leaf, jax.Array) and isinstance(value, np.ndarray) and value.flags.owndata
    return value if private else np.array(value, copy=True)


def _place(array: np.ndarray, abstract: Any) -> Any:
    if isinstance(abstract, np.ndarray | np.generic):
        return array
    value = jax.device_put(array)
    if _is_key(abstract):
        value = jax.random.wrap_key_data(value, impl=_key_kind(abstract))
    pinned = abstract.committed if isinstance(abstract, jax.Array) else abstract.sharding is not None
    return jax.device_put(value, abstract.sharding) if pinned else value
