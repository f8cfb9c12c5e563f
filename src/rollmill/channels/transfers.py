"""Transfers of pytrees between a GPU and the host, with few copies, because each copy has a fixed cost.

A copy of a few bytes takes tens of microseconds, and weights or gradients have dozens of leaves. Small leaves of
one dtype are therefore copied as one vector. On CPU backends, where JAX reads host memory, nothing is packed.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

LARGE_BYTES = 1 << 20
"""Size from which a leaf is copied alone, because packing it would take longer than another copy."""

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""The shape of each leaf."""

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""For each vector, the indices of the leaves that it contains."""


def to_host(tree: PyTree) -> PyTree[np.ndarray]:
    """Copies the arrays of a pytree to the host."""
    leaves, structure = jax.tree.flatten(tree)
    if not any(map(is_on_gpu, leaves)):
        return jax.tree.unflatten(structure, list(map(np.asarray, leaves)))
    groups, shapes = _groups(leaves), _shapes(leaves)
    vectors = _pack_by(groups)(leaves)
    for vector in vectors:
        vector.copy_to_host_async()  # starts all transfers, so that they overlap
    return jax.tree.unflatten(structure, _divide(shapes, groups, list(map(np.asarray, vectors))))


def to_device(tree: PyTree) -> PyTree:
    """Copies the arrays of a pytree from the host to the GPU of this process, or returns them on a CPU backend.

    The arrays of the host must not be written to afterwards.
    """
    if jax.default_backend() == "cpu":
        return tree
    leaves, structure = jax.tree.flatten(tree)
    if any(isinstance(leaf, jax.Array) for leaf in leaves):
        return tree
    groups = _groups(leaves)
    vectors = jax.device_put([_concatenate(leaves, group) for group in groups])
    return jax.tree.unflatten(structure, _divide_by(_shapes(leaves), groups)(vectors))


def is_on_gpu(leaf: Any) -> bool:
    """Returns whether a leaf is an array of JAX on a GPU."""
    return isinstance(leaf, jax.Array) and leaf.platform() != "cpu"  # pyright: ignore[reportAttributeAccessIssue]


def _shapes(leaves: Sequence[Any]) -> Shapes:
    return tuple(tuple(leaf.shape) for leaf in leaves)


def _groups(leaves: Sequence[Any]) -> Groups:
    """Returns the indices of the leaves in each vector: small leaves of one dtype, or a single large one."""
    groups: dict[Any, list[int]] = {}
    for n, leaf in enumerate(leaves):
        groups.setdefault(n if leaf.nbytes >= LARGE_BYTES else leaf.dtype, []).append(n)
    return tuple(map(tuple, groups.values()))


def _concatenate(leaves: Sequence[Any], group: Sequence[int]) -> np.ndarray:
    flat = [np.ravel(leaves[n]) for n in group]
    return flat[0] if len(flat) == 1 else np.concatenate(flat)


@cache
def _pack_by(groups: Groups) -> Callable[[list[Any]], list[jax.Array]]:
    return jax.jit(lambda leaves: [jnp.concatenate([jnp.ravel(leaves[n]) for n in group]) for group in groups])


@cache
def _divide_by(shapes: Shapes, groups: Groups) -> Callable[[list[Any]], list[jax.Array]]:
    return jax.jit(lambda vectors: _divide(shapes, groups, vectors))


def _divide(shapes: Shapes, groups: Groups, vectors: Sequence[Any]) -> list[Any]:
    """Returns the leaves in order, as parts of the vectors of their groups."""
    leaves: list[Any] = [None] * len(shapes)
    for group, vector in zip(groups, vectors, strict=True):
        first = 0
        for n in group:
            size = math.prod(shapes[n])
            leaves[n] = vector[first : first + size].reshape(shapes[n])
            first += size
    return leaves
