"""Faults of the compiler, made on purpose: a rule of the lowering, or of machine code, that is a little wrong.

Drawn programs must find them. Each fault is a function that changes one thing by a `pytest.MonkeyPatch`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from rollmill.fusion.backends.cpu import control as cpu_control
from rollmill.fusion.backends.cpu import operations as cpu
from rollmill.fusion.backends.cpu.builder import Emitter
from rollmill.fusion.backends.cpu.codegen import CodeWriter
from rollmill.fusion.ir import fold
from rollmill.fusion.ir import region as ir_region
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

Patch = Any
"""A `pytest.MonkeyPatch`."""

FAULTS: dict[str, Callable[[Patch], None]] = {}


def fault(name: str) -> Callable:
    def add(make: Callable[[Patch], None]) -> Callable:
        FAULTS[name] = make
        return make

    return add


def replaced(name: str, owner: Any, attribute: str, value: Any) -> None:
    """A fault that puts something else in the place of an attribute, or of an entry of a dictionary."""
    if isinstance(owner, dict):
        FAULTS[name] = lambda patch: patch.setitem(owner, attribute, value)
    else:
        FAULTS[name] = lambda patch: patch.setattr(owner, attribute, value)


def node_of(array: Any, at: int = 0) -> ScalarArray:
    return ScalarArray(alone(array.nodes.reshape(-1)[at]), array.dtype)


# --- loops and branches -------------------------------------------------------------------------------------


def _first_lane(ctx, now):
    return [context.settled(node_of(ctx.scalars(now[0])))]


def _last_lane(ctx, now):
    return [context.settled(node_of(ctx.scalars(now[0]), -1))]


def _all_lanes(ctx, now):
    return [context.settled(reductions.reduced(ctx, "and", now[0], range(len(now[0].shape))))]


replaced("a loop of lanes asks the first lane", control, "_any_lane", _first_lane)
replaced("a loop of lanes asks the last lane", control, "_any_lane", _last_lane)
replaced("a loop of lanes ends with its first lane", control, "_any_lane", _all_lanes)
replaced("lanes that have ended go on", control, "_where_lanes", lambda ctx, goes_on, new, old: new)
replaced("a scan backwards runs forwards", control._Scan, "place", lambda self, turn: turn)


@fault("a counted loop lacks its last turn")
def _(patch: Patch) -> None:
    emit = control.emit_loop
    fewer = lambda turns: turns - 1 if turns and turns > 1 else turns
    patch.setattr(
        control, "emit_loop", lambda ctx, body, asked, start, turns: emit(ctx, body, asked, start, fewer(turns))
    )


@fault("a loop does not carry flags")
def _(patch: Patch) -> None:
    emit = control.emit_loop

    def wrong(ctx, body, asked, start, turns):
        pairs = zip(emit(ctx, body, asked, start, turns), start, strict=True)
        return [before if after.dtype == np.bool_ else after for after, before in pairs]

    patch.setattr(control, "emit_loop", wrong)


@fault("a carried array is taken for unchanged")
def _(patch: Patch) -> None:
    same = loops.is_same
    patch.setattr(loops, "is_same", lambda one, other, is_node: same(one, other, is_node) or len(one.shape) == 2)


@fault("branches are exchanged")
def _(patch: Patch) -> None:
    merge = calls._merged
    patch.setattr(calls, "_merged", lambda ctx, index, cases: merge(ctx, index, cases[::-1]))


@fault("a case is that of the next number")
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


FAULTS["the last place is out of bounds"] = _starting(
    lambda start, ctx, index, most, clamp: start(ctx, index, max(most - 1, 0), clamp=clamp)
)
FAULTS["all indices are clamped"] = _starting(
    lambda start, ctx, index, most, clamp: start(ctx, index, most, clamp=True)
)
FAULTS["negative indices count from the end"] = _starting(
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


@fault("unsigned indices are read as signed")
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


replaced("a gather that fills, clamps", indexing, "is_clamped", lambda mode: True)
replaced("what is filled in is zero", indexing, "default_fill", lambda dtype: 0)
replaced("a scatter that drops, clamps", scattering, "_is_moved_inside", lambda mode: True)
replaced("a scatter that clamps, drops", scattering, "_is_moved_inside", lambda mode: False)
replaced("a scatter only replaces", scattering, "_combination", lambda ctx, kind: scattering._replaced)
replaced("a scatter of minima takes maxima", scattering.COMBINATIONS, "min", "max")


@fault("a slice begins one place later")
def _(patch: Patch) -> None:
    choose = dynamic_index._one_of
    patch.setattr(
        dynamic_index, "_one_of", lambda ctx, windows, start: choose(ctx, [*windows[1:], windows[0]], start)
    )


# --- reductions and sorting ---------------------------------------------------------------------------------


@fault("a reduction takes the other axis")
def _(patch: Patch) -> None:
    reduce_axes = reductions.reduced

    def wrong(ctx, op, value, axes):
        if len(value.shape) == 2 and len(axes) == 1:
            return reduce_axes(ctx, op, movement.reshaped(ctx, value, value.shape[::-1]), [1 - axes[0]])
        return reduce_axes(ctx, op, value, axes)

    patch.setattr(reductions, "reduced", wrong)


@fault("a reduction leaves out the first element")
def _(patch: Patch) -> None:
    fold_all = reductions.reduce
    patch.setattr(reductions, "reduce", lambda combine, own: fold_all(combine, list(own)[1:] or list(own)))


FAULTS["all is any"] = lambda patch: patch.setitem(RULES, "reduce_and", RULES["reduce_or"])
FAULTS["a least element is the greatest"] = lambda patch: patch.setitem(RULES, "reduce_min", RULES["reduce_max"])
FAULTS["argmin is argmax"] = lambda patch: patch.setitem(RULES, "argmin", RULES["argmax"])


@fault("argmax gives the last of equals")
def _(patch: Patch) -> None:
    patch.setattr(
        reductions, "is_better", lambda ctx, op, node, best: ctx.apply({"gt": "ge", "lt": "le"}[op], node, best)
    )


@fault("a running sum never runs backwards")
def _(patch: Patch) -> None:
    rule = RULES["cumsum"]
    patch.setitem(
        RULES,
        "cumsum",
        lambda ctx, e, values: rule(ctx, e._replace(params={**e.params, "reverse": False}), values),
    )


@fault("a sort exchanges equal elements")
def _(patch: Patch) -> None:
    patch.setattr(sorting, "_is_before", lambda ctx, one, other: ctx.apply("le", one[0], other[0]))


replaced("a sort compares NaN", sorting, "_key", lambda ctx, array: array)


@fault("a sort by several keys reads the last")
def _(patch: Patch) -> None:
    patch.setattr(sorting, "_is_before", lambda ctx, one, other: ctx.apply("lt", one[-1], other[-1]))


@fault("a sort takes the first axis")
def _(patch: Patch) -> None:
    order = sorting._sorted
    wrong = lambda ctx, arrays, keys, axis, *, stable: order(ctx, arrays, keys, 0, stable=stable)
    patch.setattr(sorting, "_sorted", wrong)


# --- element by element -------------------------------------------------------------------------------------


def _by_nodes(primitive: str, combine: Callable) -> Callable[[Patch], None]:
    return lambda patch: patch.setitem(RULES, primitive, elementwise._by_nodes(combine))


FAULTS["clamp has no upper bound"] = _by_nodes("clamp", lambda ctx, e, low, x, high: ctx.apply("max", x, low))
FAULTS["clamp has no lower bound"] = _by_nodes("clamp", lambda ctx, e, low, x, high: ctx.apply("min", x, high))
FAULTS["round goes down"] = _by_nodes("round", lambda ctx, e, x: ctx.apply("floor", x))
FAULTS["a cube is a square"] = _by_nodes("integer_pow", lambda ctx, e, x: ctx.apply("mul", x, x))
FAULTS["less is less or equal"] = _by_nodes("lt", lambda ctx, e, x, y: ctx.apply("le", x, y))
FAULTS["a logical shift is arithmetic"] = _by_nodes(
    "shift_right_logical", lambda ctx, e, x, y: ctx.apply("shift_right_arithmetic", x, y)
)


@fault("what is negative converts to False")
def _(patch: Patch) -> None:
    convert = elementwise.converted
    positive = lambda ctx, node: ctx.apply("gt", node, ctx.constant(0, node.dtype))
    wrong = lambda ctx, node, dtype: (
        positive(ctx, node) if dtype == np.bool_ != node.dtype else convert(ctx, node, dtype)
    )
    patch.setattr(elementwise, "converted", wrong)


@fault("select takes the other side")
def _(patch: Patch) -> None:
    rule = RULES["select_n"]
    patch.setitem(RULES, "select_n", lambda ctx, e, values: rule(ctx, e, [values[0], *values[:0:-1]]))


# --- shapes and products ------------------------------------------------------------------------------------


def _moved(primitive: str, move: Callable) -> Callable[[Patch], None]:
    return lambda patch: patch.setitem(RULES, primitive, shapes._by_move(move))


FAULTS["all axes are reversed"] = _moved("rev", lambda array, *, dimensions, **_: np.flip(array))
FAULTS["a transposition only reshapes"] = _moved(
    "transpose", lambda array, *, permutation, **_: array.reshape(np.transpose(array, permutation).shape)
)


@fault("padding is at the other end")
def _(patch: Patch) -> None:
    pad = shapes.padded
    patch.setattr(
        shapes, "padded", lambda places, config: pad(places, [(high, low, own) for low, high, own in config])
    )


@fault("iota counts along the last axis")
def _(patch: Patch) -> None:
    rule = RULES["iota"]
    along = lambda e: e._replace(params={**e.params, "dimension": len(e.shape) - 1})
    patch.setitem(RULES, "iota", lambda ctx, e, values: rule(ctx, along(e), values))


@fault("a product lacks its last term")
def _(patch: Patch) -> None:
    whole = products.sum_of_products
    part = lambda ctx, one, other, dtype: whole(
        ctx, one[:-1] if len(one) > 1 else one, other[:-1] if len(one) > 1 else other, dtype
    )
    patch.setattr(products, "sum_of_products", part)


# --- random numbers and linear algebra ----------------------------------------------------------------------

replaced("threefry rotates in another order", random, "ROTATIONS", random.ROTATIONS[::-1])


@fault("all lanes draw from the first key")
def _(patch: Patch) -> None:
    def wrong(ctx, keys, function):
        data = ctx.key_data(keys)
        first = (0,) * len(keys.shape)
        found = [
            function(ScalarArray(data.nodes[(*first, ...)], random.WORD), at) for at in np.ndindex(*keys.shape)
        ]
        if not keys.shape:
            return found[0]
        return movement.reshaped(ctx, shapes.stacked(ctx, found), (*keys.shape, *found[0].shape))

    patch.setattr(random, "_each_key", wrong)


@fault("a triangular solve takes the other triangle")
def _(patch: Patch) -> None:
    solve = linear._substituted
    wrong = lambda ctx, matrix, side, *, lower, unit: solve(ctx, matrix, side, lower=not lower, unit=unit)
    patch.setattr(linear, "_substituted", wrong)


@fault("a factorisation subtracts one product too few")
def _(patch: Patch) -> None:
    less = linear._less_products
    patch.setattr(linear, "_less_products", lambda ctx, number, one, other: less(ctx, number, one[1:], other[1:]))


# --- folding ------------------------------------------------------------------------------------------------

replaced("a difference is looked up exchanged", ir_region, "COMMUTATIVE", ir_region.COMMUTATIVE | {"sub"})
replaced("a comparison is looked up exchanged", ir_region, "COMMUTATIVE", ir_region.COMMUTATIVE | {"lt", "gt"})
replaced("a product with one is one", fold.ABSORBING, "mul", 1)
replaced("nothing is equal to itself", fold.OF_ITSELF, "eq", False)
replaced("a number less nothing is nothing", fold.NEUTRAL, "xor", (1, False))
replaced(
    "a known branch is the other",
    fold,
    "_selected",
    lambda asked, one, other: other if asked.op == "constant" else None,
)

# --- machine code -------------------------------------------------------------------------------------------


@fault("machine code: unsigned numbers compare as signed")
def _(patch: Patch) -> None:
    compare = cpu._compared
    signed = lambda dtype: dtype if dtype.kind == "f" else np.dtype(np.int32)
    patch.setattr(
        cpu, "_compared", lambda emit, symbol, operands, dtype: compare(emit, symbol, operands, signed(dtype))
    )


@fault("machine code: NaN is equal to itself")
def _(patch: Patch) -> None:
    compare = cpu._compared

    def wrong(emit, symbol, operands, dtype):
        if dtype.kind == "f" and symbol == "!=":
            return emit.builder.fcmp_ordered(symbol, *operands)
        return compare(emit, symbol, operands, dtype)

    patch.setattr(cpu, "_compared", wrong)


@fault("machine code: integers widen without their sign")
def _(patch: Patch) -> None:
    convert = cpu._converted
    unsigned = lambda dtype: np.dtype(f"uint{8 * dtype.itemsize}") if dtype.kind == "i" else dtype
    patch.setattr(cpu, "_converted", lambda emit, x, before, after: convert(emit, x, unsigned(before), after))


@fault("machine code: conversions do not saturate")
def _(patch: Patch) -> None:
    convert = cpu._converted

    def wrong(emit, x, before, after):
        if before.kind == "f" and after.kind in "iu":
            wide = emit.builder.fptosi(x, emit.vector(np.dtype(np.int64)))
            return emit.builder.trunc(wide, emit.vector(after))
        return convert(emit, x, before, after)

    patch.setattr(cpu, "_converted", wrong)


@fault("machine code: shifts by all bits leave the number")
def _(patch: Patch) -> None:
    def wrong(emit, op, x, by):
        builder = emit.builder
        own = {
            "shift_left": builder.shl,
            "shift_right_logical": builder.lshr,
            "shift_right_arithmetic": builder.ashr,
        }
        mask = ir.Constant(x.type, [x.type.element.width - 1] * emit.lanes)
        return own[op](x, builder.and_(by, mask))

    patch.setattr(cpu, "_shifted", wrong)


@fault("machine code: a division by zero is zero")
def _(patch: Patch) -> None:
    divide = cpu._divided

    def wrong(emit, op, x, y, *, signed):
        zero = ir.Constant(x.type, None)
        by_zero = emit.builder.icmp_unsigned("==", y, zero)
        return emit.builder.select(by_zero, zero, divide(emit, op, x, y, signed=signed))

    patch.setattr(cpu, "_divided", wrong)


replaced(
    "machine code: a maximum drops NaN", cpu.OF_FLOATS, "max", lambda emit, x, y: emit.intrinsic("maxnum", x, y)
)
replaced(
    "machine code: a minimum drops NaN", cpu.OF_FLOATS, "min", lambda emit, x, y: emit.intrinsic("minnum", x, y)
)
replaced("machine code: halves round up", cpu.OF_FLOATS, "round_even", lambda emit, x: emit.intrinsic("round", x))
replaced(
    "machine code: floor goes towards zero", cpu.OF_FLOATS, "floor", lambda emit, x: emit.intrinsic("trunc", x)
)
replaced(
    "machine code: environments that have ended go on", cpu_control, "_where", lambda writer, asked, new, old: new
)
replaced("machine code: zeros are not counted", cpu.OF_INTEGERS, "clz", lambda emit, x: emit.intrinsic("ctpop", x))


@fault("machine code: a loop ends with its first environment")
def _(patch: Patch) -> None:
    def wrong(self, condition):
        whole = condition[0]
        for other in condition[1:]:
            whole = self.emit.builder.and_(whole, other)
        return self.emit.call(f"llvm.vector.reduce.and.v{self.emit.lanes}i1", whole, result=ir.IntType(1))

    patch.setattr(CodeWriter, "anywhere", wrong)


@fault("machine code: floats of 16 bits are cut off")
def _(patch: Patch) -> None:
    bits = Emitter.bits_of_short

    def wrong(self, x, dtype):
        if dtype.name == "float16" or str(x.type).count("x") == 0:
            return bits(self, x, dtype)
        words = self.builder.bitcast(x, ir.VectorType(ir.IntType(32), x.type.count))
        sixteen = ir.Constant(words.type, [16] * x.type.count)
        return self.builder.trunc(self.builder.lshr(words, sixteen), ir.VectorType(ir.IntType(16), x.type.count))

    patch.setattr(Emitter, "bits_of_short", wrong)
