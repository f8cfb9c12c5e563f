"""Lowers loops: short ones are unrolled, and others become loops of the program."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.core import ShapedArray

from rollmill.fusion.ir import Node
from rollmill.fusion.lower.context import Lowering, fold_constant
from rollmill.fusion.lower.loops import Body, emit_loop
from rollmill.fusion.lower.movement import index_leading, reshape_value
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.rules.elementwise import select_elements
from rollmill.fusion.lower.rules.indexing import element_at
from rollmill.fusion.lower.rules.reductions import reduce_axes
from rollmill.fusion.lower.rules.scattering import with_element
from rollmill.fusion.lower.rules.shapes import stack_values
from rollmill.fusion.lower.values import Const, LoweringError, ScalarArray, Value, alone, is_same, is_shared

SHORT = 8
"""Maximum number of iterations of a short loop, which is unrolled unless its body is very long."""

MAX_NODES = 2000
"""Maximum number of nodes of a longer loop that is unrolled."""

MAX_NODES_SHORT = 10_000
"""Maximum number of nodes of a short loop that is unrolled."""

MAX_HELD = 128
"""Maximum size of an array whose elements a loop of the program reads or writes one iteration at a time."""

T = TypeVar("T")
"""A value or an operand."""


# --- while ----------------------------------------------------------------------------------------------


def _while(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    asked, own = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    of_condition, of_body, start = values[:asked], values[asked : asked + own], list(values[asked + own :])
    condition = lambda at, now: at.read(equation.params["cond_jaxpr"], [*of_condition, *now], at)
    body = lambda at, now: at.read(equation.params["body_jaxpr"], [*of_body, *now], at)
    if not equation.params["cond_jaxpr"].out_avals[0].shape:
        return _repeat(ctx, body, condition, start)
    # Under `vmap`, the condition is one boolean per lane.
    _, *after = _repeat(ctx, _turn_of_lanes(condition, body), _any_lane, [*condition(ctx, start), *start])
    return after


def _repeat(ctx: Lowering, body: Body, condition: Body, start: list[Value]) -> list[Value]:
    """Returns a loop for as long as its condition, a single boolean, holds."""
    # Unrolled as long as the condition is constant. Such loops have a fixed number of iterations, and each
    # iteration is folded with its own constants.
    first, now, turns = ctx.region.size, start, 0
    while turns <= SHORT or ctx.region.size - first <= MAX_NODES:
        (goes_on,) = condition(ctx, now)
        if not isinstance(goes_on, Const):
            break
        if not goes_on.array:
            return now
        now, turns = body(ctx, now), turns + 1
        if ctx.region.size - first > MAX_NODES_SHORT:
            break
    return emit_loop(ctx, body, condition, start, None)


def _any_lane(ctx: Lowering, now: list[Value]) -> list[Value]:
    """Returns whether any lane continues. The carry begins with one boolean for each lane."""
    lanes = now[0]
    return [fold_constant(reduce_axes(ctx, "or", lanes, range(len(lanes.shape))))]


def _turn_of_lanes(condition: Body, body: Body) -> Body:
    """Returns one iteration of a loop under `vmap`. Lanes that have ended keep their carried values."""

    def turn(ctx: Lowering, now: list[Value]) -> list[Value]:
        goes_on, *before = now
        pairs = zip(body(ctx, list(before)), before, strict=True)
        after = [_where_lanes(ctx, goes_on, *pair) for pair in pairs]
        # Evaluated once per iteration, and carried to the next to select the lanes that change.
        return [*condition(ctx, after), *after]

    return turn


def _where_lanes(ctx: Lowering, goes_on: Value, new: Value, old: Value) -> Value:
    """Selects the new carry in lanes that continue, and the old carry elsewhere. Lanes are the leading axes."""
    if is_same(new, old, ctx.region.is_same):
        return old
    lanes = (*goes_on.shape, *[1] * (len(old.shape) - len(goes_on.shape)))
    return fold_constant(select_elements(ctx, reshape_value(ctx, goes_on, lanes), new, old))


# --- scan -----------------------------------------------------------------------------------------------


class _Scan(NamedTuple):
    """A scan's parameters and operands."""

    jaxpr: Any
    length: int
    reverse: bool
    fixed: Sequence[Value]
    start: list[Value]
    taken: Sequence[Value]
    """Arrays of which each turn takes an element."""
    given: Sequence[ShapedArray]
    """Types of the turns' stacked outputs."""
    needed: tuple[bool, ...]
    """Whether each carried value and each stacked output is read."""

    def place(self, turn: int) -> int:
        """Returns the index of an iteration's elements in the arrays."""
        return self.length - 1 - turn if self.reverse else turn


def _scan(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    fixed, start, taken = scan_operands(equation.params, values)
    params, given = equation.params, equation.outputs[len(start) :]
    scan = _Scan(params["jaxpr"], params["length"], params["reverse"], fixed, start, taken, given, equation.needed)
    if scan.length == 0:
        return [*scan.start, *(Const(np.zeros(out.shape, out.dtype)) for out in given)]
    return _unroll(ctx, scan) or _count_turns(ctx, scan)


def scan_operands(params: Mapping[str, Any], values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Returns the operands of a scan: fixed values, carried values, and arrays that it takes elements from."""
    if "ft_in" in params:  # since jax 0.11
        fixed, start, taken = params["ft_in"].update(values).unpack()
        return list(fixed), list(start), list(taken)
    first, end = params["num_consts"], params["num_consts"] + params["num_carry"]
    return list(values[:first]), list(values[first:end]), list(values[end:])


def _unroll(ctx: Lowering, scan: _Scan) -> list[Value] | None:
    """Unrolls a scan, or returns None if it is too long."""
    begin, now = ctx.region.size, scan.start
    given: list[list[Value]] = []
    for turn in range(scan.length):
        now, own = _turn(ctx, scan, now, [index_leading(ctx, x, scan.place(turn)) for x in scan.taken])
        given.append(own)
        made = ctx.region.size - begin
        # The first iteration also creates nodes that all iterations share, so it says little about the others.
        expected = made / (turn + 1) * scan.length if turn else made
        if expected > (MAX_NODES_SHORT if scan.length <= SHORT else MAX_NODES):
            return None
    columns = zip(*(given[::-1] if scan.reverse else given), strict=True)
    return [*now, *(stack_values(ctx, column) for column in columns)]


def _turn(ctx: Lowering, scan: _Scan, now: list[Value], taken: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    count = len(scan.start)
    needed = (True,) * count + scan.needed[count:]
    results = ctx.read(scan.jaxpr, [*scan.fixed, *now, *taken], ctx, needed)
    return results[:count], results[count:]


def _count_turns(ctx: Lowering, scan: _Scan) -> list[Value]:
    """Returns a loop that counts its iterations, and writes the results of each iteration to arrays."""
    count, zero = len(scan.start), Const(np.zeros((), np.int32))
    written = [n for n, needed in enumerate(scan.needed[count:]) if needed]
    arrays = [Const(np.zeros(scan.given[n].shape, scan.given[n].dtype)) for n in written]
    for array in arrays:
        _check_held(array.shape, "gives")

    def body(at: Lowering, now: list[Value]) -> list[Value]:
        turn = at.scalar(now[0])
        last = at.constant(scan.length - 1, np.int32)
        place = at.apply("sub", last, turn) if scan.reverse else turn
        taken = [_element(at, x, place) for x in scan.taken]
        after, given = _turn(at, scan, now[1 : 1 + count], taken)
        # Only outputs with readers get an array, because each of its elements occupies a register during the whole
        # loop.
        held = zip(now[1 + count :], written, strict=True)
        arrays = [with_element(at, array, given[n], place) for array, n in held]
        return [_number(at.apply("add", turn, at.constant(1, np.int32))), *after, *arrays]

    _, *after_all = emit_loop(ctx, body, None, [zero, *scan.start, *arrays], scan.length)
    results: list[Value] = [zero] * len(scan.given)
    for n, array in zip(written, after_all[count:], strict=True):
        results[n] = array
    return [*after_all[:count], *results]


def _number(node: Node) -> ScalarArray:
    return ScalarArray(alone(node), node.dtype)


def _element(ctx: Lowering, value: Value, place: Node) -> Value:
    """Returns the element of a turn, computing evenly spaced integers by arithmetic."""
    if isinstance(value, Const) and value.array.ndim == 1 and value.dtype.kind in "iu":
        first, step = value.array[0], np.diff(value.array[:2]).sum()
        if np.array_equal(value.array, first + step * np.arange(value.array.size)):
            steps = ctx.apply("mul", place, ctx.constant(int(step), np.int32))
            number = ctx.apply("add", steps, ctx.constant(int(first), np.int32))
            return _number(ctx.region.emit("convert", number, dtype=value.dtype))
    if not is_shared(value):
        _check_held(value.shape, "takes")
    return element_at(ctx, value, place)


def _check_held(shape: tuple[int, ...], what: str) -> None:
    size = int(np.prod(shape))
    if size > MAX_HELD:
        raise LoweringError(
            f"a loop of {shape[0]} iterations {what} an array of shape {shape} in each iteration, {size} numbers "
            f"per environment, more than the limit of {MAX_HELD}. Carry only the parts that are needed"
        )


RULES: dict[str, Rule] = {"while": _while, "scan": _scan}
