"""Faults of control flow, indexing, reductions, sorting, shapes and random numbers; see `faults`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from fault_registry import Patch, fault, replaced

from rollmill.fusion.lower import context, dynamic_index, loops, movement
from rollmill.fusion.lower.rules import (
    RULES,
    calls,
    control,
    elementwise,
    indexing,
    linear,
    products,
    random,
    reductions,
    scattering,
    shapes,
    sorting,
)
from rollmill.fusion.lower.values import ScalarArray, alone


def node_of(array: Any, at: int = 0) -> ScalarArray:
    return ScalarArray(alone(array.nodes.reshape(-1)[at]), array.dtype)


# --- loops and branches -------------------------------------------------------------------------------------


def _first_lane(ctx, now):
    return [context.fold_constant(node_of(ctx.scalars(now[0])))]


def _last_lane(ctx, now):
    return [context.fold_constant(node_of(ctx.scalars(now[0]), -1))]


def _all_lanes(ctx, now):
    return [context.fold_constant(reductions.reduce_axes(ctx, "and", now[0], range(len(now[0].shape))))]


replaced("a loop of lanes asks the first lane", control, "_any_lane", _first_lane, "while")
replaced("a loop of lanes asks the last lane", control, "_any_lane", _last_lane, "while")
replaced("a loop of lanes ends with its first lane", control, "_any_lane", _all_lanes, "while")
replaced("lanes that have ended go on", control, "_where_lanes", lambda ctx, goes_on, new, old: new, "while")
replaced("a scan backwards runs forwards", control._Scan, "place", lambda self, turn: turn, "scan")


@fault("a counted loop lacks its last turn", "scan")
def _(patch: Patch) -> None:
    emit = control.emit_loop
    fewer = lambda turns: turns - 1 if turns and turns > 1 else turns
    patch.setattr(
        control, "emit_loop", lambda ctx, body, asked, start, turns: emit(ctx, body, asked, start, fewer(turns))
    )


@fault("a loop does not carry flags", "scan", "while")
def _(patch: Patch) -> None:
    emit = control.emit_loop

    def wrong(ctx, body, asked, start, turns):
        pairs = zip(emit(ctx, body, asked, start, turns), start, strict=True)
        return [before if after.dtype == np.bool_ else after for after, before in pairs]

    patch.setattr(control, "emit_loop", wrong)


@fault("a carried array is taken for unchanged", "scan", "while")
def _(patch: Patch) -> None:
    same = loops.is_same
    patch.setattr(loops, "is_same", lambda one, other, is_node: same(one, other, is_node) or len(one.shape) == 2)


@fault("branches are exchanged", "cond")
def _(patch: Patch) -> None:
    merge = calls._merge
    patch.setattr(calls, "_merge", lambda ctx, index, cases: merge(ctx, index, cases[::-1]))


@fault("a case is that of the next number", "cond", "select_n")
def _(patch: Patch) -> None:
    choose = elementwise.one_of
    wrong = lambda ctx, which, cases: choose(ctx, which, cases if len(cases) < 3 else [*cases[1:], cases[0]])
    patch.setattr(elementwise, "one_of", wrong)
    patch.setattr(calls, "one_of", wrong)


# --- indexing -----------------------------------------------------------------------------------------------


def _starting(change: Callable) -> Callable[[Patch], None]:
    def make(patch: Patch) -> None:
        start = dynamic_index.start_of
        wrong = lambda ctx, index, most, *, clamp: change(start, ctx, index, most, clamp)
        for module in (indexing, scattering):
            patch.setattr(module, "start_of", wrong)

    return make


fault(
    "the last place is out of bounds", "gather", "dynamic_slice", "dynamic_update_slice", "scatter", "scatter-add"
)(_starting(lambda start, ctx, index, most, clamp: start(ctx, index, max(most - 1, 0), clamp=clamp)))
fault("all indices are clamped", "gather", "scatter", "scatter-add")(
    _starting(lambda start, ctx, index, most, clamp: start(ctx, index, most, clamp=True))
)
fault(
    "negative indices count from the end",
    "gather",
    "dynamic_slice",
    "dynamic_update_slice",
    "scatter",
    "scatter-add",
)(
    _starting(
        lambda start, ctx, index, most, clamp: start(
            ctx,
            ctx.apply(
                "select",
                ctx.apply("lt", index, ctx.constant(0, index.dtype)),
                ctx.apply("add", index, ctx.constant(most + 1, index.dtype)),
                index,
            ),
            most,
            clamp=clamp,
        )
    )
)


@fault(
    "unsigned indices are read as signed",
    "gather",
    "dynamic_slice",
    "dynamic_update_slice",
    "scatter",
    "scatter-add",
)
def _(patch: Patch) -> None:
    _starting(
        lambda start, ctx, index, most, clamp: start(
            ctx,
            index
            if index.dtype.kind == "i"
            else ctx.apply("convert", index, dtype=np.dtype(f"int{8 * index.dtype.itemsize}")),
            most,
            clamp=clamp,
        )
    )(patch)


replaced("a gather that fills, clamps", indexing, "is_clamped", lambda mode: True, "gather", "scatter")
replaced("what is filled in is zero", indexing, "default_fill", lambda dtype: 0, "gather")
replaced(
    "a scatter that drops, clamps",
    scattering,
    "_is_moved_inside",
    lambda mode: True,
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-min",
    "scatter-max",
    "scatter-mul",
)
replaced(
    "a scatter that clamps, drops",
    scattering,
    "_is_moved_inside",
    lambda mode: False,
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-min",
    "scatter-max",
    "scatter-mul",
)
replaced(
    "a scatter only replaces",
    scattering,
    "_combination",
    lambda ctx, kind: scattering._replace,
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-min",
    "scatter-max",
    "scatter-mul",
)
replaced("a scatter of minima takes maxima", scattering.COMBINATIONS, "min", "max", "scatter-min")


@fault("a slice begins one place later", "gather", "dynamic_slice")
def _(patch: Patch) -> None:
    choose = dynamic_index._one_of
    patch.setattr(
        dynamic_index, "_one_of", lambda ctx, windows, start: choose(ctx, [*windows[1:], windows[0]], start)
    )


# --- reductions and sorting ---------------------------------------------------------------------------------


@fault(
    "a reduction takes the other axis",
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_or",
    "reduce_and",
)
def _(patch: Patch) -> None:
    reduce_axes = reductions.reduce_axes

    def wrong(ctx, op, value, axes):
        if len(value.shape) == 2 and len(axes) == 1:
            return reduce_axes(ctx, op, movement.reshape_value(ctx, value, value.shape[::-1]), [1 - axes[0]])
        return reduce_axes(ctx, op, value, axes)

    patch.setattr(reductions, "reduce_axes", wrong)


@fault("a reduction leaves out the first element", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod")
def _(patch: Patch) -> None:
    fold_all = reductions.reduce
    patch.setattr(reductions, "reduce", lambda combine, own: fold_all(combine, list(own)[1:] or list(own)))


replaced("all is any", RULES, "reduce_and", RULES["reduce_or"], "reduce_and")
replaced("a least element is the greatest", RULES, "reduce_min", RULES["reduce_max"], "reduce_min")
replaced("argmin is argmax", RULES, "argmin", RULES["argmax"], "argmin")


@fault("argmax gives the last of equals", "argmax", "argmin")
def _(patch: Patch) -> None:
    patch.setattr(
        reductions, "is_better", lambda ctx, op, node, best: ctx.apply({"gt": "ge", "lt": "le"}[op], node, best)
    )


@fault("a running sum never runs backwards", "cumsum")
def _(patch: Patch) -> None:
    rule = RULES["cumsum"]
    patch.setitem(
        RULES,
        "cumsum",
        lambda ctx, e, values: rule(ctx, e._replace(params={**e.params, "reverse": False}), values),
    )


@fault("a sort exchanges equal elements", "sort", "top_k")
def _(patch: Patch) -> None:
    patch.setattr(sorting, "_is_before", lambda ctx, one, other: ctx.apply("le", one[0], other[0]))


replaced("a sort compares NaN", sorting, "_key", lambda ctx, array, **kind: array, "sort", "top_k")


@fault("a sort by several keys reads the last", "sort", "top_k")
def _(patch: Patch) -> None:
    patch.setattr(sorting, "_is_before", lambda ctx, one, other: ctx.apply("lt", one[-1], other[-1]))


@fault("a sort takes the first axis", "sort")
def _(patch: Patch) -> None:
    order = sorting._sort_arrays
    wrong = lambda ctx, arrays, keys, axis, *, stable: order(ctx, arrays, keys, 0, stable=stable)
    patch.setattr(sorting, "_sort_arrays", wrong)


# --- element by element -------------------------------------------------------------------------------------


def _by_nodes(name: str, primitive: str, combine: Callable) -> None:
    replaced(name, RULES, primitive, elementwise._by_nodes(combine), primitive)


_by_nodes("clamp has no upper bound", "clamp", lambda ctx, e, low, x, high: ctx.apply("max", x, low))
_by_nodes("clamp has no lower bound", "clamp", lambda ctx, e, low, x, high: ctx.apply("min", x, high))
_by_nodes("round goes down", "round", lambda ctx, e, x: ctx.apply("floor", x))
_by_nodes("a cube is a square", "integer_pow", lambda ctx, e, x: ctx.apply("mul", x, x))
_by_nodes("less is less or equal", "lt", lambda ctx, e, x, y: ctx.apply("le", x, y))
_by_nodes(
    "a logical shift is arithmetic",
    "shift_right_logical",
    lambda ctx, e, x, y: ctx.apply("shift_right_arithmetic", x, y),
)


@fault("what is negative converts to False", "convert_element_type")
def _(patch: Patch) -> None:
    convert = elementwise.convert_dtype
    positive = lambda ctx, node: ctx.apply("gt", node, ctx.constant(0, node.dtype))
    wrong = lambda ctx, node, dtype: (
        positive(ctx, node) if dtype == np.bool_ != node.dtype else convert(ctx, node, dtype)
    )
    patch.setattr(elementwise, "convert_dtype", wrong)


@fault("select takes the other side", "select_n")
def _(patch: Patch) -> None:
    rule = RULES["select_n"]
    patch.setitem(RULES, "select_n", lambda ctx, e, values: rule(ctx, e, [values[0], *values[:0:-1]]))


# --- shapes and products ------------------------------------------------------------------------------------


def _moved(name: str, primitive: str, move: Callable) -> None:
    replaced(name, RULES, primitive, shapes._by_move(move), primitive)


_moved("all axes are reversed", "rev", lambda array, *, dimensions, **_: np.flip(array))
_moved(
    "a transposition only reshapes",
    "transpose",
    lambda array, *, permutation, **_: array.reshape(np.transpose(array, permutation).shape),
)


@fault(
    "padding is at the other end",
    "pad",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "reduce_window",
    "conv_general_dilated",
)
def _(patch: Patch) -> None:
    pad = shapes.pad_indices
    patch.setattr(
        shapes, "pad_indices", lambda places, config: pad(places, [(high, low, own) for low, high, own in config])
    )


@fault("iota counts along the last axis", "iota")
def _(patch: Patch) -> None:
    rule = RULES["iota"]
    along = lambda e: e._replace(params={**e.params, "dimension": len(e.shape) - 1})
    patch.setitem(RULES, "iota", lambda ctx, e, values: rule(ctx, along(e), values))


@fault("a product lacks its last term", "dot_general", "conv_general_dilated")
def _(patch: Patch) -> None:
    whole = products.sum_of_products
    part = lambda ctx, one, other, dtype: whole(
        ctx, one[:-1] if len(one) > 1 else one, other[:-1] if len(one) > 1 else other, dtype
    )
    patch.setattr(products, "sum_of_products", part)


# --- random numbers and linear algebra ----------------------------------------------------------------------

replaced(
    "threefry rotates in another order",
    random,
    "ROTATIONS",
    random.ROTATIONS[::-1],
    "random_bits",
    "random_split",
    "random_fold_in",
)


@fault("all lanes draw from the first key", "random_bits", "random_split", "random_fold_in")
def _(patch: Patch) -> None:
    def wrong(ctx, keys, function):
        data = ctx.key_data(keys)
        first = (0,) * len(keys.shape)
        found = [
            function(ScalarArray(data.nodes[(*first, ...)], random.WORD), at) for at in np.ndindex(*keys.shape)
        ]
        if not keys.shape:
            return found[0]
        return movement.reshape_value(ctx, shapes.stack_values(ctx, found), (*keys.shape, *found[0].shape))

    patch.setattr(random, "_each_key", wrong)


@fault("a triangular solve takes the other triangle", "triangular_solve")
def _(patch: Patch) -> None:
    solve = linear._substitute
    wrong = lambda ctx, matrix, side, *, lower, unit: solve(ctx, matrix, side, lower=not lower, unit=unit)
    patch.setattr(linear, "_substitute", wrong)


@fault("a factorisation subtracts one product too few", "lu", "cholesky", "triangular_solve")
def _(patch: Patch) -> None:
    less = linear._less_products
    patch.setattr(linear, "_less_products", lambda ctx, number, one, other: less(ctx, number, one[1:], other[1:]))
