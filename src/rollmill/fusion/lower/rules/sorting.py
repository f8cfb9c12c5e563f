"""Lowers sorting to a fixed network of comparisons and exchanges."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rollmill.fusion.ir import Node, is_float
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.rules.elementwise import ordered_bits
from rollmill.fusion.lower.values import LoweringError, ScalarArray, Value, no_nodes

MAX_SORTED = 64
"""Maximum number of elements along the axis of a sort."""

FEW = 12
"""Maximum number of elements that are sorted by exchanging adjacent ones, which is stable without numbering the
elements."""


def _sort(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    arrays = [ctx.scalars(value) for value in values]
    keys = [_key(ctx, array) for array in arrays[: equation.params["num_keys"]]]
    alike = all(key is array for key, array in zip(keys, arrays, strict=False)) and len(keys) == len(arrays)
    return list(_sort_arrays(ctx, arrays, keys, equation.params["dimension"], stable=not alike))


def _top_k(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Returns the greatest elements, with ties in their original order.

    NaN is greater than all numbers. Negated, as by `jnp.partition`, it is less than all.
    """
    axis, count = equation.params.get("axis", -1), equation.params["k"]
    array = ctx.scalars(values[0])
    numbers = np.array([ctx.constant(n, np.int32) for n in range(array.shape[axis])], object)
    shape = [1] * len(array.shape)
    shape[axis] = numbers.size
    order = ScalarArray(np.broadcast_to(numbers.reshape(shape), array.shape), np.dtype(np.int32))
    key = _key(ctx, array, by_sign=True)
    turned = _map_nodes(key, lambda node: ctx.apply("not", node))
    kept = [slice(None)] * len(array.shape)
    kept[axis] = slice(0, count)
    found = _sort_arrays(ctx, [array, order], [turned], axis, stable=True)
    return [ScalarArray(part.nodes[tuple(kept)], part.dtype) for part in found]


def _key(ctx: Lowering, array: ScalarArray, *, by_sign: bool = False) -> ScalarArray:
    """Integers in the order of an array's elements: NaN comes last, and both zeros are equal.

    With `by_sign`, elements that are NaN and negated come first.
    """
    if array.dtype == np.bool_:
        return _map_nodes(array, lambda node: ctx.apply("convert", node, dtype=np.int32))
    if not is_float(array.dtype):
        return array

    def key(x: Node) -> Node:
        bits = ordered_bits(ctx, x)
        limits = np.iinfo(bits.dtype)
        zero = ctx.constant(0, bits.dtype)
        last = ctx.constant(limits.min if by_sign and _is_negated(x) else limits.max, bits.dtype)
        is_zero, is_number = ctx.apply("eq", x, ctx.constant(0, x.dtype)), ctx.apply("eq", x, x)
        return ctx.apply("select", is_number, ctx.apply("select", is_zero, zero, bits), last)

    return _map_nodes(array, key)


def _is_negated(node: Node) -> bool:
    whole = node.operands[0] if node.op == "column" else node
    return whole.op == "neg" or (node.op == "constant" and bool(np.signbit(node.value)))


def _map_nodes(array: ScalarArray, change: Callable[[Node], Node]) -> ScalarArray:
    nodes = no_nodes(array.shape)
    for at in np.ndindex(*array.shape):
        nodes[at] = change(array.nodes[at])
    return ScalarArray(nodes, nodes.flat[0].dtype if nodes.size else array.dtype)


def _sort_arrays(
    ctx: Lowering, arrays: Sequence[ScalarArray], keys: Sequence[ScalarArray], axis: int, *, stable: bool
) -> Iterator[ScalarArray]:
    """Yields the arrays in the order of the keys, along an axis."""
    moved = [np.moveaxis(array.nodes, axis, -1) for array in (*arrays, *keys)]
    size, own = moved[0].shape[-1], len(arrays)
    if size > MAX_SORTED:
        raise LoweringError(f"sorting {size} elements exceeds the limit of {MAX_SORTED} for a sorting network")
    found = [nodes.copy() for nodes in moved[:own]]
    for at in np.ndindex(*moved[0].shape[:-1]):
        lines = [list(column) for column in zip(*(nodes[at] for nodes in moved), strict=True)]
        for place, line in enumerate(_sort_lines(ctx, lines, own, stable=stable)):
            for nodes, node in zip(found, line, strict=False):
                nodes[(*at, place)] = node
    return (
        ScalarArray(np.moveaxis(nodes, -1, axis), array.dtype) for nodes, array in zip(found, arrays, strict=True)
    )


def _sort_lines(ctx: Lowering, lines: list[list[Node]], own: int, *, stable: bool) -> list[list[Node]]:
    """Sorts elements, which are lists of nodes: `own` nodes, and then the nodes that they are sorted by."""
    # Merging exchanges distant elements, so equal elements keep their order only by an additional index. Exchanges
    # of neighbours never swap equal elements.
    if len(lines) > FEW and stable:
        lines = [[*line, ctx.constant(n, np.int32)] for n, line in enumerate(lines)]
    for low, high in _neighbours(len(lines)) if len(lines) <= FEW else _merging(len(lines)):
        one, other = lines[low], lines[high]
        swap = _is_before(ctx, other[own:], one[own:])
        lines[low] = [ctx.apply("select", swap, b, a) for a, b in zip(one, other, strict=True)]
        lines[high] = [ctx.apply("select", swap, a, b) for a, b in zip(one, other, strict=True)]
    return lines


def _is_before(ctx: Lowering, one: Sequence[Node], other: Sequence[Node]) -> Node:
    first = ctx.apply("lt", one[0], other[0])
    if len(one) == 1:
        return first
    equal = ctx.apply("eq", one[0], other[0])
    return ctx.apply("or", first, ctx.apply("and", equal, _is_before(ctx, one[1:], other[1:])))


def _neighbours(size: int) -> Iterator[tuple[int, int]]:
    """Yields exchanges of neighbours that sort: each pass moves the last remaining element to the end."""
    for end in range(size - 1, 0, -1):
        yield from ((place, place + 1) for place in range(end))


def _merging(size: int) -> Iterator[tuple[int, int]]:
    """Exchanges of Batcher's odd-even merge sort (1968), which are fewer."""
    step = 1
    while step < size:
        distance = step
        while distance >= 1:
            for first in range(distance % step, size - distance, 2 * distance):
                for low in range(first, first + min(distance, size - first - distance)):
                    if low // (2 * step) == (low + distance) // (2 * step):
                        yield low, low + distance
            distance //= 2
        step *= 2


RULES: dict[str, Rule] = {"sort": _sort, "top_k": _top_k}
