"""Concatenates messages along an axis. Each message is copied directly into its part of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rollmill.channels.layout import Layout, LeafLayout, fresh_buffer, round_to_alignment
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
            offset = round_to_alignment(offset + leaves[-1].nbytes)
        return BatchLayout(Layout(message.structure, tuple(leaves), offset), axes, count)

    def allocate(self) -> tuple[PyTree[np.ndarray], list[list[np.ndarray]]]:
        """Allocates a batch, and returns it with a list of views for each message to fill."""
        leaves = self.batch.flat_views(fresh_buffer(self.batch.nbytes))
        parts = [np.split(leaf, self.count, axis) for leaf, axis in zip(leaves, self.axes, strict=True)]
        return self.batch.unflatten(leaves), [[part[i] for part in parts] for i in range(self.count)]


class MessageBatch:
    """A batch to which messages are added one after the other."""

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._on_host: tuple[PyTree[np.ndarray], list[list[np.ndarray]]] | None = None
        self._parts: list[Sequence[np.ndarray | jax.Array]] = []

    def add(self, leaves: Sequence[np.ndarray | jax.Array]) -> None:
        """Adds the next message. Leaves on the host are copied, and those on a GPU are kept."""
        if not isinstance(leaves[0], jax.Array):
            self._on_host = self._on_host or self._layout.allocate()
            part = self._on_host[1][len(self._parts)]
            for destination, leaf in zip(part, leaves, strict=True):
                np.copyto(destination, leaf, casting="no")
            leaves = part
        self._parts.append(leaves)

    def tree(self) -> PyTree[np.ndarray | jax.Array]:
        """Returns the batch, once all messages were added."""
        assert len(self._parts) == self._layout.count
        if self._on_host is not None and not any(isinstance(part[0], jax.Array) for part in self._parts):
            return self._on_host[0]
        leaves = self._parts[0] if len(self._parts) == 1 else _concatenate(self._parts, self._layout.axes)
        return jax.tree.unflatten(self._layout.batch.structure, leaves)


@partial(jax.jit, static_argnums=1)
def _concatenate(parts: Sequence[Sequence[Any]], axes: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.concatenate(leaves, axis) for leaves, axis in zip(zip(*parts, strict=True), axes, strict=True)]


def _positive(leaf: LeafLayout, axis: int) -> int:
    rank = len(leaf.shape)
    if not -rank <= axis < rank:
        raise UsageError(
            f"{leaf} has no axis {axis} to concatenate messages along. hint: send an array with more axes."
        )
    return axis % rank
