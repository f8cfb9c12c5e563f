"""Emits LLVM IR for vector arithmetic, memory access and loops."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir

from rollmill.core.errors import CannotFuse
from rollmill.fusion.ir import is_short_float

Value: TypeAlias = Any
"""An LLVM IR value (`llvmlite.ir.Value`)."""

POINTER = ir.PointerType()
BYTE, INT32, INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOAT32 = np.dtype(np.float32)

FLOATS = {"float32": ir.FloatType(), "float64": ir.DoubleType()}

CONTRACTED = ("contract",)
"""Fast-math flag that lets LLVM fuse a product and a sum into one instruction with one rounding."""


class Emitter:
    """Emits the body of one LLVM function, in vectors of `lanes` elements."""

    def __init__(self, function: ir.Function, lanes: int) -> None:
        """Prepares an emitter that places code for values computed once at the beginning of the function."""
        self.lanes = lanes
        self.module = function.module
        self._function = function
        self._entry = function.append_basic_block("entry")
        body = function.append_basic_block("body")
        ir.IRBuilder(self._entry).branch(body)
        self.builder = ir.IRBuilder(body)

    # --- types and constants ------------------------------------------------------------------------------

    def vector(self, dtype: np.dtype) -> ir.VectorType:
        """Returns the LLVM vector type with one element of `dtype` per lane."""
        return ir.VectorType(number_type(dtype), self.lanes)

    def constant(self, number: Any, dtype: np.dtype = FLOAT32) -> Value:
        """Returns a constant LLVM vector with `number` in every lane."""
        return ir.Constant(self.vector(dtype), [_literal(number, dtype)] * self.lanes)

    def integer(self, number: int) -> Value:
        """Returns a constant 64-bit LLVM integer."""
        return ir.Constant(INT64, number)

    def counting(self) -> Value:
        """Returns the constant vector of lane indices, `0, 1, ..., lanes - 1`."""
        return ir.Constant(ir.VectorType(INT32, self.lanes), list(range(self.lanes)))

    # --- arithmetic ---------------------------------------------------------------------------------------

    def add(self, x: Value, y: Value) -> Value:
        """Emits LLVM code for the floating-point sum `x + y`."""
        return self.builder.fadd(x, y, flags=CONTRACTED)  # pyright: ignore[reportCallIssue]

    def subtract(self, x: Value, y: Value) -> Value:
        """Emits LLVM code for the floating-point difference `x - y`."""
        return self.builder.fsub(x, y, flags=CONTRACTED)  # pyright: ignore[reportCallIssue]

    def multiply(self, x: Value, y: Value) -> Value:
        """Emits LLVM code for the floating-point product `x * y`."""
        return self.builder.fmul(x, y, flags=CONTRACTED)  # pyright: ignore[reportCallIssue]

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """Emits a fused multiply-add, `x * y + z` with one rounding."""
        return self.intrinsic("fma", x, y, z)

    def intrinsic(self, name: str, *operands: Value, result: Any = None) -> Value:
        """Emits a call of the LLVM intrinsic `name`, in its version for the type of the first operand."""
        kinds = [operand.type for operand in operands]
        suffix = suffix_of(kinds[0]) if result is None else f"{suffix_of(result)}.{suffix_of(kinds[0])}"
        return self.call(f"llvm.{name}.{suffix}", *operands, result=result or kinds[0])

    def call(self, name: str, *operands: Value, result: Any) -> Value:
        """Emits a call of the function `name`, and declares it first if needed."""
        return self.builder.call(self.declared(name, result, [operand.type for operand in operands]), operands)

    def declared(self, name: str, result: Any, operands: list[Any]) -> ir.Function:
        """Returns the module's function `name`, declaring it with these types if it does not exist."""
        function = self.module.globals.get(name)
        return ir.Function(self.module, ir.FunctionType(result, operands), name) if function is None else function

    def each_lane(self, name: str, *operands: Value) -> Value:
        """Emits one call of a scalar C function per lane, and returns the results as a vector."""
        vector = ir.Constant(operands[0].type, ir.Undefined)
        for lane in range(self.lanes):
            place = ir.Constant(INT32, lane)
            own = [self.builder.extract_element(operand, place) for operand in operands]
            vector = self.builder.insert_element(vector, self.call(name, *own, result=own[0].type), place)
        return vector

    def broadcast(self, number: Value) -> Value:
        """Emits LLVM code that copies a scalar to every lane of a vector."""
        vector = ir.VectorType(number.type, self.lanes)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(INT32, 0))
        zeros = ir.Constant(ir.VectorType(INT32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)

    def any(self, condition: Value) -> Value:
        """Emits the logical OR of all lanes of a boolean vector."""
        return self.call(f"llvm.vector.reduce.or.v{self.lanes}i1", condition, result=ir.IntType(1))

    # --- memory -------------------------------------------------------------------------------------------

    def at(self, pointer: Value, index: Value | int, kind: Any) -> Value:
        """Returns the address of element `index` of an array of type `kind`."""
        if isinstance(index, int):
            index = self.integer(index)
        return self.builder.gep(pointer, [index], inbounds=True, source_etype=kind)

    def load_number(self, pointer: Value, dtype: np.dtype) -> Value:
        """Emits a load of one element of `dtype`. Booleans occupy a byte in memory."""
        stored = self.builder.load(pointer, typ=memory_type(dtype), align=np.dtype(dtype).itemsize)
        return self._from_memory(stored, dtype)

    def load(self, pointer: Value, dtype: np.dtype) -> Value:
        """Emits a load of a vector of consecutive elements from memory."""
        kind = ir.VectorType(memory_type(dtype), self.lanes)
        return self._from_memory(self.builder.load(pointer, typ=kind, align=np.dtype(dtype).itemsize), dtype)

    def store(self, vector: Value, pointer: Value, dtype: np.dtype) -> None:
        """Emits a store of a vector or a scalar, converted to the memory format of `dtype`."""
        whole = vector
        if dtype == np.bool_:
            whole = self.builder.zext(vector, _with_element(vector.type, memory_type(dtype)))
        elif is_short_float(dtype):
            whole = self.bits_of_short(vector, dtype)
        self.builder.store(whole, pointer, align=np.dtype(dtype).itemsize)

    def gather(self, pointer: Value, places: Value, dtype: np.dtype) -> Value:
        """Emits loads of one element per lane, each from its own index."""
        kind = memory_type(dtype)
        vector = ir.Constant(ir.VectorType(kind, self.lanes), ir.Undefined)
        for lane in range(self.lanes):
            own = ir.Constant(INT32, lane)
            place = self.builder.sext(self.builder.extract_element(places, own), INT64)
            number = self.builder.load(self.at(pointer, place, kind), typ=kind, align=np.dtype(dtype).itemsize)
            vector = self.builder.insert_element(vector, number, own)
        return self._from_memory(vector, dtype)

    def _from_memory(self, stored: Value, dtype: np.dtype) -> Value:
        if is_short_float(dtype):
            return self.short_of_bits(stored, dtype)
        if dtype != np.bool_:
            return stored
        zero = ir.Constant(stored.type, [0] * self.lanes if isinstance(stored.type, ir.VectorType) else 0)
        return self.builder.icmp_unsigned("!=", stored, zero)

    # --- floats of 16 bits ----------------------------------------------------------------------------------

    def rounded(self, x: Value, dtype: np.dtype) -> Value:
        """Rounds float32 values to a 16-bit float type, ties to even."""
        return self.short_of_bits(self.bits_of_short(x, dtype), dtype)

    def short_of_bits(self, bits: Value, dtype: np.dtype) -> Value:
        """Converts the bit patterns of a 16-bit float type to float32 values."""
        builder, wide = self.builder, _with_element(bits.type, FLOATS["float32"])
        if dtype.name == "float16":
            return builder.fpext(builder.bitcast(bits, _with_element(bits.type, ir.HalfType())), wide)
        words = builder.zext(bits, _with_element(bits.type, INT32))
        return builder.bitcast(builder.shl(words, _constant_like(words, 16)), wide)

    def bits_of_short(self, x: Value, dtype: np.dtype) -> Value:
        """Rounds float32 values to a 16-bit float type, and returns the bit patterns."""
        builder, short = self.builder, _with_element(x.type, ir.IntType(16))
        if dtype.name == "float16":
            return builder.bitcast(builder.fptrunc(x, _with_element(x.type, ir.HalfType())), short)
        words = builder.bitcast(x, _with_element(x.type, INT32))
        number = lambda n: _constant_like(words, n)
        # Adds half a unit of the last remaining bit, minus one if this bit is even. NaN could overflow to
        # infinity.
        last = builder.and_(builder.lshr(words, number(16)), number(1))
        nearest = builder.add(words, builder.add(last, number(0x7FFF)))
        quiet = builder.or_(words, number(0x0040_0000))
        nearest = builder.select(builder.fcmp_unordered("uno", x, x), quiet, nearest)
        return builder.trunc(builder.lshr(nearest, number(16)), short)

    # --- control ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Context manager for code that is emitted at the start of the function, so that it runs only once."""
        with self.builder.goto_block(self._entry):
            yield

    def slot(self, kind: Any) -> Value:
        """Allocates a local variable of an LLVM type, and returns its address."""
        with self.once():
            return variable(self.builder, kind)

    @contextlib.contextmanager
    def loop(self, end: Value | int, *, first: Value | int = 0, step: int = 1) -> Iterator[Value]:
        """Context manager that emits a loop over the indices `range(first, end, step)`, and yields the index.

        The code emitted inside the context is the body. It runs at least once.
        """
        number = lambda n: self.integer(n) if isinstance(n, int) else n
        before, body = self.builder.block, self._function.append_basic_block("loop")
        self.builder.branch(body)
        self.builder.position_at_end(body)
        index = self.builder.phi(INT64)
        index.add_incoming(number(first), before)
        yield index
        following = self.builder.add(index, self.integer(step))
        index.add_incoming(following, self.builder.block)
        after = self._function.append_basic_block("after")
        self.builder.cbranch(self.builder.icmp_unsigned("<", following, number(end)), body, after)
        self.builder.position_at_end(after)

    def sums(
        self, turns: Value | int, start: list[Value], turn: Callable[[Value, list[Value]], list[Value]]
    ) -> list[Value]:
        """Emits a loop that updates accumulators in registers, and returns their final values.

        `turn(index, values)` emits the body and returns the new values. It runs `turns` times, at least once.
        """
        before, body = self.builder.block, self._function.append_basic_block("sums")
        self.builder.branch(body)
        self.builder.position_at_end(body)
        index = self.builder.phi(INT64)
        now = [self.builder.phi(value.type) for value in start]
        for phi, value in zip((index, *now), (self.integer(0), *start), strict=True):
            phi.add_incoming(value, before)
        after = turn(index, now)
        following = self.builder.add(index, self.integer(1))
        for phi, value in zip((index, *now), (following, *after), strict=True):
            phi.add_incoming(value, self.builder.block)
        rest = self._function.append_basic_block("after")
        turns = self.integer(turns) if isinstance(turns, int) else turns
        self.builder.cbranch(self.builder.icmp_unsigned("<", following, turns), body, rest)
        self.builder.position_at_end(rest)
        return after

    @contextlib.contextmanager
    def repeat_while(self, condition: Callable[[], Value]) -> Iterator[None]:
        """Context manager that emits a while loop. `condition` emits the test before each iteration."""
        head, body = (self._function.append_basic_block(name) for name in ("head", "turn"))
        rest = self._function.append_basic_block("after")
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch(condition(), body, rest)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(head)
        self.builder.position_at_end(rest)


def variable(builder: ir.IRBuilder, kind: Any) -> Value:
    """Allocates stack memory for a value of an LLVM type, and returns its address."""
    pointer = builder.alloca(kind)
    pointer.type = POINTER  # as for every pointer
    return pointer


def byte(builder: ir.IRBuilder, pointer: Value, offset: int) -> Value:
    """Emits the LLVM address `offset` bytes after a pointer."""
    return builder.gep(pointer, [INT64(offset)], inbounds=True, source_etype=BYTE)


def read(builder: ir.IRBuilder, pointer: Value, offset: int, kind: Any = POINTER) -> Value:
    """Emits a load of the value `offset` bytes after a pointer."""
    return builder.load(byte(builder, pointer, offset), typ=kind)


def number_type(dtype: Any) -> Any:
    """Returns the LLVM type of a scalar of `dtype` in a register. 16-bit floats are held as float32."""
    dtype = np.dtype(dtype)
    dtype = FLOAT32 if is_short_float(dtype) else dtype
    return ir.IntType(1) if dtype == np.bool_ else _type_of(dtype)


def memory_type(dtype: Any) -> Any:
    """Returns the LLVM type of a scalar of `dtype` in memory. Booleans occupy a byte."""
    dtype = np.dtype(dtype)
    if is_short_float(dtype):
        return ir.IntType(16)
    return BYTE if dtype == np.bool_ else _type_of(dtype)


def _with_element(kind: Any, element: Any) -> Any:
    """Returns a vector type with the length of another type, or a scalar type if that is scalar."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _constant_like(value: Value, number: int) -> Value:
    """Returns a number in all elements of a value's type."""
    count = value.type.count if isinstance(value.type, ir.VectorType) else None
    return ir.Constant(value.type, number if count is None else [number] * count)


@functools.cache
def _type_of(dtype: np.dtype) -> Any:
    if dtype.kind in "iu":
        return ir.IntType(8 * dtype.itemsize)
    if dtype.name not in FLOATS:
        raise CannotFuse(f"machine code does not support {dtype.name}.", advice="use float32")
    return FLOATS[dtype.name]


def suffix_of(kind: Any) -> str:
    """Returns the suffix for an LLVM type in names of intrinsics, such as `v8f32`."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{suffix_of(kind.element)}"
    if isinstance(kind, ir.IntType):
        return f"i{kind.width}"
    return {"float": "f32", "double": "f64"}[str(kind)]


def _literal(number: Any, dtype: np.dtype) -> Any:
    dtype = np.dtype(dtype)
    if dtype.kind == "f" or is_short_float(dtype):
        return float(dtype.type(number))
    return int(number)
