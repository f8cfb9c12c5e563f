"""Emits elementary functions of float32 vectors, accurate to a few units in the last place.

Arguments are reduced to a small interval (W. J. Cody and W. Waite, Software Manual for the Elementary Functions,
1980), where a short series computes the function.
"""

import math
from collections.abc import Sequence

import numpy as np

from rollmill.fusion.backends.cpu.builder import FLOAT32, Emitter, Value

INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
FLOAT64 = np.dtype(np.float64)

LOG2_HIGH = 0.693359375
"""The leading bits of the natural logarithm of 2, so few that products with small integers are exact."""
LOG2_LOW = math.log(2) - LOG2_HIGH

ROUNDING = 1.5 * 2.0**23
"""Constant that rounds a small float to the nearest integer, in its lowest bits, when added to it."""


def exp(emit: Emitter, x: Value) -> Value:
    """Emits vector code for `e^x`, which is infinite from `x = 89` on."""
    whole, small = _expm1_parts(emit, _between(emit, x, -104.0, 89.0))
    return _scale_by_power(emit, emit.add(emit.constant(1.0), small), whole)


def exp2(emit: Emitter, x: Value) -> Value:
    """Emits vector code for `2^x`."""
    inside = _between(emit, x, -150.0, 129.0)
    whole, bits = _nearest(emit, inside, 1.0)
    small = _expm1_series(emit, emit.multiply(emit.subtract(inside, whole), emit.constant(math.log(2))))
    return _scale_by_power(emit, emit.add(emit.constant(1.0), small), bits)


def expm1(emit: Emitter, x: Value) -> Value:
    """Emits vector code for `e^x - 1`, accurate for small `x`."""
    whole, small = _expm1_parts(emit, _between(emit, x, -20.0, 89.0))
    # 2^n (1 + s) - 1, halved so that the power does not overflow
    half = _power_of_two(emit, emit.builder.sub(whole, emit.constant(1, INT32)))
    rest = emit.subtract(half, emit.constant(0.5))
    return _signed_zero(emit, x, emit.multiply(emit.fma(half, small, rest), emit.constant(2.0)))


def tanh(emit: Emitter, x: Value) -> Value:
    """Emits the hyperbolic tangent, as `e / (e + 2)` with `e = expm1(2 x)`, and as 1 from `x = 9.1` on."""
    inside = _between(emit, x, -9.1, 9.1)
    whole, small = _expm1_parts(emit, emit.add(inside, inside))
    power = _power_of_two(emit, whole)
    grown = emit.fma(power, small, emit.subtract(power, emit.constant(1.0)))
    return _signed_zero(emit, x, emit.builder.fdiv(grown, emit.add(grown, emit.constant(2.0))))


def logistic(emit: Emitter, x: Value) -> Value:
    """Emits vector code for the logistic function, `1 / (1 + e^-x)`."""
    one = emit.constant(1.0)
    return emit.builder.fdiv(one, emit.add(one, exp(emit, emit.builder.fneg(x))))


def log(emit: Emitter, x: Value) -> Value:
    """Emits the natural logarithm, using the series of `atanh((m - 1) / (m + 1))`.

    It is exact at 0 and infinity, and NaN for negative arguments.
    """
    builder, one = emit.builder, emit.constant(1.0)
    tiny = builder.fcmp_ordered("<", x, emit.constant(2.0**-126))
    bits = builder.bitcast(builder.select(tiny, emit.multiply(x, emit.constant(2.0**23)), x), emit.vector(INT32))
    # the exponent for which the mantissa lies around one
    shifted = builder.sub(bits, emit.constant(0x3F35_04F3, INT32))
    exponent = builder.ashr(shifted, emit.constant(23, INT32))
    mantissa = builder.sub(bits, builder.shl(exponent, emit.constant(23, INT32)))
    m = builder.bitcast(mantissa, emit.vector(FLOAT32))
    power = builder.sitofp(exponent, emit.vector(FLOAT32))
    power = builder.select(tiny, emit.subtract(power, emit.constant(23.0)), power)
    f = emit.subtract(m, one)
    ratio = builder.fdiv(f, emit.add(m, one))
    square = emit.multiply(ratio, ratio)
    series = _polynomial(emit, square, [2 / 3, 2 / 5, 2 / 7, 2 / 9])
    # log(m) = f - ratio (f - square * series), where f is exact
    bent = emit.multiply(ratio, emit.subtract(f, emit.multiply(square, series)))
    low = emit.subtract(emit.multiply(power, emit.constant(LOG2_LOW)), bent)
    found = emit.fma(power, emit.constant(LOG2_HIGH), emit.add(f, low))
    infinite = emit.constant(math.inf)
    found = builder.select(builder.fcmp_ordered("==", x, infinite), infinite, found)
    found = builder.select(builder.fcmp_ordered("==", x, emit.constant(0.0)), emit.constant(-math.inf), found)
    return builder.select(builder.fcmp_unordered("<", x, emit.constant(0.0)), emit.constant(math.nan), found)


def log1p(emit: Emitter, x: Value) -> Value:
    """Emits `log(1 + x)`, accurate for small `x`, from `u = 1 + x` and the rounding error of `u`."""
    builder, one = emit.builder, emit.constant(1.0)
    u = builder.fadd(one, x)
    lost = builder.fsub(x, builder.fsub(u, one))
    whole = builder.fadd(log(emit, u), builder.fdiv(lost, u))
    plain = builder.fcmp_ordered("==", u, emit.constant(math.inf))
    plain = builder.or_(plain, builder.fcmp_ordered("<=", u, emit.constant(0.0)))
    found = builder.select(plain, log(emit, u), whole)
    return builder.select(builder.fcmp_ordered("==", u, one), x, found)


def sin(emit: Emitter, x: Value) -> Value:
    """Emits the sine of an angle in radians, of any size."""
    return _signed_zero(emit, x, _any_angle(emit, x, "sinf", quarter=0))


def cos(emit: Emitter, x: Value) -> Value:
    """Emits the cosine of an angle in radians, of any size."""
    return _any_angle(emit, x, "cosf", quarter=1)


def tan(emit: Emitter, x: Value) -> Value:
    """Emits the tangent of an angle in radians, as `sin / cos`."""
    return emit.builder.fdiv(sin(emit, x), cos(emit, x))


def erf_inv(emit: Emitter, x: Value) -> Value:
    """Emits the inverse error function.

    See M. Giles, "Approximating the erfinv function", GPU Computing Gems 2, 2010 (the version in single
    precision).
    """
    builder = emit.builder
    one = emit.constant(1.0)
    w = builder.fneg(log(emit, emit.multiply(emit.subtract(one, x), emit.add(one, x))))
    central = builder.fcmp_ordered("<", w, emit.constant(5.0))
    near = _polynomial(emit, emit.subtract(w, emit.constant(2.5)), GILES_CENTRAL)
    far = _polynomial(emit, emit.subtract(emit.intrinsic("sqrt", w), emit.constant(3.0)), GILES_TAIL)
    found = emit.multiply(builder.select(central, near, far), x)
    at_one = builder.fcmp_ordered("==", emit.intrinsic("fabs", x), one)
    return builder.select(at_one, emit.multiply(x, emit.constant(math.inf)), found)


GILES_CENTRAL = (
    1.50140941,
    0.246640727,
    -0.00417768164,
    -0.00125372503,
    0.00021858087,
    -4.39150654e-06,
    -3.5233877e-06,
    3.43273939e-07,
    2.81022636e-08,
)
GILES_TAIL = (
    2.83297682,
    1.00167406,
    0.00943887047,
    -0.0076224613,
    0.00573950773,
    -0.00367342844,
    0.00134934322,
    0.000100950558,
    -0.000200214257,
)
"""Coefficients of Giles's polynomial for large arguments, beginning with the constant."""


def _expm1_parts(emit: Emitter, x: Value) -> tuple[Value, Value]:
    """Returns `n` and `e^r - 1`, where `x = n log 2 + r`."""
    whole, bits = _nearest(emit, x, 1 / math.log(2))
    rest = emit.fma(whole, emit.constant(-LOG2_HIGH), x)
    rest = emit.fma(whole, emit.constant(-LOG2_LOW), rest)
    return bits, _expm1_series(emit, rest)


def _nearest(emit: Emitter, x: Value, factor: float) -> tuple[Value, Value]:
    """Returns the integer nearest to `factor x`, below 2^22, as a float and as an integer."""
    builder = emit.builder
    shifted = emit.fma(x, emit.constant(factor), emit.constant(ROUNDING))
    bits = builder.bitcast(shifted, emit.vector(INT32))
    start = int(np.float32(ROUNDING).view(np.int32))
    return builder.fsub(shifted, emit.constant(ROUNDING)), builder.sub(bits, emit.constant(start, INT32))


def _expm1_series(emit: Emitter, r: Value) -> Value:
    """Returns `exp(r) - 1` for `|r| <= log(2) / 2`."""
    tail = _polynomial(emit, r, [1 / math.factorial(n) for n in range(2, 8)])
    return emit.fma(emit.multiply(r, r), tail, r)


MAX_REDUCED = 2.0**48
"""Largest angle whose quarter turns are counted exactly in double precision."""


def _any_angle(emit: Emitter, x: Value, by_c: str, *, quarter: int) -> Value:
    """Returns sine or cosine by `_circular`, or by C's function if a lane holds a greater angle."""
    builder = emit.builder
    found = emit.slot(x.type)
    builder.store(_circular(emit, x, quarter=quarter), found)
    great = builder.fcmp_ordered(">", emit.intrinsic("fabs", x), emit.constant(MAX_REDUCED))
    with builder.if_then(emit.any(great), likely=False):
        builder.store(builder.select(great, emit.each_lane(by_c, x), builder.load(found, typ=x.type)), found)
    return builder.load(found, typ=x.type)


def _signed_zero(emit: Emitter, x: Value, value: Value) -> Value:
    """Returns an odd function's value, replaced by `x` at zero."""
    return emit.builder.select(emit.builder.fcmp_ordered("==", x, emit.constant(0.0)), x, value)


def _circular(emit: Emitter, x: Value, *, quarter: int) -> Value:
    """Returns the sine of `x` plus quarter turns, reducing the argument in double precision."""
    builder = emit.builder
    wide = builder.fpext(x, emit.vector(FLOAT64))
    turns = emit.intrinsic("roundeven", builder.fmul(wide, emit.constant(2 / math.pi, FLOAT64)))
    rest = emit.intrinsic("fma", turns, emit.constant(-math.pi / 2, FLOAT64), wide)
    # the difference between half of pi and its float64 constant
    rest = emit.intrinsic("fma", turns, emit.constant(-6.123233995736766e-17, FLOAT64), rest)
    r = builder.fptrunc(rest, emit.vector(FLOAT32))
    # the last bits of the rounded multiple
    shifted = builder.fadd(turns, emit.constant(1.5 * 2.0**52, FLOAT64))
    number = builder.trunc(builder.bitcast(shifted, emit.vector(INT64)), emit.vector(INT32))
    number = builder.add(number, emit.constant(quarter, INT32))
    square = emit.multiply(r, r)
    odd = [(-1) ** n / math.factorial(2 * n + 1) for n in range(1, 5)]
    even = [(-1) ** n / math.factorial(2 * n) for n in range(1, 6)]
    sine = emit.fma(emit.multiply(r, square), _polynomial(emit, square, odd), r)
    cosine = emit.fma(square, _polynomial(emit, square, even), emit.constant(1.0))
    bit = lambda n: builder.icmp_signed(
        "!=", builder.and_(number, emit.constant(n, INT32)), emit.constant(0, INT32)
    )
    found = builder.select(bit(1), cosine, sine)
    return builder.select(bit(2), builder.fneg(found), found)


def _polynomial(emit: Emitter, x: Value, coefficients: Sequence[float]) -> Value:
    """Evaluates a polynomial by Horner's rule, from coefficients with the constant first."""
    found = emit.constant(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        found = emit.fma(found, x, emit.constant(coefficient))
    return found


def _between(emit: Emitter, x: Value, least: float, most: float) -> Value:
    """Clips a number. NaN stays NaN."""
    builder = emit.builder
    low, high = emit.constant(least), emit.constant(most)
    x = builder.select(builder.fcmp_ordered(">", low, x), low, x)
    return builder.select(builder.fcmp_ordered("<", high, x), high, x)


def _power_of_two(emit: Emitter, exponent: Value) -> Value:
    """Returns `2 ** exponent`, for exponents of normal floats."""
    biased = emit.builder.add(exponent, emit.constant(127, INT32))
    return emit.builder.bitcast(emit.builder.shl(biased, emit.constant(23, INT32)), emit.vector(FLOAT32))


def _scale_by_power(emit: Emitter, x: Value, exponent: Value) -> Value:
    """Returns `x 2^n`, computed in two steps, so that neither power overflows or underflows."""
    half = emit.builder.ashr(exponent, emit.constant(1, INT32))
    rest = emit.builder.sub(exponent, half)
    return emit.multiply(emit.multiply(x, _power_of_two(emit, half)), _power_of_two(emit, rest))
