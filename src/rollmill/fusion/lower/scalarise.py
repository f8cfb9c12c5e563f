"""Reads the jaxpr of a function of ONE environment, and makes the program that computes it for blocks of them.

What does not depend on the environment is computed beside the kernel, by the program that is being traced around
it, and handed in as uniform arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from rollmill.fusion.errors import CannotFuse, LoweringError
from rollmill.fusion.ir import Node, Program, Region, is_float
from rollmill.fusion.lower.context import Lowering, Uniforms
from rollmill.fusion.lower.invariants import ConstLabel, ValueClasses
from rollmill.fusion.lower.jaxpr import TYPES, lower_jaxpr
from rollmill.fusion.lower.rules.products import materialised
from rollmill.fusion.lower.rules.random import check_threefry
from rollmill.fusion.lower.values import (
    LEAST_ROW,
    Concat,
    Const,
    KeyPair,
    OuterProduct,
    RowArray,
    ScalarArray,
    Uniform,
    Value,
    check_size,
    filled,
    flat_nodes,
    is_key,
    shared,
)


class Scalarised(NamedTuple):
    """A program, and how the arrays of the function lie in its inputs and outputs."""

    program: Program
    """An input that is known, or equal to an earlier one, is that."""
    uniforms: list[Array]
    """What its nodes read by slot."""
    inputs: PyTree[ScalarArray | RowArray]
    """In the structure of `each`: the program's inputs."""
    outputs: PyTree[Const | Uniform | ScalarArray | RowArray | OuterProduct]
    """In the structure that the function returns. The nodes of `ScalarArray`, `RowArray` and both sides of an
    `OuterProduct` are the program's outputs, in order; what is known or uniform is not computed by it."""


def scalarise(
    function: Callable[..., Any],
    each: Sequence[PyTree[jax.ShapeDtypeStruct]],
    uniform: Sequence[PyTree[Array]] = (),
    *,
    carried: bool = False,
    summed: bool = False,
    assumed: ValueClasses = (),
) -> Scalarised:
    """The program of `function(*uniform, *each)`.

    Args:
        function: of one environment.
        each: shapes of the arguments that differ from environment to environment; each array becomes inputs of
            the program in row-major order, one a number, or one a row. A random key is two numbers.
        uniform: arguments that all environments have in common: arrays, known or traced.
        carried: whether the function returns a tuple whose first part is handed in again as the first of `each`:
            then both lie in the same way, and nothing of it is left to be known or uniform.
        summed: whether only sums of the results over environments are wanted: then products of two vectors, such
            as gradients of matrices, are left as `OuterProduct`.
        assumed: of the first leaves in `each`, which numbers are known or equal to another.

    Raises:
        CannotFuse: a primitive that has no meaning in a kernel, or arrays too large for it.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*uniform, *each)
    count = len(jax.tree.leaves(each[0])) if carried else 0
    common = list(map(shared, jax.tree.leaves(uniform)))
    task = _Task(closed, common, jax.tree.leaves(each), count, summed, assumed)
    in_rows = [_is_row(leaf) for leaf in task.leaves]
    try:
        done = _with_layout(task, in_rows)
    except CannotFuse:
        if not any(in_rows):
            raise
        done = _without_rows(task)
        if done is None:
            raise
    inputs = jax.tree.unflatten(jax.tree.structure(tuple(each)), done.inputs)
    outputs = jax.tree.unflatten(jax.tree.structure(shape), done.outputs)
    return done._replace(inputs=inputs, outputs=outputs)


class _Task(NamedTuple):
    """A traced function, and what it is called with."""

    closed: jax.extend.core.ClosedJaxpr
    common: list[Const | Uniform]
    leaves: list[Any]
    """Shapes of what differs from environment to environment."""
    carried: int
    """How many of the first of them are handed in again."""
    summed: bool
    """Whether only sums of the results are wanted."""
    assumed: ValueClasses
    """Assumed of the first leaves."""


def _with_layout(task: _Task, in_rows: list[bool]) -> Scalarised:
    """The program for inputs in rows or scalars; carried ones are in rows where they come back as such."""
    while True:
        ctx = Lowering(Region(), Uniforms(), lower_jaxpr)
        inputs = _inputs(ctx.region, task, in_rows)
        values = _results(ctx, task, inputs)
        back = [isinstance(value, RowArray | Concat) for value in values[: task.carried]]
        back += [False] * (len(in_rows) - len(back))
        wanted = [before or row for before, row in zip(in_rows, back, strict=True)]
        if wanted == in_rows:
            break
        in_rows = wanted
    outputs = [_output(ctx, value, in_rows[n] if n < task.carried else None) for n, value in enumerate(values)]
    nodes = [node for value in outputs for node in flat_nodes(value)]
    program = ctx.region.program(nodes)
    taken = tuple(node for value in inputs for node in flat_nodes(value))
    return Scalarised(program._replace(inputs=taken), _read_by(program, ctx.uniforms.arrays), inputs, outputs)


def _read_by(program: Program, arrays: Sequence[Array]) -> list[Array]:
    """Uniform arrays, of which those that nothing reads need not be computed."""
    read = program.slots()
    return [array if slot in read else jnp.zeros(1, array.dtype) for slot, array in enumerate(arrays)]


def _results(ctx: Lowering, task: _Task, inputs: Sequence[ScalarArray | RowArray]) -> list[Value]:
    values = lower_jaxpr(task.closed, [*task.common, *inputs], ctx)
    if task.summed:
        return values
    try:
        return [materialised(ctx, value) if isinstance(value, OuterProduct) else value for value in values]
    except LoweringError as error:
        raise CannotFuse(f"a result cannot be fused: {error}.") from error


def _without_rows(task: _Task) -> Scalarised | None:
    """The program for inputs of which none is in rows, which can be cut as one likes; None where there is none."""
    try:
        return _with_layout(task, [False] * len(task.leaves))
    except CannotFuse:
        return None


def _is_row(leaf: jax.ShapeDtypeStruct) -> bool:
    is_number = not is_key(leaf.dtype) and is_float(np.dtype(leaf.dtype))
    return is_number and len(leaf.shape) > 0 and leaf.shape[-1] >= LEAST_ROW


def _inputs(region: Region, task: _Task, in_rows: Sequence[bool]) -> list[ScalarArray | RowArray]:
    """A node for each number that is handed in, or row; what is known, or another again, is that."""
    unlabelled = [None] * (len(task.leaves) - len(task.assumed))
    met: dict[Any, Node] = {}
    try:
        return [
            _input(region, leaf, row, met, labels)
            for leaf, row, labels in zip(task.leaves, in_rows, [*task.assumed, *unlabelled], strict=True)
        ]
    except LoweringError as error:
        raise CannotFuse(str(error)) from error


def _input(
    region: Region, leaf: jax.ShapeDtypeStruct, in_rows: bool, met: dict[Any, Node], labels: Any
) -> ScalarArray | RowArray:
    if is_key(leaf.dtype):
        check_threefry(leaf.dtype)
        return filled(leaf.shape, leaf.dtype, lambda at: KeyPair(region.input(np.uint32), region.input(np.uint32)))
    dtype = np.dtype(leaf.dtype)
    if dtype.name not in TYPES:
        raise LoweringError(f"an argument of type {dtype.name} cannot be fused; kernels know {', '.join(TYPES)}")
    if in_rows:
        width = leaf.shape[-1]
        rows = filled(leaf.shape[:-1], dtype, lambda at: region.input(dtype, width))
        return RowArray(rows.nodes, width, dtype)
    check_size(leaf.shape, "an argument: the state")
    numbers = filled(leaf.shape, dtype, lambda at: region.input(dtype))
    for at, label in zip(np.ndindex(*leaf.shape), labels or (), strict=bool(labels)):
        known = isinstance(label, ConstLabel)
        numbers.nodes[at] = (
            region.constant(label.value, dtype) if known else met.setdefault(label, numbers.nodes[at])
        )
    return numbers


def _output(
    ctx: Lowering, value: Value, in_rows: bool | None
) -> Const | Uniform | ScalarArray | RowArray | OuterProduct:
    """A value as it leaves the program; `in_rows` says how it must lie, or None that it need not."""
    if 0 in value.shape:
        return Const(np.zeros(value.shape, value.dtype))
    try:
        if in_rows is not None:
            return ctx.rows(value) if in_rows else ctx.scalars(value)
        match value:
            case Concat():
                return ctx.scalars(value)
            case OuterProduct(left, right, dtype):
                one, other = (_output(ctx, side, _lies_in_rows(side)) for side in (left, right))
                return OuterProduct(one, other, dtype)
            case Uniform():
                return Uniform(ctx.uniforms.picked(value))
        return value
    except LoweringError as error:
        raise CannotFuse(f"a result cannot be fused: {error}.") from error


def _lies_in_rows(side: Value) -> bool:
    """Whether a side of a product is a row, and not single numbers."""
    return isinstance(side, RowArray | Concat) or (
        not isinstance(side, ScalarArray) and side.shape[-1] >= LEAST_ROW
    )
