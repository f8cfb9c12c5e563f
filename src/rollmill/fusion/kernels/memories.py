"""Orders a rollout step's writes to large arrays of the environment state, and performs them with JAX functions.

A step loads elements as they were when it began, so all loads precede the first store. A write that fills a whole
array is an exception: it loads elements while it stores others. It therefore precedes the writes to every other
array that it reads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rollmill.core.errors import CannotFuse
from rollmill.fusion.ir import evaluate
from rollmill.fusion.kernels.leaves import CellStore, Fill, Leaf
from rollmill.fusion.lower.large_arrays import memories_read


def in_order_of_writes(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Returns the leaves in memory that a step writes to, in an order that reads before it overwrites.

    Raises:
        CannotFuse: there is no such order, because several arrays are replaced by elements of each other.
    """
    waiting = [leaf for leaf in leaves if leaf.writes]
    read = {leaf.memory: _read_by_fills(leaf) for leaf in waiting}
    ordered: list[Leaf] = []
    while waiting:
        is_free = lambda leaf: not any(leaf.memory in read[other.memory] for other in waiting if other is not leaf)
        free = [leaf for leaf in waiting if is_free(leaf)]
        if not free:
            shapes = ", ".join(str(leaf.shape) for leaf in waiting)
            raise CannotFuse(
                f"a step replaces several arrays, of shapes {shapes}, with elements of each other.",
                advice="write to another array, and read it in the next step",
            )
        ordered += free[:1]
        waiting.remove(free[0])
    return ordered


def _read_by_fills(leaf: Leaf) -> set[int]:
    programs = [write.program for write in leaf.writes if isinstance(write, Fill)]
    return {memory for program in programs for memory in memories_read(program.nodes())}


class StepResults(NamedTuple):
    """Outputs of one step of a kernel program, and the arrays that the step read."""

    outputs: Sequence[Array]
    memories: Sequence[Array]
    """Large arrays as they were before the step, `[E, size]`."""
    uniforms: Sequence[Array]


def apply_writes(leaf: Leaf, step: StepResults) -> Array:
    """Returns a large array `[E, size]` after applying the writes of a step."""
    assert leaf.memory is not None
    now = step.memories[leaf.memory]
    each = jnp.arange(len(now))
    for write in leaf.writes:
        holds = jnp.ones(len(now), bool) if write.condition is None else step.outputs[write.condition]
        if isinstance(write, CellStore):
            place = step.outputs[write.place]
            now = now.at[each, place].set(jnp.where(holds, step.outputs[write.value], now[each, place]))
        else:
            now = jnp.where(holds[:, None], _fill_elements(write, step, now.shape), now)
    return now


def _fill_elements(fill: Fill, step: StepResults, shape: tuple[int, ...]) -> Array:
    """Returns the elements `[E, size]` that a fill stores."""
    block, size = shape
    captured = [step.outputs[n] for n in fill.captures]

    def element(place: Array) -> Array:
        inputs = [jnp.broadcast_to(place, (block,)), *captured]
        (found,) = evaluate(fill.program, inputs, step.uniforms, block=block, memories=step.memories)
        return found

    return jax.vmap(element, out_axes=1)(jnp.arange(size, dtype=jnp.int32))
