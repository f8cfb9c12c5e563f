"""Packages of several producers joined along an axis, straight into the batch that a trainer takes."""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.channels.layout import Layout, LeafLayout, aligned, fresh_buffer
from rollmill.core.errors import UsageError


@dataclass(frozen=True)
class BatchLayout:
    """Where each of `count` packages goes in the batch."""

    batch: Layout
    axes: tuple[int, ...]
    """The axis of each leaf along which packages are put together, not negative."""
    count: int

    @staticmethod
    def of(package: Layout, axis: int | PyTree[int], count: int) -> "BatchLayout":
        """For packages of one layout.

        Args:
            package: layout of each.
            axis: one number, or a tree of them that is like the package's or begins like it.
            count: how many are joined.

        Raises:
            UsageError: a leaf does not have the axis.
        """
        spread = jax.tree.broadcast(axis, jax.tree.unflatten(package.structure, range(len(package.leaves))))
        axes = tuple(map(_positive, package.leaves, jax.tree.leaves(spread)))
        leaves, offset = [], 0
        for leaf, at in zip(package.leaves, axes, strict=True):
            shape = (*leaf.shape[:at], leaf.shape[at] * count, *leaf.shape[at + 1 :])
            leaves.append(leaf._replace(shape=shape, offset=offset))
            offset = aligned(offset + leaves[-1].nbytes)
        return BatchLayout(Layout(package.structure, tuple(leaves), offset), axes, count)

    def places(self) -> tuple[PyTree[np.ndarray], list[list[np.ndarray]]]:
        """A batch in fresh memory, and for each package the views of it that the package fills."""
        views = self.batch.flat_views(fresh_buffer(self.batch.nbytes))
        parts = [np.split(view, self.count, axis) for view, axis in zip(views, self.axes, strict=True)]
        return self.batch.unflatten(views), [[leaf[i] for leaf in parts] for i in range(self.count)]


def _positive(leaf: LeafLayout, axis: int) -> int:
    rank = len(leaf.shape)
    if not -rank <= axis < rank:
        raise UsageError(f"{leaf} has no axis {axis} to join packages along. Send it as an array of more axes.")
    return axis % rank
