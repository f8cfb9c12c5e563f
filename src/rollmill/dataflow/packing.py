"""Puts the leaves of samples that are small beside each other: a row of them is read from one or two cache lines.

Shape letters: `R` rows, one a sample; `W` words of a row; `N` rows that are taken.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, UInt32

TOGETHER = 4
"""Rows are as many words long or a multiple of it, so that a processor can read four words at once."""


class Packed(NamedTuple):
    """Samples as a table of 32-bit words, and what does not fit into one."""

    table: UInt32[Array, "R W"]
    leaves: list[Array]
    """The samples' leaves `[R, ...]`."""
    columns: list[int | None]
    """The first word of each leaf in a row; None for one that is not in the table."""
    structure: Any

    def take(self, rows: UInt32[Array, " N"]) -> PyTree[Array]:
        """The samples of these rows; leaves `[N, ...]`."""
        words = self.table[rows]
        taken = [
            leaf[rows] if first is None else _from_words(words[:, first : first + words_of(leaf)], leaf)
            for leaf, first in zip(self.leaves, self.columns, strict=True)
        ]
        return jax.tree.unflatten(self.structure, taken)


def pack(samples: PyTree[Array]) -> Packed:
    """The samples, whose leaves are `[R, ...]`, packed."""
    leaves, structure = jax.tree.flatten(samples)
    columns, width = [], 0
    for leaf in leaves:
        fits = leaf.dtype.itemsize == 4 and jnp.issubdtype(leaf.dtype, jnp.number)
        columns.append(width if fits else None)
        width += words_of(leaf) if fits else 0
    words = [_to_words(leaf) for leaf, first in zip(leaves, columns, strict=True) if first is not None]
    empty = jnp.zeros((len(leaves[0]), -width % TOGETHER), jnp.uint32)
    return Packed(jnp.concatenate([*words, empty], axis=1), leaves, columns, structure)


def words_of(leaf: Array) -> int:
    """Numbers of one row of a leaf."""
    return math.prod(leaf.shape[1:])


def _to_words(leaf: Array) -> UInt32[Array, "R width"]:
    return jax.lax.bitcast_convert_type(leaf, jnp.uint32).reshape(leaf.shape[0], words_of(leaf))


def _from_words(words: UInt32[Array, "N width"], like: Array) -> Array:
    return jax.lax.bitcast_convert_type(words, like.dtype).reshape(len(words), *like.shape[1:])
