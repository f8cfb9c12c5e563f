"""Lowers operations that only rearrange or repeat elements, which costs nothing in a kernel."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.large_arrays import is_too_large
from rollmill.fusion.lower.large_moves import beside, lower_move, part_of, with_padding
from rollmill.fusion.lower.movement import concatenate_last_axis, gather_static, reshape_value
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.values import (
    Concat,
    Const,
    LoweringError,
    OuterProducts,
    RowArray,
    ScalarArray,
    Uniform,
    Value,
    is_large,
    positions,
)

SHARED_OR_ROWS = (Const, Uniform, RowArray, Concat)
"""Kinds of values whose elements are rearranged during lowering, whatever their size."""

Move = Callable[..., np.ndarray]
"""NumPy function that rearranges an array: `(array, **params) -> array`."""


def _broadcast(
    array: np.ndarray, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any
) -> np.ndarray:
    axes = [1] * len(shape)
    for size, axis in zip(array.shape, broadcast_dimensions, strict=True):
        axes[axis] = size
    return np.broadcast_to(array.reshape(axes), tuple(shape))


def _reshape(array: np.ndarray, *, new_sizes: Sequence[int], dimensions: Any = None, **_: Any) -> np.ndarray:
    if dimensions is not None:
        array = array.transpose(dimensions)
    return array.reshape(tuple(new_sizes))


def _slice(
    array: np.ndarray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
    **_: Any,
) -> np.ndarray:
    steps = strides or [1] * array.ndim
    return array[tuple(map(slice, start_indices, limit_indices, steps))]


MOVES: dict[str, Move] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": lambda array, *, dimensions, **_: array.squeeze(tuple(dimensions)),
    "expand_dims": lambda array, *, dimensions, **_: np.expand_dims(array, tuple(dimensions)),
    "transpose": lambda array, *, permutation, **_: array.transpose(permutation),
    "rev": lambda array, *, dimensions, **_: np.flip(array, tuple(dimensions)),
    "tile": lambda array, *, reps, **_: np.tile(array, tuple(reps)),
}
"""Primitives that rearrange or repeat elements."""


def _by_move(move: Move) -> Rule:
    def rule(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
        if len(values) != 1:
            raise LoweringError("kernels do not support shapes that are unknown during tracing")
        (value,) = values
        if is_large(value) or (is_too_large(equation.shape) and not isinstance(value, SHARED_OR_ROWS)):
            return [lower_move(ctx, equation.primitive, value, equation.shape, equation.params)]
        # Rearranging the indices shows where every element goes, for any operation.
        return [gather_static(ctx, value, move(positions(value.shape), **equation.params))]

    return rule


def _transpose(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    (value,) = values
    if isinstance(value, OuterProducts):
        return [value.transposed if tuple(equation.params["permutation"]) == (1, 0) else value]
    return _by_move(MOVES["transpose"])(ctx, equation, values)


def _split(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    (value,), axis = values, equation.params["axis"]
    ends = np.cumsum(equation.params["sizes"])[:-1]
    if is_large(value):
        firsts = [0, *map(int, ends)]
        cuts = zip(firsts, equation.outputs, strict=True)
        return [part_of(ctx, value, axis, first, out.shape) for first, out in cuts]
    parts = np.split(positions(value.shape), ends, axis=axis)
    return _only_needed(ctx, equation, value, parts)


def _unstack(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    (value,), axis = values, equation.params["axis"]
    places = np.moveaxis(positions(value.shape), axis, 0)
    return _only_needed(ctx, equation, value, [places[n, ...] for n in range(len(places))])


def _only_needed(ctx: Lowering, equation: Equation, value: Value, parts: Sequence[np.ndarray]) -> list[Value]:
    pairs = zip(parts, equation.needed, strict=True)
    # Parts without readers are not created, because each row would need nodes.
    return [gather_static(ctx, value, part) if needed else Const(np.zeros(0)) for part, needed in pairs]


def _concatenate(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    return [concatenate_values(ctx, values, equation.params["dimension"])]


def _stack(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    return [stack_values(ctx, values, equation.params["axis"])]


def stack_values(ctx: Lowering, values: Sequence[Value], axis: int = 0) -> Value:
    """Stacks values of equal shape along a new axis, without any operation in the kernel."""
    shape = list(values[0].shape)
    shape.insert(axis, 1)
    return concatenate_values(ctx, [reshape_value(ctx, value, tuple(shape)) for value in values], axis)


def concatenate_values(ctx: Lowering, values: Sequence[Value], axis: int) -> Value:
    """Concatenates values along an axis, without any operation in the kernel."""
    # Empty operands contribute nothing. Often, only one operand remains without them.
    values = [value for value in values if value.shape[axis]] or values[:1]
    if len(values) == 1:
        return values[0]
    shape = list(values[0].shape)
    shape[axis] = sum(value.shape[axis] for value in values)
    in_rows = any(isinstance(value, RowArray | Concat) for value in values)
    if any(map(is_large, values)) or (is_too_large(shape) and not in_rows):
        return beside(ctx, values, axis, tuple(shape))
    if not any(isinstance(value, RowArray) or hasattr(value, "parts") for value in values):
        nodes = [ctx.scalars(value).nodes for value in values]
        return ScalarArray(np.concatenate(nodes, axis=axis), values[0].dtype)
    # Rows along the last axis stay separate parts until they are read as one row.
    if axis == len(values[0].shape) - 1:
        return concatenate_last_axis(ctx, list(values))
    rows = [ctx.rows(value) for value in values]
    return RowArray(np.concatenate([part.nodes for part in rows], axis=axis), rows[0].width, rows[0].dtype)


def _pad(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    value, fill = values
    if is_large(value) or (is_too_large(equation.shape) and isinstance(value, ScalarArray)):
        return [with_padding(ctx, value, ctx.scalar(fill), equation.params["padding_config"], equation.shape)]
    places = pad_indices(positions(value.shape), equation.params["padding_config"])
    return [gather_static(ctx, value, places, ctx.scalar(fill))]


def pad_indices(places: np.ndarray, config: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Pads an array of indices with -1, which stands for the padding value. Negative padding crops."""
    for axis, (low, high, inside) in enumerate(config):
        size = places.shape[axis]
        # Interior padding first, then padding at both ends, and finally the cropping of negative padding.
        spread = np.full((*places.shape[:axis], max(0, size + (size - 1) * inside), *places.shape[axis + 1 :]), -1)
        np.moveaxis(spread, axis, 0)[:: inside + 1] = np.moveaxis(places, axis, 0)
        widths = [(0, 0)] * places.ndim
        widths[axis] = (max(low, 0), max(high, 0))
        spread = np.pad(spread, widths, constant_values=-1)
        kept = slice(max(-low, 0), spread.shape[axis] - max(-high, 0))
        places = spread[(slice(None),) * axis + (kept,)]
    return places


def _iota(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    axis = equation.params["dimension"]
    axes = [1] * len(equation.shape)
    axes[axis] = equation.shape[axis]
    numbers = np.arange(equation.shape[axis]).astype(equation.dtype).reshape(axes)
    return [Const(np.broadcast_to(numbers, equation.shape))]


RULES: dict[str, Rule] = {
    **{name: _by_move(move) for name, move in MOVES.items()},
    "transpose": _transpose,
    "split": _split,
    "unstack": _unstack,
    "concatenate": _concatenate,
    "stack": _stack,
    "pad": _pad,
    "iota": _iota,
}

MAX_PICKED = 64
"""Maximum size of a uniform array, other than a vector, that is rearranged during lowering. Larger arrays are
rearranged by the prologue."""


def is_moved_here(value: Value) -> bool:
    """Returns whether a shared array's elements are rearranged during lowering rather than by the prologue."""
    if isinstance(value, Uniform) and value.places is None:
        return value.array.ndim <= 1 or value.array.size <= MAX_PICKED
    return True
