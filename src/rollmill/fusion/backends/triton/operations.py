"""Generates the arithmetic of programs as Triton source, with one expression per operation.

Scalars are tensors `[BLOCK]`. Rows are tensors `[BLOCK, columns]`, padded to the next power of two. Some
operations have two forms: `exact`, with the results of JAX, and `fast`, which uses the GPU's special-function
units. The fast form is only for rows of a policy.
"""

from collections.abc import Sequence

import numpy as np

from rollmill.fusion.ir import Node, is_short_float

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
"""Triton types by the names of NumPy dtypes."""

TINY = "1.1754943508222875e-38"
"""The smallest normal float32. Some CUDA functions give wrong results for arguments below it."""

COMMON_OPERATIONS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "abs": "tl.abs({0})",
    "select": "tl.where({0}, {1}, {2})",
}

INTEGER_OPERATIONS = {
    "neg": "-{0}",
    "div": "quotient({0}, {1}, {is_signed})",
    "rem": "remainder({0}, {1}, {is_signed})",
    "div_by": "{0} // {1}",
    "rem_by": "{0} % {1}",
    "max": "larger({0}, {1}, {is_signed})",
    "min": "smaller({0}, {1}, {is_signed})",
    "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
    "shift_left": "tl.where({1}.to({unsigned}, bitcast=True) < {bits}, {0} << {1}, 0)",
    "shift_right_logical": "tl.where({1}.to({unsigned}, bitcast=True) < {bits}, {0}.to({unsigned}, bitcast=True) "
    ">> {1}.to({unsigned}, bitcast=True), 0)",
    "shift_right_arithmetic": "{0}.to({signed}, bitcast=True) >> at_most({1}.to({unsigned}, bitcast=True), "
    "{bits} - 1)",
    "shift_left_by": "{0} << {1}",
    "shift_right_logical_by": "{0}.to({unsigned}, bitcast=True) >> {1}.to({unsigned}, bitcast=True)",
    "shift_right_arithmetic_by": "{0}.to({signed}, bitcast=True) >> {1}",
    "population_count": "libdevice.popc({0}.to({unsigned}, bitcast=True).to(tl.int32))",
    "clz": "libdevice.clz({0}.to({unsigned}, bitcast=True).to(tl.int32)) - {missing_bits}",
}
"""Expressions for operations on integers. Booleans are integers of one bit.

Operations whose names end in `_by` have a constant second operand that needs no check. See `by_constant`."""

FLOAT_OPERATIONS = {
    "neg": "{0} * -1.0",  # Triton negates by `0 - x`, which gives zero the wrong sign
    "div": "tl.div_rn({0}, {1})",
    "rem": "libdevice.fmod({0}, {1})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0}))",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "pow": "libdevice.pow(normal({0}), normal({1}))",
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
    "cbrt": f"tl.where(tl.abs({{0}}) < {TINY}, {{0}}, libdevice.cbrt({{0}}))",
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


def _extreme(name: str, instruction: str) -> str:
    """Returns the source of the Triton function `name` of two integers, by a 32-bit instruction."""
    return f"""\
@triton.jit
def {name}(x, y, is_signed: tl.constexpr):
    if is_signed:
        whole = [x.to(tl.int32), y.to(tl.int32)]
        text: tl.constexpr = "{instruction}.s32 $0, $1, $2;"
        return tl.inline_asm_elementwise(text, "=r,r,r", whole, dtype=tl.int32, is_pure=True, pack=1)
    else:
        whole = [x.to(tl.uint32), y.to(tl.uint32)]
        text: tl.constexpr = "{instruction}.u32 $0, $1, $2;"
        return tl.inline_asm_elementwise(text, "=r,r,r", whole, dtype=tl.uint32, is_pure=True, pack=1)
"""


HELPERS = f"""\
TINY = tl.constexpr({TINY})

@triton.jit
def fast_tanh(x):
    text: tl.constexpr = "tanh.approx.f32 $0, $1;"
    return tl.inline_asm_elementwise(text, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

@triton.jit
def normal(x):
    return tl.where(tl.abs(x) < TINY, x * 0.0, x)

@triton.jit
def divisor(y, is_signed: tl.constexpr):
    if is_signed:
        return tl.where((y == 0) | (y == -1), 1, y)
    else:
        return larger(y, tl.full(y.shape, 1, y.dtype), False).to(y.dtype)

@triton.jit
def quotient(x, y, is_signed: tl.constexpr):
    whole = x // divisor(y, is_signed)
    if is_signed:
        whole = tl.where(y == -1, -x, whole)
    return tl.where(y == 0, ~tl.zeros_like(x), whole).to(x.dtype)

@triton.jit
def remainder(x, y, is_signed: tl.constexpr):
    return tl.where(y == 0, x, x % divisor(y, is_signed)).to(x.dtype)

{_extreme("larger", "max")}
{_extreme("smaller", "min")}
@triton.jit
def either(condition, x, y):
    whole = [condition.to(tl.int32), x.to(tl.int32), y.to(tl.int32)]
    text: tl.constexpr = "{{ .reg .pred p; setp.ne.b32 p, $1, 0; selp.b32 $0, $2, $3, p; }}"
    return tl.inline_asm_elementwise(text, "=r,r,r,r", whole, dtype=tl.int32, is_pure=True, pack=1)

@triton.jit
def at_most(x, limit: tl.constexpr):
    return smaller(x, tl.full(x.shape, limit, tl.uint32), False).to(x.dtype)

@triton.jit
def greater(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def lesser(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
"""
"""Source of the Triton functions that expressions call.

Division gives the results of XLA in the cases that processors leave undefined: by zero, and of the minimum by -1.

The maximum and minimum of two integers are 32-bit instructions in inline assembly. LLVM would turn them into
16-bit instructions if it knows that the operands were widened from 16 bits. The assembler of NVIDIA then compiles
two consecutive instructions, as for a clamped index, to code with other results (docs/numbers.md). LLVM would also
recognise a maximum in a selection between the operands of its condition. `either` hides this from it (see
`is_extreme`)."""


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "is_finite")
"""Operations whose result is a boolean, whatever the type of their operands."""


def of_type(text: str, op: str, dtype: np.dtype) -> str:
    """Returns an expression that converts another to exactly this type.

    This is needed because Triton reads literals as int32 or float32 and widens the other operand, and because sums
    of short integers and booleans become int32.
    """
    if op in COMPARISONS or dtype == np.float32:
        return text
    return f"({text}).to({TYPES[dtype.name]})"


KNOWN = "_by"
"""Suffix of an operation's name that says that its second operand is constant."""


def by_constant(op: str, dtype: np.dtype, amount: object) -> str:
    """Returns the name of an integer operation, in a version without checks if the constant `amount` makes checks
    unnecessary.
    """
    if not isinstance(amount, int) or isinstance(amount, bool) or dtype.kind not in "iu":
        return op
    if op.startswith("shift"):
        return op + KNOWN if 0 <= amount < dtype.itemsize * 8 else op
    return op + KNOWN if op in ("div", "rem") and amount not in (0, -1) else op


SELECT_APART = "select_apart"
"""Name of a selection between integers that LLVM cannot analyse."""


def is_extreme(node: Node) -> bool:
    """Returns whether LLVM might replace a selection by a maximum or minimum of two short integers."""
    condition, *values = node.operands
    if condition.op not in COMPARISONS or any(value.dtype.kind not in "iu" for value in values):
        return False
    compared = {_strip_conversions(operand) for operand in condition.operands}
    shared = compared.intersection(map(_strip_conversions, values))
    return bool(shared) and any(x.dtype.kind in "iu" and x.dtype.itemsize <= SHORT for x in {*compared, *values})


SHORT = 2
"""Maximum bytes of an integer for which LLVM has 16-bit instructions."""


def _strip_conversions(node: Node) -> Node:
    """Returns the node before conversions from one type to another."""
    while node.op == "convert":
        node = node.operands[0]
    return node


def expression(op: str, dtype: np.dtype, operand: np.dtype, names: Sequence[str], *, fast: bool) -> str:
    """Returns an expression for an operation on named tensors of one shape. `of_type` then converts it to `dtype`.

    `op` is a key of `operations.OPERATIONS` or `operations.TYPED`. `operand` is the type of the first operand, or
    of the second for `select`. `fast` allows the special-function units. Raises a `KeyError` if the operation does
    not exist for this type.
    """
    if op == "convert":
        return _convert(names[0], operand, dtype)
    if op == "bitcast":
        return f"{names[0]}.to({TYPES[dtype.name]}, bitcast=True)"
    if is_short_float(operand) and op != "select":
        return _operation(op, np.dtype(np.float32), [_wide(name) for name in names], fast=fast)
    return _operation(op, operand, names, fast=fast)


def _wide(name: str) -> str:
    return f"{name}.to(tl.float32)"


def _convert(name: str, before: np.dtype, after: np.dtype) -> str:
    """Converts a value to another type. Floats are truncated towards zero, and limited to the bounds of the type.

    The conversion of Triton is undefined for NaN and for values outside these bounds.
    """
    if after == np.bool_:
        return f"{name} != 0"
    if before.kind in "iub" or after.kind not in "iu":
        return f"{name}.to({TYPES[after.name]})"
    wide = name if before == np.float32 else _wide(name)
    if after == np.uint32:
        return f"libdevice.float2uint_rz({wide}).to(tl.uint32, bitcast=True)"
    whole = f"libdevice.float2int_rz({wide})"
    if after == np.int32:
        return whole
    limits = np.iinfo(after)
    return f"tl.minimum(tl.maximum({whole}, {limits.min}), {limits.max}).to({TYPES[after.name]})"


def _operation(op: str, operand: np.dtype, names: Sequence[str], *, fast: bool) -> str:
    bits = 1 if operand == np.bool_ else operand.itemsize * 8
    of_bits = {"bits": bits, "missing_bits": 32 - bits, "unsigned": f"tl.uint{bits}", "signed": f"tl.int{bits}"}
    return _template(op, operand, fast=fast).format(*names, **of_bits, is_signed=operand.kind == "i")


def _template(op: str, operand: np.dtype, *, fast: bool) -> str:
    if op == SELECT_APART:
        return "either({0}, {1}, {2})"
    if op in COMMON_OPERATIONS:
        return COMMON_OPERATIONS[op]
    if operand.kind in "iub":
        return "tl.full([BLOCK], 1, tl.int1)" if op == "is_finite" else INTEGER_OPERATIONS[op]
    return FAST[op] if fast and op in FAST else FLOAT_OPERATIONS[op]
