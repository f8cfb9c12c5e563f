"""Emits LLVM IR for the arithmetic operations of programs."""

from collections.abc import Callable, Sequence

import numpy as np
from llvmlite import ir

from rollmill.core.errors import CannotFuse
from rollmill.fusion.backends.cpu import functions
from rollmill.fusion.backends.cpu.builder import FLOAT32, Emitter, Value, number_type
from rollmill.fusion.ir import is_short_float

COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

FLOAT_OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": Emitter.add,
    "sub": Emitter.subtract,
    "mul": Emitter.multiply,
    "div": lambda emit, x, y: emit.builder.fdiv(x, y),
    "rem": lambda emit, x, y: _rest_of_floats(emit, x, y),
    "neg": lambda emit, x: emit.builder.fneg(x),
    "abs": lambda emit, x: emit.intrinsic("fabs", x),
    "sign": lambda emit, x: _sign_of_float(emit, x),
    "max": lambda emit, x, y: emit.intrinsic("maximum", x, y),
    "min": lambda emit, x, y: emit.intrinsic("minimum", x, y),
    "floor": lambda emit, x: emit.intrinsic("floor", x),
    "ceil": lambda emit, x: emit.intrinsic("ceil", x),
    "round_away": lambda emit, x: emit.intrinsic("round", x),
    "round_even": lambda emit, x: emit.intrinsic("roundeven", x),
    "sqrt": lambda emit, x: emit.intrinsic("sqrt", x),
    "rsqrt": lambda emit, x: emit.builder.fdiv(emit.constant(1.0), emit.intrinsic("sqrt", x)),
    "is_finite": lambda emit, x: emit.builder.fcmp_ordered("<", emit.intrinsic("fabs", x), emit.constant(np.inf)),
    "exp": functions.exp,
    "exp2": functions.exp2,
    "expm1": functions.expm1,
    "log": functions.log,
    "log1p": functions.log1p,
    "tanh": functions.tanh,
    "logistic": functions.logistic,
    "sin": functions.sin,
    "cos": functions.cos,
    "tan": functions.tan,
    "erf_inv": functions.erf_inv,
}

LIBM_FUNCTIONS = {
    "pow": "powf",
    "cbrt": "cbrtf",
    "asin": "asinf",
    "acos": "acosf",
    "atan": "atanf",
    "atan2": "atan2f",
    "sinh": "sinhf",
    "cosh": "coshf",
    "asinh": "asinhf",
    "acosh": "acoshf",
    "atanh": "atanhf",
    "erf": "erff",
    "erfc": "erfcf",
}
"""Functions that are rare in environments. They call the C library, lane by lane."""

INTEGER_OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": lambda emit, x, y: emit.builder.add(x, y),
    "sub": lambda emit, x, y: emit.builder.sub(x, y),
    "mul": lambda emit, x, y: emit.builder.mul(x, y),
    "neg": lambda emit, x: emit.builder.neg(x),
    "and": lambda emit, x, y: emit.builder.and_(x, y),
    "or": lambda emit, x, y: emit.builder.or_(x, y),
    "xor": lambda emit, x, y: emit.builder.xor(x, y),
    "not": lambda emit, x: emit.builder.not_(x),
    "population_count": lambda emit, x: emit.intrinsic("ctpop", x),
    "clz": lambda emit, x: emit.call(
        f"llvm.ctlz.v{emit.lanes}i{x.type.element.width}",
        x,
        ir.Constant(ir.IntType(1), 0),
        result=x.type,
    ),
}


def emit_operation(
    emit: Emitter, op: str, operands: Sequence[Value], dtypes: Sequence[np.dtype], result: np.dtype
) -> Value:
    """Emits one operation of `ir.operations.OPERATIONS` on vectors of these dtypes.

    Raises `CannotFuse` if a dtype is not supported.
    """
    if op == "select":
        return emit.builder.select(*operands)
    if op == "bitcast":
        return _bits_read_anew(emit, operands[0], dtypes[0], result)
    if op == "convert":
        found = _convert(emit, operands[0], _in_registers(dtypes[0]), _in_registers(result))
    else:
        found = _arithmetic(emit, op, operands, _in_registers(dtypes[-1]))
    return emit.rounded(found, result) if is_short_float(result) else found


def _in_registers(dtype: np.dtype) -> np.dtype:
    """Returns the type to compute in: 16-bit floats are computed in float32, and rounded after each operation."""
    return FLOAT32 if is_short_float(dtype) else dtype


def _bits_read_anew(emit: Emitter, x: Value, before: np.dtype, after: np.dtype) -> Value:
    bits = emit.bits_of_short(x, before) if is_short_float(before) else x
    return (
        emit.short_of_bits(bits, after)
        if is_short_float(after)
        else emit.builder.bitcast(bits, emit.vector(after))
    )


def _arithmetic(emit: Emitter, op: str, operands: Sequence[Value], dtype: np.dtype) -> Value:
    if op in COMPARED:
        return _compare(emit, COMPARED[op], operands, dtype)
    if dtype.kind == "f":
        return _of_floats(emit, op, operands, dtype)
    if op in INTEGER_OPERATIONS:
        return INTEGER_OPERATIONS[op](emit, *operands)
    return _of_integers(emit, op, operands, signed=dtype.kind == "i")


def _of_floats(emit: Emitter, op: str, operands: Sequence[Value], dtype: np.dtype) -> Value:
    if dtype != FLOAT32:
        raise CannotFuse(f"machine code does not support {op} of {dtype.name}.")
    if op in LIBM_FUNCTIONS:
        return emit.each_lane(LIBM_FUNCTIONS[op], *operands)
    return FLOAT_OPERATIONS[op](emit, *operands)


def _of_integers(emit: Emitter, op: str, operands: Sequence[Value], *, signed: bool) -> Value:
    builder = emit.builder
    match op:
        case "max" | "min":
            return emit.intrinsic(f"{'s' if signed else 'u'}{op}", *operands)
        case "div" | "rem":
            return _divide(emit, op, *operands, signed=signed)
        case "abs":
            x = operands[0]
            below = builder.icmp_signed("<", x, ir.Constant(x.type, None))
            return builder.select(below, builder.neg(x), x) if signed else x
        case "sign":
            x, zero = operands[0], ir.Constant(operands[0].type, None)
            one = builder.zext(builder.icmp_signed("!=", x, zero), x.type)
            return builder.select(builder.icmp_signed("<", x, zero), builder.neg(one), one) if signed else one
        case "shift_left" | "shift_right_logical" | "shift_right_arithmetic":
            return _shift(emit, op, *operands)
    raise CannotFuse(f"machine code does not support {op} of integers.")


def _compare(emit: Emitter, symbol: str, operands: Sequence[Value], dtype: np.dtype) -> Value:
    builder = emit.builder
    if dtype.kind == "f":
        compare = builder.fcmp_unordered if symbol == "!=" else builder.fcmp_ordered
    else:
        compare = builder.icmp_signed if dtype.kind == "i" else builder.icmp_unsigned
    return compare(symbol, *operands)


def _divide(emit: Emitter, op: str, x: Value, y: Value, *, signed: bool) -> Value:
    """Divides integers with the results of JAX where a processor would trap: by zero, and of the minimum by -1."""
    builder, number = emit.builder, lambda n: ir.Constant(x.type, [n] * emit.lanes)
    by_zero = builder.icmp_unsigned("==", y, number(0))
    safe = builder.select(by_zero, number(1), y)
    whole = x
    if signed:
        by_minus_one = builder.icmp_signed("==", y, number(-1))
        safe = builder.select(by_minus_one, number(1), safe)
        whole = builder.select(by_minus_one, builder.neg(x), x)
    if op == "div":
        divided = (builder.sdiv if signed else builder.udiv)(whole, safe)
        return builder.select(by_zero, number(-1), divided)
    rest = (builder.srem if signed else builder.urem)(x, safe)
    return builder.select(by_zero, x, rest)


def _shift(emit: Emitter, op: str, x: Value, by: Value) -> Value:
    """Shifts by the full width or more leave only the sign."""
    builder, bits = emit.builder, x.type.element.width
    shift = {
        "shift_left": builder.shl,
        "shift_right_logical": builder.lshr,
        "shift_right_arithmetic": builder.ashr,
    }
    if isinstance(by, ir.Constant):
        amount = by.constant[0] if isinstance(by.constant, list | tuple) else None
        amount = amount.constant if isinstance(amount, ir.Constant) else amount
        if isinstance(amount, int) and 0 <= amount < bits:
            return shift[op](x, by)
    number = lambda n: ir.Constant(x.type, [n] * emit.lanes)
    fits = builder.icmp_unsigned("<", by, number(bits))
    if op == "shift_right_arithmetic":
        return builder.ashr(x, builder.select(fits, by, number(bits - 1)))
    return builder.select(fits, shift[op](x, builder.select(fits, by, number(0))), number(0))


def _sign_of_float(emit: Emitter, x: Value) -> Value:
    """Returns the sign: -1, a signed 0, 1, or NaN."""
    builder = emit.builder
    decided = builder.fcmp_ordered("!=", x, emit.constant(0.0))
    return builder.select(decided, emit.intrinsic("copysign", emit.constant(1.0), x), _without_denormals(emit, x))


def _rest_of_floats(emit: Emitter, x: Value, y: Value) -> Value:
    """Returns the remainder of a division of floats, by the instruction instead of a call of `fmodf`.

    LLVM assumes that the result of `fmodf` is not NaN if the dividend is finite and the divisor is not zero,
    although either operand may be NaN.
    """
    return emit.builder.frem(x, _without_denormals(emit, y))


def _without_denormals(emit: Emitter, x: Value) -> Value:
    """Flushes denormal operands to zero, as XLA does on CPUs."""
    builder = emit.builder
    tiny = builder.fcmp_ordered("<", emit.intrinsic("fabs", x), emit.constant(2.0**-126))
    return builder.select(tiny, emit.intrinsic("copysign", emit.constant(0.0), x), x)


def _convert(emit: Emitter, x: Value, before: np.dtype, after: np.dtype) -> Value:
    """Floats become the nearest integers towards zero, within the bounds of the dtype."""
    builder, kind = emit.builder, emit.vector(after)
    if before == after:
        return x
    if after == np.bool_:
        zero = emit.constant(0, before)
        return builder.fcmp_unordered("!=", x, zero) if before.kind == "f" else builder.icmp_signed("!=", x, zero)
    if before.kind == "f" and after.kind == "f":
        return builder.fpext(x, kind) if after.itemsize > before.itemsize else builder.fptrunc(x, kind)
    if before.kind == "f":
        return emit.intrinsic("fptosi.sat" if after.kind == "i" else "fptoui.sat", x, result=kind)
    if after.kind == "f":
        return builder.sitofp(x, kind) if before.kind == "i" else builder.uitofp(x, kind)
    widening = number_type(after).width - number_type(before).width
    if widening < 0:
        return builder.trunc(x, kind)
    if widening == 0:
        return x
    return builder.sext(x, kind) if before.kind == "i" else builder.zext(x, kind)
