"""Writes the kernel of a minibatch's gradients."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rollmill.dataflow import TOGETHER
from rollmill.fusion.accumulators import Accumulators, Part, Side, Tile, accumulators_of, is_row, width_of
from rollmill.fusion.leaves import Leaf
from rollmill.fusion.triton_operations import TYPES
from rollmill.fusion.triton_source import Numerics, Writer, columns

if TYPE_CHECKING:
    from rollmill.fusion.gradients import GradientStep


class Place(NamedTuple):
    """Where a leaf of the samples is read."""

    pointer: str
    first: int | None
    """Its first word in a row of the table; None where it is an array of its own."""
    shuffled: bool
    """Whether it lies in the order of the batch, and not of the minibatch."""


def gradient_source(
    step: "GradientStep", places: Sequence[Place], *, whole_blocks: bool, numerics: Numerics
) -> str:
    """The function `kernel` of a minibatch's gradients.

    Its arguments are pointers to the packed table, to the minibatch's rows, to the leaves that are arrays of their
    own and to uniform arrays, then to the sums of each program `[PROGRAMS, SIZE]`; and `N` samples, `W` words of a
    row of the table, `SIZE`, `PROGRAMS` and `BLOCK`.

    Args:
        step: the program of one sample.
        places: of the sample's leaves.
        whole_blocks: whether every block is full.
        numerics: of products.
    """
    program = step.scalarised.program
    uniform = [f"uniform{n}" for n in range(len(step.scalarised.uniforms))]
    kept = accumulators_of(step.sums, program.outputs)
    writer = Writer(numerics, uniform, indent=2)
    names = _write_sample(writer, step, places, "" if whole_blocks else "here")
    writing = _Summing(writer, dict(zip(program.outputs, names, strict=True)), "" if whole_blocks else "here")
    for n, tile in enumerate(kept.tiles):
        writing.add_tile(n, tile)
    for n, (_, node) in enumerate(kept.numbers):
        writing.add_number(n, node)
    own = dict.fromkeys(place.pointer for place in places if place.first is None)
    arguments = ", ".join(["table", "rows", *own, *uniform, "sums"])
    constants = ", ".join(f"{name}: tl.constexpr" for name in ("N", "W", "SIZE", "PROGRAMS", "BLOCK"))
    head = ["@triton.jit", f"def kernel({arguments}, {constants}):"]
    loop = ["    for first in range(tl.program_id(0) * BLOCK, N, PROGRAMS * BLOCK):"]
    return "\n".join([*head, *writer.prelude, *_empty(kept), *loop, *writer.lines, *_stores(kept)]) + "\n"


# --- one block of samples -----------------------------------------------------------------------------------


def _write_sample(writer: Writer, step: "GradientStep", places: Sequence[Place], mask: str) -> list[str]:
    writer.line("place = first + tl.arange(0, BLOCK)")
    if mask:
        writer.line(f"{mask} = place < N")
    writer.line("row = tl.load(rows + place" + (f", mask={mask}, other=0)" if mask else ")"))
    writer.line("at = row.to(tl.int64) * W")
    table = _Table(writer)
    inputs = []
    for leaf, place in zip(step.sample, places, strict=True):
        if place.first is not None and leaf.width is None:
            inputs += [table.word(place.first + n, leaf.dtype) for n in range(len(leaf.places))]
        else:
            inputs += _load(writer, leaf, place, mask)
    return writer.write(step.scalarised.program, inputs)


class _Table:
    """Reads words of the table's rows, four at a time."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._read: dict[int, list[str]] = {}

    def word(self, number: int, dtype: np.dtype) -> str:
        """The name of a word as a number of this type."""
        group, place = divmod(number, TOGETHER)
        if group not in self._read:
            self._read[group] = self._four(group)
        word = self._read[group][place]
        if dtype == np.uint32:
            return word
        name = self._writer.fresh()
        self._writer.line(f"{name} = {word}.to({TYPES[dtype.name]}, bitcast=True)")
        return name

    def _four(self, group: int) -> list[str]:
        tile, names = self._writer.fresh(), [self._writer.fresh() for _ in range(TOGETHER)]
        even, odd = self._writer.fresh(), self._writer.fresh()
        words = f"tl.load(table + at[:, None] + ({group * TOGETHER} + tl.arange(0, {TOGETHER}))[None, :])"
        self._writer.line(f"{tile} = {words}")
        self._writer.line(f"{even}, {odd} = tl.split(tl.reshape({tile}, [BLOCK, 2, 2]))")
        self._writer.line(f"{names[0]}, {names[2]} = tl.split({even})")
        self._writer.line(f"{names[1]}, {names[3]} = tl.split({odd})")
        return names


def _load(writer: Writer, leaf: Leaf, place: Place, mask: str) -> list[str]:
    """Names of a leaf's numbers, or rows."""
    size = int(np.prod(leaf.shape))
    row = f"row.to(tl.int64) * {size}" if place.shuffled else f"place * {size}"
    begin = row if place.first is None else "at"
    names = []
    for n in range(len(leaf.places)):
        names.append(writer.fresh())
        start = f"{begin} + {(place.first or 0) + n * (leaf.width or 1)}"
        checks = [mask] if mask and not place.shuffled else []
        if leaf.width is not None:
            column = writer.columns(leaf.width)
            start = f"({start})[:, None] + {column}[None, :]"
            checks = [f"{check}[:, None]" for check in checks]
            checks += [f"({column}[None, :] < {leaf.width})"] if columns(leaf.width) != leaf.width else []
        other = f", mask={' & '.join(checks)}, other=0" if checks else ""
        cast = f".to({TYPES[leaf.dtype.name]}, bitcast=True)" if place.first is not None else ""
        writer.line(f"{names[-1]} = tl.load({place.pointer} + {start}{other}){cast}")
    return names


# --- sums -------------------------------------------------------------------------------------------------


class _Summing:
    """Adds a block's results to what is kept."""

    def __init__(self, writer: Writer, names: dict, mask: str) -> None:
        self._writer = writer
        self._names = names
        self._mask = mask

    def add_tile(self, n: int, tile: Tile) -> None:
        """`tile += left^T right`; samples that are none are zero on the right."""
        left, right = self._side(tile.left), self._side(tile.right)
        if self._mask:
            right = f"tl.where({self._mask}[:, None], {right}, 0.0)"
        self._writer.line(f"tile{n} = {self._writer.product(f'tl.trans({left})', right, onto=f'tile{n}')}")

    def add_number(self, n: int, node) -> None:
        """A number of each sample, kept apart for each place of a block."""
        name = self._names[node]
        self._writer.line(
            f"number{n} += tl.where({self._mask}, {name}, 0.0)" if self._mask else f"number{n} += {name}"
        )

    def _side(self, side: Side) -> str:
        if is_row(side):
            (row,) = side
            assert row is not None
            return self._writer.masked(row, self._names[row], "0.0")
        numbers = ["tl.full([BLOCK], 1.0, tl.float32)" if x is None else self._whole(x) for x in side]
        numbers += ["tl.zeros([BLOCK], tl.float32)"] * (columns(len(side)) - len(side))
        return self._writer.joined(numbers)

    def _whole(self, node) -> str:
        return f"tl.broadcast_to({self._names[node]}, [BLOCK])"


def _empty(kept: Accumulators) -> list[str]:
    lines = [f"    tile{n} = tl.zeros({_shape(tile)}, tl.float32)" for n, tile in enumerate(kept.tiles)]
    return lines + [f"    number{n} = tl.zeros([BLOCK], tl.float32)" for n in range(len(kept.numbers))]


def _shape(tile: Tile) -> str:
    return f"[{columns(width_of(tile.left))}, {columns(width_of(tile.right))}]"


def _stores(kept: Accumulators) -> list[str]:
    lines = ["    own = sums + tl.program_id(0) * SIZE"]
    for n, tile in enumerate(kept.tiles):
        lines += [f"    i{n} = tl.arange(0, {columns(width_of(tile.left))})[:, None]"]
        lines += [f"    o{n} = tl.arange(0, {columns(width_of(tile.right))})[None, :]"]
        lines += [_store(n, part) for part in tile.parts]
    lines += [
        f"    tl.store(own + {offset}, tl.sum(number{n}, axis=0))" for n, (offset, _) in enumerate(kept.numbers)
    ]
    return lines


def _store(n: int, part: Part) -> str:
    """Stores what of a tile belongs to one result, in the result's row-major order."""
    row, strides = f"(i{n} - {part.first_row})", (1, part.rows) if part.turned else (part.columns, 1)
    place = f"{part.offset} + {row} * {strides[0]} + o{n} * {strides[1]}"
    mask = f"({row} >= 0) & ({row} < {part.rows}) & (o{n} < {part.columns})"
    return f"    tl.store(own + {place}, tile{n}, mask={mask})"
