"""Arrays without elements in a training state that is divided among devices.

XLA drops the sharding of an array without elements. A program that takes and returns such an array, for example
the readings of a robot without sensors, then rejects its own result, or ends the process with a segmentation fault
(jaxlib 0.10 and 0.11). Programs for several devices therefore neither take nor return such arrays, but create them
again.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree


class EmptyArrays(NamedTuple):
    """The leaves without elements of a tree whose leaves are divided among devices."""

    structure: Any
    """The structure of the tree."""
    arrays: dict[int, Array]
    """The leaves without elements on all devices, by their number among the leaves of the tree."""

    @classmethod
    def of(cls, tree: PyTree[jax.ShapeDtypeStruct], shardings: PyTree[NamedSharding]) -> "EmptyArrays":
        """Finds the leaves without elements. On a single device they are like all others, and none is returned."""
        leaves, structure = jax.tree.flatten(tree)
        arrays: dict[int, Array] = {}
        for number, (leaf, sharding) in enumerate(zip(leaves, jax.tree.leaves(shardings), strict=True)):
            if leaf.size or sharding.num_devices == 1:
                continue
            part = np.zeros(sharding.shard_shape(leaf.shape), leaf.dtype)
            arrays[number] = jax.make_array_from_callback(leaf.shape, sharding, lambda _, part=part: part)
        return cls(structure, arrays)

    def removed_from(self, tree: PyTree[Any]) -> PyTree[Any]:
        """Returns the tree with each leaf without elements replaced by None."""
        if not self.arrays:
            return tree
        kept = (None if number in self.arrays else leaf for number, leaf in enumerate(jax.tree.leaves(tree)))
        return jax.tree.unflatten(self.structure, kept)

    def added_to(self, tree: PyTree[Any]) -> PyTree[Any]:
        """Returns a tree on all devices with its leaves without elements."""
        return self._complete(tree, self.arrays) if self.arrays else tree

    def added_to_part(self, tree: PyTree[Any]) -> PyTree[Any]:
        """Returns a single device's part of the tree with its leaves without elements."""
        part = lambda whole: jnp.zeros(whole.sharding.shard_shape(whole.shape), whole.dtype)
        return self._complete(tree, jax.tree.map(part, self.arrays)) if self.arrays else tree

    def _complete(self, tree: PyTree[Any], arrays: dict[int, Array]) -> PyTree[Any]:
        others = iter(jax.tree.leaves(tree))
        numbers = range(self.structure.num_leaves)
        return jax.tree.unflatten(self.structure, [arrays[n] if n in arrays else next(others) for n in numbers])


NO_EMPTY_ARRAYS = EmptyArrays(None, {})
"""Removes nothing from a tree, and adds nothing to it."""
