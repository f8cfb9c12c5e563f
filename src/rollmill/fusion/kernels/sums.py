"""Results that are needed only as sums over samples, such as gradients.

The gradient of a weight matrix is a sum of outer products, and so one product of two tall matrices. Gradients of
single samples are never materialised. Shape letters: `N` samples.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from rollmill.fusion.kernels.leaves import Leaf, leaves_of_outputs
from rollmill.fusion.lower.prologue import UniformArrays
from rollmill.fusion.lower.values import Concat, OuterProducts, Output, is_output


class LeafPair(NamedTuple):
    """The two vectors of an outer product per sample. Each vector is one leaf, or several leaves concatenated."""

    left: tuple[Leaf, ...]
    right: tuple[Leaf, ...]


class Sum(NamedTuple):
    """A sum over samples, of an array or of outer products."""

    leaves: tuple[Leaf, ...]
    """The array, as one leaf or as leaves side by side. Empty for outer products."""
    pairs: tuple[LeafPair, ...] = ()
    """Vectors whose outer products are summed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the summed array."""
        if len(self.leaves) == 1:
            return self.leaves[0].shape
        sides = [self.leaves] if self.leaves else self.pairs[0]
        return tuple(sum(leaf.shape[0] for leaf in side) for side in sides)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the summed array."""
        return self.leaves[0].dtype if self.leaves else self.pairs[0].left[0].dtype

    @property
    def size(self) -> int:
        """Number of elements of the summed array."""
        return math.prod(self.shape)

    @property
    def is_computed(self) -> bool:
        """Whether a program computes the result for each sample. Otherwise it is equal for all samples."""
        return not self.leaves or bool(self.leaves[0].places)


def sums_of(results: PyTree[Output], first: int = 0) -> list[Sum]:
    """Returns a `Sum` for each leaf of a pytree of results. The nodes of these results begin at output number
    `first` of a program.
    """
    sums = []
    for value in jax.tree.leaves(results, is_leaf=is_output):
        sums.append(_sum(value, first))
        first += sum(len(leaf.places) for leaf in _leaves(sums[-1]))
    return sums


def _leaves(each: Sum) -> list[Leaf]:
    return [*each.leaves, *(leaf for pair in each.pairs for side in pair for leaf in side)]


def _sum(value: Output, first: int) -> Sum:
    if not isinstance(value, OuterProducts):
        return Sum(_side_by_side(value, first))
    pairs = []
    # Consecutive outputs: the left side of a product, then its right side.
    for pair in value.pairs:
        sides = []
        for side in pair:
            sides.append(_side_by_side(side, first))
            first += sum(len(leaf.places) for leaf in sides[-1])
        pairs.append(LeafPair(*sides))
    return Sum((), tuple(pairs))


def _side_by_side(value: Any, first: int) -> tuple[Leaf, ...]:
    # Parts got their layout when they became outputs, so they are nodes or constants.
    return tuple(leaves_of_outputs(value.parts if isinstance(value, Concat) else [value], first))


def mean_of(
    each: Sum, outputs: Sequence[Array], uniforms: UniformArrays, num_samples: int, precision: Any
) -> Array:
    """Returns the mean of a result over samples, from a program's outputs, as the reference for kernels."""
    if not each.is_computed:
        return each.leaves[0].repeated(uniforms)

    def join(side: Sequence[Leaf]) -> Array:
        parts = [leaf.join(outputs, uniforms, num_samples) for leaf in side]
        return jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]

    if each.leaves:
        return jnp.mean(join(each.leaves), axis=0)

    def product(pair: LeafPair) -> Array:
        left, right = map(join, pair)
        return jax.lax.dot(left.T, right, precision=precision, preferred_element_type=np.dtype(np.float32))

    return functools.reduce(jnp.add, map(product, each.pairs)) / num_samples
