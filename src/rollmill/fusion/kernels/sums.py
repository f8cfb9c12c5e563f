"""Results of which only the sum over samples is wanted.

The gradient of a matrix of weights is a sum of outer products, and so a product of two tall matrices: the gradient
of one sample is never materialised. Shape letters: `N` samples.
"""

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
from rollmill.fusion.lower.values import OuterProduct, Output, is_output


class Sum(NamedTuple):
    """One result: the sum over samples of an array, or of the products of two vectors."""

    left: Leaf
    right: Leaf | None = None
    """The second vector."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.left.shape if self.right is None else (*self.left.shape, *self.right.shape)

    @property
    def size(self) -> int:
        """Numbers of the result."""
        return math.prod(self.shape)

    @property
    def is_computed(self) -> bool:
        """Whether a program computes it; it is the same for all samples otherwise."""
        return bool(self.left.places)


def sums_of(lowered: LoweredFunction) -> list[Sum]:
    """The results of a function that was lowered to be summed, leaf by leaf."""
    first, sums = 0, []
    for value in jax.tree.leaves(lowered.outputs, is_leaf=is_output):
        sums.append(_sum(value, first))
        # Outputs follow each other: the left side of a product, then its right one.
        first += len(sums[-1].left.places) + len(sums[-1].right.places if sums[-1].right else ())
    return sums


def _sum(value: Output, first: int) -> Sum:
    if not isinstance(value, OuterProduct):
        return Sum(output_leaf(value, first))
    # Both sides were given a layout when they became outputs: they are nodes, or constants.
    sides: Any = value.left, value.right
    left = output_leaf(sides[0], first)
    return Sum(left, output_leaf(sides[1], first + len(left.places)))


def mean_of(
    each: Sum, outputs: Sequence[Array], uniforms: UniformArrays, num_samples: int, precision: Any
) -> Array:
    """The mean over samples, from a program's outputs for all of them: the reference for kernels."""
    if not each.is_computed:
        return each.left.repeated(uniforms)
    left = each.left.join(outputs, uniforms, num_samples)
    if each.right is None:
        return jnp.mean(left, axis=0)
    right = each.right.join(outputs, uniforms, num_samples)
    product = jax.lax.dot(left.T, right, precision=precision, preferred_element_type=np.dtype(np.float32))
    return product / num_samples
