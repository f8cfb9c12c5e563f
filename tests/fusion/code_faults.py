"""Faults of folding and of machine code; see `faults`."""

import numpy as np
from fault_registry import Patch, fault, replaced
from llvmlite import ir

from rollmill.fusion.backends.cpu import control as cpu_control, operations as cpu
from rollmill.fusion.backends.cpu.builder import Emitter
from rollmill.fusion.backends.cpu.codegen import CodeWriter
from rollmill.fusion.ir import fold, region as ir_region

# --- folding ------------------------------------------------------------------------------------------------

replaced("a difference is looked up exchanged", ir_region, "COMMUTATIVE", ir_region.COMMUTATIVE | {"sub"}, "sub")
replaced(
    "a comparison is looked up exchanged",
    ir_region,
    "COMMUTATIVE",
    ir_region.COMMUTATIVE | {"lt", "gt"},
    "lt",
    "gt",
)
replaced("a product with one is one", fold.ABSORBING, "mul", 1, "mul")
replaced("nothing is equal to itself", fold.WITH_EQUAL_OPERANDS, "eq", False, "eq")
replaced("a number less nothing is nothing", fold.NEUTRAL, "xor", (1, False), "xor")
replaced(
    "a known branch is the other",
    fold,
    "_fold_select",
    lambda asked, one, other: other if asked.op == "constant" else None,
    "select_n",
    "cond",
)

# --- machine code -------------------------------------------------------------------------------------------


@fault("machine code: unsigned numbers compare as signed", "lt", "le", "gt", "ge")
def _(patch: Patch) -> None:
    compare = cpu._compare
    signed = lambda dtype: dtype if dtype.kind == "f" else np.dtype(np.int32)
    patch.setattr(
        cpu, "_compare", lambda emit, symbol, operands, dtype: compare(emit, symbol, operands, signed(dtype))
    )


@fault("machine code: NaN is equal to itself", "ne")
def _(patch: Patch) -> None:
    compare = cpu._compare

    def wrong(emit, symbol, operands, dtype):
        if dtype.kind == "f" and symbol == "!=":
            return emit.builder.fcmp_ordered(symbol, *operands)
        return compare(emit, symbol, operands, dtype)

    patch.setattr(cpu, "_compare", wrong)


@fault("machine code: integers widen without their sign", "convert_element_type")
def _(patch: Patch) -> None:
    convert = cpu._convert
    unsigned = lambda dtype: np.dtype(f"uint{8 * dtype.itemsize}") if dtype.kind == "i" else dtype
    patch.setattr(cpu, "_convert", lambda emit, x, before, after: convert(emit, x, unsigned(before), after))


@fault("machine code: conversions do not saturate", "convert_element_type")
def _(patch: Patch) -> None:
    convert = cpu._convert

    def wrong(emit, x, before, after):
        if before.kind == "f" and after.kind in "iu":
            wide = emit.builder.fptosi(x, emit.vector(np.dtype(np.int64)))
            return emit.builder.trunc(wide, emit.vector(after))
        return convert(emit, x, before, after)

    patch.setattr(cpu, "_convert", wrong)


@fault(
    "machine code: shifts by all bits leave the number",
    "shift_left",
    "shift_right_logical",
    "shift_right_arithmetic",
)
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

    patch.setattr(cpu, "_shift", wrong)


@fault("machine code: a division by zero is zero", "div", "rem")
def _(patch: Patch) -> None:
    divide = cpu._divide

    def wrong(emit, op, x, y, *, signed):
        zero = ir.Constant(x.type, None)
        by_zero = emit.builder.icmp_unsigned("==", y, zero)
        return emit.builder.select(by_zero, zero, divide(emit, op, x, y, signed=signed))

    patch.setattr(cpu, "_divide", wrong)


replaced(
    "machine code: a maximum drops NaN",
    cpu.FLOAT_OPERATIONS,
    "max",
    lambda emit, x, y: emit.intrinsic("maxnum", x, y),
    "max",
    "reduce_max",
    "cummax",
)
replaced(
    "machine code: a minimum drops NaN",
    cpu.FLOAT_OPERATIONS,
    "min",
    lambda emit, x, y: emit.intrinsic("minnum", x, y),
    "min",
    "reduce_min",
    "cummin",
)
replaced(
    "machine code: halves round up",
    cpu.FLOAT_OPERATIONS,
    "round_even",
    lambda emit, x: emit.intrinsic("round", x),
    "round",
)
replaced(
    "machine code: floor goes towards zero",
    cpu.FLOAT_OPERATIONS,
    "floor",
    lambda emit, x: emit.intrinsic("trunc", x),
    "floor",
)
replaced(
    "machine code: environments that have ended go on",
    cpu_control,
    "_where",
    lambda writer, asked, new, old: new,
    "while",
)
replaced(
    "machine code: zeros are not counted",
    cpu.INTEGER_OPERATIONS,
    "clz",
    lambda emit, x: emit.intrinsic("ctpop", x),
    "clz",
)


@fault("machine code: a loop ends with its first environment", "while")
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
