"""Results of which only the sum over samples is wanted.

The gradient of a matrix of weights is a sum of outer products, and so a product of two tall matrices: the gradient
of one sample is never materialised. Shape letters: `N` samples.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rollmill.fusion.kernels.leaves import Leaf, output_leaf
from rollmill.fusion.lower.function import LoweredFunction
from rollmill.fusion.lower.prologue import UniformArrays
from rollmill.fusion.lower.values import OuterProducts, Output, is_output


class LeafPair(NamedTuple):
    """Two vectors of each sample, which are multiplied."""

    left: Leaf
    right: Leaf


class Sum(NamedTuple):
    """One result: the sum over samples of an array, or of outer products of vectors."""

    leaf: Leaf | None
    """The array, or None for products."""
    pairs: tuple[LeafPair, ...] = ()
    """Vectors of the products, which are added."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        if self.leaf is not None:
            return self.leaf.shape
        left, right = self.pairs[0]
        return (*left.shape, *right.shape)

    @property
    def dtype(self) -> np.dtype:
        """The type of the result."""
        return self.leaf.dtype if self.leaf is not None else self.pairs[0].left.dtype

    @property
    def size(self) -> int:
        """Numbers of the result."""
        return math.prod(self.shape)

    @property
    def is_computed(self) -> bool:
        """Whether a program computes it; it is the same for all samples otherwise."""
        return self.leaf is None or bool(self.leaf.places)


def sums_of(lowered: LoweredFunction) -> list[Sum]:
    """The results of a function that was lowered to be summed, leaf by leaf."""
    first, sums = 0, []
    for value in jax.tree.leaves(lowered.outputs, is_leaf=is_output):
        sums.append(_sum(value, first))
        first += sum(len(leaf.places) for leaf in _leaves(sums[-1]))
    return sums


def _leaves(each: Sum) -> list[Leaf]:
    return [leaf for pair in each.pairs for leaf in pair] if each.leaf is None else [each.leaf]


def _sum(value: Output, first: int) -> Sum:
    if not isinstance(value, OuterProducts):
        return Sum(output_leaf(value, first))
    pairs = []
    # Outputs follow each other: the left side of a product, then its right one.
    for pair in value.pairs:
        # Both sides were given a layout when they became outputs: they are nodes, or constants.
        sides: Any = pair
        left = output_leaf(sides[0], first)
        right = output_leaf(sides[1], first + len(left.places))
        first += len(left.places) + len(right.places)
        pairs.append(LeafPair(left, right))
    return Sum(None, tuple(pairs))


def mean_of(
    each: Sum, outputs: Sequence[Array], uniforms: UniformArrays, num_samples: int, precision: Any
) -> Array:
    """The mean over samples, from a program's outputs for all of them: the reference for kernels."""
    if each.leaf is not None:
        if not each.is_computed:
            return each.leaf.repeated(uniforms)
        return jnp.mean(each.leaf.join(outputs, uniforms, num_samples), axis=0)

    def product(pair: LeafPair) -> Array:
        left, right = (leaf.join(outputs, uniforms, num_samples) for leaf in pair)
        return jax.lax.dot(left.T, right, precision=precision, preferred_element_type=np.dtype(np.float32))

    return functools.reduce(jnp.add, map(product, each.pairs)) / num_samples
