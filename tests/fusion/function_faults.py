"""Faults of functions of numbers, of windows, and of rules that are made of others; see `faults`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from fault_registry import Patch, fault, replaced

from rollmill.fusion.lower import movement
from rollmill.fusion.lower.rules import (
    RULES,
    calls,
    control,
    elementwise,
    indexing,
    linear,
    random,
    reductions,
    scattering,
    shapes,
    sorting,
    windows,
)

Params = dict[str, Any]


def _with_params(name: str, primitive: str, change: Callable[[Params], Params]) -> None:
    """A fault that reads other parameters of a primitive than it has."""
    rule = RULES[primitive]
    other = lambda equation: equation._replace(params={**equation.params, **change(equation.params)})
    replaced(name, RULES, primitive, lambda ctx, e, values: rule(ctx, other(e), values), primitive)


def _as(name: str, primitive: str, other: str) -> None:
    """A fault that takes one primitive for another."""
    replaced(name, RULES, primitive, RULES[other], primitive)


# --- one taken for another ----------------------------------------------------------------------------------

_as("a sine is a cosine", "sin", "cos")
_as("an arc tangent is a hyperbolic one", "atan", "tanh")
_as("exp2 is exp", "exp2", "exp")
_as("log1p is log", "log1p", "log")
_as("erf is erfc", "erf", "erfc")
_as("logistic is tanh", "logistic", "tanh")
_as("a ceiling is a floor", "ceil", "floor")
_as("bits are counted from the left", "population_count", "clz")
_as("a running maximum is a minimum", "cummax", "cummin")
_as("a running product is a sum", "cumprod", "cumsum")
_as("an exclusive or of all is an or", "reduce_xor", "reduce_or")
_as("a product of all is a sum", "reduce_prod", "reduce_sum")
_as("pooling of minima is of maxima", "reduce_window_min", "reduce_window_max")
_as("lanes take the least for the greatest", "pmax", "pmin")
_as("or is exclusive", "or", "xor")
_as("greater or equal is greater", "ge", "gt")
_as("the sign is the number", "sign", "copy")
_as("a scatter that subtracts, adds", "scatter-sub", "scatter-add")
_as("a scatter that multiplies, adds", "scatter-mul", "scatter-add")

# --- parameters ---------------------------------------------------------------------------------------------

_with_params("a running maximum never runs backwards", "cummax", lambda own: {"reverse": False})
_with_params("a running log-sum runs backwards", "cumlogsumexp", lambda own: {"reverse": not own["reverse"]})
_with_params("a split takes its sizes backwards", "split", lambda own: {"sizes": own["sizes"][::-1]})
_with_params("a system is never transposed", "triangular_solve", lambda own: {"transpose_a": False})
_with_params("a diagonal is never one", "triangular_solve", lambda own: {"unit_diagonal": False})
_with_params(
    "precision keeps a bit more", "reduce_precision", lambda own: {"mantissa_bits": own["mantissa_bits"] + 1}
)
_with_params("pooling is without gaps", "reduce_window_max", lambda own: {"window_dilation": (1,) * 4})
_with_params("every power is one less", "integer_pow", lambda own: {"y": own["y"] - 1})


@fault("all rounding is to even numbers", "round")
def _(patch: Patch) -> None:
    rule = elementwise._by_nodes(lambda ctx, e, x: ctx.apply("round_even", x))
    patch.setitem(RULES, "round", rule)


@fault("the neighbour is on the other side", "nextafter")
def _(patch: Patch) -> None:
    rule = RULES["nextafter"]
    patch.setitem(RULES, "nextafter", lambda ctx, e, values: rule(ctx, e, values[::-1]))


@fault("an angle has its sides exchanged", "atan2")
def _(patch: Patch) -> None:
    rule = RULES["atan2"]
    patch.setitem(RULES, "atan2", lambda ctx, e, values: rule(ctx, e, values[::-1]))


@fault("a difference is the other way round", "sub")
def _(patch: Patch) -> None:
    rule = RULES["sub"]
    patch.setitem(RULES, "sub", lambda ctx, e, values: rule(ctx, e, values[::-1]))


@fault("16-bit floats read their bits anew as if they were integers", "bitcast_convert_type")
def _(patch: Patch) -> None:
    rule = elementwise._by_nodes(lambda ctx, e, x: elementwise.convert_dtype(ctx, x, e.params["new_dtype"]))
    patch.setitem(RULES, "bitcast_convert_type", rule)


# --- moving and windows -------------------------------------------------------------------------------------


@fault("a concatenation is backwards", "concatenate")
def _(patch: Patch) -> None:
    rule = RULES["concatenate"]
    patch.setitem(RULES, "concatenate", lambda ctx, e, values: rule(ctx, e, values[::-1]))


@fault("windows ignore their strides", "reduce_window_sum", "reduce_window_max", "conv_general_dilated")
def _(patch: Patch) -> None:
    under = windows.windows

    def wrong(places, sizes, strides, dilation):
        right = under(places, sizes, strides, dilation)
        dense = under(places, sizes, [1] * len(strides), dilation)
        return dense[tuple(slice(0, n) for n in right.shape[: len(strides)])]

    patch.setattr(windows, "windows", wrong)


@fault("weights are turned around", "conv_general_dilated")
def _(patch: Patch) -> None:
    rule = RULES["conv_general_dilated"]

    def wrong(ctx, e, values):
        turned = RULES["rev"](ctx, e._replace(params={"dimensions": (2,)}), values[1:])
        return rule(ctx, e, [values[0], *turned])

    patch.setitem(RULES, "conv_general_dilated", wrong)


@fault("a fill value is the default", "gather")
def _(patch: Patch) -> None:
    rule = RULES["gather"]
    patch.setitem(
        RULES, "gather", lambda ctx, e, values: rule(ctx, e._replace(params={**e.params, "fill_value": 7}), values)
    )


@fault("a window may lie half outside", "gather", "dynamic_slice")
def _(patch: Patch) -> None:
    start = indexing.start_of
    patch.setattr(
        indexing, "start_of", lambda ctx, index, most, *, clamp: start(ctx, index, max(most - 1, 0), clamp=clamp)
    )


@fault("an update begins one place earlier", "dynamic_update_slice")
def _(patch: Patch) -> None:
    rule = RULES["dynamic_update_slice"]

    def wrong(ctx, e, values):
        value, block, *starts = values
        earlier = elementwise.apply_operation(
            ctx, "sub", starts[0], control._number(ctx.constant(1, starts[0].dtype))
        )
        return rule(ctx, e, [value, block, earlier, *starts[1:]])

    patch.setitem(RULES, "dynamic_update_slice", wrong)


@fault(
    "what is written to a place twice stands there as first written", "scatter-add", "scatter-mul", "scatter-sub"
)
def _(patch: Patch) -> None:
    """The second half of the indices are out of bounds, as if a place could be written once."""
    scatter = scattering.window_start

    def wrong(ctx, shape, sizes, numbers, at, index, *, clamp):
        starts, inside = scatter(ctx, shape, sizes, numbers, at, index, clamp=clamp)
        return starts, ctx.constant(False, bool) if sum(at) > 1 else inside

    patch.setattr(scattering, "window_start", wrong)


# --- sorting and reductions ---------------------------------------------------------------------------------


@fault("merging leaves out its last exchange", "sort", "top_k")
def _(patch: Patch) -> None:
    merge = sorting._merging
    patch.setattr(sorting, "_merging", lambda size: list(merge(size))[:-1])


@fault("a sort is stable only among neighbours", "sort", "top_k")
def _(patch: Patch) -> None:
    order = sorting._sort_lines
    patch.setattr(sorting, "_sort_lines", lambda ctx, lines, own, *, stable: order(ctx, lines, own, stable=False))


@fault("the greatest few come in ascending order", "top_k")
def _(patch: Patch) -> None:
    rule = RULES["top_k"]
    backwards = lambda ctx, found: [movement.gather_static(ctx, x, np.arange(x.shape[-1])[::-1]) for x in found]
    patch.setitem(
        RULES,
        "top_k",
        lambda ctx, e, values: (
            backwards(ctx, rule(ctx, e, values)) if len(values[0].shape) == 1 else rule(ctx, e, values)
        ),
    )


@fault("NaN is never the greatest", "argmax", "argmin")
def _(patch: Patch) -> None:
    patch.setattr(reductions, "is_better", lambda ctx, op, node, best: ctx.apply(op, node, best))


@fault("an own reduction leaves out its last element", "reduce")
def _(patch: Patch) -> None:
    rule = RULES["reduce"]

    def wrong(ctx, e, values):
        count = len(values) // 2
        fewer = [
            movement.gather_static(ctx, x, shapes.positions(x.shape)[..., :-1]) if x.shape[-1] > 1 else x
            for x in values[:count]
        ]
        return rule(ctx, e, [*fewer, *values[count:]])

    patch.setitem(RULES, "reduce", wrong)


# --- keys, systems and calls --------------------------------------------------------------------------------


@fault("numbers are folded into keys as nothing", "random_fold_in")
def _(patch: Patch) -> None:
    rule = RULES["random_fold_in"]
    nothing = lambda ctx, value: elementwise.apply_operation(ctx, "sub", value, value)
    patch.setitem(
        RULES, "random_fold_in", lambda ctx, e, values: rule(ctx, e, [values[0], nothing(ctx, values[1])])
    )


@fault("the words of a key are exchanged", "random_wrap", "random_unwrap")
def _(patch: Patch) -> None:
    rule = RULES["random_unwrap"]

    def wrong(ctx, e, values):
        (data,) = rule(ctx, e, values)
        return [movement.gather_static(ctx, data, np.flip(shapes.positions(data.shape), -1))]

    patch.setitem(RULES, "random_unwrap", wrong)


@fault("rows are not exchanged", "lu")
def _(patch: Patch) -> None:
    patch.setattr(linear, "_exchange", lambda ctx, rows, first, place: None)


@fault("a branch beyond the last is the first", "cond")
def _(patch: Patch) -> None:
    merge = calls._merge
    patch.setattr(calls, "_merge", lambda ctx, index, cases: merge(ctx, index, [*cases[:-1], cases[0]]))


@fault("a long scan starts from nothing", "scan")
def _(patch: Patch) -> None:
    count = control._count_turns

    def wrong(ctx, scan):
        nothing = [elementwise.apply_operation(ctx, "xor", x, x) if x.dtype == np.int32 else x for x in scan.start]
        return count(ctx, scan._replace(start=nothing))

    patch.setattr(control, "_count_turns", wrong)


@fault("what a long scan gives stands backwards", "scan")
def _(patch: Patch) -> None:
    written = control.with_element
    patch.setattr(
        control,
        "with_element",
        lambda ctx, array, element, index: written(
            ctx, array, element, ctx.apply("sub", ctx.constant(array.shape[0] - 1, np.int32), index)
        ),
    )


@fault("random words lack their last addition", "random_bits", "random_split", "random_fold_in", "threefry2x32")
def _(patch: Patch) -> None:
    patch.setattr(random, "TURNS", random.TURNS - 1)
