"""A network as one vector, on which an element-wise optimiser takes one step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


class Vector(NamedTuple):
    """The leaves of a tree, concatenated to one vector."""

    numbers: Float[Array, " size"]
    leaves: list[Array]
    """Cut out of `numbers`."""

    def offset_of(self, array: Any) -> int | None:
        """Returns the offset of a leaf in the vector, or None for other arrays."""
        first = 0
        for leaf in self.leaves:
            # By identity: a prologue hands on an argument that it does not change as the same object.
            if leaf is array:
                return first
            first += leaf.size
        return None


def as_vector(tree: PyTree[Array]) -> Float[Array, " size"]:
    """Returns the elements of a tree's leaves as one vector."""
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])


def cut(numbers: Float[Array, " size"], like: PyTree[jax.ShapeDtypeStruct]) -> tuple[PyTree[Array], Vector]:
    """Returns the tree encoded by a vector, and its leaves."""
    leaves, first = [], 0
    for leaf in jax.tree.leaves(like):
        leaves.append(numbers[first : first + leaf.size].reshape(leaf.shape))
        first += leaf.size
    return jax.tree.unflatten(jax.tree.structure(like), leaves), Vector(numbers, leaves)


def can_be_vector(tree: PyTree[Any]) -> bool:
    """Returns whether all leaves are of float32."""
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(leaf.dtype == jnp.float32 for leaf in leaves)
