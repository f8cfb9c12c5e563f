"""Reads and writes the leaves of a tree for the environments of a block, in Triton's language."""

import math
from collections.abc import Sequence

import numpy as np

from rollmill.fusion.leaves import Leaf
from rollmill.fusion.prelude import columns
from rollmill.fusion.triton_source import Writer

FEW = 4
"""Numbers of a leaf that Triton may place. It asks of each place that it reads or writes what else in the kernel
depends on it, which took most of the time to compile an environment of a hundred numbers."""


def load_leaf(writer: Writer, pointer: str, leaf: Leaf, mask: str) -> list[str]:
    """The names of a leaf's numbers, or rows."""
    names = []
    for n in range(len(leaf.places)):
        names.append(writer.fresh())
        place, masks = _place(writer, "env", leaf, n, mask)
        other = f", mask={masks}, other=0" if masks else ""
        writer.line(f"{names[-1]} = tl.load({pointer} + {place}{other})")
    return names


def store_leaf(writer: Writer, pointer: str, row: str, leaf: Leaf, names: Sequence[str], mask: str) -> None:
    """Writes a leaf to rows of an array; neighbouring numbers leave together, four or two at a time."""
    size = math.prod(leaf.shape)
    together = 1 if leaf.width is not None else next(n for n in (4, 2, 1) if size % n == 0)
    if leaf.width is None and size > FEW and leaf.dtype.itemsize in WORDS:
        _store_by_instructions(writer, f"{pointer} + {row} * {size}", leaf.dtype, names, together, mask)
    elif together > 1:
        _store_together(writer, pointer, f"{row} * {size}", names, mask)
    else:
        _store_one_by_one(writer, pointer, row, leaf, names, mask)


def _store_one_by_one(writer: Writer, pointer: str, row: str, leaf: Leaf, names: Sequence[str], mask: str) -> None:
    for n, name in enumerate(names):
        place, masks = _place(writer, row, leaf, n, mask)
        other = f", mask={masks}" if masks else ""
        shape = "[BLOCK]" if leaf.width is None else f"[BLOCK, {columns(leaf.width)}]"
        writer.line(f"tl.store({pointer} + {place}, tl.broadcast_to({name}, {shape}){other})")


def _store_together(writer: Writer, pointer: str, first: str, names: Sequence[str], mask: str) -> None:
    whole = [f"tl.broadcast_to({name}, [BLOCK])" for name in names]
    if len(names) == 2:
        tile = f"tl.join({whole[0]}, {whole[1]})"
    else:
        even, odd = (f"tl.join({whole[n]}, {whole[n + 2]})" for n in (0, 1))
        tile = f"tl.reshape(tl.join({even}, {odd}), [BLOCK, 4])"
    other = f", mask={mask}[:, None]" if mask else ""
    place = f"({first})[:, None] + tl.arange(0, {len(names)})[None, :]"
    writer.line(f"tl.store({pointer} + {place}, {tile}{other})")


WORDS = {1: ("b8", "tl.int32"), 4: ("b32", "tl.int32, bitcast=True")}
"""By the bytes of a number: what an instruction writes, and how a register of 32 bits comes to hold it."""


def _store_by_instructions(
    writer: Writer, row: str, dtype: np.dtype, names: Sequence[str], together: int, mask: str
) -> None:
    """Writes numbers of each environment side by side, from an address on, by instructions of the chip."""
    kind, cast = WORDS[dtype.itemsize]
    start = writer.fresh()
    writer.line(f"{start} = ({row}).to(tl.int64)")
    inside = [f"{mask}.to(tl.int32)"] if mask else []
    for first in range(0, len(names), together):
        own = [f"tl.broadcast_to({name}, [BLOCK]).to({cast})" for name in names[first : first + together]]
        text = _instruction(kind, first * dtype.itemsize, together, masked=bool(mask))
        taken = ", ".join([start, *own, *inside])
        registers = ",".join(["=r", "l"] + ["r"] * (len(own) + len(inside)))
        writer.line(
            f'tl.inline_asm_elementwise("{text}", "{registers}", [{taken}], dtype=tl.int32, is_pure=False, pack=1)'
        )


def _instruction(kind: str, offset: int, together: int, *, masked: bool) -> str:
    """Writes operands from the third on, where the last one says so; the first is a result that nobody reads."""
    place, operands = f"[$1 + {offset}]", ", ".join(f"${2 + n}" for n in range(together))
    what = f".v{together}.{kind} {place}, {{{operands}}}" if together > 1 else f".{kind} {place}, {operands}"
    if not masked:
        return f"st.global{what}; mov.b32 $0, 0;"
    inside = f"setp.ne.b32 inside, ${2 + together}, 0;"
    return f"{{ .reg .pred inside; {inside} @inside st.global{what}; mov.b32 $0, 0; }}"


def _place(writer: Writer, row: str, leaf: Leaf, n: int, mask: str) -> tuple[str, str]:
    """Where the n-th number or row of a leaf lies in its rows of an array, and which of it exist."""
    size = math.prod(leaf.shape)
    if leaf.width is None:
        return f"{row} * {size} + {n}", mask
    column = writer.before.columns(leaf.width)
    masks = [f"{mask}[:, None]"] if mask else []
    masks += [f"({column}[None, :] < {leaf.width})"] if columns(leaf.width) != leaf.width else []
    return f"({row} * {size} + {n * leaf.width})[:, None] + {column}[None, :]", " & ".join(masks)
