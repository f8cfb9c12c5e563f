"""Writes programs as Triton source.

Rows have as many columns as the next power of two; the columns that are too many are zero wherever they could be
read.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from rollmill.fusion.beside import LEFT, ONE, ZERO, Apart, joined, side_by_side
from rollmill.fusion.folding import is_float
from rollmill.fusion.ir import Loop, Node, Program
from rollmill.fusion.narrow import MOST, Head, Narrow, find_narrow, is_stacked_product
from rollmill.fusion.prelude import Numerics, Prelude, as_taken, columns
from rollmill.fusion.triton_memory import BY_TRITON, Memory
from rollmill.fusion.triton_operations import TYPES, by_constant, expression
from rollmill.fusion.triton_order import SEPARATOR, Names, Order

Beside: TypeAlias = Callable[["Writer", Sequence[str]], str]
"""Makes a row of scalars with these names, as many as a power of two."""

MOST_SUMMED = 8
"""Products with as few rows or columns are sums on the ordinary units: cheaper than to fill a tensor core."""


class Writer:
    """Lines of a kernel's source: those before its loop, and those of the part that is being written."""

    def __init__(
        self,
        numerics: Numerics,
        slots: Sequence[str],
        *,
        indent: int = 1,
        beside: Beside | None = None,
        apart: Apart = LEFT,
        exact_scalars: bool = True,
        memory: Memory = BY_TRITON,
        prefix: str = "v",
    ) -> None:
        """Lines so far none.

        Args:
            numerics: of what is not exact.
            slots: pointers to uniform arrays.
            indent: of the part that is being written.
            beside: how scalars become a row; `joined` where it is left out.
            apart: how scalars come out of rows, and go into them.
            exact_scalars: whether functions of single numbers are exact, as an environment's must be.
            memory: how the kernel reads and writes.
            prefix: of all names.
        """
        self.numerics: Numerics = numerics
        self._exact_scalars = exact_scalars
        self._prefix = prefix
        self.memory = memory
        self.before = Prelude(numerics, slots, self.fresh, memory=memory)
        self.lines: list[str] = []
        self._slots = slots
        self._indent = indent
        self._scattered: set[Node] = set()
        self._narrow = Narrow({}, {}, {}, {})
        self._beside = beside or joined
        self._apart = apart
        self.tiles: dict[Head | tuple[str, ...], str] = {}
        """Rows of scalars, and products that several nodes share, by what they are made of."""
        self._count = 0

    def line(self, text: str) -> None:
        """Adds a line of the part that is being written."""
        self.lines.append("    " * self._indent + text)

    def deeper(self, by: int = 1) -> None:
        """Indents what follows."""
        self._indent += by

    def write(
        self, program: Program, inputs: Sequence[str], *, then: Callable[[Names], None] | None = None
    ) -> list[str]:
        """Writes a program whose inputs have these names; returns the names of its outputs.

        `then` is called after each node, with the names of all that is written.
        """
        order = Order(self, program, inputs)
        self._find_products(order.nodes, program.outputs)
        order.write(then)
        return [order.names[node] for node in program.outputs]

    def named(self, inputs: Sequence[Node], names: Sequence[str]) -> list[str]:
        """What inputs are called whose numbers have these names; some are known, or another's again."""
        known = lambda node: self._constant(node) if node.op == "constant" else names[int(node.attributes[0])]
        return [known(node) for node in inputs]

    # --- one node -------------------------------------------------------------------------------------

    def node(self, node: Node, operands: list[str]) -> str:
        """Writes a node whose operands have these names; returns its own, or the names of its numbers."""
        match node.op:
            case "constant":
                return self._constant(node)
            case "uniform":
                slot, place = node.attributes
                return self.before.uniform(slot, place, node.dtype, node.width)
            case "loop":
                return self._loop(node.attributes[0], operands)
            case "item":
                return operands[0].split(SEPARATOR)[node.attributes[0]]
            case "dot":
                return self._dot(node, operands[0])
            case "stack":
                return self._stack(node, operands)
        return self._narrow_node(node, operands) or self._assign(self._expression(node, operands))

    def _narrow_node(self, node: Node, operands: list[str]) -> str | None:
        """A node that belongs to a narrow product."""
        narrow = self._narrow
        if node in narrow.absorbed:
            return operands[node.operands.index(narrow.absorbed[node])]
        if node in narrow.heads:
            return self._head(*narrow.heads[node], operands[0])
        if node in narrow.added:
            return self._added(node, narrow.added[node], operands)
        return None

    def _added(self, node: Node, product: Node, operands: list[str]) -> str:
        """A narrow product, and what is added to it."""
        at = node.operands.index(product)
        addend = self._narrow.first[product]
        more = ONE if addend is None or addend.scalar is None else operands[1 - at]
        return self._first(product, [*operands[at].split(SEPARATOR), more])

    def _assign(self, text: str) -> str:
        name = self.fresh()
        self.line(f"{name} = {text}")
        return name

    def fresh(self) -> str:
        """A name that nothing has yet."""
        self._count += 1
        return f"{self._prefix}{self._count}"

    def shape(self, node: Node) -> str:
        """Of what a node becomes."""
        return "[BLOCK]" if node.width is None else f"[BLOCK, {columns(node.width)}]"

    def _expression(self, node: Node, operands: list[str]) -> str:
        first = node.operands[0]
        match node.op:
            case "table":
                return self.memory.read(f"{self._slots[node.attributes[0]]} + {operands[0]}", [])
            case "splat":
                return f"tl.broadcast_to({self._repeated(first, operands[0])}, {self.shape(node)})"
            case "column":
                column = self.before.columns(first.width or 0)
                nothing = "-0.0" if is_float(node.dtype) else "0"  # added to -0 it leaves the sign
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
            operands = [
                self._repeated(operand, name) if operand.width is None else name for operand, name in pairs
            ]
        fast = self.numerics != "float32" and (node.width is not None or not self._exact_scalars)
        kind = node.operands[1] if node.op == "select" else first
        last = node.operands[-1]
        op = by_constant(node.op, kind.dtype, last.value if last.op == "constant" else None)
        return expression(op, node.dtype, kind.dtype, operands, fast=fast)

    def _constant(self, node: Node) -> str:
        number = node.value
        if isinstance(number, float) and not math.isfinite(number):
            number = f'float("{number}")'
        if is_float(node.dtype) and number == 0 and math.copysign(1, node.value) < 0:
            return f"(tl.full([BLOCK], 0.0, {TYPES[node.dtype.name]}) * -1.0)"  # `full` drops the sign
        return f"tl.full([BLOCK], {number}, {TYPES[node.dtype.name]})"

    # --- rows ------------------------------------------------------------------------------------------

    def masked(self, row: Node, name: str, other: str) -> str:
        """A row whose columns that are too many are `other`."""
        width = row.width or 0
        whole = f"tl.broadcast_to({name}, {self.shape(row)})"
        return (
            whole
            if columns(width) == width
            else f"tl.where({self.before.columns(width)}[None, :] < {width}, {whole}, {other})"
        )

    def _repeated(self, scalar: Node, name: str) -> str:
        """A scalar as a row of one column."""
        return f"{self._beside_others(scalar, name)}[:, None]"

    def _beside_others(self, scalar: Node, name: str) -> str:
        """A scalar where it goes into rows; what is the same for all environments lies anywhere."""
        return name if scalar.op in ("constant", "uniform") else self._apart.into(name)

    def _stack(self, node: Node, operands: list[str]) -> str:
        if node in self._scattered:
            return SEPARATOR.join(operands)
        pairs = zip(node.operands, operands, strict=True)
        own = [f"tl.broadcast_to({self._beside_others(*pair)}, [BLOCK])" for pair in pairs]
        zero = self.before.once(("zero", node.dtype), f"tl.full([BLOCK], 0, {TYPES[node.dtype.name]})")
        return side_by_side(self, own + [zero] * (columns(node.width or 0) - len(own)))

    def _dot(self, node: Node, operand: str) -> str:
        slot, rows, size, start, transposed = node.attributes
        source, width = node.operands[0], node.width or 0
        if node in self._narrow.first:
            return operand if self._narrow.first[node] is not None else self._first(node, operand.split(SEPARATOR))
        if source in self._scattered:
            stride = (1, rows) if transposed else (size, 1)
            own = [
                self.before.row(slot, row * stride[0] + start * stride[1], width, stride[1]) for row in range(rows)
            ]
            scalars = map(self._repeated, source.operands, operand.split(SEPARATOR))
            return self._assign(" + ".join(f"{scalar} * {row}" for scalar, row in zip(scalars, own, strict=True)))
        matrix = self.before.matrix(slot, rows, size, start, width, transposed=transposed, of_scalars=False)
        return self._assign(self.product(self._taken(source, operand), matrix))

    def _taken(self, row: Node, name: str) -> str:
        """A row as a product takes it."""
        return as_taken(self.masked(row, name, "0.0"), row.width or 0, self.numerics)

    def product(self, left: str, right: str, *, onto: str = "") -> str:
        """The product of two matrices, added to a third where there is one."""
        more = f", {onto}" if onto else ""
        if self.numerics == "bfloat16":
            return f"tl.dot({left}.to(tl.bfloat16), {right}.to(tl.bfloat16){more})"
        precision = "tf32" if self.numerics == "tf32" else "ieee"
        return f'tl.dot({left}, {right}{more}, input_precision="{precision}")'

    # --- narrow products -------------------------------------------------------------------------------

    def _find_products(self, nodes: Sequence[Node], outputs: Sequence[Node]) -> None:
        """Which products are narrow; exact ones are sums where that is cheap.

        A stack that anything else reads is a row like others, and so are its products.
        """
        exact = self.numerics == "float32"
        most = MOST_SUMMED if exact else MOST
        read = {operand for node in nodes if not is_stacked_product(node, most) for operand in node.operands}
        self._scattered |= {node for node in nodes if node.op == "stack"} - read - set(outputs)
        if not exact:
            self._narrow = self._narrow.joined(find_narrow(nodes, outputs, self._scattered))

    def _first(self, node: Node, scalars: Sequence[str]) -> str:
        """The product of a few scalars; what is added to it is one more row of the matrix."""
        slot, rows, size, start, transposed = node.attributes
        width = node.width or 0
        matrix = self.before.matrix(slot, rows, size, start, width, transposed=transposed, of_scalars=True)
        addend = self._narrow.first[node]
        if addend is not None:
            slot, place = addend.row.attributes
            row = self.before.uniform(slot, place, addend.row.dtype, addend.row.width)
            matrix = self.before.once(
                ("one more row", matrix, row),
                f"tl.where({self.before.columns(MOST)}[:, None] == {rows}, {row}.to({matrix}.dtype), {matrix})",
            )
        return self._assign(self.product(self.beside(scalars), matrix))

    def beside(self, scalars: Sequence[str]) -> str:
        """A row of scalars with these names, filled up with zeros; each is made once."""
        key = tuple(scalars)
        if key not in self.tiles:
            self.tiles[key] = self._beside(self, [*key, *[ZERO] * (columns(len(key)) - len(key))])
        return self.tiles[key]

    def _head(self, head: Head, column: int, row: str) -> str:
        """One column of a product that all sums over a row share."""
        if head not in self.tiles:
            left = self._taken(head.row, row)
            self.tiles[head] = self._assign(self.product(left, self.before.heads(head)))
        return self._assign(self._apart.column(self.tiles[head], head.columns, column))

    def _loop(self, loop: Loop, operands: list[str]) -> str:
        """Returns the names of the carried numbers, separated."""
        count, middle = len(loop.body.outputs), len(loop.body.inputs)
        carried = []
        for name, node in zip(operands, loop.body.outputs, strict=False):
            whole = name if node.width is None else f"tl.broadcast_to({name}, {self.shape(node)})"
            carried.append(
                self._assign(
                    f"{whole} - tl.zeros({self.shape(node)}, {TYPES[node.dtype.name]})"
                    if node.dtype != np.bool_
                    else f"{whole} & tl.full({self.shape(node)}, 1, tl.int1)"
                )
            )
        inputs = [*carried, *operands[count:middle]]
        tiles = dict(self.tiles)
        if loop.condition is None:
            self.line(f"for _ in range({loop.turns}):")
            self.deeper()
            self._replace(carried, self.write(loop.body, inputs))
            self.deeper(-1)
            self.tiles = tiles
            return SEPARATOR.join(carried)
        asked = [*carried, *operands[middle:]]
        going = self._assign(self.write(loop.condition, asked)[0])
        self.line(f"while tl.max({going}.to(tl.int32), axis=0) != 0:")
        self.deeper()
        self._replace(carried, self.write(loop.body, inputs), going, loop)
        self.tiles = dict(tiles)
        self.line(f"{going} = {self.write(loop.condition, asked)[0]}")
        self.deeper(-1)
        self.tiles = tiles
        return SEPARATOR.join(carried)

    def _replace(self, carried: list[str], after: list[str], going: str = "", loop: Loop | None = None) -> None:
        """Gives the carried numbers their values after a turn, all at once."""
        news = [self._assign(new) for new in after]
        for n, (name, new) in enumerate(zip(carried, news, strict=True)):
            if loop is not None:
                condition = going if loop.body.outputs[n].width is None else f"{going}[:, None]"
                new = f"tl.where({condition}, {new}, {name})"
            self.line(f"{name} = {new}")


def _least(row: Node) -> str:
    return 'float("-inf")' if is_float(row.dtype) else str(np.iinfo(row.dtype).min)


def _greatest(row: Node) -> str:
    return 'float("inf")' if is_float(row.dtype) else str(np.iinfo(row.dtype).max)
