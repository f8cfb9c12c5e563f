"""Gradients of networks with wide layers, whose sums over samples do not fit on the chip.

The gradient of a matrix of 256 x 256 takes all registers of a multiprocessor. A kernel then writes both vectors
of the outer product of each sample to memory, and one matrix product after the kernel adds up all samples.
Everything else is summed in the kernel as usual, and rows are divided into tiles.

Shape letters: `N` samples of a minibatch, `O` and `I` rows and columns of a gradient.
"""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rollmill.core.errors import CannotFuse
from rollmill.core.machine import Numerics
from rollmill.fusion.ir import Node
from rollmill.fusion.kernels.gradients import GradientStep
from rollmill.fusion.kernels.leaves import Leaf
from rollmill.fusion.kernels.sums import LeafPair, Sum
from rollmill.fusion.opt.row_tiles import divide_into_tiles, largest_tiled_size

MAX_SUMMED = 4_096
"""Maximum number of elements of a matrix whose gradient a kernel sums in registers: 64 x 64, which is 32 registers
per thread of 4 warps."""

MIN_SIDE = 16
"""Vectors with at most this many elements share tiles with others, however large the gradient is."""

StoredRow = tuple[Node, ...]
"""A row of each sample, written to memory tile by tile."""


class OfStored(NamedTuple):
    """How to compute a gradient from stored rows: a matrix as products of rows, or a bias as a sum of rows."""

    pairs: list[tuple[int, int]]
    """Pairs of stored rows, by number, whose matrix products are added."""
    row: int | None = None
    """Number of the row that is summed over samples, if there are no products."""


class WideGradients(NamedTuple):
    """The tiled program of a sample's gradients, and how to compute results from the rows that it stores."""

    step: GradientStep
    """The step whose sums the kernel accumulates."""
    stored: list[StoredRow]
    results: list[OfStored | int]
    """The gradients in order, each computed from stored rows, or given as the size of a sum of the kernel."""

    def assembled(
        self, means: Float[Array, " own"], rows: Sequence[Float[Array, "N width"]], numerics: Numerics
    ) -> Float[Array, " size"]:
        """Returns the means of all results over samples, from the kernel's means and the rows that the kernel has
        stored.
        """
        precision = "highest" if numerics == "float32" else None
        first, parts = 0, []

        def product(one: int, other: int) -> Array:
            left, right = rows[one], rows[other]
            over_samples = (((0,), (0,)), ((), ()))
            return jax.lax.dot_general(
                left, right, over_samples, precision=precision, preferred_element_type=jnp.dtype(jnp.float32)
            )

        for result in self.results:
            if isinstance(result, int):
                parts.append(means[first : first + result])
                first += result
            elif result.row is not None:
                parts.append(jnp.mean(rows[result.row], axis=0, dtype=jnp.float32))
            else:
                total = reduce(jnp.add, [product(*pair) for pair in result.pairs])
                parts.append(total.reshape(-1) / rows[0].shape[0])
        return jnp.concatenate(parts)


def largest_summed_size(step: GradientStep) -> int:
    """Returns the number of elements of the largest matrix that a gradient kernel can read in tiles, or 0.

    The result is 0 for sequences, and for networks that a sample uses several times, such as once for each agent.
    """
    if step.carried_leaves or any(len(each.pairs) > 1 for each in step.sums):
        return 0
    return largest_tiled_size(step.program)


@lru_cache(maxsize=16)
def wide_gradients(step: GradientStep, tile: int) -> WideGradients:
    """Returns a gradient step in which no row has more than `tile` columns. A row is a vector of one sample.

    Gradients of weight matrices that are too large to be summed in a kernel are left out of the step's sums. For
    these, the kernel stores the two vectors of each sample's outer product, and `WideGradients.assembled`
    multiplies them.

    Raises:
        CannotFuse: the step belongs to a sequence, a wider row is an input or is used in a loop, or rows cannot be
            divided into whole tiles.
    """
    found = None if step.carried_leaves else divide_into_tiles(step.program, tile)
    if found is None:
        raise CannotFuse(f"the gradients cannot be computed in tiles of {tile} columns.")
    split = lambda side: tuple(part for leaf in side for part in _split(leaf, found.outputs, tile))
    rows_of = lambda side: tuple(found.program.outputs[place] for leaf in split(side) for place in leaf.places)
    large = {
        n: [tuple(map(rows_of, pair)) for pair in each.pairs]
        for n, each in enumerate(step.sums)
        if _is_large(each)
    }
    stored = list(dict.fromkeys(row for pairs in large.values() for pair in pairs for row in pair))
    own, results = [], []
    for n, each in enumerate(step.sums):
        if n in large:
            results.append(OfStored([(stored.index(left), stored.index(right)) for left, right in large[n]]))
        elif each.leaves and each.is_computed and (row := rows_of(each.leaves)) in stored:
            results.append(OfStored([], stored.index(row)))
        else:
            own.append(Sum(split(each.leaves), tuple(LeafPair(*map(split, pair)) for pair in each.pairs)))
            results += [each.size] if each.is_computed else []
    lowered = dataclasses.replace(step.lowered, program=found.program)
    return WideGradients(dataclasses.replace(step, lowered=lowered, sums=own), stored, results)


def _is_large(each: Sum) -> bool:
    """Returns whether a sum of outer products of rows is left to a matrix product after the kernel."""
    leaves = [leaf for pair in each.pairs for side in pair for leaf in side]
    return (
        bool(leaves)
        and all(leaf.width for leaf in leaves)
        and min(each.shape) > MIN_SIDE
        and each.size > MAX_SUMMED
    )


def _split(leaf: Leaf, outputs: Sequence[tuple[int, ...]], tile: int) -> tuple[Leaf, ...]:
    """Returns the leaves of the tiles of a leaf."""
    places = [place for output in leaf.places for place in outputs[output]]
    if leaf.width is None or leaf.width <= tile:
        return (leaf._replace(places=tuple(places)),)
    if leaf.width % tile == 0 and len(leaf.places) > 1:
        return (leaf._replace(places=tuple(places), width=tile),)
    if len(leaf.places) > 1:
        raise CannotFuse(f"rows of {leaf.width} columns cannot be divided into tiles of {tile}.")
    widths = [min(tile, leaf.width - first) for first in range(0, leaf.width, tile)]
    return tuple(Leaf((width,), leaf.dtype, (place,), width) for width, place in zip(widths, places, strict=True))
