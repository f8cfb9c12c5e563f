"""Writes the kernel of a minibatch's gradients."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rollmill.dataflow import TOGETHER
from rollmill.fusion.accumulators import Accumulators, Part, Side, Tile, accumulators_of, is_row, width_of
from rollmill.fusion.leaves import Leaf
from rollmill.fusion.triton_operations import TYPES
from rollmill.fusion.triton_source import ONE, Names, Numerics, Writer, columns, selected

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
    step: "GradientStep",
    places: Sequence[Place],
    slots: Sequence[str],
    pointers: Sequence[str],
    *,
    whole_blocks: bool,
    numerics: Numerics,
) -> str:
    """The function `kernel` of a minibatch's gradients.

    Its arguments are pointers to the packed table, to the rows of all minibatches `[M, N]`, to the number of this
    one, `pointers`, then to the sums of each program `[PROGRAMS, SIZE]`; and `N` samples, `W` words of a row of
    the table, `SIZE`, `PROGRAMS` and `BLOCK`. What a block needs is read while the block before is computed.

    Args:
        step: the program of one sample.
        places: of the sample's leaves.
        slots: pointers to the program's uniform arrays.
        pointers: the arguments that places and slots need.
        whole_blocks: whether every block is full.
        numerics: of products.
    """
    program, mask = step.scalarised.program, "" if whole_blocks else "here"
    kept = accumulators_of(step.sums, program.outputs)
    samples = _Samples()
    writer = Writer(numerics, slots, indent=2, beside=samples.beside, exact_scalars=False)
    inputs = [name for leaf, place in zip(step.sample, places, strict=True) for name in samples.read(leaf, place)]
    writer.lines += samples.words
    writer.write(program, inputs, then=_Summing(writer, kept, mask).add_what_is_there)
    arguments = ", ".join(["table", "rows", "minibatch", *pointers, "sums"])
    constants = ", ".join(f"{name}: tl.constexpr" for name in ("N", "W", "SIZE", "PROGRAMS", "BLOCK"))
    head = ["@triton.jit", f"def kernel({arguments}, {constants}):"]
    loop = ["    for first in range(tl.program_id(0) * BLOCK, N, PROGRAMS * BLOCK):"]
    here = [f"        {mask} = first + tl.arange(0, BLOCK) < N"] if mask else []
    lines = [*loop, *here, *samples.ahead(), *writer.lines, *samples.over()]
    return "\n".join([*head, *writer.prelude, *samples.opening(), *_empty(kept), *lines, *_stores(kept)]) + "\n"


# --- one block of samples -----------------------------------------------------------------------------------


class _Samples:
    """Reads the samples of the next block while one is computed: words of the table four at a time."""

    def __init__(self) -> None:
        self.words: list[str] = []
        """Lines that take apart what was read."""
        self._fetched: dict[str, str] = {}
        self._groups: dict[int, list[str]] = {}
        self._numbers: dict[str, int] = {}

    def read(self, leaf: Leaf, place: Place) -> list[str]:
        """Names of a leaf's numbers, or rows."""
        if place.first is not None and leaf.width is None:
            return [self._word(place.first + n, leaf.dtype) for n in range(len(leaf.places))]
        return [self._load(leaf, place, n) for n in range(len(leaf.places))]

    def beside(self, writer: Writer, parts: Sequence[str]) -> str:
        """A row of scalars; those that lie beside each other in the table are read as a row."""
        numbers = [self._numbers.get(part, -1) for part in parts]
        count = next((n for n, number in enumerate(numbers) if number != numbers[0] + n), len(parts))
        if numbers[0] < 0 or count < 2:
            return selected(writer, parts)
        column = writer.columns(len(parts))
        words = f"table + at[:, None] + {numbers[0]} + {column}[None, :]"
        fetched = self._fetch(f"tl.load({words}, mask={column}[None, :] < {count}, other=0)")
        tile = f"{fetched}.to(tl.float32, bitcast=True)"
        return selected(writer, parts, onto=(tile, count))

    # --- ahead of the block that is computed -----------------------------------------------------------------

    def opening(self) -> list[str]:
        """Lines that read the first block's samples."""
        return [
            "    rows += tl.load(minibatch).to(tl.int64) * N",
            "    spot = tl.minimum(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), N - 1)",
            "    row = tl.load(rows + spot)",
            "    at = row.to(tl.int64) * W",
            *(f"    {name} = {expression}" for name, expression in self._fetched.items()),
            *(f"    {line}" for line in NEXT),
        ]

    def ahead(self) -> list[str]:
        """Lines that read the next block's samples."""
        fetches = [f"        next_{name} = {expression}" for name, expression in self._fetched.items()]
        return ["        at = row.to(tl.int64) * W", *fetches, *(f"        {line}" for line in NEXT)]

    def over(self) -> list[str]:
        """Lines that make the next block's samples those that are computed."""
        return [f"        {name} = next_{name}" for name in self._fetched]

    def _fetch(self, expression: str) -> str:
        """The name of what an expression of `spot`, `row` and `at` reads."""
        name = f"s{len(self._fetched)}"
        self._fetched[name] = expression
        return name

    def _word(self, number: int, dtype: np.dtype) -> str:
        """The name of a word of the table as a number of this type."""
        group, place = divmod(number, TOGETHER)
        if group not in self._groups:
            self._groups[group] = self._four(group)
        name = f"w{number}"
        self.words.append(f"        {name} = {self._groups[group][place]}.to({TYPES[dtype.name]}, bitcast=True)")
        if dtype == np.float32:
            self._numbers[name] = number
        return name

    def _four(self, group: int) -> list[str]:
        first = group * TOGETHER
        tile = self._fetch(f"tl.load(table + at[:, None] + ({first} + tl.arange(0, {TOGETHER}))[None, :])")
        names = [f"{tile}_{n}" for n in range(TOGETHER)]
        self.words += [
            f"        {tile}_even, {tile}_odd = tl.split(tl.reshape({tile}, [BLOCK, 2, 2]))",
            f"        {names[0]}, {names[2]} = tl.split({tile}_even)",
            f"        {names[1]}, {names[3]} = tl.split({tile}_odd)",
        ]
        return names

    def _load(self, leaf: Leaf, place: Place, n: int) -> str:
        """The name of the n-th number, or row, of a leaf."""
        size = int(np.prod(leaf.shape))
        row = f"row.to(tl.int64) * {size}" if place.shuffled else f"spot.to(tl.int64) * {size}"
        start = f"{row if place.first is None else 'at'} + {(place.first or 0) + n * (leaf.width or 1)}"
        mask = ""
        if leaf.width is not None:
            column = f"tl.arange(0, {columns(leaf.width)})[None, :]"
            start = f"({start})[:, None] + {column}"
            mask = f", mask={column} < {leaf.width}, other=0" if columns(leaf.width) != leaf.width else ""
        cast = f".to({TYPES[leaf.dtype.name]}, bitcast=True)" if place.first is not None else ""
        before = "" if place.shuffled else f" + tl.load(minibatch).to(tl.int64) * {size} * N"
        return self._fetch(f"tl.load({place.pointer}{before} + {start}{mask}){cast}")


NEXT = ("spot = tl.minimum(spot + PROGRAMS * BLOCK, N - 1)", "row = tl.load(rows + spot)")
"""Lines that go on to the rows of the next block."""


# --- sums -------------------------------------------------------------------------------------------------


class _Summing:
    """Adds a block's results to what is kept, each as soon as it is there, so that it need not be held."""

    def __init__(self, writer: Writer, kept: Accumulators, mask: str) -> None:
        self._writer, self._mask = writer, mask
        self._tiles = dict(enumerate(kept.tiles))
        self._numbers = {n: node for n, (_, node) in enumerate(kept.numbers)}

    def add_what_is_there(self, names: Names) -> None:
        """Adds all of which every operand has a name, once."""
        for n, tile in list(self._tiles.items()):
            if all(node is None or node in names for node in (*tile.left, *tile.right)):
                self._add_tile(n, self._tiles.pop(n), names)
        for n, node in list(self._numbers.items()):
            if node in names:
                self._add_number(n, names[self._numbers.pop(n)])

    def _add_tile(self, n: int, tile: Tile, names: Names) -> None:
        """`tile += right^T left`; samples that are none are zero on the right."""
        left, right = self._side(tile.left, names), self._side(tile.right, names)
        if self._mask:
            right = f"tl.where({self._mask}[:, None], {right}, 0.0)"
        self._writer.line(f"tile{n} = {self._writer.product(f'tl.trans({right})', left, onto=f'tile{n}')}")

    def _add_number(self, n: int, name: str) -> None:
        """A number of each sample, kept apart for each place of a block."""
        self._writer.line(
            f"number{n} += tl.where({self._mask}, {name}, 0.0)" if self._mask else f"number{n} += {name}"
        )

    def _side(self, side: Side, names: Names) -> str:
        if is_row(side):
            (row,) = side
            assert row is not None
            return self._writer.masked(row, names[row], "0.0")
        if side == (None,):
            return self._writer.ones()
        return self._writer.beside([ONE if node is None else names[node] for node in side])


def _empty(kept: Accumulators) -> list[str]:
    lines = [f"    tile{n} = tl.zeros({_shape(tile)}, tl.float32)" for n, tile in enumerate(kept.tiles)]
    return lines + [f"    number{n} = tl.zeros([BLOCK], tl.float32)" for n in range(len(kept.numbers))]


def _shape(tile: Tile) -> str:
    return f"[{columns(width_of(tile.right))}, {columns(width_of(tile.left))}]"


def _stores(kept: Accumulators) -> list[str]:
    lines = ["    own = sums + tl.program_id(0) * SIZE"]
    for n, tile in enumerate(kept.tiles):
        lines += [f"    i{n} = tl.arange(0, {columns(width_of(tile.left))})[None, :]"]
        lines += [f"    o{n} = tl.arange(0, {columns(width_of(tile.right))})[:, None]"]
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
