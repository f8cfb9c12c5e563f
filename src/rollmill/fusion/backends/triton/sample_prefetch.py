"""Prefetches the samples of a minibatch one block ahead of the computation."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rollmill.dataflow import TOGETHER
from rollmill.fusion.backends.triton.hoist import columns
from rollmill.fusion.backends.triton.memory import BY_TRITON, Memory
from rollmill.fusion.backends.triton.operations import TYPES
from rollmill.fusion.backends.triton.registers import pack_by_select
from rollmill.fusion.backends.triton.source import KernelSource
from rollmill.fusion.kernels.leaves import Leaf
from rollmill.fusion.kernels.loop_fission import SampleTurns

ONE_TURN = SampleTurns()


class SamplePlace(NamedTuple):
    """Location from which a GPU kernel reads one leaf of the samples."""

    pointer: str
    first: int | None
    """Index of the leaf's first word in a row of the packed batch, or None if the leaf has an array of its own."""
    shuffled: bool
    """Whether samples are stored in the order of the batch, and so must be looked up by row, rather than in the
    order of the minibatch."""


class SamplePrefetch:
    """Generates the loads of the next block's samples, four words of the packed batch at a time."""

    def __init__(
        self, prefix: str, *, by_step: bool = False, memory: Memory = BY_TRITON, turns: SampleTurns = ONE_TURN
    ) -> None:
        """Generates no loads yet. With `by_step`, samples are sequences, read from the last step to the first."""
        self._prefix, self._by_step, self._memory, self._turns = prefix, by_step, memory, turns
        self.words: list[str] = []
        """Lines that take apart what was read."""
        self._fetched: list[tuple[tuple[str, ...], str]] = []
        self._groups: dict[int, list[str]] = {}
        self._numbers: dict[str, tuple[int, int]] = {}
        """Words of the packed batch, each with the distance between consecutive steps."""

    def read(self, leaf: Leaf, place: SamplePlace, wanted: Sequence[int]) -> list[str]:
        """Returns the names of those elements or rows of a leaf whose indices are in `wanted`."""
        strides = [self._turns.strides.get(leaf.places[n], 0) for n in wanted]
        if place.first is not None and leaf.width is None:
            words = zip(wanted, strides, strict=True)
            return [self._word(place.first + n, stride, leaf.dtype) for n, stride in words]
        return [self._load(leaf, place, n, stride) for n, stride in zip(wanted, strides, strict=True)]

    def beside(self, source: KernelSource, parts: Sequence[str]) -> str:
        """Returns the name of a row of scalars. Scalars adjacent in the packed batch are loaded as one row."""
        # Parts that are adjacent words of the packed batch are read as one row. Other parts are selected into
        # their columns one by one.
        numbers = [self._numbers.get(part, (-1, 0)) for part in parts]
        first, stride = numbers[0]
        count = next((n for n, number in enumerate(numbers) if number != (first + n, stride)), len(parts))
        if first < 0 or count < 2:
            return pack_by_select(source, parts)
        column = source.before.columns(len(parts))
        words = f"table + at[:, None] + {first}{_in_turn(stride)} + {column}[None, :]"
        fetched = self._fetch(self._memory.read(words, [f"{column}[None, :] < {count}"]))
        tile = f"{fetched}.to(tl.float32, bitcast=True)"
        return pack_by_select(source, parts, onto=(tile, count))

    # --- ahead of the block that is computed -----------------------------------------------------------------

    def opening(self) -> list[str]:
        """Returns the lines that load the samples of the first block."""
        first = ["spot = tl.minimum(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), N - 1)", self._row()]
        fetches = [f"{', '.join(names)} = {expression}" for names, expression in self._fetched]
        begin, after = first, self._next()
        if self._in_turns is not None:
            begin, after = self._in_turns("0"), self._in_turns("1")
        return [f"    {line}" for line in (*begin, "at = row.to(tl.int64) * W", *fetches, *after)]

    def ahead(self) -> list[str]:
        """Returns the lines that load the samples of the next block."""
        later = lambda names: ", ".join(f"next_{name}" for name in names)
        fetches = [f"{later(names)} = {expression}" for names, expression in self._fetched]
        after = self._next() if self._in_turns is None else self._in_turns("(count + 2)")
        return [f"        {line}" for line in ("at = row.to(tl.int64) * W", *fetches, *after)]

    def over(self) -> list[str]:
        """Returns the lines that switch to the prefetched block at the end of an iteration."""
        return [f"        {name} = next_{name}" for names, _ in self._fetched for name in names]

    def _fetch(self, expression: str) -> str:
        """Returns the name of the value read by an expression of `spot`, `row` and `at`."""
        name = f"{self._prefix}s{len(self._fetched)}"
        self._fetched.append(((name,), expression))
        return name

    def _row(self) -> str:
        """Returns the line that reads the rows of a block."""
        return f"row = {self._memory.read('rows + spot', [])}"

    def _next(self) -> Sequence[str]:
        """Returns the lines that continue to the rows of the next block."""
        return "spot = tl.minimum(spot + PROGRAMS * BLOCK, N - 1)", self._row()

    @property
    def _in_turns(self) -> Callable[[str], Sequence[str]] | None:
        """Returns a function from a step's index to the lines that move to its rows, or None without steps."""
        return self._step if self._by_step else self._turn if self._turns.count > 1 else None

    def _turn(self, number: str) -> Sequence[str]:
        """Returns the lines that go to a part of a block's samples, by the number of the turn."""
        block = f"tl.program_id(0) * BLOCK + {number} // {self._turns.count} * (PROGRAMS * BLOCK)"
        return (
            f"spot = tl.minimum({block} + tl.arange(0, BLOCK), N - 1)",
            f"turn = {number} % {self._turns.count}",
            self._row(),
        )

    def _step(self, number: str) -> Sequence[str]:
        """Returns the lines that go to the rows of a step, by its number.

        A block of sequences has `T` steps, processed from last to first. Then comes the next block.
        """
        block = f"tl.program_id(0) * BLOCK + {number} // T * (PROGRAMS * BLOCK)"
        return (
            f"spot = tl.minimum({block} + tl.arange(0, BLOCK), N - 1)",
            f"step = T - 1 - {number} % T",
            f"{self._row()}.to(tl.int64) + step * STRIDE",
            "place = step * N + spot",
        )

    def _word(self, number: int, stride: int, dtype: np.dtype) -> str:
        """Returns the name of a table word, converted to this type."""
        name = f"{self._prefix}w{number}"
        word = self._one(number, stride) if stride else self._of_four(number)
        self.words.append(f"        {name} = {word}.to({TYPES[dtype.name]}, bitcast=True)")
        if dtype == np.float32:
            self._numbers[name] = number, stride
        return name

    def _one(self, number: int, stride: int) -> str:
        return self._fetch(self._memory.read(f"table + at + {number}{_in_turn(stride)}", []))

    def _of_four(self, number: int) -> str:
        # Four 32-bit words are one load of 16 bytes, which is the maximum.
        group, place = divmod(number, TOGETHER)
        if group not in self._groups:
            self._groups[group] = self._four(group)
        return self._groups[group][place]

    def _four(self, group: int) -> list[str]:
        first = group * TOGETHER
        if self._memory.four is not None:
            name = f"{self._prefix}s{len(self._fetched)}"
            names = tuple(f"{name}_{n}" for n in range(TOGETHER))
            self._fetched.append((names, f"{self._memory.four}(table + at + {first})"))
            return list(names)
        tile = self._fetch(f"tl.load(table + at[:, None] + ({first} + tl.arange(0, {TOGETHER}))[None, :])")
        names = [f"{tile}_{n}" for n in range(TOGETHER)]
        self.words += [
            f"        {tile}_even, {tile}_odd = tl.split(tl.reshape({tile}, [BLOCK, 2, 2]))",
            f"        {names[0]}, {names[2]} = tl.split({tile}_even)",
            f"        {names[1]}, {names[3]} = tl.split({tile}_odd)",
        ]
        return names

    def _load(self, leaf: Leaf, place: SamplePlace, n: int, stride: int) -> str:
        """Returns the name of the n-th number, or row, of a leaf."""
        size = int(np.prod(leaf.shape))
        spot = "place" if self._by_step else "spot"
        row = f"row.to(tl.int64) * {size}" if place.shuffled else f"{spot}.to(tl.int64) * {size}"
        start = f"{row if place.first is None else 'at'} + {(place.first or 0) + n * (leaf.width or 1)}"
        start += _in_turn(stride * (leaf.width or 1))
        checks = []
        if leaf.width is not None:
            column = f"tl.arange(0, {columns(leaf.width)})[None, :]"
            start = f"({start})[:, None] + {column}"
            checks = [f"{column} < {leaf.width}"] if columns(leaf.width) != leaf.width else []
        cast = f".to({TYPES[leaf.dtype.name]}, bitcast=True)" if place.first is not None else ""
        # Leaves changed by `condition` are stored minibatch by minibatch, `[M, N, ...]` or `[M, T, N, ...]`.
        before = "" if place.shuffled else f" + tl.load(minibatch).to(tl.int64) * {size} * N * T"
        return self._fetch(f"{self._memory.read(f'{place.pointer}{before} + {start}', checks)}{cast}")


def _in_turn(stride: int) -> str:
    """Returns code for an offset that grows by `stride` with each iteration of a loop."""
    return f" + turn * {stride}" if stride else ""
