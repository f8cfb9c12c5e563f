"""Concatenates messages along an axis. Each message is copied directly into its part of the batch."""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.channels.layout import Layout, LeafLayout, aligned, fresh_buffer
from rollmill.core.errors import UsageError


@dataclass(frozen=True)
class BatchLayout:
    """The memory layout of a batch of `count` concatenated messages."""

    batch: Layout
    """Memory layout of the whole batch."""
    axes: tuple[int, ...]
    """Axis along which each leaf is concatenated, not negative."""
    count: int
    """Number of messages in the batch."""

    @staticmethod
    def of(message: Layout, axis: int | PyTree[int], count: int) -> "BatchLayout":
        """Returns the layout of `count` messages concatenated along an axis.

        The axis is one integer for all leaves, or a pytree of integers, and may be negative. Raises a `UsageError`
        if a leaf lacks this axis.
        """
        axis_tree = jax.tree.broadcast(axis, jax.tree.unflatten(message.structure, range(len(message.leaves))))
        axes = tuple(map(_positive, message.leaves, jax.tree.leaves(axis_tree)))
        leaves, offset = [], 0
        for leaf, leaf_axis in zip(message.leaves, axes, strict=True):
            shape = (*leaf.shape[:leaf_axis], leaf.shape[leaf_axis] * count, *leaf.shape[leaf_axis + 1 :])
            leaves.append(leaf._replace(shape=shape, offset=offset))
            offset = aligned(offset + leaves[-1].nbytes)
        return BatchLayout(Layout(message.structure, tuple(leaves), offset), axes, count)

    def allocate(self) -> tuple[PyTree[np.ndarray], list[list[np.ndarray]]]:
        """Allocates a batch, and returns it with a list of views for each message to fill."""
        leaves = self.batch.flat_views(fresh_buffer(self.batch.nbytes))
        parts = [np.split(leaf, self.count, axis) for leaf, axis in zip(leaves, self.axes, strict=True)]
        return self.batch.unflatten(leaves), [[part[i] for part in parts] for i in range(self.count)]


def _positive(leaf: LeafLayout, axis: int) -> int:
    rank = len(leaf.shape)
    if not -rank <= axis < rank:
        raise UsageError(
            f"{leaf} has no axis {axis} to concatenate messages along. hint: send an array with more axes."
        )
    return axis % rank
