"""A profile as tables of a terminal."""

import io
from collections.abc import Iterable, Sequence
from math import fsum

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollmill.pages.text import number, printable
from rollmill.profiling.breakdown import (
    LEAST_SHOWN,
    OperationNode,
    WholeTime,
    category_seconds,
    duration_of,
    first_of_each_kind,
    in_order,
    operation_tree,
    total_overlap,
    whole_time,
    working_processes,
)
from rollmill.profiling.results import CATEGORIES, Advice, MemoryUse, Overlap, ProcessTime, Profile
from rollmill.profiling.text import (
    NOTHING_TO_ADVISE,
    correction_text,
    count,
    counted,
    device_kinds_text,
    duration,
    fullest_text,
    machine_text,
    milliseconds,
    percent,
    size_of,
    sizes_text,
    speed_text,
    summed_over_text,
    titled,
)

MOST_PROCESSES = 16
"""Processes that tables list; more are summed up."""
MOST_PROGRAMS, MOST_OPERATIONS_OF_MEMORY = 4, 2
"""Programs whose memory is shown, and operations of each."""


def draw_profile(profile: Profile, *, width: int = 80) -> str:
    """The profile as plain text.

    Args:
        profile: with its advice.
        width: columns of the terminal, from 60.
    """
    return as_text(profile_view(profile), width=width)


def as_text(view: RenderableType, *, width: int) -> str:
    """The text that a terminal without colours shows, without blanks at the ends of lines."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=False, color_system=None, legacy_windows=False
    )
    with console.capture() as captured:
        console.print(view)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def profile_view(profile: Profile) -> RenderableType:
    """The profile for `rich.console.Console.print`; fits 80 columns."""
    parts: list[RenderableType] = [_head(profile), Text(""), _operations(profile)]
    if profile.processes:
        parts += [Text(""), _overlaps(profile.processes), Text(""), _host(profile.processes)]
        if any(process.transitions for process in profile.processes):
            parts += [Text(""), _transitions(profile.processes)]
    if profile.devices:
        parts += [Text(""), _devices(profile)]
    if profile.memory:
        parts += [Text(""), _memory(profile.memory)]
    if profile.book_keeping:
        parts += [Text(""), _book_keeping(profile)]
    parts += [Text(""), _advice(profile.advice)]
    if profile.notes:
        parts += [Text(""), heading("Notes"), *(paragraph(printable(note)) for note in profile.notes)]
    return Group(*parts)


def heading(text: str, unit: str = "") -> Text:
    """The title of a table, and the unit of its figures."""
    return Text.assemble((text, "bold"), (f"  {unit}" if unit else "", "dim"))


def paragraph(text: str, *, indent: int = 2) -> RenderableType:
    """Indented text that wraps at the terminal's width."""
    return Padding(Text(text), (0, 0, 0, indent))


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table whose first column is a name, which is cut where the terminal is too narrow; the others are figures.

    Args:
        columns: their titles; one that begins with a blank is of text, too.
        rows: cells of each line.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    first, *others = columns
    table.add_column(_name(first))
    for title in others:
        is_text = title.startswith(" ")
        justify = "left" if is_text else "right"
        table.add_column(
            Text(title.strip(), no_wrap=True, overflow="ellipsis"), justify=justify, no_wrap=not is_text
        )
    is_name = [title.startswith(" ") for title in others]
    for label, *cells in rows:
        texts = [_name(cell, indent=0) if name else cell for cell, name in zip(cells, is_name, strict=True)]
        table.add_row(_name(label), *texts)
    return table


def _name(name: str | Text, *, indent: int = 2) -> Text:
    """A name that is cut rather than wrapped: only columns that could wrap are made narrower than their text."""
    text = Text(" " * indent, no_wrap=True, overflow="ellipsis")
    return text.append(name) if isinstance(name, str) else text.append_text(name)


def _head(profile: Profile) -> RenderableType:
    return Group(
        Text.assemble((titled(profile), "bold"), f": {speed_text(profile)}"),
        Text(machine_text(profile)),
        Text(f"an iteration: {sizes_text(profile)}, {duration(profile.iteration.unprofiled)}"),
        Text(correction_text(profile)),
    )


def _operations(profile: Profile) -> RenderableType:
    whole = whole_time(profile)
    nodes = [
        node for node in in_order(operation_tree(profile.operations)) if whole.share(node.seconds) >= LEAST_SHOWN
    ]
    rows = [_operation_row(node, whole) for node in nodes]
    rest = (("(idle: neither host nor device)", whole.idle), ("(of no operation)", whole.unnamed))
    rows += [
        (name, percent(whole.share(seconds)), milliseconds(seconds), "", "", "")
        for name, seconds in rest
        if whole.share(seconds) >= LEAST_SHOWN
    ]
    parts: list[RenderableType] = [
        heading("Operations", f"ms an iteration{summed_over_text(profile)}"),
        table_of(("operation", "share", "ms", "device", "host", "kernels"), rows),
    ]
    if any(operation.device for operation in profile.operations):
        parts.append(paragraph(device_kinds_text(profile)))
    mixed = fsum(node.mixed for node in operation_tree(profile.operations))
    if whole.share(mixed) >= LEAST_SHOWN:
        parts.append(
            paragraph(
                f"~ {milliseconds(mixed)} ms of the device are an estimate: fused operations that span several "
                "operations, divided by their cost."
            )
        )
    return Group(*parts)


def _operation_row(node: OperationNode, whole: WholeTime) -> tuple[str | Text, ...]:
    name = Text("  " * node.depth + printable(node.name), style="" if node.depth else "bold")
    estimated = "~" if node.seconds and node.mixed / node.seconds >= 0.01 else ""
    return (
        name,
        percent(whole.share(node.seconds)),
        milliseconds(node.seconds),
        estimated + milliseconds(node.device),
        milliseconds(node.host),
        count(node.kernels) if node.kernels else "",
    )


def _overlaps(processes: Sequence[ProcessTime]) -> RenderableType:
    shown = first_of_each_kind(processes, MOST_PROCESSES)
    rows = [_overlap_row(printable(process.name), process.overlap) for process in shown]
    if len(training := working_processes(processes)) > 1:
        rows.append(_overlap_row(f"all {len(training)}", total_overlap(training)))
    columns = ("process", "ms", "both", "device only", "host only", "neither")
    unit = "share of an iteration" + _left_out(processes)
    return Group(heading("Host and device at work", unit), table_of(columns, rows))


def _left_out(processes: Sequence[ProcessTime]) -> str:
    return "" if len(processes) <= MOST_PROCESSES else f"; {MOST_PROCESSES} of {len(processes)} processes"


def _overlap_row(name: str, overlap: Overlap) -> tuple[str, ...]:
    whole = duration_of(overlap)
    parts = (overlap.both, overlap.device_only, overlap.host_only, overlap.neither)
    return (name, milliseconds(whole), *(percent(part / whole if whole > 0 else 0.0) for part in parts))


def _host(processes: Sequence[ProcessTime]) -> RenderableType:
    """Categories as rows, so that any number of them fits; processes as columns while there are few."""
    shown = processes if len(processes) <= 3 else ()
    seconds = {
        category: [category_seconds(process, category) for process in processes]
        for category in CATEGORIES
        if any(category_seconds(process, category) > 0 for process in processes)
    }
    if not seconds:
        return Text("No activity of a host was recorded.")
    names = [printable(process.name) for process in shown]
    whole = fsum(duration_of(process.overlap) for process in processes)
    rows = [
        (
            category,
            *([milliseconds(one) for one in each] if shown else [milliseconds(fsum(each))]),
            percent(fsum(each) / whole if whole > 0 else 0.0),
            _longest(processes, category),
        )
        for category, each in seconds.items()
    ]
    columns = ("category", *(names or [f"all {len(processes)}"]), "share", " longest activity")
    return Group(heading("Host by category", "ms an iteration, of all threads"), table_of(columns, rows))


def _longest(processes: Sequence[ProcessTime], category: str) -> str:
    activities = [one for process in processes for one in process.host if one.category == category]
    return printable(max(activities, key=lambda one: one.seconds).activity)


def _transitions(processes: Sequence[ProcessTime]) -> RenderableType:
    kinds = dict.fromkeys(kind for process in processes for kind in process.transitions)
    shown = processes if len(processes) <= 3 else ()
    rows = [
        (
            printable(kind),
            *(count(process.transitions.get(kind, 0.0)) for process in shown),
            *(
                []
                if len(shown) == 1
                else [count(fsum(process.transitions.get(kind, 0.0) for process in processes))]
            ),
        )
        for kind in kinds
    ]
    all_of_them = [] if len(shown) == 1 else [f"all {len(processes)}"]
    columns = ("from one part into another", *(printable(process.name) for process in shown), *all_of_them)
    return Group(heading("Transitions", "calls an iteration"), table_of(columns, rows))


def _devices(profile: Profile) -> RenderableType:
    rows = [
        (
            printable(one.device),
            percent(one.utilisation),
            "-" if one.sm_activity is None else percent(one.sm_activity),
            percent(one.occupied),
        )
        for one in profile.devices
    ]
    columns = ("device", "utilisation (NVML)", "SM activity", "kernels ran")
    return Group(heading("Devices", "share of the time"), table_of(columns, rows))


def _memory(memory: Sequence[MemoryUse]) -> RenderableType:
    rows = [
        (
            printable(use.program),
            *(size_of(part) for part in (use.arguments, use.outputs, use.temporary)),
            fullest_text(use, MOST_OPERATIONS_OF_MEMORY),
        )
        for use in memory[:MOST_PROGRAMS]
    ]
    columns = ("program", "arguments", "outputs", "temporary", " for, when it is fullest")
    return Group(heading("Memory of compiled programs", _programs_left_out(memory)), table_of(columns, rows))


def _programs_left_out(memory: Sequence[MemoryUse]) -> str:
    return f"the {MOST_PROGRAMS} largest of {len(memory)}" if len(memory) > MOST_PROGRAMS else ""


def _book_keeping(profile: Profile) -> RenderableType:
    rows = [
        (printable(one.kind), count(one.events), number(one.nanoseconds), milliseconds(one.seconds))
        for one in sorted(profile.book_keeping, key=lambda one: -one.seconds)
    ]
    unit = (
        f"{counted(profile.iteration.iterations, 'iteration', 'iterations')} in "
        f"{counted(profile.iteration.windows, 'window', 'windows')}"
    )
    columns = ("event", "an iteration", "ns each", "ms an iteration")
    return Group(heading("Cost of the profiler", unit), table_of(columns, rows))


def _advice(advice: Sequence[Advice]) -> RenderableType:
    if not advice:
        return Group(heading("Advice"), paragraph(NOTHING_TO_ADVISE))
    parts: list[RenderableType] = [heading("Advice")]
    for rank, one in enumerate(advice, 1):
        saves = f" (saves about {duration(one.saves)} an iteration)" if one.saves > 0 else ""
        title = Text.assemble(f"{rank}. ", (printable(one.title), "bold"), saves)
        parts.append(Padding(title, (0, 0, 0, 2)))
        parts.append(paragraph(printable(one.text), indent=5))
        if one.options:
            parts.append(Padding(Text(printable(one.options), style="cyan"), (0, 0, 0, 5)))
    return Group(*parts)
