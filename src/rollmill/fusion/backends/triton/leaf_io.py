"""Generates Triton loads and stores of pytree leaves, for a block of environments."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollmill.fusion.backends.triton.hoist import columns
from rollmill.fusion.backends.triton.operations import TYPES
from rollmill.fusion.backends.triton.registers import interleave
from rollmill.fusion.backends.triton.source import KernelSource
from rollmill.fusion.kernels.leaves import Leaf


class Word(NamedTuple):
    """How to load and store elements of one size with PTX instructions, through 32-bit registers."""

    kind: str
    out: str
    """Source suffix that converts a register to an element of type `{type}`."""
    into: str
    """Source suffix that converts an element to a register."""


WORDS = {
    1: Word("b8", ".to({type})", ".to(tl.int32)"),
    2: Word("b16", ".to(tl.int16).to({type}, bitcast=True)", ".to(tl.int16, bitcast=True).to(tl.int32)"),
    4: Word("b32", ".to({type}, bitcast=True)", ".to(tl.int32, bitcast=True)"),
}
"""PTX accesses by element size in bytes."""


class LeafIO(NamedTuple):
    """Loads and stores pytree leaves for a block of environments, as Triton source."""

    source: KernelSource
    mask: str
    """Name of the mask of environments that exist, or an empty string if every block is full."""

    def load(self, pointer: str, row: str, leaf: Leaf) -> list[str]:
        """Writes the loads of a leaf, and returns the names of its elements or rows."""
        if self._are_many(leaf):
            return self._load_by_instructions(f"{pointer} + {row} * {math.prod(leaf.shape)}", leaf)
        names = []
        for n in range(len(leaf.places)):
            names.append(self.source.fresh())
            self.source.line(f"{names[-1]} = {self.source.memory.read(*self._place(pointer, row, leaf, n))}")
        return names

    def store(self, pointer: str, row: str, leaf: Leaf, names: Sequence[str]) -> None:
        """Writes the stores of a leaf into rows of an array, coalescing adjacent elements."""
        if self._are_many(leaf):
            self._store_by_instructions(f"{pointer} + {row} * {math.prod(leaf.shape)}", leaf, names)
        elif leaf.width is None and len(names) in (2, 4):
            self._store_together(pointer, f"{row} * {len(names)}", names)
        else:
            self._store_one_by_one(pointer, row, leaf, names)

    def _are_many(self, leaf: Leaf) -> bool:
        return leaf.width is None and len(leaf.places) > self.source.memory.few

    # --- as Triton places them -------------------------------------------------------------------------------

    def _store_one_by_one(self, pointer: str, row: str, leaf: Leaf, names: Sequence[str]) -> None:
        shape = "[BLOCK]" if leaf.width is None else f"[BLOCK, {columns(leaf.width)}]"
        for n, name in enumerate(names):
            places, checks = self._place(pointer, row, leaf, n)
            self.source.line(self.source.memory.write(places, f"tl.broadcast_to({name}, {shape})", checks))

    def _store_together(self, pointer: str, first: str, names: Sequence[str]) -> None:
        tile = interleave(self.source, [f"tl.broadcast_to({name}, [BLOCK])" for name in names])
        places = f"{pointer} + ({first})[:, None] + tl.arange(0, {len(names)})[None, :]"
        checks = [f"{self.mask}[:, None]"] if self.mask else []
        self.source.line(self.source.memory.write(places, tile, checks))

    def _place(self, pointer: str, row: str, leaf: Leaf, n: int) -> tuple[str, list[str]]:
        """Returns the offset and mask of the n-th element or row of a leaf."""
        size = math.prod(leaf.shape)
        if leaf.width is None:
            return f"{pointer} + {row} * {size} + {n}", [self.mask] if self.mask else []
        column = self.source.before.columns(leaf.width)
        checks = [f"{self.mask}[:, None]"] if self.mask else []
        checks += [f"({column}[None, :] < {leaf.width})"] if columns(leaf.width) != leaf.width else []
        return f"{pointer} + ({row} * {size} + {n * leaf.width})[:, None] + {column}[None, :]", checks

    # --- by instructions of the chip --------------------------------------------------------------------------

    def _load_by_instructions(self, row: str, leaf: Leaf) -> list[str]:
        """Loads consecutive elements from each environment's address. Masked environments get zeros."""
        word, start = WORDS[leaf.dtype.itemsize], self._address(row)
        together, inside = _together(leaf), self._inside()
        names = [self.source.fresh() for _ in leaf.places]
        for first in range(0, len(names), together):
            what, operands = _instruction_suffix(word.kind, 0, together)
            text = f"ld.global{what} {operands}, [${together} + {first * leaf.dtype.itemsize}];"
            if inside:
                zeros = " ".join(f"mov.b32 ${n}, 0;" for n in range(together))
                text = f"{zeros} {_where_inside(text, together + 1)}"
            written = "=&r" if inside else "=r"  # the zeros are written before the operands are read
            registers = ",".join([written] * together + ["l"] + ["r"] * len(inside))
            types = "tl.int32" if together == 1 else f"({', '.join(['tl.int32'] * together)})"
            loaded = _instruction(text, registers, [start, *inside], types, is_pure=True)
            self.source.line(f"{', '.join(names[first : first + together])} = {loaded}")
        for name in names:
            out = " != 0" if leaf.dtype == np.bool_ else word.out.format(type=TYPES[leaf.dtype.name])
            self.source.line(f"{name} = {name}{out}")
        return names

    def _store_by_instructions(self, row: str, leaf: Leaf, names: Sequence[str]) -> None:
        """Stores consecutive elements at each environment's address."""
        word, start = WORDS[leaf.dtype.itemsize], self._address(row)
        together, inside = _together(leaf), self._inside()
        for first in range(0, len(names), together):
            own = [f"tl.broadcast_to({name}, [BLOCK]){word.into}" for name in names[first : first + together]]
            what, operands = _instruction_suffix(word.kind, 2, together)
            text = f"st.global{what} [$1 + {first * leaf.dtype.itemsize}], {operands};"
            text = _where_inside(text, 2 + together) if inside else text
            registers = ",".join(["=r", "l"] + ["r"] * (together + len(inside)))
            text = f"{text} mov.b32 $0, 0;"  # sets an output that nobody reads
            self.source.line(_instruction(text, registers, [start, *own, *inside], "tl.int32", is_pure=False))

    def _address(self, row: str) -> str:
        start = self.source.fresh()
        self.source.line(f"{start} = ({row}).to(tl.int64)")
        return start

    def _inside(self) -> list[str]:
        """Returns an operand, where environments of a block may not be there."""
        return [f"{self.mask}.to(tl.int32)"] if self.mask else []


def _together(leaf: Leaf) -> int:
    """Returns the maximum number of elements moved at once."""
    return next(n for n in (4, 2, 1) if len(leaf.places) % n == 0)


def _instruction_suffix(kind: str, first: int, together: int) -> tuple[str, str]:
    """Returns the suffix of an instruction that moves this number of elements, and its operands."""
    operands = ", ".join(f"${first + n}" for n in range(together))
    return (f".v{together}.{kind}", f"{{{operands}}}") if together > 1 else (f".{kind}", operands)


def _where_inside(text: str, operand: int) -> str:
    return f"{{ .reg .pred inside; setp.ne.b32 inside, ${operand}, 0; @inside {text} }}"


def _instruction(text: str, registers: str, operands: Sequence[str], types: str, *, is_pure: bool) -> str:
    arguments = ", ".join(operands)
    how = f"dtype={types}, is_pure={is_pure}, pack=1"
    return f'tl.inline_asm_elementwise("{text}", "{registers}", [{arguments}], {how})'
