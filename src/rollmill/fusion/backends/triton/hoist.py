"""Loads uniform scalars, rows and matrices before the main loop of a kernel.

They stay in registers or shared memory throughout the loop. Rows are padded to the next power of two columns, and
matrices are padded with zeros.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rollmill.core.machine import Numerics
from rollmill.fusion.backends.triton.memory import BY_TRITON, Memory
from rollmill.fusion.backends.triton.operations import TYPES
from rollmill.fusion.ir import Node
from rollmill.fusion.opt.skinny_matmul import MAX_SKINNY, ColumnDots

MIN_COLUMNS = 16
"""Minimum number of columns of an operand of tensor cores."""


def columns(width: int) -> int:
    """Returns the padded number of columns of a row with `width` columns."""
    return max(MIN_COLUMNS, 2 ** math.ceil(math.log2(width)))


class MatrixPart(NamedTuple):
    """The part of a uniform matrix that a product multiplies by."""

    slot: int
    first: int
    """Index of its first element in the array."""
    rows: int
    columns: int
    strides: tuple[int, int]
    """Distances in the array between consecutive rows, and between consecutive columns."""

    @classmethod
    def of(cls, product: Node) -> "MatrixPart":
        """Returns the part of a matrix that a `dot` node multiplies by."""
        slot, row, column, size, transposed = product.attributes
        strides = (1, size) if transposed else (size, 1)
        first = row * strides[0] + column * strides[1]
        return cls(slot, first, product.operands[0].width or 0, product.width or 0, strides)


class KeptMatrices(NamedTuple):
    """Matrices that stay on the chip in a loop that reloads all other matrices."""

    slots: Sequence[str]
    """Pointers to the uniform arrays, which do not depend on the iteration."""
    bytes: int
    """Room for matrices, which the first ones take."""


NOTHING_KEPT = KeptMatrices((), 0)


class Hoisted:
    """Generates the lines of a kernel before its main loop, computing each value only once."""

    def __init__(
        self,
        numerics: Numerics,
        slots: Sequence[str],
        fresh: Callable[[], str],
        *,
        memory: Memory = BY_TRITON,
        kept: KeptMatrices = NOTHING_KEPT,
    ) -> None:
        """Prepares an empty prologue, in which `fresh` returns new names.

        `slots` are pointers to uniform arrays, and `memory` reads rows and matrices. `kept` are matrices to load
        only once.
        """
        self.lines: list[str] = []
        self._numerics = numerics
        self._slots = slots
        self._fresh = fresh
        self._read = memory.read
        self._kept, self._room = kept.slots, kept.bytes
        self._names: dict[tuple, str] = {}

    def once(self, key: tuple, text: str) -> str:
        """Returns the name of an expression, which is written only the first time that its key is used."""
        if key not in self._names:
            self._names[key] = self._fresh()
            self.lines.append(f"    {self._names[key]} = {text}")
        return self._names[key]

    def columns(self, width: int) -> str:
        """Returns the name of the column indices of a row."""
        return self.once(("columns", columns(width)), f"tl.arange(0, {columns(width)})")

    def mma_order(self, width: int) -> str:
        """Returns the name of a row's column indices, in the order of `permute_to_mma_order`."""
        column = self.columns(width)
        if self._numerics != "tf32":
            return column
        return self.once(
            ("mma_order", columns(width)), f"{column} // 8 * 8 + {column} % 4 * 2 + {column} // 4 % 2"
        )

    def uniform(self, slot: int, place: int, dtype: np.dtype, width: int | None) -> str:
        """Loads a uniform row, or a uniform scalar broadcast over the block, and returns its name."""
        if width is not None:
            return self.row(slot, place, width)
        load = f"tl.load({self._slots[slot]} + {place})"
        load = f"{load} != 0" if dtype == np.bool_ else load
        return self.once(("uniform", slot, place), f"tl.full([BLOCK], {load}, {TYPES[dtype.name]})")

    def row(self, slot: int, place: int, width: int, stride: int = 1) -> str:
        """Loads `width` elements of a uniform array, `stride` elements apart, as a row, and returns its name."""
        column = self.columns(width)
        check = [] if columns(width) == width else [f"{column}[None, :] < {width}"]
        step = f"{column}[None, :]" if stride == 1 else f"{column}[None, :] * {stride}"
        load = self._read(f"{self._slots[slot]} + {place} + {step}", check)
        return self.once(("row", slot, place, width, stride), load)

    def matrix(self, part: MatrixPart, *, of_scalars: bool) -> str:
        """Loads part of a uniform matrix, and returns its name.

        Its rows are in the order of tensor-core products, or in their original order if `of_scalars` is set.
        """
        rows, width = part.rows, part.columns
        row, column = self.columns(rows) if of_scalars else self.mma_order(rows), self.columns(width)
        # A transposed matrix is read with exchanged strides, without moving it in memory.
        place = f"{part.first} + {row}[:, None] * {part.strides[0]} + {column}[None, :] * {part.strides[1]}"
        checks = [f"({row}[:, None] < {rows})"] if columns(rows) != rows else []
        checks += [f"({column}[None, :] < {width})"] if columns(width) != width else []
        cast = ".to(tl.bfloat16)" if self._numerics == "bfloat16" else ""
        key = ("matrix", part, of_scalars)
        if key in self._names:
            return self._names[key]
        size = (2 if cast else 4) * columns(rows) * columns(width)
        stays = not of_scalars and size <= self._room
        self._room -= size if stays else 0
        slots = self._kept if stays else self._slots
        return self.once(key, f"{self._read(f'{slots[part.slot]} + {place}', checks)}{cast}")

    def heads(self, head: ColumnDots) -> str:
        """Loads uniform rows as the columns of a matrix, and returns its name."""
        width = head.row.width or 0
        along, across = self.mma_order(width), f"tl.arange(0, {head.columns})"
        dtype = "tl.bfloat16" if self._numerics == "bfloat16" else "tl.float32"
        matrix = self.once(("heads", head), f"tl.zeros([{columns(width)}, {head.columns}], {dtype})")
        check = [] if columns(width) == width else [f"{along} < {width}"]
        # Column by column, because the rows may be in different arrays, or apart in one array.
        for n, weight in enumerate(head.weights):
            slot, place = weight.attributes
            load = f"{self._read(f'{self._slots[slot]} + {place} + {along}', check)}[:, None].to({dtype})"
            matrix = self.once(("heads", head, n), f"tl.where({across}[None, :] == {n}, {load}, {matrix})")
        return matrix

    def ones(self) -> str:
        """Returns the name of a row with a one in the first column and zeros elsewhere, for every sample."""
        row = f"tl.where({self.columns(MAX_SKINNY)}[None, :] == 0, 1.0, 0.0)"
        return self.once(("ones",), f"tl.broadcast_to({row}, [BLOCK, {MAX_SKINNY}])")


def permute_to_mma_order(row: str, width: int, numerics: Numerics) -> str:
    """Returns an expression for a row with its columns in the order of `Hoisted.mma_order`, as the left operand of
    a product.

    A tensor-core product leaves adjacent columns in a thread. A bfloat16 product also takes adjacent columns from
    a thread, but a tf32 product takes columns that are four apart. Permuting each group of eight columns to 0 2 4
    6 1 3 5 7 avoids moving values between threads.
    """
    if numerics != "tf32":
        return row
    eights = f"tl.reshape({row}, [BLOCK, {columns(width) // 8}, 4, 2])"
    return f"tl.reshape(tl.permute({eights}, (0, 1, 3, 2)), [BLOCK, {columns(width)}])"
