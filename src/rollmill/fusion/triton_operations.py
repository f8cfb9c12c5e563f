"""The arithmetic of nodes in Triton's language: one expression an operation.

Scalars are tensors `[BLOCK]`, rows `[BLOCK, columns]` with as many columns as the next power of two. What is said
twice is `exact`, as JAX computes it, and `fast`, on the special-function units, for the rows of a policy where
its numbers need not be exact.
"""

from collections.abc import Sequence

import numpy as np

TYPES = {
    "bool": "tl.int1",
    "int8": "tl.int8",
    "int16": "tl.int16",
    "int32": "tl.int32",
    "uint8": "tl.uint8",
    "uint16": "tl.uint16",
    "uint32": "tl.uint32",
    "float16": "tl.float16",
    "bfloat16": "tl.bfloat16",
    "float32": "tl.float32",
}
"""Triton's types by the names of NumPy's."""

OF_ALL = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "abs": "tl.abs({0})",
    "select": "tl.where({0}, {1}, {2})",
}

OF_INTEGERS = {
    "div": "{0} // {1}",
    "rem": "{0} % {1}",
    "max": "tl.maximum({0}, {1})",
    "min": "tl.minimum({0}, {1})",
    "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0)).to({type})",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
    "shift_left": "tl.where({1} < {bits}, {0} << {1}, 0).to({type})",
    "shift_right_logical": "tl.where({1} < {bits}, {0}.to({unsigned}, bitcast=True) >> {1}.to({unsigned}, "
    "bitcast=True), 0).to({type}, bitcast=True)",
    "shift_right_arithmetic": "{0}.to({signed}, bitcast=True) >> tl.minimum({1}, {bits} - 1)",
    "shift_left_by": "{0} << {1}",
    "shift_right_logical_by": "({0}.to({unsigned}, bitcast=True) >> {1}.to({unsigned}, bitcast=True))"
    ".to({type}, bitcast=True)",
    "shift_right_arithmetic_by": "{0}.to({signed}, bitcast=True) >> {1}",
    "population_count": "libdevice.popc({0}.to(tl.int32, bitcast=True)).to({type})",
    "clz": "libdevice.clz({0}.to(tl.int32, bitcast=True)).to({type})",
}
"""Booleans are integers of one bit. What ends in `_by` is for shifts by fewer than all bits: see `by_constant`."""

OF_FLOATS = {
    "div": "tl.div_rn({0}, {1})",
    "rem": "libdevice.fmod({0}, {1})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0}))",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "pow": "libdevice.pow({0}, {1})",
    "nextafter": "libdevice.nextafter({0}, {1})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "round_away": "libdevice.round({0})",
    "round_even": "libdevice.rint({0})",
    "exp": "libdevice.exp({0})",
    "exp2": "libdevice.exp2({0})",
    "expm1": "libdevice.expm1({0})",
    "log": "libdevice.log({0})",
    "log1p": "libdevice.log1p({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({0}))",
    "cbrt": "libdevice.cbrt({0})",
    "sin": "libdevice.sin({0})",
    "cos": "libdevice.cos({0})",
    "tan": "libdevice.tan({0})",
    "asin": "libdevice.asin({0})",
    "acos": "libdevice.acos({0})",
    "atan": "libdevice.atan({0})",
    "atan2": "libdevice.atan2({0}, {1})",
    "sinh": "libdevice.sinh({0})",
    "cosh": "libdevice.cosh({0})",
    "asinh": "libdevice.asinh({0})",
    "acosh": "libdevice.acosh({0})",
    "atanh": "libdevice.atanh({0})",
    "tanh": "libdevice.tanh({0})",
    "logistic": "tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))",
    "erf": "libdevice.erf({0})",
    "erfc": "libdevice.erfc({0})",
    "erf_inv": "libdevice.erfinv({0})",
    "is_finite": 'tl.abs({0}) < float("inf")',
}

FAST = {
    "div": "{0} / {1}",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sqrt": "tl.sqrt({0})",
    "tanh": "fast_tanh({0})",
    "logistic": "0.5 * fast_tanh(0.5 * {0}) + 0.5",
}

HELPERS = """\
@triton.jit
def fast_tanh(x):
    text: tl.constexpr = "tanh.approx.f32 $0, $1;"
    return tl.inline_asm_elementwise(text, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
"""
"""Functions that expressions call."""


def by_constant(op: str, dtype: np.dtype, amount: object) -> str:
    """The name of an operation whose second operand is known, or None where it is not."""
    return f"{op}_by" if op.startswith("shift") and isinstance(amount, int) and amount < dtype.itemsize * 8 else op


def expression(op: str, dtype: np.dtype, operand: np.dtype, names: Sequence[str], *, fast: bool) -> str:
    """An operation on named tensors of one shape.

    Args:
        op: a name in `operations.OPERATIONS` or `operations.TYPED`.
        dtype: of the result.
        operand: dtype of the first operand; of the second for `select`.
        names: of the operands.
        fast: whether the special-function units may be used.

    Raises:
        KeyError: no such operation on this type.
    """
    if op == "convert":
        return f"{names[0]} != 0" if dtype == np.bool_ else f"{names[0]}.to({TYPES[dtype.name]})"
    if op == "bitcast":
        return f"{names[0]}.to({TYPES[dtype.name]}, bitcast=True)"
    bits = 1 if operand == np.bool_ else operand.itemsize * 8
    kinds = {"bits": bits, "unsigned": f"tl.uint{bits}", "signed": f"tl.int{bits}", "type": TYPES[dtype.name]}
    return _template(op, operand, fast=fast).format(*names, **kinds)


def _template(op: str, operand: np.dtype, *, fast: bool) -> str:
    if op in OF_ALL:
        return OF_ALL[op]
    if operand.kind in "iub":
        return "tl.full([BLOCK], 1, tl.int1)" if op == "is_finite" else OF_INTEGERS[op]
    return FAST[op] if fast and op in FAST else OF_FLOATS[op]
