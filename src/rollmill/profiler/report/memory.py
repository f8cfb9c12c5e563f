"""Draws the report section on the memory of compiled programs, and on the operations that use temporary memory."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from rollmill.pages.page import BarPart, bar_row, escape_html, escaped_name, folded_table, legend
from rollmill.profiler.report.sections import Section
from rollmill.profiling.program_memory import MAX_INTERVALS
from rollmill.profiling.results import MemoryUse, OperationMemory
from rollmill.profiling.text import fullest_text, path_text, size_of

MAX_PROGRAMS, FEW_PROGRAMS, MAX_OPERATIONS = 30, 4, 12
"""Maximum number of programs shown on the page and in the terminal, and of operations shown for one program."""
COLOURS = 7
"""Number of operations that have their own colour."""
HEIGHT = 150
OTHERS = "all smaller ones"
NO_COURSE = (
    '<p class="how">The bars are of the moment when it is fullest. The compiler says no more of it, as of all '
    "programs from the cache of compiled programs. With an empty folder as ROLLMILL_CACHE_DIR it is compiled anew "
    "and drawn from its beginning to its end.</p>"
)


def memory_section(memory: Sequence[MemoryUse]) -> Section:
    """Returns the report section on the memory of compiled programs."""
    if not memory:
        return Section("", "", ())
    shown = sorted(memory, key=lambda one: -_total_bytes(one))[:MAX_PROGRAMS]
    most = max(1, _total_bytes(shown[0]))
    rows = [
        bar_row(
            one.program,
            [
                BarPart(one.arguments / most, "device", f"arguments: {size_of(one.arguments)}"),
                BarPart(one.outputs / most, "both", f"outputs: {size_of(one.outputs)}"),
                BarPart(one.temporary / most, "host", f"temporary: {size_of(one.temporary)}"),
            ],
            size_of(_total_bytes(one)),
        )
        for one in shown
    ]
    columns = ("program", "arguments", "outputs", "temporary")
    return Section(
        "Memory of compiled programs",
        "Each bar is one program: what it is given, what it returns, and what it needs only while it runs. "
        "Arguments and outputs may share memory, so the sum is an upper bound.",
        [
            legend({"arguments": "device", "outputs": "both", "temporary": "host"}),
            *rows,
            *_temporary(memory),
            folded_table((*columns, "for, when it is fullest"), [_row(one, 3) for one in shown]),
        ],
        "Memory of compiled programs",
        f"the {FEW_PROGRAMS} largest of {len(memory)}" if len(memory) > FEW_PROGRAMS else "",
        (*columns, " for, when it is fullest"),
        [_row(one, 2) for one in memory[:FEW_PROGRAMS]],
    )


def _row(use: MemoryUse, operations: int) -> tuple[str, ...]:
    sizes = map(size_of, (use.arguments, use.outputs, use.temporary))
    return (use.program, *sizes, fullest_text(use, operations))


class Layer(NamedTuple):
    """A layer in the memory drawing: one operation, or several small operations together."""

    name: str
    colour: str
    course: Sequence[int]


def _temporary(programs: Sequence[MemoryUse]) -> list[str]:
    """Returns the operations that use the temporary memory of the program that needs most of it."""
    memory = max((one for one in programs if one.operations), key=lambda one: one.temporary, default=None)
    if memory is None:
        return []
    layers = _layers(memory.operations)
    colours = {layer.name: layer.colour for layer in layers}
    shown = [one for one in memory.operations if one.bytes > 0][:MAX_OPERATIONS]
    bars = [
        bar_row(
            (name := path_text(one.path)),
            [BarPart(one.bytes / shown[0].bytes, colours.get(name, "idle"), name)],
            size_of(one.bytes),
        )
        for one in shown
    ]
    drawing = _course(memory.program, layers) if any(layer.course for layer in layers) else [NO_COURSE]
    return [f"<h3>Temporary memory of {escaped_name(memory.program)}</h3>", *drawing, *bars]


def _course(program: str, layers: Sequence[Layer]) -> list[str]:
    """Draws the temporary memory of a program from its first instruction to its last."""
    most = size_of(max(_sum(layer.course for layer in layers)))
    return [
        '<p class="how">Of the program that needs most: from left to right is each time when memory is taken or '
        "given back, in the order of the instructions, those of a loop once; so it is no axis of time. Upwards is "
        f"the memory of the operations, {escape_html(most)} at most. The bars are of the moment when "
        "it is fullest.</p>",
        legend({layer.name: layer.colour for layer in layers}),
        _drawing(program, layers),
    ]


def _layers(operations: Sequence[OperationMemory]) -> list[Layer]:
    """Returns the operations that need most at some moment, and the others as one."""
    largest = sorted(operations, key=lambda one: -max(one.course, default=0))
    layers = [Layer(path_text(one.path), f"c{index}", one.course) for index, one in enumerate(largest[:COLOURS])]
    others = largest[COLOURS:]
    return [*layers, Layer(OTHERS, "idle", _sum(one.course for one in others))] if others else layers


def _drawing(program: str, layers: Sequence[Layer]) -> str:
    """Stacks each layer's memory on the layers before."""
    tops = [_sum(layer.course for layer in layers[:count]) for count in range(1, len(layers) + 1)]
    scale = HEIGHT / max(1, *tops[-1])
    areas = [_area(layer, [top * scale for top in course]) for layer, course in zip(layers, tops, strict=True)]
    figure = (
        f'<svg height="{HEIGHT}" viewBox="0 0 {len(tops[-1])} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="temporary memory of {escaped_name(program)}">'
        f"{''.join(reversed(areas))}</svg>"
    )
    return _with_axes(figure, max(tops[-1]))


def _with_axes(figure: str, most: int) -> str:
    """Adds axes to a figure: bytes up to `most` on the vertical axis, and instructions on the horizontal axis."""
    marks = "".join(
        f'<span style="top:{100 * (1 - share):.0f}%">{size_of(round(share * most))}</span>'
        for share in (0, 0.5, 1)
    )
    return (
        '<div class="chart low"><div class="upwards">temporary memory</div>'
        f'<div class="marks down">{marks}</div><div class="plot">{figure}</div>'
        '<div class="across">instructions, in their order</div></div>'
    )


def _area(layer: Layer, tops: Sequence[float]) -> str:
    """Draws a layer as an area from its top down to zero. Lower layers are drawn over it."""
    steps = "".join(f"V{HEIGHT - top:.1f}h1" for top in tops)
    return (
        f'<path d="M0 {HEIGHT}{steps}V{HEIGHT}z" style="fill:var(--{layer.colour})">'
        f"<title>{escaped_name(layer.name)}</title></path>"
    )


def _sum(courses: Iterable[Sequence[int]]) -> list[int]:
    """Returns the total bytes in each interval. A profile edited by hand may have any number of intervals."""
    return [sum(each) for each in zip_longest(*courses, fillvalue=0)][:MAX_INTERVALS]


def _total_bytes(memory: MemoryUse) -> int:
    return memory.arguments + memory.outputs + memory.temporary
