"""Lowers pooling, the reduction of an array over sliding windows."""

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any

import numpy as np

from rollmill.fusion.ir import Node
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.rules.indexing import cells
from rollmill.fusion.lower.rules.reductions import identity_element
from rollmill.fusion.lower.rules.shapes import pad_indices
from rollmill.fusion.lower.values import LoweringError, ScalarArray, Value, alone, no_nodes, positions

POOLS = {"reduce_window_sum": "add", "reduce_window_max": "max", "reduce_window_min": "min"}
"""Operations between two elements that the pooling primitives apply, by primitive."""

MAX_COMBINED = 4096
"""Maximum number of scalars or rows under all windows of one pooling operation."""


def windows(
    places: np.ndarray, sizes: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> np.ndarray:
    """Returns the indices of the elements in each window, `[*outputs, *sizes]`."""
    # Positions that a window covers, including the gaps of its dilation.
    reach = [(size - 1) * step + 1 for size, step in zip(sizes, dilation, strict=True)]
    if any(span > size for span, size in zip(reach, places.shape, strict=True)):
        # `sliding_window_view` raises an error if windows are longer than the array. The result is then empty.
        counts = [max(0, size - span + 1) for span, size in zip(reach, places.shape, strict=True)]
        return np.zeros((*(-(-n // step) for n, step in zip(counts, strides, strict=True)), *sizes), int)
    under = np.lib.stride_tricks.sliding_window_view(places, reach)
    # Strides select windows, and dilation selects positions within each window.
    return under[(*(slice(None, None, n) for n in strides), *(slice(None, None, n) for n in dilation))]


def spread(places: np.ndarray, padding: Sequence[tuple[int, int]], dilation: Sequence[int]) -> np.ndarray:
    """Pads an array of indices with -1 around them, and between them if `dilation` is greater than one."""
    pairs = zip(padding, dilation, strict=True)
    return pad_indices(places, [(low, high, step - 1) for (low, high), step in pairs])


def _under_windows(params: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """Returns the positions in an array that each window covers, `[*outputs, window size]`, or -1 for padding."""
    rank = len(shape)
    # An array of rows has one axis less than the primitive, which does nothing along rows.
    places = spread(positions(shape), params["padding"][:rank], params["base_dilation"][:rank])
    own = (params[name][:rank] for name in ("window_dimensions", "window_strides", "window_dilation"))
    under = windows(places, *own)
    under = under.reshape(*under.shape[:rank], prod(under.shape[rank:]))
    if under.size > MAX_COMBINED:
        raise LoweringError(
            f"{under[..., 0].size:,} windows of {under.shape[-1]:,} numbers exceed the limit of {MAX_COMBINED:,} "
            "numbers in all windows together"
        )
    return under


def _pool(op: str) -> Rule:
    """Returns the rule of a pooling operation. It leaves out padding, which is the identity of the operation."""

    def rule(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
        (value,) = values
        own = cells(ctx, value, whole_rows=_leaves_rows(equation.params))
        under = _under_windows(equation.params, own.nodes.shape)
        nothing = ctx.constant(identity_element(op, own.dtype), own.dtype)
        flat, results = own.nodes.reshape(-1), no_nodes(under.shape[:-1])
        for at in np.ndindex(*results.shape):
            # -1 is padding. The neutral element appears only if a window contains no elements at all.
            inside: list[Node] = [flat[place] for place in under[at] if place >= 0]
            results[at] = reduce(lambda a, b: ctx.apply(op, a, b), inside) if inside else nothing
        return [own.again(results) if own.width is None else ctx.rows_of(results, own.width, own.dtype)]

    return rule


def _leaves_rows(params: dict[str, Any]) -> bool:
    """Returns whether windows are one column wide, so that nothing happens along rows."""
    trivial = params["padding"][-1] == (0, 0) and params["base_dilation"][-1] == 1
    return trivial and params["window_dimensions"][-1] == params["window_strides"][-1] == 1


def _reduce_window(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Pools several arrays together by the caller's function, ignoring padding as XLA does."""
    count = len(values) // 2
    arrays, starts = [ctx.scalars(value) for value in values[:count]], list(values[count:])
    under = _under_windows(equation.params, arrays[0].shape)
    results = [no_nodes(under.shape[:-1]) for _ in arrays]
    for at in np.ndindex(*under.shape[:-1]):
        totals = starts
        for place in under[at][under[at] >= 0]:
            own = [ScalarArray(alone(array.nodes.flat[place]), array.dtype) for array in arrays]
            totals = ctx.read(equation.params["jaxpr"], [*totals, *own], ctx)
        for nodes, total in zip(results, totals, strict=True):
            nodes[at] = ctx.scalar(total)
    return [ScalarArray(nodes, array.dtype) for nodes, array in zip(results, arrays, strict=True)]


RULES: dict[str, Rule] = {**{name: _pool(op) for name, op in POOLS.items()}, "reduce_window": _reduce_window}
