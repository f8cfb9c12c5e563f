"""Numbers in kernels for GPUs have the type that their program says, in Triton's eyes as well.

Triton widens what stands beside a number in an expression. A number of a wider type than its program's is refused
where its bits are read anew, or where a loop carries it on, and compares as another one where it has overflowed.
"""

import re

import jax
import numpy as np
import pytest
from kernel_runs import kernel_of

from rollmill.fusion.backends.triton.codegen import TritonWriter
from rollmill.fusion.backends.triton.compile import compile_for
from rollmill.fusion.backends.triton.operations import (
    COMMON_OPERATIONS,
    COMPARISONS,
    FLOAT_OPERATIONS,
    INTEGER_OPERATIONS,
    TYPES,
)
from rollmill.fusion.ir import is_float
from rollmill.fusion.ir.region import Region
from wordings import raises

ONE = {"neg", "abs", "sign", "not", "population_count", "clz", "is_finite"}
OF_ONE_FLOAT = FLOAT_OPERATIONS.keys() - {"div", "rem", "max", "min", "pow", "atan2"}
SHORT = ("int8", "uint16")
OTHERS = ("uint8", "int16", "int32", "uint32", "float16", "bfloat16", "float32", "bool")

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")


def program_of(name):
    """All operations of a type, with second operands that are known and that are not."""
    dtype, region = np.dtype(jax.numpy.dtype(name)), Region()
    x, y, asked = region.input(dtype), region.input(dtype), region.input(np.dtype(bool))
    own = FLOAT_OPERATIONS if is_float(dtype) else INTEGER_OPERATIONS
    logical = {"and", "or", "xor", "not", "eq", "ne", "select"}
    names = [
        op for op in (*COMMON_OPERATIONS, *own) if not op.endswith("_by") and (name != "bool" or op in logical)
    ]
    found = []
    for op in names:
        result = np.dtype(bool) if op in COMPARISONS else dtype
        if op == "select":
            found.append(region.emit(op, asked, x, y, dtype=dtype))
        elif op in ONE | OF_ONE_FLOAT:
            found.append(region.emit(op, x, dtype=result))
        else:
            found += [region.emit(op, x, other, dtype=result) for other in (y, region.constant(3, dtype))]
    return region.program([node for node in found if node.op not in ("input", "constant")])


def compile_with_types(program, monkeypatch, tmp_path):
    """Compiles a program's kernel, in which each node is asserted to be of its type."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    write = TritonWriter.node

    def typed(self, node, operands):
        name = write(self, node, operands)
        if node.op not in ("constant", "uniform", "item", "stack"):
            self.source.line(f"tl.static_assert({name}.dtype == {TYPES[node.dtype.name]}, '{node.op}')")
        return name

    monkeypatch.setattr(TritonWriter, "node", typed)
    shape = lambda node: (16,) if node.width is None else (16, node.width)
    structs = [jax.ShapeDtypeStruct(shape(node), node.dtype) for node in program.inputs]
    return compile_for(kernel_of(program, len(structs), 0, 16), structs, 90)


@pytest.mark.parametrize("name", (*SHORT, *OTHERS))
@pytest.mark.slow_beyond(len(SHORT))
def test_all_operations_give_their_type(name, monkeypatch, tmp_path):
    assert ".target sm_90" in compile_with_types(program_of(name), monkeypatch, tmp_path).asm["ptx"]


def test_another_type_is_seen(monkeypatch, tmp_path):
    monkeypatch.setitem(COMMON_OPERATIONS, "add", "{0} + {1} == {0}")
    region = Region()
    x, y = region.input(np.dtype("float32")), region.input(np.dtype("float32"))
    with raises("triton-cannot-compile-kernel", "add"):
        compile_with_types(region.program([region.emit("add", x, y, dtype=np.float32)]), monkeypatch, tmp_path)


@pytest.mark.parametrize("name", ("int8", "uint16", "float16", "bfloat16", "bool"))
@pytest.mark.slow_beyond(2)
def test_what_is_read_from_a_row_has_the_type_of_the_row(name, monkeypatch, tmp_path):
    dtype, region = np.dtype(jax.numpy.dtype(name)), Region()
    numbers = region.input(np.dtype("float32"), 40)
    row = region.emit(
        "ne" if name == "bool" else "convert", numbers, *[numbers] * (name == "bool"), dtype=dtype, width=40
    )
    found = [region.emit("column", row, dtype=dtype, attributes=(3,))]
    if name != "bool":
        found += [region.emit(op, row, dtype=dtype) for op in ("row_max", "row_min")]
    assert compile_with_types(region.program(found), monkeypatch, tmp_path).asm["ptx"]


def test_bits_of_a_column_are_read_anew(monkeypatch, tmp_path):
    region = Region()
    row = region.emit("convert", region.input(np.dtype("float32"), 40), dtype=np.int16, width=40)
    column = region.emit("column", row, dtype=np.int16, attributes=(3,))
    program = region.program([region.emit("bitcast", column, dtype=np.float16)])
    assert compile_with_types(program, monkeypatch, tmp_path).asm["ptx"]


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32"])
def test_short_integers_are_compared_as_whole_ones(name, monkeypatch, tmp_path):
    """NVIDIA's assembler makes wrong code of two instructions in a row that take the larger number of 16 bits."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    region = Region()
    dtype, whole = np.dtype(name), np.dtype("int32")
    x = region.input(np.dtype("int8") if dtype == whole else dtype)  # LLVM knows that a widened number is short
    held = region.emit("convert", x, dtype=dtype) if dtype == whole else x
    least = region.emit("max", held, region.constant(1, dtype), dtype=dtype)
    most = region.emit("min", least, region.constant(7, dtype), dtype=dtype)
    shifted = region.emit("shift_right_arithmetic", held, most, dtype=dtype)
    kernel = kernel_of(region.program([most, shifted]), 1, 0, 16)
    text = compile_for(kernel, [jax.ShapeDtypeStruct((16,), x.dtype)], 90).asm["ptx"]
    assert "max." in text and not re.search(r"(max|min)\.[su]16", text), text


def clamped_by_selections(region, x, dtype):
    """A number that is held between 1 and 7 by `select`, as `jnp.where(x < 1, 1, x)` does."""
    for op, limit in (("lt", region.constant(1, dtype)), ("gt", region.constant(7, dtype))):
        condition = region.emit(op, x, limit, dtype=np.dtype(bool))
        x = region.emit("select", condition, limit, x, dtype=dtype)
    return x


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16"])
def test_selections_of_short_integers_are_of_whole_ones(name, monkeypatch, tmp_path):
    """LLVM takes them for the larger and the smaller of two numbers of 16 bits, if they are widened as well."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    region, dtype, whole = Region(), np.dtype(name), np.dtype("int32")
    x, y = region.input(dtype), region.input(dtype)
    outputs = [
        clamped_by_selections(region, x, dtype),
        clamped_by_selections(region, region.emit("convert", x, dtype=whole), whole),
        region.emit("div", x, y, dtype=dtype),
        region.emit("rem", x, y, dtype=dtype),
    ]
    kernel = kernel_of(region.program(outputs), 2, 0, 16)
    text = compile_for(kernel, [jax.ShapeDtypeStruct((16,), dtype)] * 2, 90).asm["ptx"]
    assert "selp.b32" in text and not re.search(r"(max|min)\.[su]16", text), text
