"""The layout of a pytree in a flat buffer. Both ends of a channel know it, and it is never sent.

Every leaf starts at a multiple of 64 bytes, which is a cache line, and the alignment at which JAX can use a host
buffer without copying it.
"""

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rollmill.channels.transfers import to_host
from rollmill.core.errors import UsageError

ALIGNMENT = 64
NOT_NUMERIC = "OSUmM"  # kind codes of objects, strings and dates in NumPy

Buffer: TypeAlias = memoryview | bytearray | np.ndarray
"""A writable buffer, at least as large as the layout requires."""


class LeafLayout(NamedTuple):
    """One array of a layout: its path in the pytree, its shape and dtype, and its offset in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the array's elements in bytes, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype.name}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Layout:
    """The structure of a pytree, and the offsets of its leaves in a buffer of `nbytes` bytes."""

    structure: Any
    """Structure of the pytree. It is not part of the digest, because it differs between processes."""

    leaves: tuple[LeafLayout, ...]
    """Layouts of the leaves, in the order of the flattened pytree."""
    nbytes: int
    """Size of the buffer in bytes, including padding."""

    @staticmethod
    def of(tree: PyTree) -> "Layout":
        """Returns the layout of a pytree of arrays, or of shapes such as `jax.eval_shape` returns.

        Raises a `UsageError` if a leaf is not a numeric array. Typed random keys are not supported.
        """
        named, structure = jax.tree.flatten_with_path(tree)
        leaves, offset = [], 0
        for path, leaf in named:
            name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
            dtype = _numeric(name, leaf)
            leaves.append(LeafLayout(name, tuple(leaf.shape), dtype, offset))
            offset = round_to_alignment(offset + leaves[-1].nbytes)
        return Layout(structure, tuple(leaves), offset)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of names, shapes, dtypes and byte order, which must be equal at both ends."""
        return hashlib.sha256("\n".join([sys.byteorder, *map(str, self.leaves)]).encode()).hexdigest()

    def flat_views(self, buffer: Buffer) -> list[np.ndarray]:
        """Returns views of `buffer` as arrays, in the order of `leaves`. They are writable if the buffer is."""
        return [np.ndarray(leaf.shape, leaf.dtype, buffer, leaf.offset) for leaf in self.leaves]

    def pack(self, tree: PyTree, buffer: Buffer) -> None:
        """Copies the leaves of `tree` to their offsets in `buffer`.

        Raises a `UsageError` if structure, shape or dtype differ from the layout. Nothing is converted.
        """
        self.fill(self.flat_views(buffer), tree)

    def fill(self, views: Sequence[np.ndarray], tree: PyTree) -> None:
        """Copies the leaves of `tree` into `views`, the result of `flat_views`, which the caller can reuse."""
        for view, leaf in zip(views, self.on_host(tree), strict=True):
            np.copyto(view, leaf, casting="no")

    def on_host(self, tree: PyTree) -> list[np.ndarray]:
        """Returns the leaves of `tree` as NumPy arrays, checked like in `pack`.

        Leaves that are already on the host are not copied.
        """
        leaves, structure = jax.tree.flatten(tree)
        if structure != self.structure:
            raise UsageError(
                f"the layout has the structure {self.structure}, got a tree with the structure {structure}."
            )
        return [_check_array(leaf, layout) for leaf, layout in zip(to_host(leaves), self.leaves, strict=True)]

    def unflatten(self, leaves: Sequence[np.ndarray]) -> PyTree[np.ndarray]:
        """Rebuilds the pytree of this layout from its leaves."""
        return jax.tree.unflatten(self.structure, leaves)


def round_to_alignment(nbytes: int) -> int:
    """Rounds a number of bytes up to the alignment of leaves."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def fresh_buffer(nbytes: int) -> np.ndarray:
    """Allocates an uninitialised buffer of `nbytes` bytes, aligned to 64 bytes."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def _numeric(name: str, leaf: Any) -> np.dtype:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise UsageError(
            f"{name} is a {type(leaf).__name__}, but channels carry only arrays. hint: convert it to an array."
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise UsageError(
            f"{name} is a typed random key of {leaf.dtype}, but channels carry only numeric arrays. hint: send "
            "`jax.random.key_data(key)`, and call `jax.random.wrap_key_data` at the other end."
        )
    dtype = np.dtype(leaf.dtype)
    if dtype.kind in NOT_NUMERIC or dtype.fields or not dtype.isnative:
        raise UsageError(
            f"{name} is an array of {dtype}, but channels carry only numeric arrays in the machine's byte order."
        )
    return dtype


def _check_array(array: np.ndarray, layout: LeafLayout) -> np.ndarray:
    if array.shape != layout.shape or array.dtype != layout.dtype:
        raise UsageError(f"expected {layout}, got {array.dtype.name}{list(array.shape)}.")
    return array
