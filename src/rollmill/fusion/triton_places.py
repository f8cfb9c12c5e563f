"""Reads and writes the leaves of a tree for the environments of a block, in Triton's language."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollmill.fusion.leaves import Leaf
from rollmill.fusion.prelude import columns, read
from rollmill.fusion.triton_operations import TYPES
from rollmill.fusion.triton_source import Writer


class Word(NamedTuple):
    """How numbers of a size are moved by an instruction, through registers of 32 bits."""

    kind: str
    out: str
    """What follows a register's name to make it a number of `{type}`."""
    into: str
    """What follows a number's name to fill a register."""


WORDS = {
    1: Word("b8", ".to({type})", ".to(tl.int32)"),
    2: Word("b16", ".to(tl.int16).to({type}, bitcast=True)", ".to(tl.int16, bitcast=True).to(tl.int32)"),
    4: Word("b32", ".to({type}, bitcast=True)", ".to(tl.int32, bitcast=True)"),
}
"""By the bytes of a number."""


class Places(NamedTuple):
    """Where the environments of a block have their leaves.

    Numbers are moved by instructions of the chip, side by side as they lie; rows by Triton, which has threads
    exchange them so that neighbours write neighbours, but in long programs each as it is: see `HELPERS`.
    """

    writer: Writer
    mask: str
    """Which environments are there; empty where all are."""
    is_long: bool
    """Whether the program is."""

    def load(self, pointer: str, row: str, leaf: Leaf) -> list[str]:
        """The names of a leaf's numbers, or rows."""
        if leaf.width is None:
            return self._load_numbers(f"{pointer} + {row} * {math.prod(leaf.shape)}", leaf)
        return [self._load_row(pointer, row, leaf, n) for n in range(len(leaf.places))]

    def store(self, pointer: str, row: str, leaf: Leaf, names: Sequence[str]) -> None:
        """Writes a leaf to rows of an array."""
        if leaf.width is None:
            self._store_numbers(f"{pointer} + {row} * {math.prod(leaf.shape)}", leaf, names)
        else:
            for n, name in enumerate(names):
                self._store_row(pointer, row, leaf, n, name)

    # --- rows ------------------------------------------------------------------------------------------------

    def _load_row(self, pointer: str, row: str, leaf: Leaf, n: int) -> str:
        places, checks = self._of_row(pointer, row, leaf, n)
        masks = f", mask={' & '.join(checks)}, other=0" if checks else ""
        name = self.writer.fresh()
        self.writer.line(f"{name} = {read(places, checks) if self.is_long else f'tl.load({places}{masks})'}")
        return name

    def _store_row(self, pointer: str, row: str, leaf: Leaf, n: int, name: str) -> None:
        places, checks = self._of_row(pointer, row, leaf, n)
        whole = f"tl.broadcast_to({name}, [BLOCK, {columns(leaf.width or 0)}])"
        if self.is_long:
            self.writer.line(f"write_where({places}, {whole}, {' & '.join(checks) or EVERYWHERE})")
        else:
            mask = f", mask={' & '.join(checks)}" if checks else ""
            self.writer.line(f"tl.store({places}, {whole}{mask})")

    def _of_row(self, pointer: str, row: str, leaf: Leaf, n: int) -> tuple[str, list[str]]:
        """Where the n-th row of a leaf lies, and which of its numbers exist."""
        width = leaf.width or 0
        column = self.writer.before.columns(width)
        checks = [f"{self.mask}[:, None]"] if self.mask else []
        checks += [f"({column}[None, :] < {width})"] if columns(width) != width else []
        start = f"({row} * {math.prod(leaf.shape)} + {n * width})"
        return f"{pointer} + {start}[:, None] + {column}[None, :]", checks

    # --- numbers ---------------------------------------------------------------------------------------------

    def _load_numbers(self, row: str, leaf: Leaf) -> list[str]:
        """Numbers that lie side by side from each environment's address on; where it is not there, zeros."""
        word, start, together, inside = (
            WORDS[leaf.dtype.itemsize],
            self._address(row),
            _together(leaf),
            self._inside(),
        )
        names = [self.writer.fresh() for _ in leaf.places]
        for first in range(0, len(names), together):
            what, operands = _moved(word.kind, 0, together)
            text = f"ld.global{what} {operands}, [${together} + {first * leaf.dtype.itemsize}];"
            if inside:
                zeros = " ".join(f"mov.b32 ${n}, 0;" for n in range(together))
                text = f"{zeros} {_where_inside(text, together + 1)}"
            written = "=&r" if inside else "=r"  # zeros come before the operands are read
            registers = ",".join([written] * together + ["l"] + ["r"] * len(inside))
            types = "tl.int32" if together == 1 else f"({', '.join(['tl.int32'] * together)})"
            found = _instruction(text, registers, [start, *inside], types, is_pure=True)
            self.writer.line(f"{', '.join(names[first : first + together])} = {found}")
        for name in names:
            out = " != 0" if leaf.dtype == np.bool_ else word.out.format(type=TYPES[leaf.dtype.name])
            self.writer.line(f"{name} = {name}{out}")
        return names

    def _store_numbers(self, row: str, leaf: Leaf, names: Sequence[str]) -> None:
        """Writes numbers side by side from each environment's address on."""
        word, start, together, inside = (
            WORDS[leaf.dtype.itemsize],
            self._address(row),
            _together(leaf),
            self._inside(),
        )
        for first in range(0, len(names), together):
            own = [f"tl.broadcast_to({name}, [BLOCK]){word.into}" for name in names[first : first + together]]
            what, operands = _moved(word.kind, 2, together)
            text = f"st.global{what} [$1 + {first * leaf.dtype.itemsize}], {operands};"
            text = _where_inside(text, 2 + together) if inside else text
            registers = ",".join(["=r", "l"] + ["r"] * (together + len(inside)))
            text = f"{text} mov.b32 $0, 0;"  # a result, which nobody reads
            self.writer.line(_instruction(text, registers, [start, *own, *inside], "tl.int32", is_pure=False))

    def _address(self, row: str) -> str:
        start = self.writer.fresh()
        self.writer.line(f"{start} = ({row}).to(tl.int64)")
        return start

    def _inside(self) -> list[str]:
        """An operand, where environments of a block may not be there."""
        return [f"{self.mask}.to(tl.int32)"] if self.mask else []


EVERYWHERE = "tl.full([1, 1], True, tl.int1)"


def _together(leaf: Leaf) -> int:
    """Numbers that are moved at once."""
    return next(n for n in (4, 2, 1) if len(leaf.places) % n == 0)


def _moved(kind: str, first: int, together: int) -> tuple[str, str]:
    """How an instruction says what it moves, and its operands, from this one on."""
    operands = ", ".join(f"${first + n}" for n in range(together))
    return (f".v{together}.{kind}", f"{{{operands}}}") if together > 1 else (f".{kind}", operands)


def _where_inside(text: str, operand: int) -> str:
    return f"{{ .reg .pred inside; setp.ne.b32 inside, ${operand}, 0; @inside {text} }}"


def _instruction(text: str, registers: str, operands: Sequence[str], types: str, *, is_pure: bool) -> str:
    taken = ", ".join(operands)
    how = f"dtype={types}, is_pure={is_pure}, pack=1"
    return f'tl.inline_asm_elementwise("{text}", "{registers}", [{taken}], {how})'
