"""Generates a step's writes to large arrays of the environment state.

A write replaces one element per environment, or the whole array of the environments that need it. A whole array is
written by a function of its own, called for one environment after the other, in which all threads write adjacent
elements. Barriers between loads and stores of different threads keep them in order.
"""

import math
from collections.abc import Sequence

import numpy as np

from rollmill.fusion.backends.triton.codegen import MemoryPlace, TritonWriter
from rollmill.fusion.backends.triton.operations import TYPES
from rollmill.fusion.backends.triton.source import KernelSource
from rollmill.fusion.ir import Node
from rollmill.fusion.kernels.leaves import CellStore, Fill, Leaf
from rollmill.fusion.lower.large_arrays import memories_read
from rollmill.fusion.opt.schedule import schedule_of

ELEMENTS_TOGETHER = 256
"""Number of adjacent elements of one environment that are written at once."""

BARRIER = "tl.debug_barrier()"


class StepStores:
    """Writes of a step to large arrays, generated at the end of the step."""

    def __init__(self, writer: TritonWriter, leaves: Sequence[Leaf], mask: str) -> None:
        """Prepares the stores of leaves, in this order. `mask` marks the environments that exist, or is empty."""
        self.functions: list[str] = []
        """Source of the functions that write whole arrays."""
        self._writer, self._leaves, self._mask = writer, leaves, mask

    def write(self, nodes: Sequence[Node], names: Sequence[str]) -> None:
        """Generates the writes, given the outputs of the step's program (`nodes`) and their names in the
        source.
        """
        if not self._leaves:
            return
        # Threads share environments, so all loads must precede the first store.
        self._writer.source.line(BARRIER)
        for leaf in self._leaves:
            for write in leaf.writes:
                holds = self._condition(None if write.condition is None else names[write.condition])
                if isinstance(write, CellStore):
                    self._store(leaf, names[write.place], names[write.value], holds)
                else:
                    self._fill(leaf, write, [(nodes[n], names[n]) for n in write.captures], holds)
        self._writer.source.line(BARRIER)

    def _condition(self, name: str | None) -> str:
        holds = "tl.full([BLOCK], True, tl.int1)" if name is None else f"tl.broadcast_to({name}, [BLOCK])"
        return f"({holds} & {self._mask})" if self._mask else holds

    def _store(self, leaf: Leaf, place: str, number: str, holds: str) -> None:
        pointer, row, _ = self._cells(leaf)
        places = f"{pointer} + {row} + tl.broadcast_to({place}, [BLOCK])"
        self._writer.source.line(f"write_cell({places}, tl.broadcast_to({number}, [BLOCK]), {holds})")

    def _cells(self, leaf: Leaf) -> MemoryPlace:
        assert leaf.memory is not None
        return self._writer.cells[leaf.memory]

    # --- whole arrays ---------------------------------------------------------------------------------------

    def _fill(self, leaf: Leaf, fill: Fill, captured: Sequence[tuple[Node, str]], holds: str) -> None:
        source = self._writer.source
        words = [self._word(node, name) for node, name in captured]
        left, own = source.fresh(), source.fresh()
        source.line(f"{left} = {holds}")
        source.line(f"while tl.max({left}.to(tl.int32), axis=0) != 0:")
        source.deeper()
        source.line(f"{own} = tl.min(tl.where({left}, tl.arange(0, BLOCK), BLOCK), axis=0)")
        of_own = [f"tl.sum(tl.where(tl.arange(0, BLOCK) == {own}, {word}, 0), axis=0)" for word in words]
        pointers = [cells.pointer for cells in self._writer.cells]
        name = f"fill{len(self.functions)}"
        environment = f"tl.program_id(0) * BLOCK + {own}"
        together = min(ELEMENTS_TOGETHER, 1 << (math.prod(leaf.shape) - 1).bit_length())
        arguments = ", ".join([environment, *pointers, *self._writer.source.slots, *of_own])
        source.line(f"{name}({arguments}, BLOCK={together})")
        source.line(f"{left} = {left} & (tl.arange(0, BLOCK) != {own})")
        source.deeper(-1)
        source.line(BARRIER)  # other threads may read or overwrite the stored elements
        self.functions.append(self._function(name, leaf, fill, [node for node, _ in captured], pointers))

    def _word(self, node: Node, name: str) -> str:
        """Assigns a scalar of each environment as 32 bits, so that a masked sum selects one without rounding."""
        source, whole = self._writer.source, f"tl.broadcast_to({name}, [BLOCK])"
        words = source.fresh()
        source.line(f"{words} = {whole}{_into_word(node.dtype)}")
        return words

    def _function(
        self, name: str, leaf: Leaf, fill: Fill, captured: Sequence[Node], pointers: Sequence[str]
    ) -> str:
        """Returns the source of a function that writes all elements of one environment."""
        slots = [f"slot{n}" for n in range(len(self._writer.source.slots))]
        source = KernelSource(self._writer.source.numerics, slots)
        writer = TritonWriter(source)
        rows = [f"row{n}" for n in range(len(pointers))]
        writer.cells = [cells._replace(row=row) for cells, row in zip(self._writer.cells, rows, strict=True)]
        words = [f"word{n}" for n in range(len(captured))]
        size, own = math.prod(leaf.shape), self._cells(leaf).pointer
        source.deeper()
        source.line("place = first + tl.arange(0, BLOCK)")
        source.line(f"here = place < {size}")
        inputs = [source.fresh()]
        source.line(f"{inputs[0]} = tl.minimum(place, {size - 1})")
        for node, word in zip(captured, words, strict=True):
            inputs.append(source.fresh())
            source.line(f"{inputs[-1]} = tl.broadcast_to({word}, [BLOCK]){_out_of_word(node.dtype)}")
        (element,) = writer.write(schedule_of(fill.program), inputs)
        if leaf.memory in memories_read(fill.program.nodes()):
            source.line(BARRIER)
        target = f"{own} + {rows[leaf.memory or 0]} + place"
        source.line(f"write_cell({target}, tl.broadcast_to({element}, [BLOCK]), here)")
        head = [
            "@triton.jit",
            f"def {name}({', '.join(['environment', *pointers, *slots, *words])}, BLOCK: tl.constexpr):",
            *(
                f"    {row} = environment.to(tl.int64) * {cells.size}"
                for row, cells in zip(rows, self._writer.cells, strict=True)
            ),
        ]
        loop = f"    for first in range(0, {size}, BLOCK):"
        return "\n".join([*head, *source.before.lines, loop, *source.lines, "", ""])


def _into_word(dtype: np.dtype) -> str:
    if dtype.itemsize == 4:
        return "" if dtype == np.int32 else ".to(tl.int32, bitcast=True)"
    if dtype.kind in "iub":
        return ".to(tl.int32)"
    return ".to(tl.int16, bitcast=True).to(tl.int32)"


def _out_of_word(dtype: np.dtype) -> str:
    if dtype == np.bool_:
        return " != 0"
    if dtype.itemsize == 4:
        return "" if dtype == np.int32 else f".to({TYPES[dtype.name]}, bitcast=True)"
    if dtype.kind in "iu":
        return f".to({TYPES[dtype.name]})"
    return f".to(tl.int16).to({TYPES[dtype.name]}, bitcast=True)"
