"""Packs the small leaves of each sample next to each other, so that a sample is read from one or two cache lines.

Shape letters: `R` rows, one for each sample, `W` words of a row, `N` rows to take.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped, UInt32

from rollmill.core.types import is_key

TOGETHER = 4
"""Number of words that row lengths are a multiple of, so that a processor can read four words at once."""


LARGE_BYTES = 4096
"""Size of a leaf of one sample above which it is not packed, and is processed in chunks."""


class PackedSamples(eqx.Module):
    """Samples as a table of 32-bit words, plus the leaves that do not fit into the table."""

    table: UInt32[Array, "R W"]
    leaves: list[Array]
    """Leaves of the samples, `[R, ...]`, typed keys as their data."""
    columns: tuple[int | None, ...] = eqx.field(static=True)
    """First word of each leaf in a row, or None for a leaf outside the table."""
    keys: tuple[Any, ...] = eqx.field(static=True)
    """PRNG implementation of each leaf that is a typed key, and None for other leaves."""
    structure: Any = eqx.field(static=True)

    @property
    def samples(self) -> PyTree[Array]:
        """Returns the original samples of the table, with leaves `[R, ...]`."""
        return self._tree(self.leaves)

    def take(self, rows: UInt32[Array, " N"]) -> PyTree[Array]:
        """Returns the samples in the given rows, with leaves `[N, ...]`."""
        words = self.table[rows]
        taken = [
            leaf[rows] if first is None else _from_words(words[:, first : first + words_of(leaf)], leaf)
            for leaf, first in zip(self.leaves, self.columns, strict=True)
        ]
        return self._tree(taken)

    def _tree(self, leaves: list[Array]) -> PyTree[Array]:
        wrapped = [
            leaf if key is None else jax.random.wrap_key_data(leaf, impl=key)
            for leaf, key in zip(leaves, self.keys, strict=True)
        ]
        return jax.tree.unflatten(self.structure, wrapped)


class Rows(eqx.Module):
    """Samples as flat rows of 32-bit words and other leaves, without their tree structure (`to_rows`)."""

    words: UInt32[Array, "*R W"]
    """All 32-bit leaves, side by side."""
    others: list[Shaped[Array, "..."]]
    """All other leaves, `[*R, ...]`."""


def to_rows(samples: PyTree[Array]) -> Rows:
    """Converts samples with leaves `[R, ...]` to `Rows`, which have no tree structure."""
    leaves = jax.tree.leaves(samples)
    words = [_to_words(leaf) for leaf in leaves if _fits(leaf)]
    empty = jnp.zeros((len(leaves[0]), 0), jnp.uint32)
    return Rows(jnp.concatenate([empty, *words], axis=1), [leaf for leaf in leaves if not _fits(leaf)])


def from_rows(rows: Rows, struct: PyTree[jax.ShapeDtypeStruct]) -> PyTree[Array]:
    """Converts `Rows`, or some of them, to samples with leaves `[R, ...]`. `struct` describes ONE sample."""
    leaves, structure = jax.tree.flatten(struct)
    first, others, count = 0, iter(rows.others), len(rows.words)
    samples = []
    for leaf in leaves:
        if not _fits(leaf):
            samples.append(next(others))
            continue
        width = math.prod(leaf.shape)
        words = rows.words[:, first : first + width]
        samples.append(jax.lax.bitcast_convert_type(words, leaf.dtype).reshape(count, *leaf.shape))
        first += width
    return jax.tree.unflatten(structure, samples)


def pack(samples: PyTree[Array]) -> PackedSamples:
    """Packs samples with leaves `[R, ...]` into a table of 32-bit words."""
    typed, structure = jax.tree.flatten(samples)
    keys = [jax.random.key_impl(leaf) if is_key(leaf.dtype) else None for leaf in typed]
    leaves = [jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf for leaf in typed]
    columns, width = [], 0
    for leaf in leaves:
        columns.append(width if _fits(leaf) else None)
        width += words_of(leaf) if _fits(leaf) else 0
    words = [_to_words(leaf) for leaf in leaves if _fits(leaf)]
    empty = jnp.zeros((len(leaves[0]), -width % TOGETHER), jnp.uint32)
    return PackedSamples(jnp.concatenate([*words, empty], axis=1), leaves, tuple(columns), tuple(keys), structure)


def is_large(leaf: jax.ShapeDtypeStruct) -> bool:
    """Returns whether a leaf of ONE sample is large, such as an image."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize > LARGE_BYTES


def words_of(leaf: Array) -> int:
    """Returns how many elements one row of a leaf has."""
    return math.prod(leaf.shape[1:])


def _fits(leaf: Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether each element of a leaf is one 32-bit word."""
    return leaf.dtype.itemsize == 4 and jnp.issubdtype(leaf.dtype, jnp.number)


def _to_words(leaf: Array) -> UInt32[Array, "R width"]:
    return jax.lax.bitcast_convert_type(leaf, jnp.uint32).reshape(leaf.shape[0], words_of(leaf))


def _from_words(words: UInt32[Array, "N width"], like: Array) -> Array:
    return jax.lax.bitcast_convert_type(words, like.dtype).reshape(len(words), *like.shape[1:])
