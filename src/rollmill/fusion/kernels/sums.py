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
from rollmill.fusion.lower.scalarise import Scalarised
from rollmill.fusion.lower.values import OuterProduct, Value, is_value


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


def sums_of(scalarised: Scalarised) -> list[Sum]:
    """The results of a function that was scalarised to be summed, leaf by leaf."""
    first, found = 0, []
    for value in jax.tree.leaves(scalarised.outputs, is_leaf=is_value):
        found.append(_sum(value, first))
        first += len(found[-1].left.places) + len(found[-1].right.places if found[-1].right else ())
    return found


def _sum(value: Value, first: int) -> Sum:
    if not isinstance(value, OuterProduct):
        return Sum(output_leaf(value, first))
    left = output_leaf(value.left, first)
    return Sum(left, output_leaf(value.right, first + len(left.places)))


def mean_of(found: Sum, outputs: Sequence[Array], num_samples: int, precision: Any) -> Array:
    """The mean over samples, from a program's outputs for all of them: the reference for kernels."""
    if not found.is_computed:
        return jnp.asarray(found.left.same, found.left.dtype)
    left = found.left.join(outputs, num_samples)
    if found.right is None:
        return jnp.mean(left, axis=0)
    right = found.right.join(outputs, num_samples)
    product = jax.lax.dot(left.T, right, precision=precision, preferred_element_type=np.dtype(np.float32))
    return product / num_samples
