"""Arrays with too many elements for one node each. Elements are computed or loaded only when they are read.

An operation on a whole array returns a `ComputedArray`, which knows how to compute one element. A large leaf of
the environment state is a `MemoryArray`: reading an element is a load, and writing one records a write, which is
stored at the end of the step. Selecting between whole arrays makes these writes conditional. The first state of a
new episode is therefore stored, in a loop over all elements, only in environments whose episode has ended.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollmill.core.types import is_key
from rollmill.fusion.ir import Node
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.dynamic_index import dynamic_slice_by_select, select
from rollmill.fusion.lower.element_index import INDEX, ElementIndex, is_at, node_of, plus, times
from rollmill.fusion.lower.loops import emit_loop
from rollmill.fusion.lower.values import (
    MAX_SCALARS,
    CellWrite,
    ComputedArray,
    Const,
    FillWrite,
    LoweringError,
    MemoryArray,
    OuterProducts,
    ScalarArray,
    Start,
    Uniform,
    Value,
    WholeWrite,
    alone,
    fill_nodes,
    no_nodes,
)

Element = Callable[[Lowering, ElementIndex], Any]
"""Function that returns the node or `KeyPair` of an element: `(context, index) -> Node`."""

MAX_WRITES = 64
"""Maximum number of elements of an array that a step may write one by one. Each read compares its index with all
of them."""


MAX_NODES = 60_000
"""Maximum number of nodes of a step, beyond which no more elements of large arrays are computed."""

MIN_TURNS, MAX_TURNS = 8, 128
"""Minimum and maximum number of elements that a loop computes one after the other and holds at once."""

MAX_WRITTEN_OUT = 1_000
"""Maximum number of nodes for the elements of a small array that is computed without a loop."""


def is_too_large(shape: Sequence[int]) -> bool:
    """Returns whether an array has too many elements for one node each."""
    return int(np.prod(shape)) > MAX_SCALARS


def lazy_array(
    ctx: Lowering,
    shape: Sequence[int],
    dtype: Any,
    element: Element,
    everywhere: Node | None = None,
    *,
    by_loops: bool = False,
) -> Value:
    """Returns an array whose elements the function `element` computes.

    The elements of a small array are computed at once, and the elements of a large array only when they are read.
    `by_loops` means that each element needs a separate loop.
    """
    if is_too_large(shape):
        return ComputedArray(tuple(shape), dtype, element, everywhere)
    count = int(np.prod(shape))
    if by_loops and count > MAX_TURNS:
        raise LoweringError(
            f"{count} values of each environment each need a loop over a large array, more than the limit of "
            f"{MAX_TURNS}"
        )
    may_loop = everywhere is None and MIN_TURNS <= count <= MAX_TURNS and not is_key(dtype)
    if may_loop and (by_loops or _nodes_of_one(ctx, shape, element) * count > MAX_WRITTEN_OUT):
        return _by_loop(ctx, tuple(shape), dtype, element)
    return fill_nodes(tuple(shape), dtype, lambda at: element(ctx, ElementIndex(shape, axes=at)))


def _nodes_of_one(ctx: Lowering, shape: Sequence[int], element: Element) -> int:
    """Returns the number of nodes for one more element, without the nodes that all elements share."""
    for flat in (0, 1):
        before = _nodes_made(ctx)
        element(ctx, ElementIndex(shape, flat=flat))
    return _nodes_made(ctx) - before


def _nodes_made(ctx: Lowering) -> int:
    region, count = ctx.region, 0
    while region is not None:
        count, region = count + region.size, region.outer
    return count


def _by_loop(ctx: Lowering, shape: tuple[int, ...], dtype: Any, element: Element) -> Value:
    """Returns an array whose elements a loop of the program computes, one in each turn."""
    count, zero = int(np.prod(shape)), Const(np.zeros((), np.int32))

    def body(at: Lowering, now: list[Value]) -> list[Value]:
        turn, held = at.scalar(now[0]), at.scalars(now[1]).nodes
        node, after = element(at, ElementIndex(shape, flat=turn)), no_nodes(count)
        for place in range(count):
            here = at.apply("eq", turn, at.constant(place, INDEX))
            after[place] = select(at, here, node, held[place])
        following = at.apply("add", turn, at.constant(1, INDEX))
        return [ScalarArray(alone(following), INDEX), ScalarArray(after, dtype)]

    _, found = emit_loop(ctx, body, None, [zero, Const(np.zeros(count, dtype))], count)
    return ScalarArray(ctx.scalars(found).nodes.reshape(shape), dtype)


def broadcast_node(shape: Sequence[int], dtype: Any, node: Node) -> ComputedArray:
    """Returns a large array with the same node for all elements."""
    return ComputedArray(tuple(shape), dtype, lambda ctx, index: node, node)


def mapped_elements(
    ctx: Lowering, combine: Callable[..., Any], values: Sequence[Value], dtype: Any, shape: tuple[int, ...]
) -> Value:
    """Applies `combine` to the elements of several arrays, one of them large. Axes of length 1 are broadcast."""
    nodes = [everywhere(ctx, value) for value in values]
    if all(node is not None for node in nodes):
        return broadcast_node(shape, dtype, combine(*nodes))

    def element(at: Lowering, index: ElementIndex) -> Any:
        return combine(*(element_of(at, value, broadcast_index(at, index, value.shape)) for value in values))

    return ComputedArray(shape, dtype, element)


def everywhere(ctx: Lowering, value: Value) -> Node | None:
    """Returns the node that equals all elements of an array, or None if they differ."""
    if isinstance(value, ComputedArray):
        return value.everywhere
    if isinstance(value, Const) and value.array.size and np.all(value.array == value.array.flat[0]):
        signs = {repr(number.item()) for number in value.array.reshape(-1)[[0, -1]]}
        if value.dtype.kind in "biu" or (len(signs) == 1 and value.array.flat[0] != 0):
            return ctx.constant(value.array.flat[0].item(), value.dtype)
    if not isinstance(value, MemoryArray) and value.shape == () and not is_key(value.dtype):
        return ctx.scalar(value)
    return None


def broadcast_index(ctx: Lowering, index: ElementIndex, shape: tuple[int, ...]) -> ElementIndex:
    """Converts an index to the corresponding index of an operand whose axes of length 1 were broadcast."""
    if shape == index.shape:
        return index
    if shape == ():
        return ElementIndex((), axes=())
    axes = index.axes(ctx)[len(index.shape) - len(shape) :]
    return ElementIndex(shape, axes=[0 if size == 1 else at for size, at in zip(shape, axes, strict=True)])


# --- reading ----------------------------------------------------------------------------------------------


def element_of(ctx: Lowering, value: Value, index: ElementIndex) -> Any:
    """Returns the element of an array at an index that is in bounds, as a node or a `KeyPair`."""
    match value:
        case ComputedArray():
            key = (ctx.region, index.key)
            if key not in value.read:
                value.read[key] = _compute_element(ctx, value, index)
            return value.read[key]
        case MemoryArray():
            return _after_writes(ctx, value, index)
        case Const() | Uniform() if not is_key(value.dtype):
            return _read_shared_element(ctx, value, index)
        case OuterProducts():
            raise LoweringError("kernels cannot read single elements of an outer product")
    scalars = ctx.scalars(value).nodes
    return dynamic_slice_by_select(ctx, scalars, index.axes(ctx), [1] * scalars.ndim).reshape(-1)[0]


def _compute_element(ctx: Lowering, value: ComputedArray, index: ElementIndex) -> Any:
    """Returns an element, which may read elements of other arrays, and these of others."""
    # An array computed from adjacent elements of an array that is computed in this way multiplies the reads.
    if _nodes_made(ctx) > MAX_NODES:
        raise LoweringError(
            f"an element of an array of shape {value.shape} takes more than {MAX_NODES:,} operations; compute the "
            "array over several steps, or keep it in the state"
        )
    try:
        return value.element(ctx, index)
    except RecursionError:
        raise LoweringError(
            f"an array of shape {value.shape} is computed from others in too many steps; write fewer elements"
        ) from None


def _read_shared_element(ctx: Lowering, value: Const | Uniform, index: ElementIndex) -> Node:
    if isinstance(value, Const):
        if (node := everywhere(ctx, value)) is not None:
            return node
        if (node := _evenly_spaced(ctx, value, index)) is not None:
            return node
    flat = index.flat(ctx)
    if isinstance(flat, int):
        if isinstance(value, Const):
            return ctx.constant(value.array.reshape(-1)[flat].item(), value.dtype)
        place = flat if value.places is None else int(value.places.reshape(-1)[flat])
        return ctx.region.uniform(ctx.prologue.slot(value.array), place, value.dtype)
    slot = ctx.prologue.slot(ctx.array(value))
    return ctx.region.emit("table", flat, dtype=value.dtype, attributes=(slot,))


def _evenly_spaced(ctx: Lowering, value: Const, index: ElementIndex) -> Node | None:
    """Returns an element computed by arithmetic, where integers are evenly spaced along all axes."""
    array = value.array
    if value.dtype.kind not in "iu" or array.size < 2:
        return None
    first = array.flat[0]
    steps = [
        (array[(0,) * axis + (1,) + (0,) * (array.ndim - axis - 1)].astype(np.int64) - int(first))
        if size > 1
        else np.int64(0)
        for axis, size in enumerate(array.shape)
    ]
    grid = sum(
        step * np.arange(size).reshape(tuple(-1 if n == axis else 1 for n in range(array.ndim)))
        for axis, (step, size) in enumerate(zip(steps, array.shape, strict=True))
    )
    if not np.array_equal(np.broadcast_to(int(first) + grid, array.shape), array.astype(np.int64)):
        return None
    strides = [int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim)]
    if all(
        int(step) == stride for step, stride, size in zip(steps, strides, array.shape, strict=True) if size > 1
    ):
        place: Start = index.flat(ctx)
    else:
        place = 0
        for step, at in zip(steps, index.axes(ctx), strict=True):
            place = plus(ctx, place, times(ctx, at, int(step))) if step else place
    node = node_of(ctx, plus(ctx, place, int(first)))
    return ctx.region.emit("convert", node, dtype=value.dtype)


def _after_writes(ctx: Lowering, value: MemoryArray, index: ElementIndex) -> Node:
    """Returns an element after the writes so far: as it was when the step began, or as it was last written."""
    flat = index.flat(ctx)
    # Starts at the last unconditional write of all elements, because earlier writes are never read.
    writes, begin = list(value.writes), None
    for n, write in enumerate(value.writes):
        if isinstance(write, WholeWrite) and write.condition is None:
            writes, begin = list(value.writes[n + 1 :]), write.value
    if begin is None:
        node = ctx.region.emit("cell", node_of(ctx, flat), dtype=value.dtype, attributes=(value.memory,))
    else:
        node = element_of(ctx, begin, index)
    for write in writes:
        node = _after_write(ctx, write, node, index, flat)
    return node


def _replaces_all(write: Any) -> bool:
    return isinstance(write, WholeWrite) and write.condition is None


def _after_write(ctx: Lowering, write: Any, before: Node, index: ElementIndex, flat: Start) -> Node:
    if isinstance(write, CellWrite):
        here = is_at(ctx, write.place, flat)
        if here is False:
            return before
        condition, new = logical_and(ctx, None if here is True else here, write.condition), write.value
    else:
        condition, new = write.condition, element_of(ctx, write.value, index)
    return new if condition is None else select(ctx, condition, new, before)  # pyright: ignore[reportReturnType]


def logical_and(ctx: Lowering, one: Node | bool | None, other: Node | bool | None) -> Node | None:
    """Returns the logical AND of two conditions. None stands for a condition that is always true."""
    conditions = [each for each in (one, other) if isinstance(each, Node)]
    if len(conditions) == 2:
        return ctx.apply("and", *conditions)
    return conditions[0] if conditions else None


# --- writing ----------------------------------------------------------------------------------------------


def with_cell(
    ctx: Lowering, value: Value, index: ElementIndex, element: Node, condition: Node | None
) -> ComputedArray | MemoryArray:
    """Returns a large array with one element replaced if a condition is true."""
    write = CellWrite(index.flat(ctx), element, condition)
    if isinstance(value, MemoryArray):
        if len(value.writes) >= MAX_WRITES:
            raise LoweringError(
                f"more than {MAX_WRITES} elements of an array of shape {value.shape} are written in a step"
            )
        return value._replace(writes=(*value.writes, write))

    def after(at: Lowering, place: ElementIndex) -> Any:
        return _after_write(at, write, element_of(at, value, place), place, place.flat(at))

    return ComputedArray(value.shape, value.dtype, after)


def chosen_whole(ctx: Lowering, condition: Node, one: Value, other: Value) -> Value | None:
    """Selects between whole arrays by making their writes conditional. Returns None if neither is in memory."""
    opposite = ctx.apply("not", condition)
    match one, other:
        case MemoryArray(), MemoryArray():
            if one.memory != other.memory:
                return None
            return _merge(ctx, condition, opposite, one, other)
        case MemoryArray(), _:
            return _rewritten(ctx, one, condition, WholeWrite(other, opposite))
        case _, MemoryArray():
            return _rewritten(ctx, other, opposite, WholeWrite(one, condition))
    return None


def _merge(ctx: Lowering, condition: Node, opposite: Node, one: MemoryArray, other: MemoryArray) -> MemoryArray:
    # Writes that both arrays have in common are unconditional.
    pairs = zip(one.writes, other.writes, strict=False)
    common = next((n for n, (a, b) in enumerate(pairs) if a is not b), min(len(one.writes), len(other.writes)))
    rest = [_under(ctx, write, opposite) for write in other.writes[common:]]
    rest += [_under(ctx, write, condition) for write in one.writes[common:]]
    return one._replace(writes=(*one.writes[:common], *rest))


def _rewritten(ctx: Lowering, value: MemoryArray, condition: Node, whole: WholeWrite) -> MemoryArray:
    return value._replace(writes=(*(_under(ctx, write, condition) for write in value.writes), whole))


def _under(ctx: Lowering, write: Any, condition: Node) -> Any:
    return write._replace(condition=logical_and(ctx, condition, write.condition))


# --- the end of a step --------------------------------------------------------------------------------------


def writes_to_memory(ctx: Lowering, memory: int, value: Value) -> MemoryArray:
    """Converts a large array to writes to the memory that stores it.

    A write that replaces the whole array becomes a program that computes each element. Raises a `LoweringError` if
    an array is replaced by other elements of itself.
    """
    if not (isinstance(value, MemoryArray) and value.memory == memory):
        value = MemoryArray(memory, value.shape, np.dtype(value.dtype), (WholeWrite(value, None),))
    writes = list(value.writes)
    first = max((n for n, write in enumerate(writes) if _replaces_all(write)), default=0)
    programs = [
        _fill(ctx, memory, write, value.shape) if isinstance(write, WholeWrite) else _place(ctx, write)
        for write in writes[first:]
        if not isinstance(write, FillWrite)  # created only here
    ]
    return value._replace(writes=tuple(programs))


def _place(ctx: Lowering, write: CellWrite) -> CellWrite:
    return write._replace(place=node_of(ctx, write.place))


def _fill(ctx: Lowering, memory: int, write: WholeWrite, shape: tuple[int, ...]) -> FillWrite:
    inside = ctx.inside()
    place = inside.region.input(np.int32)
    element = element_of(inside, write.value, ElementIndex(shape, flat=place))
    program = inside.region.program([element])
    for node in program.nodes():
        if memory in memories_read([node]) and not (node.op == "cell" and node.operands[0] is place):
            raise LoweringError(
                f"a step replaces a whole array of shape {shape} with its own elements from other positions. "
                "Write only the elements that change, or alternate between two arrays"
            )
    return FillWrite(program, tuple(inside.region.captures), write.condition)


def memories_read(nodes: Sequence[Node]) -> set[int]:
    """Returns the numbers of the memories that nodes load elements from, including in loops."""
    found: set[int] = set()
    for node in nodes:
        if node.op == "cell":
            found.add(node.attributes[0])
        elif node.op == "loop":
            body, condition, _ = node.attributes[0]
            found |= memories_read(body.nodes())
            found |= set() if condition is None else memories_read(condition.nodes())
    return found
