"""The gradients of a minibatch as one kernel on a GPU."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.dataflow import TOGETHER
from rollmill.fusion.backends.triton.codegen import TritonWriter
from rollmill.fusion.backends.triton.compile import Kernel, call
from rollmill.fusion.backends.triton.hoist import columns
from rollmill.fusion.backends.triton.operations import TYPES
from rollmill.fusion.backends.triton.order import Names
from rollmill.fusion.backends.triton.registers import ONE, pack_by_select
from rollmill.fusion.backends.triton.source import KernelSource
from rollmill.fusion.ir import Node, Program
from rollmill.fusion.kernels.accumulators import Side, Tile, TilePart, accumulators_of, is_row, width_of
from rollmill.fusion.kernels.arguments import KernelArguments
from rollmill.fusion.kernels.gradients import GradientStep, Minibatch
from rollmill.fusion.kernels.leaves import Leaf
from rollmill.fusion.kernels.loop_fission import FissionPlan, Sweep, plan_sweeps
from rollmill.fusion.kernels.vector import Vector
from rollmill.fusion.numerics import Numerics


class GradientLaunch(NamedTuple):
    """The launch of the kernel of a minibatch's gradients."""

    programs: int
    """Each goes through its part of the minibatch block by block."""
    block: int = 64
    """Samples of a block; a power of two, at least 16."""
    num_warps: int = 4


def run_gradients_kernel(
    step: GradientStep, minibatch: Minibatch, *, launch: GradientLaunch, numerics: Numerics
) -> Float[Array, " size"]:
    """All samples in one kernel on a GPU, and the sum over its programs, always in the same order."""
    kernel, arrays = gradient_kernel(step, minibatch, launch=launch, numerics=numerics)
    (sums,) = call(kernel, arrays)
    return jnp.sum(sums, axis=0) / minibatch.num_samples


def gradient_kernel(
    step: GradientStep, minibatch: Minibatch, *, launch: GradientLaunch, numerics: Numerics
) -> tuple[Kernel, list[Any]]:
    """The kernel of a minibatch, and the arrays that it takes."""
    packed, num_samples = minibatch.packed, minibatch.num_samples
    conditioned = minibatch.shuffled.conditioned
    given = KernelArguments()
    places = [
        SamplePlace(_pointer(given, conditioned[number]), None, shuffled=False)
        if number in conditioned
        else SamplePlace("table", first, shuffled=True)
        if first is not None
        else SamplePlace(_pointer(given, leaf), None, shuffled=True)
        for number, (leaf, first) in enumerate(zip(packed.leaves, packed.columns, strict=True))
    ]
    if minibatch.vector is not None:
        _pointer(given, minibatch.vector.numbers)
    aligned = len(given.arrays)
    slots = [_slot(given, array, minibatch.vector) for array in minibatch.uniforms.slots]
    whole_blocks = num_samples % launch.block == 0
    pointers = [_pointer(given, array) for array in given.arrays]
    source = gradient_source(step, places, slots, pointers, whole_blocks=whole_blocks, numerics=numerics)
    size = sum(each.size for each in step.sums if each.is_computed)
    programs = min(launch.programs, -(-num_samples // launch.block))
    sums = jax.ShapeDtypeStruct((programs, size), jnp.dtype(jnp.float32))
    sizes = {"N": num_samples, "W": packed.table.shape[1], "SIZE": size, "PROGRAMS": programs}
    arrays = [packed.table, minibatch.shuffled.rows, minibatch.number.reshape(1), *given.arrays]
    constants, uniforms = {**sizes, "BLOCK": launch.block}, len(given.arrays) - aligned
    return Kernel(source, programs, (sums,), constants, launch.num_warps, uniforms), arrays


def _pointer(given: KernelArguments, array: Any) -> str:
    """The name of the pointer to an array."""
    return f"given{given.index_of(array)}"


def _slot(given: KernelArguments, array: Any, vector: Vector | None) -> str:
    """The pointer to a uniform array; weights are read from their vector."""
    offset = None if vector is None else vector.offset_of(array)
    if vector is None or offset is None:
        return _pointer(given, array)
    return f"({_pointer(given, vector.numbers)} + {offset})"


# --- its source -------------------------------------------------------------------------------------------


class SamplePlace(NamedTuple):
    """The memory that a leaf of the samples is read from."""

    pointer: str
    first: int | None
    """Its first word in a row of the table; None where it is an array of its own."""
    shuffled: bool
    """Whether it lies in the order of the batch, and not of the minibatch."""


def gradient_source(
    step: GradientStep,
    places: Sequence[SamplePlace],
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
    kept = accumulators_of(step.sums, step.program.outputs)
    plan = plan_sweeps(kept, step.program)
    numbers = {node: f"sum{n}" for n, node in enumerate(node for each in plan.sweeps for node in each.numbers)}
    lines = []
    for n, each in enumerate(plan.sweeps):
        lines += _sweep(_Common(step, places, slots, whole_blocks, numerics), each, numbers, f"p{n}")
    arguments = ", ".join(["table", "rows", "minibatch", *pointers, "sums"])
    constants = ", ".join(f"{name}: tl.constexpr" for name in ("N", "W", "SIZE", "PROGRAMS", "BLOCK"))
    head = [
        "@triton.jit",
        f"def kernel({arguments}, {constants}):",
        "    rows += tl.load(minibatch).to(tl.int64) * N",
        "    own = sums + tl.program_id(0) * SIZE",
    ]
    return "\n".join([*head, *lines, *_number_stores(plan, numbers)]) + "\n"


class _Common(NamedTuple):
    """The arguments that all sweeps of a kernel share."""

    step: GradientStep
    places: Sequence[SamplePlace]
    slots: Sequence[str]
    whole_blocks: bool
    numerics: Numerics


def _sweep(task: _Common, each: Sweep, numbers: Mapping[Node, str], prefix: str) -> list[str]:
    """One sweep over a program's samples, and its sums; all its names begin alike."""
    mask = "" if task.whole_blocks else "here"
    summing_from = [node for tile in each.tiles.values() for node in (*tile.left, *tile.right) if node is not None]
    program = Program(task.step.program.inputs, (*dict.fromkeys([*summing_from, *each.numbers]),))
    samples = _SamplePrefetch(prefix)
    source = KernelSource(task.numerics, task.slots, indent=2, prefix=f"{prefix}v")
    writer = TritonWriter(source, beside=samples.beside, exact_scalars=False)
    inputs = _inputs(task, program, samples)
    source.lines += samples.words
    writer.write(program, inputs, then=_Summing(writer, each, numbers, mask).add_what_is_there)
    loop = ["    for first in range(tl.program_id(0) * BLOCK, N, PROGRAMS * BLOCK):"]
    here = [f"        {mask} = first + tl.arange(0, BLOCK) < N"] if mask else []
    before = [*source.before.lines, *samples.opening(), *_empty(each, numbers)]
    inside = [*loop, *here, *samples.ahead(), *source.lines, *samples.over()]
    return [*before, *inside, *_tile_stores(each), *_summed(each, numbers)]


def _inputs(task: _Common, program: Program, samples: "_SamplePrefetch") -> list[str]:
    """The names of the inputs that a sweep needs; the others are not read."""
    needed = {node for node in program.nodes() if node.op == "input"}
    names = [""] * len(program.inputs)
    for leaf, place in zip(task.step.sample, task.places, strict=True):
        if any(program.inputs[n] in needed for n in leaf.places):
            for n, name in zip(leaf.places, samples.read(leaf, place), strict=True):
                names[n] = name
    return names


# --- one block of samples -----------------------------------------------------------------------------------


class _SamplePrefetch:
    """Reads the samples of the next block while one is computed: words of the table four at a time."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.words: list[str] = []
        """Lines that take apart what was read."""
        self._fetched: dict[str, str] = {}
        self._groups: dict[int, list[str]] = {}
        self._numbers: dict[str, int] = {}

    def read(self, leaf: Leaf, place: SamplePlace) -> list[str]:
        """Names of a leaf's numbers, or rows."""
        if place.first is not None and leaf.width is None:
            return [self._word(place.first + n, leaf.dtype) for n in range(len(leaf.places))]
        return [self._load(leaf, place, n) for n in range(len(leaf.places))]

    def beside(self, source: KernelSource, parts: Sequence[str]) -> str:
        """A row of scalars; those that lie beside each other in the table are read as a row."""
        numbers = [self._numbers.get(part, -1) for part in parts]
        count = next((n for n, number in enumerate(numbers) if number != numbers[0] + n), len(parts))
        if numbers[0] < 0 or count < 2:
            return pack_by_select(source, parts)
        column = source.before.columns(len(parts))
        words = f"table + at[:, None] + {numbers[0]} + {column}[None, :]"
        fetched = self._fetch(f"tl.load({words}, mask={column}[None, :] < {count}, other=0)")
        tile = f"{fetched}.to(tl.float32, bitcast=True)"
        return pack_by_select(source, parts, onto=(tile, count))

    # --- ahead of the block that is computed -----------------------------------------------------------------

    def opening(self) -> list[str]:
        """Lines that read the first block's samples."""
        return [
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
        name = f"{self._prefix}s{len(self._fetched)}"
        self._fetched[name] = expression
        return name

    def _word(self, number: int, dtype: np.dtype) -> str:
        """The name of a word of the table as a number of this type."""
        group, place = divmod(number, TOGETHER)
        if group not in self._groups:
            self._groups[group] = self._four(group)
        name = f"{self._prefix}w{number}"
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

    def _load(self, leaf: Leaf, place: SamplePlace, n: int) -> str:
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
    """Adds a block's results to the accumulators, each as soon as it is computed, so that it need not be held."""

    def __init__(self, writer: TritonWriter, each: Sweep, numbers: Mapping[Node, str], mask: str) -> None:
        self._writer, self._mask = writer, mask
        self._tiles = dict(each.tiles)
        self._numbers = {node: numbers[node] for node in each.numbers}

    def add_what_is_there(self, names: Names) -> None:
        """Adds all of which every operand has a name, once."""
        for n, tile in list(self._tiles.items()):
            if all(node is None or node in names for node in (*tile.left, *tile.right)):
                self._add_tile(n, self._tiles.pop(n), names)
        for node in list(self._numbers):
            if node in names:
                self._add_number(self._numbers.pop(node), names[node])

    def _add_tile(self, n: int, tile: Tile, names: Names) -> None:
        """`tile += right^T left`; samples that are none are zero on the right."""
        left, right = self._side(tile.left, names), self._side(tile.right, names)
        if self._mask:
            right = f"tl.where({self._mask}[:, None], {right}, 0.0)"
        self._writer.source.line(f"tile{n} = {self._writer.product(f'tl.trans({right})', left, onto=f'tile{n}')}")

    def _add_number(self, total: str, name: str) -> None:
        """A number of each sample, kept apart for each place of a block."""
        self._writer.source.line(
            f"{total} += tl.where({self._mask}, {name}, 0.0)" if self._mask else f"{total} += {name}"
        )

    def _side(self, side: Side, names: Names) -> str:
        if is_row(side):
            (row,) = side
            assert row is not None
            return self._writer.masked(row, names[row], "0.0")
        if side == (None,):
            return self._writer.source.before.ones()
        return self._writer.beside([ONE if node is None else names[node] for node in side])


def _empty(each: Sweep, numbers: Mapping[Node, str]) -> list[str]:
    lines = [f"    tile{n} = tl.zeros({_shape(tile)}, tl.float32)" for n, tile in each.tiles.items()]
    return lines + [f"    {numbers[node]} = tl.zeros([BLOCK], tl.float32)" for node in each.numbers]


def _shape(tile: Tile) -> str:
    return f"[{columns(width_of(tile.right))}, {columns(width_of(tile.left))}]"


def _tile_stores(each: Sweep) -> list[str]:
    lines = []
    for n, tile in each.tiles.items():
        lines += [f"    i{n} = tl.arange(0, {columns(width_of(tile.left))})[None, :]"]
        lines += [f"    o{n} = tl.arange(0, {columns(width_of(tile.right))})[:, None]"]
        lines += [_store(n, part) for part in tile.parts]
    return lines


def _summed(each: Sweep, numbers: Mapping[Node, str]) -> list[str]:
    """Lines that make one number of what was kept for each place of a block."""
    return [f"    {numbers[node]}_all = tl.sum({numbers[node]}, axis=0)" for node in each.numbers]


def _number_stores(plan: FissionPlan, numbers: Mapping[Node, str]) -> list[str]:
    lines = []
    for offset, terms in plan.numbers:
        parts = [
            f"{numbers[node]}_all" if factor == 1 else f"{factor} * {numbers[node]}_all" for factor, node in terms
        ]
        lines.append(f"    tl.store(own + {offset}, {' + '.join(parts)})")
    return lines


def _store(n: int, part: TilePart) -> str:
    """Stores the part of a tile that belongs to one result, in the result's row-major order."""
    row, strides = f"(i{n} - {part.first_row})", (1, part.rows) if part.turned else (part.columns, 1)
    place = f"{part.offset} + {row} * {strides[0]} + o{n} * {strides[1]}"
    mask = f"({row} >= 0) & ({row} < {part.rows}) & (o{n} < {part.columns})"
    return f"    tl.store(own + {place}, tile{n}, mask={mask})"
