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

from rollmill.fusion.folding import is_float
from rollmill.fusion.invariants import Fixed, Labels
from rollmill.fusion.ir import Node, Program, Region
from rollmill.fusion.making import Making, Uniforms
from rollmill.fusion.reading import TYPES, read
from rollmill.fusion.refusals import CannotFuse, NotLowered
from rollmill.fusion.rules.products import written_out
from rollmill.fusion.rules.random import check_threefry
from rollmill.fusion.values import (
    LEAST_ROW,
    Joined,
    KeyPair,
    Known,
    Outer,
    Rows,
    Scalars,
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
    inputs: PyTree[Scalars | Rows]
    """In the structure of `each`: the program's inputs."""
    outputs: PyTree[Known | Uniform | Scalars | Rows | Outer]
    """In the structure that the function returns; nodes of `Scalars` and `Rows`, and of both sides of an `Outer`,
    are the program's outputs, in order, and what is known or uniform is not computed by it."""


def scalarise(
    function: Callable[..., Any],
    each: Sequence[PyTree[jax.ShapeDtypeStruct]],
    uniform: Sequence[PyTree[Array]] = (),
    *,
    carried: bool = False,
    summed: bool = False,
    assumed: Labels = (),
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
            as gradients of matrices, are left as `Outer`.
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
    common: list[Known | Uniform]
    leaves: list[Any]
    """Shapes of what differs from environment to environment."""
    carried: int
    """How many of the first of them are handed in again."""
    summed: bool
    """Whether only sums of the results are wanted."""
    assumed: Labels
    """Of the first leaves."""


def _with_layout(task: _Task, in_rows: list[bool]) -> Scalarised:
    """The program for inputs in rows or scalars; carried ones are in rows where they come back as such."""
    while True:
        making = Making(Region(), Uniforms(), read)
        inputs = _inputs(making.region, task, in_rows)
        values = _results(making, task, inputs)
        back = [isinstance(value, Rows | Joined) for value in values[: task.carried]]
        back += [False] * (len(in_rows) - len(back))
        wanted = [before or row for before, row in zip(in_rows, back, strict=True)]
        if wanted == in_rows:
            break
        in_rows = wanted
    outputs = [_output(making, value, in_rows[n] if n < task.carried else None) for n, value in enumerate(values)]
    nodes = [node for value in outputs for node in flat_nodes(value)]
    program = making.region.program(nodes)
    taken = tuple(node for value in inputs for node in flat_nodes(value))
    return Scalarised(program._replace(inputs=taken), _read_by(program, making.uniforms.arrays), inputs, outputs)


def _read_by(program: Program, arrays: Sequence[Array]) -> list[Array]:
    """Uniform arrays, of which those that nothing reads need not be computed."""
    read = program.slots()
    return [array if slot in read else jnp.zeros(1, array.dtype) for slot, array in enumerate(arrays)]


def _results(making: Making, task: _Task, inputs: Sequence[Scalars | Rows]) -> list[Value]:
    values = read(task.closed, [*task.common, *inputs], making)
    if task.summed:
        return values
    try:
        return [written_out(making, value) if isinstance(value, Outer) else value for value in values]
    except NotLowered as error:
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


def _inputs(region: Region, task: _Task, in_rows: Sequence[bool]) -> list[Scalars | Rows]:
    """A node for each number that is handed in, or row; what is known, or another again, is that."""
    unlabelled = [None] * (len(task.leaves) - len(task.assumed))
    met: dict[Any, Node] = {}
    try:
        return [
            _input(region, leaf, row, met, labels)
            for leaf, row, labels in zip(task.leaves, in_rows, [*task.assumed, *unlabelled], strict=True)
        ]
    except NotLowered as error:
        raise CannotFuse(str(error)) from error


def _input(
    region: Region, leaf: jax.ShapeDtypeStruct, in_rows: bool, met: dict[Any, Node], labels: Any
) -> Scalars | Rows:
    if is_key(leaf.dtype):
        check_threefry(leaf.dtype)
        return filled(leaf.shape, leaf.dtype, lambda at: KeyPair(region.input(np.uint32), region.input(np.uint32)))
    dtype = np.dtype(leaf.dtype)
    if dtype.name not in TYPES:
        raise NotLowered(f"an argument of type {dtype.name} cannot be fused; kernels know {', '.join(TYPES)}")
    if in_rows:
        width = leaf.shape[-1]
        rows = filled(leaf.shape[:-1], dtype, lambda at: region.input(dtype, width))
        return Rows(rows.nodes, width, dtype)
    check_size(leaf.shape, "an argument: the state")
    numbers = filled(leaf.shape, dtype, lambda at: region.input(dtype))
    for at, label in zip(np.ndindex(*leaf.shape), labels or (), strict=bool(labels)):
        known = isinstance(label, Fixed)
        numbers.nodes[at] = (
            region.constant(label.value, dtype) if known else met.setdefault(label, numbers.nodes[at])
        )
    return numbers


def _output(making: Making, value: Value, in_rows: bool | None) -> Known | Uniform | Scalars | Rows | Outer:
    """A value as it leaves the program; `in_rows` says how it must lie, or None that it need not."""
    if 0 in value.shape:
        return Known(np.zeros(value.shape, value.dtype))
    try:
        if in_rows is not None:
            return making.rows(value) if in_rows else making.scalars(value)
        match value:
            case Joined():
                return making.scalars(value)
            case Outer(left, right, dtype):
                one, other = (_output(making, side, _lies_in_rows(side)) for side in (left, right))
                return Outer(one, other, dtype)
            case Uniform():
                return Uniform(making.uniforms.picked(value))
        return value
    except NotLowered as error:
        raise CannotFuse(f"a result cannot be fused: {error}.") from error


def _lies_in_rows(side: Value) -> bool:
    """Whether a side of a product is a row, and not single numbers."""
    return isinstance(side, Rows | Joined) or (not isinstance(side, Scalars) and side.shape[-1] >= LEAST_ROW)
