"""Generates the Triton source of programs.

Rows are padded to the next power of two columns. The padding is zero wherever it may be read.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from rollmill.fusion.backends.triton.control import SEPARATOR, AddSum, write_items
from rollmill.fusion.backends.triton.hoist import MatrixPart, columns, permute_to_mma_order
from rollmill.fusion.backends.triton.operations import (
    SELECT_APART,
    TYPES,
    by_constant,
    expression,
    is_extreme,
    of_type,
)
from rollmill.fusion.backends.triton.registers import KEEP_LAYOUT, ONE, ZERO, LayoutChange, interleave, pack_row
from rollmill.fusion.backends.triton.source import KernelSource
from rollmill.fusion.ir import Node, is_float
from rollmill.fusion.opt.schedule import Schedule
from rollmill.fusion.opt.skinny_matmul import (
    MAX_SKINNY,
    ColumnDots,
    SkinnyMatmuls,
    find_skinny_matmuls,
    scattered_stacks,
)

Beside: TypeAlias = Callable[[KernelSource, Sequence[str]], str]
"""Function that emits a row built from the scalars with these names. Their number is a power of two."""

MAX_SUMMED = 8
"""Exact matrix products with at most this many rows or columns are computed as sums outside of tensor cores, which
is cheaper than padding them."""


class MemoryPlace(NamedTuple):
    """Location of a large array of the environment state in memory."""

    pointer: str
    row: str
    """Expression for the offset of each environment's elements, or of one environment's elements."""
    size: int
    """Number of elements per environment."""


class TritonWriter:
    """Writes programs as lines of a kernel's Triton source."""

    def __init__(
        self,
        source: KernelSource,
        *,
        beside: Beside | None = None,
        apart: LayoutChange = KEEP_LAYOUT,
        exact_scalars: bool = True,
    ) -> None:
        """Prepares a writer after the lines of `source` so far.

        `beside` joins scalars to a row, by default by `pack_row`, and `apart` takes scalars out of rows and puts
        them into rows. Functions of scalars are exact if `exact_scalars`, as an environment requires.
        """
        self.source = source
        self._exact_scalars = exact_scalars
        self._scattered: set[Node] = set()
        self._skinny = SkinnyMatmuls({}, {}, {}, {})
        self._beside = beside or pack_row
        self._apart = apart
        self.cells: Sequence[MemoryPlace] = ()
        """Large arrays of the state, by index."""
        self.tiles: dict[ColumnDots | tuple[str, ...], str] = {}
        """Rows of scalars, and products that several nodes share, by the operands that they are made of."""

    def write(self, schedule: Schedule, inputs: Sequence[str], *, add_sum: AddSum | None = None) -> list[str]:
        """Writes a scheduled program whose inputs have these names, and returns the names of its outputs.

        `add_sum` is called where the schedule accumulates a sum over samples, and writes that addition.
        """
        nodes, outputs = schedule.program.nodes(), schedule.program.outputs
        exact = self.source.numerics == "float32"
        # Added to the earlier set, because the body of a loop is a separate program with other nodes.
        self._scattered |= scattered_stacks(nodes, outputs, MAX_SUMMED if exact else MAX_SKINNY)
        if not exact:
            self._skinny = self._skinny.joined(find_skinny_matmuls(nodes, outputs, self._scattered))
        names = {node: inputs[int(node.attributes[0])] for node in nodes if node.op == "input"}
        names = write_items(self, schedule.items, names, add_sum)
        return [names[node] for node in outputs]

    def named(self, inputs: Sequence[Node], names: Sequence[str]) -> list[str]:
        """Returns the name of each input of a program, which may be a constant or a duplicate of another input."""
        known = lambda node: self._constant(node) if node.op == "constant" else names[int(node.attributes[0])]
        return [known(node) for node in inputs]

    # --- one node -------------------------------------------------------------------------------------

    def node(self, node: Node, operands: list[str]) -> str:
        """Writes the source of a node. Returns its name, or the joined names if it has several results."""
        match node.op:
            case "constant":
                return self._constant(node)
            case "uniform":
                slot, place = node.attributes
                return self.source.before.uniform(slot, place, node.dtype, node.width)
            case "item":
                return operands[0].split(SEPARATOR)[node.attributes[0]]
            case "dot":
                return self._dot(node, operands[0])
            case "stack":
                return self._stack(node, operands)
        return self._skinny_node(node, operands) or self._assign(
            of_type(self._expression(node, operands), node.op, node.dtype)
        )

    def _skinny_node(self, node: Node, operands: list[str]) -> str | None:
        """Returns a node that belongs to a skinny product."""
        skinny = self._skinny
        if node in skinny.absorbed:
            return operands[node.operands.index(skinny.absorbed[node])]
        if node in skinny.heads:
            return self._head(*skinny.heads[node], operands[0])
        if node in skinny.added:
            return self._add_addend(node, skinny.added[node], operands)
        return None

    def _add_addend(self, node: Node, product: Node, operands: list[str]) -> str:
        """Returns a skinny product with its addend."""
        at = node.operands.index(product)
        addend = self._skinny.first[product]
        more = ONE if addend is None or addend.scalar is None else operands[1 - at]
        return self._first(product, [*operands[at].split(SEPARATOR), more])

    def _assign(self, text: str) -> str:
        name = self.source.fresh()
        self.source.line(f"{name} = {text}")
        return name

    def shape(self, node: Node) -> str:
        """Returns the shape of a node's Triton tensor, such as `[BLOCK, 64]`."""
        return "[BLOCK]" if node.width is None else f"[BLOCK, {columns(node.width)}]"

    def _expression(self, node: Node, operands: list[str]) -> str:
        first = node.operands[0]
        match node.op:
            case "cell" | "table":
                return self._load_scalar(node, operands[0])
            case "splat":
                return f"tl.broadcast_to({self._repeat(first, operands[0])}, {self.shape(node)})"
            case "column":
                column = self.source.before.columns(first.width or 0)
                nothing = "-0.0" if is_float(node.dtype) else "0"  # adding to -0 preserves the sign of zero
                chosen = f"tl.where({column}[None, :] == {node.attributes[0]}, {operands[0]}, {nothing})"
                return self._apart.scalar(f"tl.sum({chosen}, axis=1)")
            case "row_sum":
                return self._apart.scalar(f"tl.sum({self.masked(first, operands[0], '0.0')}, axis=1)")
            case "row_max":
                return self._apart.scalar(
                    f"tl.reduce({self.masked(first, operands[0], _least(first))}, 1, greater)"
                )
            case "row_min":
                return self._apart.scalar(
                    f"tl.reduce({self.masked(first, operands[0], _greatest(first))}, 1, lesser)"
                )
        if node.width is not None:
            pairs = zip(node.operands, operands, strict=True)
            operands = [self._repeat(operand, name) if operand.width is None else name for operand, name in pairs]
        fast = self.source.numerics != "float32" and (node.width is not None or not self._exact_scalars)
        kind = node.operands[1] if node.op == "select" else first
        last = node.operands[-1]
        op = by_constant(node.op, kind.dtype, last.value if last.op == "constant" else None)
        op = SELECT_APART if op == "select" and is_extreme(node) else op
        return expression(op, node.dtype, kind.dtype, operands, fast=fast)

    def _load_scalar(self, node: Node, place: str) -> str:
        """Returns a scalar loaded from a different position for each environment."""
        number = node.attributes[0]
        if node.op == "table":
            return self.source.memory.read(f"{self.source.slots[number]} + {place}", [])
        pointer, row, _ = self.cells[number]
        return f"read_cell({pointer} + {row} + tl.broadcast_to({place}, [BLOCK]))"

    def _constant(self, node: Node) -> str:
        number = node.value
        if isinstance(number, float) and not math.isfinite(number):
            number = f'float("{number}")'
        if is_float(node.dtype) and number == 0 and math.copysign(1, node.value) < 0:
            # `full` would lose the sign of zero
            return f"(tl.full([BLOCK], 0.0, {TYPES[node.dtype.name]}) * -1.0)"
        return f"tl.full([BLOCK], {number}, {TYPES[node.dtype.name]})"

    # --- rows ------------------------------------------------------------------------------------------

    def masked(self, row: Node, name: str, other: str) -> str:
        """Returns an expression for a row with `other` in its padding columns."""
        width = row.width or 0
        whole = f"tl.broadcast_to({name}, {self.shape(row)})"
        return (
            whole
            if columns(width) == width
            else f"tl.where({self.source.before.columns(width)}[None, :] < {width}, {whole}, {other})"
        )

    def _repeat(self, scalar: Node, name: str) -> str:
        """Returns a scalar as a row of one column."""
        return f"{self._beside_others(scalar, name)}[:, None]"

    def _beside_others(self, scalar: Node, name: str) -> str:
        """Returns a scalar in the layout that rows are built from, which uniform scalars have already."""
        return name if scalar.op in ("constant", "uniform") else self._apart.into(name)

    def _stack(self, node: Node, operands: list[str]) -> str:
        if node in self._scattered:
            return SEPARATOR.join(operands)
        pairs = zip(node.operands, operands, strict=True)
        # `tl.join` needs operands of one shape. The padding columns are zeros.
        own = [f"tl.broadcast_to({self._beside_others(*pair)}, [BLOCK])" for pair in pairs]
        zero = self.source.before.once(("zero", node.dtype), f"tl.full([BLOCK], 0, {TYPES[node.dtype.name]})")
        return interleave(self.source, own + [zero] * (columns(node.width or 0) - len(own)))

    def _dot(self, node: Node, operand: str) -> str:
        left, width = node.operands[0], node.width or 0
        if node in self._skinny.first:
            return operand if self._skinny.first[node] is not None else self._first(node, operand.split(SEPARATOR))
        if left in self._scattered:
            part = MatrixPart.of(node)
            stride = part.strides
            own = [
                self.source.before.row(part.slot, part.first + row * stride[0], width, stride[1])
                for row in range(part.rows)
            ]
            scalars = map(self._repeat, left.operands, operand.split(SEPARATOR))
            return self._assign(" + ".join(f"{scalar} * {row}" for scalar, row in zip(scalars, own, strict=True)))
        matrix = self.source.before.matrix(MatrixPart.of(node), of_scalars=False)
        return self._assign(self.product(self._take(left, operand), matrix))

    def _take(self, row: Node, name: str) -> str:
        """Returns a row as a product takes it."""
        return permute_to_mma_order(self.masked(row, name, "0.0"), row.width or 0, self.source.numerics)

    def product(self, left: str, right: str, *, onto: str = "") -> str:
        """Returns an expression for a matrix product, optionally added to the matrix `onto`."""
        more = f", {onto}" if onto else ""
        if self.source.numerics == "bfloat16":
            return f"tl.dot({left}.to(tl.bfloat16), {right}.to(tl.bfloat16){more})"
        precision = "tf32" if self.source.numerics == "tf32" else "ieee"
        return f'tl.dot({left}, {right}{more}, input_precision="{precision}")'

    # --- skinny products -------------------------------------------------------------------------------

    def _first(self, node: Node, scalars: Sequence[str]) -> str:
        """Returns the product of a few scalars. A bias is one more row of the matrix."""
        before, part = self.source.before, MatrixPart.of(node)
        matrix = before.matrix(part, of_scalars=True)
        addend = self._skinny.first[node]
        if addend is not None:
            slot, place = addend.row.attributes
            row = before.uniform(slot, place, addend.row.dtype, addend.row.width)
            # The bias becomes a row of the matrix, next to the rows of the scalars, so that the product adds it at
            # no cost.
            matrix = before.once(
                ("one more row", matrix, row),
                f"tl.where({before.columns(MAX_SKINNY)}[:, None] == {part.rows}, {row}.to({matrix}.dtype), "
                f"{matrix})",
            )
        return self._assign(self.product(self.beside(scalars), matrix))

    def beside(self, scalars: Sequence[str]) -> str:
        """Returns the name of a row built from scalars and padded with zeros. Equal rows are built once."""
        key = tuple(scalars)
        if key not in self.tiles:
            self.tiles[key] = self._beside(self.source, [*key, *[ZERO] * (columns(len(key)) - len(key))])
        return self.tiles[key]

    def _head(self, head: ColumnDots, column: int, row: str) -> str:
        """Returns one column of a product that all sums over a row share."""
        if head not in self.tiles:
            left = self._take(head.row, row)
            self.tiles[head] = self._assign(self.product(left, self.source.before.heads(head)))
        return self._assign(self._apart.column(self.tiles[head], head.columns, column))


def _least(row: Node) -> str:
    return 'float("-inf")' if is_float(row.dtype) else str(np.iinfo(row.dtype).min)


def _greatest(row: Node) -> str:
    return 'float("inf")' if is_float(row.dtype) else str(np.iinfo(row.dtype).max)
