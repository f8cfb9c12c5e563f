"""Lowers JAX loops that are not unrolled to loops of a kernel program."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rollmill.core.types import is_key
from rollmill.fusion.ir import Loop, Node, Program
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.values import KeyPair, RowArray, ScalarArray, Value, flat_nodes, is_same, no_nodes

Body = Callable[[Lowering, list[Value]], list[Value]]
"""Function that lowers the body of a loop: `(context, carried values) -> carried values of the next iteration`."""


class CarryForm(NamedTuple):
    """How a loop carries an array: as scalars, as rows, or not at all if it does not change."""

    changes: bool = False
    in_rows: bool = False


def emit_loop(
    ctx: Lowering, body: Body, condition: Body | None, start: Sequence[Value], turns: int | None
) -> list[Value]:
    """Adds a loop to the program, and returns the carried values after its last iteration.

    A counted loop makes `turns` iterations. Any other loop has a condition, which decides from the carried values,
    initially `start`, whether another iteration follows.
    """
    held, inside, after = _turn(ctx, body, start)
    changing = [n for n, how in enumerate(held) if how.changes]
    if not changing:
        return list(start)  # no iteration changes anything
    outputs = [_as_carried(inside, after[n], held[n]) for n in changing]
    program = inside.region.program([node for value in outputs for node in flat_nodes(value)])
    asking, asked = (None, []) if condition is None else _asking(ctx, condition, start, held)
    # Outside of the body, in the form that the body needs, such as scalars for a constant start value.
    carried = [_as_carried(ctx, start[n], held[n]) for n in changing]
    first = [node for value in carried for node in flat_nodes(value)]
    loop = ctx.region.emit(
        "loop",
        *(*first, *inside.region.captures, *asked),
        dtype=np.int32,
        attributes=(Loop(program, asking, turns),),
    )
    items = (
        ctx.region.emit("item", loop, dtype=node.dtype, width=node.width, attributes=(n,))
        for n, node in enumerate(program.outputs)
    )
    results = list(start)
    for n, value in zip(changing, carried, strict=True):
        results[n] = _like(value, lambda: next(items))
    return results


def _turn(ctx: Lowering, body: Body, start: Sequence[Value]) -> tuple[list[CarryForm], Lowering, list[Value]]:
    """Returns the forms of all carried values, the context of the body, and the values after a turn."""
    held = [CarryForm() for _ in start]
    while True:
        inside = ctx.inside()
        before = [_hand_in(inside, value, how) for value, how in zip(start, held, strict=True)]
        after = body(inside, list(before))
        # A fixed point: changed values must be carried, and values computed from them may change, too. Forms only
        # grow, from not carried over scalars to rows, so the loop ends.
        wider = [_as_needed(inside, *each) for each in zip(held, before, after, strict=True)]
        if wider == held:
            return held, inside, after
        held = wider


def _asking(
    ctx: Lowering, condition: Body, start: Sequence[Value], held: Sequence[CarryForm]
) -> tuple[Program, list[Node]]:
    """Returns the program of a loop's condition, and the outside values that it reads."""
    inside = ctx.inside()
    now = [_hand_in(inside, value, how) for value, how in zip(start, held, strict=True)]
    (goes_on,) = condition(inside, now)
    program = inside.region.program([inside.scalar(goes_on)])
    return program, inside.region.captures


def _hand_in(inside: Lowering, value: Value, how: CarryForm) -> Value:
    """Returns a carried array as a turn sees it."""
    if not how.changes:
        return value
    if how.in_rows:
        row = lambda: inside.region.input(value.dtype, value.shape[-1])
        return _like(RowArray(no_nodes(value.shape[:-1]), value.shape[-1], value.dtype), row)
    dtype = np.uint32 if is_key(value.dtype) else value.dtype
    return _like(ScalarArray(no_nodes(value.shape), value.dtype), lambda: inside.region.input(dtype))


def _like(value: ScalarArray | RowArray, make: Callable[[], Node]) -> ScalarArray | RowArray:
    """Returns an array of the same kind, with nodes made in row-major order."""
    nodes = no_nodes(value.nodes.shape)
    for at in np.ndindex(*nodes.shape):
        nodes[at] = KeyPair(make(), make()) if is_key(value.dtype) else make()
    return value._replace(nodes=nodes)


def _as_needed(inside: Lowering, how: CarryForm, before: Value, after: Value) -> CarryForm:
    """Returns how a loop must carry an array, given its value after an iteration."""
    if not how.changes and is_same(before, after, inside.region.is_same):
        return how
    return CarryForm(True, how.in_rows or isinstance(after, RowArray) or isinstance(before, RowArray))


def _as_carried(ctx: Lowering, value: Value, how: CarryForm) -> ScalarArray | RowArray:
    return ctx.rows(value) if how.in_rows else ctx.scalars(value)
