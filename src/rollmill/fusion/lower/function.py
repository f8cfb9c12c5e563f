"""Lowers a function of ONE environment to a program for blocks of environments.

The part that does not depend on the environment becomes the prologue, which computes the program's uniform arrays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import Array, PyTree

from rollmill.core.errors import CannotFuse
from rollmill.core.types import is_key
from rollmill.fusion.ir import Node, Program, Region, is_float
from rollmill.fusion.lower.complex_numbers import without_complex_numbers
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.invariants import ConstLabel, ValueClasses
from rollmill.fusion.lower.jaxpr import TYPES, lower_jaxpr
from rollmill.fusion.lower.large_arrays import is_too_large, writes_to_memory
from rollmill.fusion.lower.prologue import Prologue, PrologueBuilder, UniformArrays, trace_prologue
from rollmill.fusion.lower.rules.products import expand_outer_products
from rollmill.fusion.lower.rules.random import check_threefry
from rollmill.fusion.lower.values import (
    MAX_COLUMNS,
    MIN_ROW,
    ComputedArray,
    Concat,
    Const,
    FillWrite,
    KeyPair,
    LoweringError,
    MemoryArray,
    OuterProducts,
    Output,
    PrologueOutput,
    RowArray,
    ScalarArray,
    Uniform,
    Value,
    VectorPair,
    check_size,
    fill_nodes,
    flat_nodes,
    is_traced,
    shared_array,
)


@dataclass(frozen=True, eq=False, repr=False)
class LoweredFunction:
    """A function of ONE environment, lowered to a program and its prologue.

    It holds no tracers, so it can be stored, printed, and used for any number of kernels.
    """

    jaxpr: core.ClosedJaxpr
    """The jaxpr that was lowered."""
    program: Program
    """The program. An input that is constant or equals an earlier input is replaced by that node."""
    prologue: Prologue
    """Computes the arrays that the program reads by slot, from the uniform arguments."""
    inputs: PyTree
    """The program's inputs as `ScalarArray`s and `RowArray`s, in the structure of the arguments that differ
    between environments. A `MemoryArray` stands for a large array, whose elements are loaded rather than
    passed."""
    outputs: PyTree
    """One `Output` per array, in the structure that the function returns. The program's outputs are the nodes of
    `ScalarArray`s and `RowArray`s, the vectors of `OuterProducts`, and the writes of `MemoryArray`s, in order.
    Constants and `PrologueOutput`s are not among them."""

    def __repr__(self) -> str:
        # Kept short, because JAX prints the arguments of each partial function that it traces.
        return f"LoweredFunction of {len(self.program.nodes())} nodes"


class TracedFunction(NamedTuple):
    """The jaxpr of a function, with the information needed to lower it."""

    closed: core.ClosedJaxpr
    uniform: list[jax.ShapeDtypeStruct]
    """Shapes of the argument leaves that all environments share."""
    each: list[Any]
    """Shapes of the argument leaves that differ between environments."""
    inputs: Any
    """Pytree structure of the leaves in `each`."""
    outputs: Any
    """Pytree structure of the results."""
    carried: int
    """Number of leading leaves in `each` that are results of the previous call."""
    summed: bool
    """Whether only sums of the results over environments are needed."""


def lower_function(
    function: Callable[..., Any],
    each: Sequence[PyTree[jax.ShapeDtypeStruct]],
    uniform: Sequence[PyTree[Any]] = (),
    *,
    carried: bool = False,
    summed: bool = False,
) -> LoweredFunction:
    """Lowers `function(*uniform, *each)` to a program. Takes the arguments of `trace_function`.

    Raises `CannotFuse` if a primitive is not supported or an array is too large.
    """
    return lower_traced(trace_function(function, each, uniform, carried=carried, summed=summed))


def trace_function(
    function: Callable[..., Any],
    each: Sequence[PyTree[jax.ShapeDtypeStruct]],
    uniform: Sequence[PyTree[Any]] = (),
    *,
    carried: bool = False,
    summed: bool = False,
) -> TracedFunction:
    """Traces `function(*uniform, *each)` for one environment.

    `each` has the shapes of the arguments that differ between environments. Each of their arrays becomes inputs of
    the program, one per scalar or row, in row-major order. A random key is two scalars. `uniform` has the
    arguments that all environments share, as shapes or arrays. The program reads only those that it uses.

    With `carried`, the first part of the returned tuple is the first `each` argument of the next call. Both then
    use the same layout, and no part of it is treated as constant or uniform. With `summed`, only sums of the
    results over environments are needed. Outer products of vectors, such as gradients of matrices, then remain
    `OuterProducts`.
    """
    # Weak types are kept, because they determine how JAX promotes operands.
    shapes = jax.tree.map(_shape_of, tuple(uniform))
    closed, results = jax.make_jaxpr(function, return_shape=True)(*shapes, *each)
    if any(map(is_traced, closed.consts)):
        raise TypeError("a lowered function reads a traced array. Make it a uniform argument")
    closed = without_complex_numbers(closed)
    leaves, structure = jax.tree.flatten(tuple(each))
    count = len(jax.tree.leaves(each[0])) if carried else 0
    return TracedFunction(
        closed, jax.tree.leaves(shapes), leaves, structure, jax.tree.structure(results), count, summed
    )


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval: Any = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def lower_traced(traced: TracedFunction, assumed: ValueClasses = ()) -> LoweredFunction:
    """Lowers a traced function, assuming that some elements of its first leaves are constant or equal (`assumed`).

    Raises `CannotFuse` if a primitive is not supported or an array is too large.
    """
    # Input rows cannot be sliced, which some functions need. Scalars can be sliced, and large arrays can stay in
    # memory. If all layouts fail, the first error with large arrays in memory is raised, because it names the
    # caller's operation.
    errors: list[tuple[bool, CannotFuse]] = []
    for layouts in _layouts_worth_trying(traced):
        try:
            return _with_layout(traced, assumed, layouts)
        except CannotFuse as error:
            errors.append((MEMORY not in layouts, error))
    raise min(errors, key=lambda pair: pair[0])[1]


ROWS, SCALARS, MEMORY = "rows", "scalars", "memory"
Layouts: TypeAlias = list[str]
"""How each argument leaf that differs between environments is held: as scalars, as rows, or in memory."""


def _layouts_worth_trying(traced: TracedFunction) -> list[Layouts]:
    """Returns the layouts in which a function may be lowered, the best first."""
    # Sums over samples have no state that could be written in place.
    count = 0 if traced.summed else traced.carried
    is_memory = [n < count and _fits_memory(leaf) for n, leaf in enumerate(traced.each)]
    is_row = [_is_row(leaf) for leaf in traced.each]
    choices: list[Layouts] = []
    for large_rows, rows in ((True, True), (False, True), (False, False)):
        pairs = zip(is_row, is_memory, strict=True)
        own = [
            ROWS if row and (large_rows if memory else rows) else MEMORY if memory else SCALARS
            for row, memory in pairs
        ]
        choices += [own] if own not in choices else []
    return choices


def _fits_memory(leaf: jax.ShapeDtypeStruct) -> bool:
    return is_too_large(leaf.shape) and not is_key(leaf.dtype) and np.dtype(leaf.dtype).name in TYPES


def _with_layout(traced: TracedFunction, assumed: ValueClasses, layouts: Layouts) -> LoweredFunction:
    """Returns the program for inputs in these layouts. Carried inputs use rows if they are returned as rows."""
    lowered: list[tuple[Program, list[Any], list[Output]]] = []

    def make(uniform: list[Array]) -> UniformArrays:
        ctx, inputs, values = _stable_layout(traced, assumed, layouts, uniform)
        arrays: list[Array] = []
        memories = iter(range(len(values)))
        outputs = [
            _store(ctx, next(memories), value)
            if layout == MEMORY
            else _output(ctx, value, layout, arrays, traced.summed)
            for value, layout in values
        ]
        program = ctx.region.program([node for output in outputs for node in flat_nodes(output)])
        taken = tuple(node for value in inputs for node in flat_nodes(value))
        lowered.append((program._replace(inputs=taken), inputs, outputs))
        return UniformArrays(_read_by([program, *_fills(outputs)], ctx.prologue.arrays), arrays)

    # All lowering happens within this trace. Computations of rules on uniform arrays become the prologue, and only
    # nodes, which hold no arrays, leave the trace.
    prologue = trace_prologue(make, traced.uniform)
    program, inputs, outputs = lowered[0]
    unflatten = jax.tree.unflatten
    arguments, results = unflatten(traced.inputs, inputs), unflatten(traced.outputs, outputs)
    return LoweredFunction(traced.closed, program, prologue, arguments, results)


def _stable_layout(
    traced: TracedFunction, assumed: ValueClasses, layouts: Layouts, uniform: list[Array]
) -> tuple[Lowering, list[ScalarArray | RowArray | MemoryArray], list[tuple[Value, str | None]]]:
    """Returns the context, the inputs, and the results with the layout that each must have.

    Lowered again while a carried leaf comes back in another layout than it was handed in. A leaf that comes back
    in rows is handed in as rows. A wide leaf that comes back in parts is handed in as scalars from then on, as
    tiled kernels cannot carry wide rows.
    """
    common, in_parts = list(map(shared_array, uniform)), set[int]()
    while True:
        ctx = Lowering(Region(), PrologueBuilder(), lower_jaxpr)
        inputs = _inputs(ctx.region, traced, assumed, layouts)
        values = _results(ctx, traced, [*common, *inputs])
        wanted = list(layouts)
        for n, value in enumerate(values[: traced.carried]):
            if isinstance(value, Concat) and value.shape[-1] > MAX_COLUMNS:
                in_parts.add(n)
            if layouts[n] != MEMORY and isinstance(value, RowArray | Concat):
                wanted[n] = SCALARS if n in in_parts else ROWS
        if wanted == layouts:
            own = [*layouts[: traced.carried], *[None] * (len(values) - traced.carried)]
            return ctx, inputs, list(zip(values, own, strict=True))
        layouts = wanted


def _fills(outputs: Sequence[Output]) -> list[Program]:
    """Returns the programs that write whole arrays to memory."""
    memories = [output for output in outputs if isinstance(output, MemoryArray)]
    return [write.program for output in memories for write in output.writes if isinstance(write, FillWrite)]


def _read_by(programs: Sequence[Program], arrays: Sequence[Array]) -> list[Array]:
    """Returns the uniform arrays, with a placeholder for each array that no program reads."""
    # Slots keep their indices, which are attributes of nodes, so an unread array is replaced instead of removed.
    read = set[int]().union(*(program.slots() for program in programs))
    return [array if slot in read else jnp.zeros(1, array.dtype) for slot, array in enumerate(arrays)]


def _results(ctx: Lowering, traced: TracedFunction, arguments: Sequence[Value]) -> list[Value]:
    values = lower_jaxpr(traced.closed, arguments, ctx, keeps_products=True)
    if traced.summed:
        return values
    try:
        return [expand_outer_products(ctx, value) for value in values]
    except LoweringError as error:
        raise CannotFuse(f"a result cannot be fused: {error}.") from error


def _is_row(leaf: jax.ShapeDtypeStruct) -> bool:
    is_number = not is_key(leaf.dtype) and is_float(np.dtype(leaf.dtype))
    return is_number and len(leaf.shape) > 0 and leaf.shape[-1] >= MIN_ROW


def _inputs(
    region: Region, traced: TracedFunction, assumed: ValueClasses, layouts: Layouts
) -> list[ScalarArray | RowArray | MemoryArray]:
    """Returns a node for each input number or row, replacing constants and repetitions."""
    unlabelled = [None] * (len(traced.each) - len(assumed))
    met: dict[Any, Node] = {}
    try:
        memories = iter(range(len(layouts)))
        return [
            MemoryArray(next(memories), leaf.shape, np.dtype(leaf.dtype))
            if layout == MEMORY
            else _input(region, leaf, layout == ROWS, met, labels)
            for leaf, layout, labels in zip(traced.each, layouts, [*assumed, *unlabelled], strict=True)
        ]
    except LoweringError as error:
        raise CannotFuse(str(error)) from error


def _input(
    region: Region, leaf: jax.ShapeDtypeStruct, in_rows: bool, met: dict[Any, Node], labels: Any
) -> ScalarArray | RowArray:
    if is_key(leaf.dtype):
        check_threefry(leaf.dtype)
        return fill_nodes(
            leaf.shape, leaf.dtype, lambda at: KeyPair(region.input(np.uint32), region.input(np.uint32))
        )
    dtype = np.dtype(leaf.dtype)
    if dtype.name not in TYPES:
        raise LoweringError(
            f"an argument of type {dtype.name} cannot be fused. Kernels support {', '.join(TYPES)}"
        )
    if in_rows:
        width = leaf.shape[-1]
        rows = fill_nodes(leaf.shape[:-1], dtype, lambda at: region.input(dtype, width))
        return RowArray(rows.nodes, width, dtype)
    check_size(leaf.shape, "an argument: the state")
    numbers = fill_nodes(leaf.shape, dtype, lambda at: region.input(dtype))
    # The first element with a label represents all others with this label, which remain inputs without readers.
    for at, label in zip(np.ndindex(*leaf.shape), labels or (), strict=bool(labels)):
        known = isinstance(label, ConstLabel)
        numbers.nodes[at] = (
            region.constant(label.value, dtype) if known else met.setdefault(label, numbers.nodes[at])
        )
    return numbers


def _store(ctx: Lowering, memory: int, value: Value) -> MemoryArray:
    """Converts a carried array to the values that are written to its memory."""
    try:
        return writes_to_memory(ctx, memory, value)
    except LoweringError as error:
        raise CannotFuse(f"a result cannot be fused: {error}.") from error


def _output(ctx: Lowering, value: Value, layout: str | None, uniform: list[Array], summed: bool) -> Output:
    """Returns a value as it leaves the program, or the prologue, whose outputs so far are `uniform`.

    A layout requires rows or scalars, and None accepts either. A vector that is `summed` may be in parts.
    """
    if 0 in value.shape:
        return Const(np.zeros(value.shape, value.dtype))
    try:
        if layout is not None:
            return ctx.rows(value) if layout == ROWS else ctx.scalars(value)
        match value:
            case ComputedArray() | MemoryArray():
                return ctx.scalars(value)
            case Concat():
                return _side(ctx, value) if summed and len(value.shape) == 1 else ctx.scalars(value)
            case OuterProducts():
                return _sides_of(ctx, value)
            case Uniform():
                uniform.append(ctx.prologue.picked(value))
                return PrologueOutput(len(uniform) - 1, value.shape, value.dtype)
        return value
    except LoweringError as error:
        raise CannotFuse(f"a result cannot be fused: {error}.") from error


def _sides_of(ctx: Lowering, value: OuterProducts) -> OuterProducts:
    """Returns a sum of products in the form of an output: vectors of rows, of scalars, or of both."""
    pairs = [VectorPair(*map(partial(_side, ctx), pair)) for pair in value.pairs]
    # A result is stored in blocks, and the blocks must be equal for all pairs.
    if len({(_widths(left), _widths(right)) for left, right in pairs}) > 1:
        whole = lambda side: ctx.scalars(side) if isinstance(side, Concat) else side
        pairs = [VectorPair(whole(left), whole(right)) for left, right in pairs]
    return OuterProducts(tuple(pairs), value.dtype)


def _side(ctx: Lowering, side: Value) -> Const | RowArray | ScalarArray | Concat:
    """Returns a side of a product of vectors as an output."""
    if 0 in side.shape:
        return Const(np.zeros(side.shape, side.dtype))
    if isinstance(side, Concat):
        return Concat(tuple(_side(ctx, part) for part in side.parts if part.shape[-1]))
    return ctx.rows(side) if _lies_in_rows(side) else ctx.scalars(side)


def _widths(side: Value) -> tuple[int, ...]:
    parts = side.parts if isinstance(side, Concat) else (side,)
    return tuple(part.shape[-1] for part in parts)


def _lies_in_rows(side: Value) -> bool:
    """Returns whether a side of a product is a row, rather than scalars."""
    return isinstance(side, RowArray) or (not isinstance(side, ScalarArray) and side.shape[-1] >= MIN_ROW)
