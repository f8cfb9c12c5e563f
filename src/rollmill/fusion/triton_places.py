"""Reads and writes the leaves of a tree for the environments of a block, in Triton's language."""

import math
from collections.abc import Sequence

import numpy as np

from rollmill.fusion.beside import side_by_side
from rollmill.fusion.leaves import Leaf
from rollmill.fusion.prelude import columns
from rollmill.fusion.triton_operations import TYPES
from rollmill.fusion.triton_source import Writer

FEW = 4
"""Numbers of a leaf that Triton may place. It asks of each place that it reads or writes what else in the kernel
depends on it, which took most of the time to compile an environment of two hundred numbers."""

WORDS = {1: ("b8", ".to({type})"), 4: ("b32", ".to({type}, bitcast=True)")}
"""By the bytes of a number: what an instruction moves, and how it comes out of a register of 32 bits."""


def load_leaf(writer: Writer, pointer: str, leaf: Leaf, mask: str) -> list[str]:
    """The names of a leaf's numbers, or rows."""
    if _by_instructions(leaf):
        return _load_by_instructions(writer, f"{pointer} + env * {math.prod(leaf.shape)}", leaf, mask)
    names = []
    for n in range(len(leaf.places)):
        names.append(writer.fresh())
        place, masks = _place(writer, "env", leaf, n, mask)
        other = f", mask={masks}, other=0" if masks else ""
        writer.line(f"{names[-1]} = tl.load({pointer} + {place}{other})")
    return names


def store_leaf(writer: Writer, pointer: str, row: str, leaf: Leaf, names: Sequence[str], mask: str) -> None:
    """Writes a leaf to rows of an array; neighbouring numbers leave together."""
    if _by_instructions(leaf):
        _store_by_instructions(writer, f"{pointer} + {row} * {math.prod(leaf.shape)}", leaf, names, mask)
    elif leaf.width is None and len(names) in (2, 4):
        _store_together(writer, pointer, f"{row} * {len(names)}", names, mask)
    else:
        _store_one_by_one(writer, pointer, row, leaf, names, mask)


def _by_instructions(leaf: Leaf) -> bool:
    return leaf.width is None and len(leaf.places) > FEW and leaf.dtype.itemsize in WORDS


# --- as Triton places them -------------------------------------------------------------------------------------


def _store_one_by_one(writer: Writer, pointer: str, row: str, leaf: Leaf, names: Sequence[str], mask: str) -> None:
    for n, name in enumerate(names):
        place, masks = _place(writer, row, leaf, n, mask)
        other = f", mask={masks}" if masks else ""
        shape = "[BLOCK]" if leaf.width is None else f"[BLOCK, {columns(leaf.width)}]"
        writer.line(f"tl.store({pointer} + {place}, tl.broadcast_to({name}, {shape}){other})")


def _store_together(writer: Writer, pointer: str, first: str, names: Sequence[str], mask: str) -> None:
    tile = side_by_side(writer, [f"tl.broadcast_to({name}, [BLOCK])" for name in names])
    other = f", mask={mask}[:, None]" if mask else ""
    place = f"({first})[:, None] + tl.arange(0, {len(names)})[None, :]"
    writer.line(f"tl.store({pointer} + {place}, {tile}{other})")


def _place(writer: Writer, row: str, leaf: Leaf, n: int, mask: str) -> tuple[str, str]:
    """Where the n-th number or row of a leaf lies in its rows of an array, and which of it exist."""
    size = math.prod(leaf.shape)
    if leaf.width is None:
        return f"{row} * {size} + {n}", mask
    column = writer.before.columns(leaf.width)
    masks = [f"{mask}[:, None]"] if mask else []
    masks += [f"({column}[None, :] < {leaf.width})"] if columns(leaf.width) != leaf.width else []
    return f"({row} * {size} + {n * leaf.width})[:, None] + {column}[None, :]", " & ".join(masks)


# --- by instructions of the chip -------------------------------------------------------------------------------


def _load_by_instructions(writer: Writer, row: str, leaf: Leaf, mask: str) -> list[str]:
    """Numbers that lie side by side from each environment's address on; where it is not there, zeros."""
    kind, cast = WORDS[leaf.dtype.itemsize]
    start, together, inside = _address(writer, row), _together(leaf), _condition(mask)
    names = [writer.fresh() for _ in leaf.places]
    for first in range(0, len(names), together):
        own = names[first : first + together]
        what, operands = _moved(kind, 0, together)
        text = f"ld.global{what} {operands}, [${together} + {first * leaf.dtype.itemsize}];"
        if inside:
            zeros = " ".join(f"mov.b32 ${n}, 0;" for n in range(together))
            text = f"{zeros} {_where_inside(text, together + 1)}"
        written = "=&r" if inside else "=r"  # zeros come before the operands are read
        registers = ",".join([written] * together + ["l"] + ["r"] * len(inside))
        types = "tl.int32" if together == 1 else f"({', '.join(['tl.int32'] * together)})"
        writer.line(f"{', '.join(own)} = {_instruction(text, registers, [start, *inside], types, is_pure=True)}")
    for name in names:
        whole = f"{name} != 0" if leaf.dtype == np.bool_ else name + cast.format(type=TYPES[leaf.dtype.name])
        writer.line(f"{name} = {whole}")
    return names


def _store_by_instructions(writer: Writer, row: str, leaf: Leaf, names: Sequence[str], mask: str) -> None:
    """Writes numbers side by side from each environment's address on."""
    kind, cast = WORDS[leaf.dtype.itemsize]
    start, together, inside = _address(writer, row), _together(leaf), _condition(mask)
    for first in range(0, len(names), together):
        own = [
            f"tl.broadcast_to({name}, [BLOCK]){cast.format(type='tl.int32')}"
            for name in names[first : first + together]
        ]
        what, operands = _moved(kind, 2, together)
        text = f"st.global{what} [$1 + {first * leaf.dtype.itemsize}], {operands};"
        text = _where_inside(text, 2 + together) if inside else text
        registers = ",".join(["=r", "l"] + ["r"] * (together + len(inside)))
        text = f"{text} mov.b32 $0, 0;"  # a result, which nobody reads
        writer.line(_instruction(text, registers, [start, *own, *inside], "tl.int32", is_pure=False))


def _together(leaf: Leaf) -> int:
    """Numbers that are moved at once."""
    return next(n for n in (4, 2, 1) if len(leaf.places) % n == 0)


def _moved(kind: str, first: int, together: int) -> tuple[str, str]:
    """How an instruction says what it moves, and its operands, from this one on."""
    operands = ", ".join(f"${first + n}" for n in range(together))
    return (f".v{together}.{kind}", f"{{{operands}}}") if together > 1 else (f".{kind}", operands)


def _address(writer: Writer, row: str) -> str:
    start = writer.fresh()
    writer.line(f"{start} = ({row}).to(tl.int64)")
    return start


def _condition(mask: str) -> list[str]:
    """An operand, where environments of a block may not be there."""
    return [f"{mask}.to(tl.int32)"] if mask else []


def _where_inside(text: str, operand: int) -> str:
    return f"{{ .reg .pred inside; setp.ne.b32 inside, ${operand}, 0; @inside {text} }}"


def _instruction(text: str, registers: str, operands: Sequence[str], types: str, *, is_pure: bool) -> str:
    taken = ", ".join(operands)
    how = f"dtype={types}, is_pure={is_pure}, pack=1"
    return f'tl.inline_asm_elementwise("{text}", "{registers}", [{taken}], {how})'
