"""Runs a program with JAX functions on any device, as the reference for kernels."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rollmill.fusion.ir.fold import is_short_float
from rollmill.fusion.ir.node import Loop, Node, Program
from rollmill.fusion.ir.operations import OPERATIONS, ROWS, TYPED


class Arrays(NamedTuple):
    """The arrays that a program reads while JAX functions evaluate it."""

    inputs: Sequence[Array]
    uniforms: Sequence[Array]
    memories: Sequence[Array]
    block: int


def evaluate(
    program: Program,
    inputs: Sequence[Array],
    uniforms: Sequence[Array],
    *,
    block: int,
    precision: Any = None,
    memories: Sequence[Array] = (),
) -> list[Array]:
    """Returns the outputs of a program for a block of environments, as arrays `[block]` or `[block, width]`.

    `inputs` have these shapes too. `uniforms` are the arrays that nodes read by slot, and `memories` are large
    arrays of the environment state, `[block, size]`. `precision` is passed to `jax.lax.dot`.
    """
    results: dict[Node, Any] = {}
    arrays = Arrays(inputs, uniforms, memories, block)
    for node in program.nodes():
        results[node] = _value(node, [results[operand] for operand in node.operands], arrays, precision)
    shape = lambda node: (block,) if node.width is None else (block, node.width)
    return [jnp.broadcast_to(results[node], shape(node)) for node in program.outputs]


def _value(node: Node, operands: list[Any], arrays: Arrays, precision: Any):
    if node.op in OPERATIONS:
        return _operation(node, _alike(node, operands))
    if node.op in TYPED:
        convert = jax.lax.convert_element_type if node.op == "convert" else jax.lax.bitcast_convert_type
        return _round(convert(_alike(node, operands)[0], node.dtype))
    if node.op in ROWS:
        return _row_value(node, operands, arrays.uniforms, precision)
    return _structural_value(node, operands, arrays, precision)


def _operation(node: Node, operands: list[Any]) -> Array:
    """Floats of 16 bits are computed with in float32, and rounded after each operation, as in kernels."""
    # A select returns one of its operands unchanged, and its condition is not a float.
    if node.op == "select" or not any(is_short_float(x.dtype) for x in operands):
        return OPERATIONS[node.op](*operands)
    result = OPERATIONS[node.op](*(x.astype(jnp.float32) for x in operands))
    return _round(result.astype(node.dtype))


def _round(x: Array) -> Array:
    """Puts a barrier after 16-bit floats, because XLA may otherwise omit the rounding between two operations."""
    return jax.lax.optimization_barrier(x) if is_short_float(x.dtype) else x


def _structural_value(node: Node, operands: list[Any], arrays: Arrays, precision: Any):
    match node.op:
        case "input":
            return arrays.inputs[node.attributes[0]]
        case "constant":
            return jnp.asarray(node.value, node.dtype)
        case "uniform":
            slot, place = node.attributes
            flat = arrays.uniforms[slot].reshape(-1)
            return flat[place] if node.width is None else flat[place : place + node.width]
        case "table":
            return arrays.uniforms[node.attributes[0]].reshape(-1)[operands[0]]
        case "cell":
            places = jnp.broadcast_to(operands[0], (arrays.block,))
            return arrays.memories[node.attributes[0]][jnp.arange(arrays.block), places]
        case "loop":
            return _loop(node, operands, arrays, precision)
        case "item":
            return operands[0][node.attributes[0]]
    raise ValueError(f"unknown operation {node.op!r}")


def _alike(node: Node, operands: list[Any]) -> list[Any]:
    """Operands of one shape: scalars become columns where the result is a row."""
    if node.width is not None:
        # Adds a trailing axis of length one, because `[block]` would otherwise be broadcast along the columns.
        pairs = zip(node.operands, operands, strict=True)
        operands = [x[..., None] if operand.width is None else x for operand, x in pairs]
    shape = np.broadcast_shapes(*(jnp.shape(x) for x in operands))
    return [jnp.broadcast_to(x, shape) for x in operands]


def _row_value(node: Node, operands: list[Any], uniforms: Sequence[Array], precision: Any) -> Array:
    first = operands[0]
    match node.op:
        case "splat":
            return jnp.broadcast_to(first[..., None], (*jnp.shape(first), node.width))
        case "stack":
            return jnp.stack(jnp.broadcast_arrays(*operands), axis=-1)
        case "column":
            return first[..., node.attributes[0]]
        case "row_sum":
            return first.sum(axis=-1)
        case "row_max":
            return first.max(axis=-1)
        case "row_min":
            return first.min(axis=-1)
    slot, row, column, size, transposed = node.attributes
    stored = uniforms[slot].reshape(-1, size)
    matrix = stored.T if transposed else stored
    own = matrix[row : row + (node.operands[0].width or 1), column : column + (node.width or 1)]
    return jax.lax.dot(first, own, precision=precision, preferred_element_type=node.dtype)


def _loop(node: Node, operands: list[Any], arrays: Arrays, precision: Any) -> list[Array]:
    """Runs a loop, in which each environment continues for as long as its own condition holds."""
    loop: Loop = node.attributes[0]
    count = len(loop.body.outputs)
    block, uniforms, memories = arrays.block, arrays.uniforms, arrays.memories
    widths = [node.width for node in loop.body.outputs]
    whole = lambda x, width: jnp.broadcast_to(x, (block,) if width is None else (block, width))
    carried = [whole(x, width) for x, width in zip(operands[:count], widths, strict=True)]
    middle = len(loop.body.inputs)
    of_body, of_condition = operands[count:middle], operands[middle:]

    def turn(carried: list[Array]) -> list[Array]:
        now = [*carried, *of_body]
        return evaluate(loop.body, now, uniforms, block=block, precision=precision, memories=memories)

    condition = loop.condition
    if condition is None:
        return jax.lax.fori_loop(0, loop.trip_count, lambda _, now: turn(now), carried)
    asked = lambda now: [*now, *of_condition]
    goes_on = lambda now: evaluate(condition, asked(now), uniforms, block=block, memories=memories)[0]

    def masked(now: list[Array]) -> list[Array]:
        # A block continues as long as any environment does. The other environments compute as well, but keep their
        # values.
        going = goes_on(now)
        keep = lambda new, old: jnp.where(going if new.ndim == 1 else going[:, None], new, old)
        return [keep(new, old) for new, old in zip(turn(now), now, strict=True)]

    return jax.lax.while_loop(lambda now: jnp.any(goes_on(now)), masked, carried)
