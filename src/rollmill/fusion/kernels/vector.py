"""A network as one vector, so that an element-wise optimiser makes one step for all leaves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


class Vector(NamedTuple):
    """The leaves of a pytree, concatenated into one vector."""

    numbers: Float[Array, " size"]
    leaves: list[Array]
    """The leaves, as slices of `numbers`."""

    def offset_of(self, array: Any) -> int | None:
        """Returns the index of a leaf's first element in the vector, or None for any other array."""
        first = 0
        for leaf in self.leaves:
            # Compares identities, because a prologue returns an unchanged argument as the same object.
            if leaf is array:
                return first
            first += leaf.size
        return None


def as_vector(tree: PyTree[Array]) -> Float[Array, " size"]:
    """Concatenates the leaves of a pytree into one vector."""
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])


def split_vector(
    numbers: Float[Array, " size"], like: PyTree[jax.ShapeDtypeStruct]
) -> tuple[PyTree[Array], Vector]:
    """Splits a vector into a pytree with the shapes of `like`.

    Returns the pytree, and a `Vector` with the position of each of its leaves.
    """
    leaves, first = [], 0
    for leaf in jax.tree.leaves(like):
        leaves.append(numbers[first : first + leaf.size].reshape(leaf.shape))
        first += leaf.size
    return jax.tree.unflatten(jax.tree.structure(like), leaves), Vector(numbers, leaves)


def can_be_vector(tree: PyTree[Any]) -> bool:
    """Returns whether all leaves of a pytree are float32, and there is at least one."""
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(leaf.dtype == jnp.float32 for leaf in leaves)
