"""Compiles programs to LLVM IR for blocks of samples.

A block is a few vectors with one sample per lane. Scalars of a program become vectors, and rows lie in memory.
Element-wise operations on rows are fused into the loop that reads the result, so only rows that are read more than
once, or by a matrix product, are stored.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from rollmill.core.errors import CannotFuse
from rollmill.fusion.backends.cpu.builder import FLOAT32, INT32, Emitter, Value, memory_type, suffix_of
from rollmill.fusion.backends.cpu.control import BlockValue, Vectors, assign, new_variable, read, write_loop
from rollmill.fusion.backends.cpu.memory import (
    Matrix,
    Placed,
    Scratch,
    pack,
    product,
    round_up_width,
    side_by_side,
)
from rollmill.fusion.backends.cpu.operations import emit_operation
from rollmill.fusion.ir import OPERATIONS, TYPED, Node, is_float
from rollmill.fusion.opt.schedule import Accumulate, Emit, EmitLoop, If, Item, Schedule, Segment

STORED = ("dot", "column", "loop", "item", "stack")
"""Operations that read row operands from memory."""

COMBINED = {"row_sum": "add", "row_max": "max", "row_min": "min"}


class MemoryCells(NamedTuple):
    """Location of a large array of the environment state in memory, for a block of samples."""

    pointer: Value
    """Address of the elements of the block's first sample."""
    stride: int
    """Number of elements per sample, or 0 if all lanes read from the same sample."""
    dtype: np.dtype

    def places(self, emit: Emitter, group: int, places: Value) -> Value:
        """Converts element indices within each sample to offsets from `pointer`, for vector number `group` of the
        block.
        """
        rows = [(group * emit.lanes + lane) * self.stride for lane in range(emit.lanes)]
        return emit.builder.add(places, ir.Constant(ir.VectorType(INT32, emit.lanes), rows))

    def load(self, emit: Emitter, group: int, places: Value) -> Value:
        """Loads one element per sample, for vector number `group` of the block."""
        return emit.gather(self.pointer, self.places(emit, group, places), self.dtype)


class CodeWriter:
    """Emits the LLVM IR of programs into a function, block by block."""

    def __init__(self, emit: Emitter, scratch: Scratch, slots: Sequence[Value], *, block: int, room: int) -> None:
        """Prepares a writer for blocks of samples, a power of two and at least the lanes.

        `slots` are pointers to uniform arrays, and a product may hold `room` vectors in registers.
        """
        self.emit, self.scratch, self.block, self.room = emit, scratch, block, room
        self.groups = block // emit.lanes
        self._slots = slots
        self.cells: list[MemoryCells] = []
        """Large arrays of the state, by index."""
        self._uniform: dict[Any, Any] = {}  # values that are read only once
        self._held: dict[Node, BlockValue] = {}
        self._beside: dict[Node, Placed] = {}  # scalars by their place in memory
        self._stored: set[Node] = set()

    def write(
        self, schedule: Schedule, inputs: Sequence[BlockValue], *, add_sum: Callable[[int], None] | None = None
    ) -> list[BlockValue]:
        """Emits a scheduled program, and returns its outputs, with rows stored in memory.

        `add_sum(number)` is called where the schedule accumulates a sum over samples, and emits that addition.
        """
        nodes, outputs = schedule.program.nodes(), schedule.program.outputs
        outer = self._held, self._beside, self._stored
        self._held, self._beside, self._stored = {}, {}, _find_stored(nodes, outputs)
        for node in nodes:
            if node.op == "input":
                self._held[node] = inputs[int(node.attributes[0])]
        self._write_items(schedule.items, add_sum)
        values = [self.in_memory(node) if node.width is not None else self._held[node] for node in outputs]
        self._held, self._beside, self._stored = outer
        return values

    def _write_items(self, items: Sequence[Item], add_sum: Callable[[int], None] | None = None) -> None:
        for item in items:
            match item:
                case Emit(node):
                    self._held[node] = self._node(node)
                case EmitLoop(node):
                    self._held[node] = write_loop(self, item)
                case If(condition, body, results):
                    self._write_branch(condition, body, results)
                case Segment(body):
                    self._write_items(body)  # LLVM has no use for segments
                case Accumulate(number):
                    assert add_sum is not None
                    add_sum(number)

    def _write_branch(self, condition: Node, body: Sequence[Item], results: Sequence[Node]) -> None:
        variables = {node: new_variable(self, node) for node in results}
        needed = self.anywhere(self.vectors(condition))
        # Values of the branch are unknown after it, because they are not even computed if the branch is not taken.
        held, beside = dict(self._held), dict(self._beside)
        with self.emit.builder.if_then(needed):
            self._write_items(body)
            for node, variable in variables.items():
                assign(self, variable, self.value(node))
        self._held, self._beside = held, beside
        for node, variable in variables.items():
            self._held[node] = read(self, variable)

    def anywhere(self, condition: Vectors) -> Value:
        """Emits a test of whether a boolean is true for any sample of the block."""
        return self.emit.any(functools.reduce(self.emit.builder.or_, condition))

    # --- one node ------------------------------------------------------------------------------------------

    def value(self, node: Node) -> BlockValue:
        """Returns the computed value of a node. A row is first stored in memory if it is not there yet."""
        return self._held[node] if node.width is None else self.in_memory(node)

    def _node(self, node: Node) -> BlockValue:
        if node.op in SPECIAL:
            return SPECIAL[node.op](self, node)
        if node.width is None:
            return self._numbers(node)
        self._ready(node)
        return self._compute_rows(node) if node in self._stored else None

    def _constant(self, node: Node) -> Vectors:
        return [self.emit.constant(node.value, node.dtype)] * self.groups

    def _from_table(self, node: Node) -> Vectors:
        pointer = self._slots[node.attributes[0]]
        return [self.emit.gather(pointer, place, node.dtype) for place in self.vectors(node.operands[0])]

    def _from_memory(self, node: Node) -> Vectors:
        cells, places = self.cells[node.attributes[0]], node.operands[0]
        return [cells.load(self.emit, group, own) for group, own in enumerate(self.vectors(places))]

    def _item(self, node: Node) -> BlockValue:
        carried: Any = self._held[node.operands[0]]  # final value that a loop has carried
        return carried[node.attributes[0]]

    def _stack(self, node: Node) -> Placed:
        return self.beside([self.vectors(operand) for operand in node.operands], node.dtype)

    def vectors(self, node: Node) -> Vectors:
        """Returns the computed value of a scalar node as vectors with one sample per lane."""
        value = self._held[node]
        assert isinstance(value, list), node
        return value

    def _numbers(self, node: Node) -> Vectors:
        operands = [self.vectors(operand) for operand in node.operands]
        dtypes = [operand.dtype for operand in node.operands]
        return [emit_operation(self.emit, node.op, own, dtypes, node.dtype) for own in zip(*operands, strict=True)]

    def _uniform_value(self, node: Node) -> BlockValue:
        return self._uniform_number(node) if node.width is None else self._uniform_row(node)

    def _uniform_number(self, node: Node) -> Vectors:
        if node not in self._uniform:
            slot, place = node.attributes
            with self.emit.once():
                pointer = self.emit.at(self._slots[slot], place, memory_type(node.dtype))
                self._uniform[node] = self.emit.broadcast(self.emit.load_number(pointer, node.dtype))
        return [self._uniform[node]] * self.groups

    def _uniform_row(self, node: Node) -> Placed:
        slot, place = node.attributes
        return self._pack(slot, place, (1, node.width or 0), (0, 1), node.dtype, stride=0)

    def _pack(
        self, slot: int, first: int, shape: tuple[int, int], strides: tuple[int, int], dtype: np.dtype, stride: int
    ) -> Placed:
        """Returns a matrix, or a row, of a uniform array, copied once with whole vectors in each row."""
        key, columns = (slot, first, shape, strides), round_up_width(shape[1], self.emit.lanes)
        if key not in self._uniform:
            self._uniform[key] = self.scratch.take(shape[0] * columns, dtype)
            with self.emit.once():
                source = self.emit.at(self._slots[slot], first, memory_type(dtype))
                matrix = Matrix(*shape, *strides, columns, dtype)
                pack(self.emit, self._uniform[key], source, matrix)
        return Placed(self._uniform[key], stride and columns, 1, shape[1], dtype)

    # --- rows ----------------------------------------------------------------------------------------------

    def new_rows(self, width: int, dtype: np.dtype = FLOAT32) -> Placed:
        """Allocates scratch memory for one row of `width` columns per sample."""
        columns = round_up_width(width, self.emit.lanes)
        return Placed(self.scratch.take(self.block * columns, dtype), columns, 1, width, dtype)

    def in_memory(self, node: Node) -> Placed:
        """Returns the rows of a node in memory, computing and storing them first if needed."""
        held = self._held[node]
        if isinstance(held, Placed):
            return held
        self._ready(node)
        self._held[node] = self._compute_rows(node)
        return self._held[node]  # pyright: ignore[reportReturnType]

    def copy(self, source: Placed, target: Placed) -> None:
        """Emits a copy of the rows of all samples to other rows."""
        whole = self.contiguous(source)
        with self.emit.loop(self.block) as sample:
            for n in range(0, target.sample_stride, self.emit.lanes):
                vector = self.emit.load(whole.at(self.emit, sample, n), source.dtype)
                self.emit.store(vector, target.at(self.emit, sample, n), source.dtype)

    def contiguous(self, held: BlockValue) -> Placed:
        """Returns rows whose columns are adjacent in memory, copying them if needed."""
        assert isinstance(held, Placed)
        return held if held.is_contiguous else side_by_side(self.emit, self.scratch, held, self.block)

    def _dot(self, node: Node) -> Placed:
        for dtype in (node.dtype, node.operands[0].dtype):
            if dtype != FLOAT32:
                raise CannotFuse(f"machine code does not support matrices of {dtype.name}.", advice="use float32")
        slot, row, column, size, transposed = node.attributes
        width, rows = node.width or 0, node.operands[0].width or 0
        strides = (1, size) if transposed else (size, 1)
        first = row * strides[0] + column * strides[1]
        matrix = self._pack(slot, first, (rows, width), strides, node.dtype, stride=1)
        rows_of_product = self.new_rows(width)
        product(self.emit, self.in_memory(node.operands[0]), matrix, rows_of_product, self.block, self.room)
        return rows_of_product

    def beside(self, numbers: Sequence[Vectors], dtype: np.dtype = FLOAT32) -> Placed:
        """Stores scalars in memory as the columns of one row per sample."""
        count = len(numbers)
        rows = Placed(self.scratch.take(self.block * count, dtype), 1, self.block, count, dtype)
        for column, vectors in enumerate(numbers):
            for group, vector in enumerate(vectors):
                self.emit.store(vector, rows.at(self.emit, group * self.emit.lanes, column), dtype)
        return rows

    def _column(self, node: Node) -> Vectors:
        rows = self.in_memory(node.operands[0])
        return self.strided(rows.at(self.emit, 0, node.attributes[0]), rows.sample_stride, rows.dtype)

    def strided(self, pointer: Value, stride: int, dtype: np.dtype) -> Vectors:
        """Loads one scalar per sample, from addresses `stride` elements apart."""
        emit, kind = self.emit, memory_type(dtype)
        pointers = [emit.at(pointer, first * stride, kind) for first in range(0, self.block, emit.lanes)]
        if stride == 1:
            return [emit.load(own, dtype) for own in pointers]
        places = emit.builder.mul(emit.counting(), emit.constant(stride, np.dtype(np.int32)))
        return [emit.gather(own, places, dtype) for own in pointers]

    def _compute_rows(self, node: Node) -> Placed:
        """Computes a row of each sample, in one loop."""
        rows = self.new_rows(node.width or 0, node.dtype)
        with self.emit.loop(self.block) as sample:
            for n in range(0, rows.sample_stride, self.emit.lanes):
                vector = self._elements(node, sample, n, {}, root=True)
                self.emit.store(vector, rows.at(self.emit, sample, n), node.dtype)
        return rows

    def _reduce(self, node: Node) -> Vectors:
        """Reduces a row sample by sample, and returns the results as vectors."""
        row = node.operands[0]
        self._ready(node)
        width, lanes = row.width or 0, self.emit.lanes
        totals = Placed(self.scratch.take(self.block, node.dtype), 1, self.block, 1, node.dtype)
        with self.emit.loop(self.block) as sample:
            total = None
            for n in range(0, width, lanes):
                vector = self._elements(row, sample, n, {})
                # The last vector extends beyond the row. Values computed from its padding must not count.
                if n + lanes > width:
                    vector = self._without_padding(vector, width - n, node.op, node.dtype)
                pair = None if total is None else (total, vector)
                dtypes = [node.dtype, node.dtype]
                total = (
                    vector
                    if pair is None
                    else emit_operation(self.emit, COMBINED[node.op], pair, dtypes, node.dtype)
                )
            self.emit.store(self.across(node.op, total, node.dtype), totals.at(self.emit, sample, 0), node.dtype)
        pointers = [totals.at(self.emit, group * lanes, 0) for group in range(self.groups)]
        return [self.emit.load(pointer, node.dtype) for pointer in pointers]

    def across(self, op: str, vector: Value, dtype: np.dtype = FLOAT32) -> Value:
        """Reduces the lanes of a vector to one scalar, by a sum, maximum or minimum in a fixed order."""
        kind, operation = vector.type.element, COMBINED[op]
        named = lambda own: f"llvm.vector.reduce.{own}.{suffix_of(vector.type)}"
        if not is_float(dtype):
            sign = "" if operation == "add" else "s" if dtype.kind == "i" else "u"
            return self.emit.call(named(f"{sign}{operation}"), vector, result=kind)
        if operation != "add":
            return self.emit.call(named(f"f{operation}imum"), vector, result=kind)
        sum_of = self.emit.declared(named("fadd"), kind, [kind, vector.type])
        return self.emit.builder.call(sum_of, [kind(-0.0), vector], fastmath=("reassoc",))

    def _without_padding(self, vector: Value, width: int, op: str, dtype: np.dtype) -> Value:
        lane = self.emit.counting()
        inside = self.emit.builder.icmp_signed("<", lane, self.emit.constant(width, np.dtype(np.int32)))
        return self.emit.builder.select(inside, vector, self.emit.constant(_neutral(op, dtype), dtype))

    # --- elements of rows at their uses --------------------------------------------------------------------

    def _ready(self, row: Node) -> None:
        """Stores the values that a loop over samples reads in memory, before the loop begins."""
        for operand in row.operands:
            if operand.width is None:
                self._place(operand)
            # The row is computed by its reader, so its operands must be in memory instead.
            elif self._held[operand] is None:
                self._ready(operand)
            else:
                self._held[operand] = self.contiguous(self._held[operand])

    def _place(self, number: Node) -> None:
        """Returns the address of a number per sample, unless it is uniform."""
        if number.op in ("constant", "uniform") or number in self._beside:
            return
        self._beside[number] = self.beside([self.vectors(number)], number.dtype)

    def _elements(
        self, node: Node, sample: Value, first: int, known: dict[Node, Value], *, root: bool = False
    ) -> Value:
        """Returns adjacent elements of a sample's row, starting at this column."""
        if node not in known:
            known[node] = self._element(node, sample, first, known, root=root)
        return known[node]

    def _element(self, node: Node, sample: Value, first: int, known: dict[Node, Value], *, root: bool) -> Value:
        if node.width is None:
            if node in self._beside:
                return self.emit.broadcast(
                    self.emit.load_number(self._beside[node].at(self.emit, sample, 0), node.dtype)
                )
            return self.vectors(node)[0]
        held = self._held.get(node)
        if isinstance(held, Placed) and not root:
            return self.emit.load(held.at(self.emit, sample, first), node.dtype)
        operands = [self._elements(operand, sample, first, known) for operand in node.operands]
        if node.op == "splat":
            return operands[0]
        return emit_operation(
            self.emit, node.op, operands, [operand.dtype for operand in node.operands], node.dtype
        )


SPECIAL: dict[str, Callable[[CodeWriter, Node], Any]] = {
    "constant": CodeWriter._constant,
    "uniform": CodeWriter._uniform_value,
    "table": CodeWriter._from_table,
    "cell": CodeWriter._from_memory,
    "item": CodeWriter._item,
    "dot": CodeWriter._dot,
    "stack": CodeWriter._stack,
    "column": CodeWriter._column,
    "row_sum": CodeWriter._reduce,
    "row_max": CodeWriter._reduce,
    "row_min": CodeWriter._reduce,
}
"""Emitters of operations other than arithmetic, by name."""


def _neutral(op: str, dtype: np.dtype) -> Any:
    """Returns the neutral element of a sum, or of an extreme."""
    if op == "row_sum":
        return 0
    least, most = (-np.inf, np.inf) if is_float(dtype) else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return least if op == "row_max" else most


def _find_stored(nodes: Sequence[Node], outputs: Sequence[Node]) -> set[Node]:
    """Returns the rows to keep in memory: rows that are read more than once, by a product, or as an output."""
    readers: dict[Node, int] = {}
    stored = {node for node in outputs if node.width is not None}
    for node in nodes:
        for operand in node.operands:
            if operand.width is not None:
                readers[operand] = readers.get(operand, 0) + 1
                if node.op in STORED:
                    stored.add(operand)
    computed = lambda node: node.op in OPERATIONS or node.op in TYPED
    # Rows with several readers are computed once, except booleans, which are cheap to compute again.
    often = {node for node, count in readers.items() if count > 1 and computed(node) and node.dtype != np.bool_}
    return stored | often
