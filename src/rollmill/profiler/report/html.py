"""A profile as one page that loads nothing else."""

from collections.abc import Sequence
from math import fsum

from rollmill.core.text import compact
from rollmill.pages.page import (
    BarPart,
    asset,
    bar_row,
    escaped,
    folded,
    folded_table,
    legend,
    page,
    ratio,
    section,
    table,
    tiles,
)
from rollmill.profiler.report.machine_sections import devices_section, notes_section, profiler_section
from rollmill.profiler.report.memory import memory_section
from rollmill.profiler.report.roofline import roofline_section
from rollmill.profiler.report.timeline import timeline_section
from rollmill.profiling.breakdown import (
    LEAST_SHOWN,
    OVERLAPS,
    OperationNode,
    WholeTime,
    category_seconds,
    duration_of,
    first_of_each_kind,
    longest_operations,
    overlap_values,
    total_overlap,
    whole_time,
    working_processes,
)
from rollmill.profiling.results import CATEGORIES, Advice, Overlap, ProcessTime, Profile
from rollmill.profiling.text import (
    NOTHING_TO_ADVISE,
    count,
    counted,
    device_kinds_text,
    duration,
    error_text,
    machine_text,
    milliseconds,
    path_text,
    percent,
    size_of,
    sizes_text,
    speed_of,
    summed_over_text,
    titled,
)

MOST_OPERATIONS = 40
"""Operations that figures and tables show, the longest ones."""
MOST_PROCESSES = 48
FEW_PROCESSES = 16
"""Processes that charts show before they are asked for more."""
MOST_ACTIVITIES = 40
MOST_LINES = 30
"""Lines of the other tables and lists."""


def profile_page(profile: Profile) -> str:
    """The page; lists, names and timelines are bounded, so that it stays below 300 kB.

    Args:
        profile: with its advice.
    """
    timeline = timeline_section(profile.processes)
    script = asset(__name__, "timeline.js") if timeline else ""
    body = [
        _head(profile),
        _advice(profile.advice),
        _operations(profile),
        *(_of_processes(profile.processes) if profile.processes else []),
        timeline,
        roofline_section(profile),
        devices_section(profile),
        memory_section(profile.memory),
        profiler_section(profile),
        notes_section(profile),
    ]
    return page(f"Profile of {titled(profile)}", [part for part in body if part], script=script)


def _head(profile: Profile) -> str:
    overlap = total_overlap(working_processes(profile.processes))
    whole = duration_of(overlap)
    figures = [(compact(speed_of(profile)), "environment steps a second, without the profiler")]
    figures.append((duration(profile.iteration.unprofiled), f"an iteration of {sizes_text(profile)}"))
    if whole > 0:
        at_work = overlap.device_only + overlap.both
        figures.append((percent(at_work / whole), "of the time the device computes"))
        figures.append((percent(overlap.host_only / whole), "of the time only the host is at work"))
    figures.append((error_text(profile), "error of the profile's total, once the profiler's cost is taken out"))
    return "\n".join(
        [
            f"<h1>Profile of {escaped(titled(profile))}</h1>",
            f'<p class="dim">{escaped(machine_text(profile))}</p>',
            tiles(figures),
        ]
    )


def _advice(advice: Sequence[Advice]) -> str:
    how = "Changes that the figures below suggest, the largest predicted saving first. Predictions are guesses."
    if not advice:
        return section("What would make it faster", "", [f"<p>{escaped(NOTHING_TO_ADVISE)}</p>"])
    return section(
        "What would make it faster",
        how,
        [f'<ol class="advice">{"".join(map(_advised, advice[:MOST_LINES]))}</ol>'],
    )


def _advised(advice: Advice) -> str:
    saves = (
        f' <span class="saves">saves about {duration(advice.saves)} an iteration</span>'
        if advice.saves > 0
        else ""
    )
    options = f" <br><code>{escaped(advice.options)}</code>" if advice.options else ""
    return f"<li><b>{escaped(advice.title)}</b>{saves}<br>{escaped(advice.text)}{options}</li>"


# --- operations -----------------------------------------------------------------------------------------


def _operations(profile: Profile) -> str:
    whole = whole_time(profile)
    shown, left_out = longest_operations(profile, least=LEAST_SHOWN, most=MOST_OPERATIONS)
    longest = max([node.seconds for node in shown] + [whole.idle, whole.unnamed], default=0.0)
    rows = [_operation_bar(node, whole, longest) for node in shown]
    rest = [("idle", whole.idle), ("of no operation", whole.unnamed)]
    for name, seconds in rest:
        if whole.share(seconds) >= LEAST_SHOWN:
            part = BarPart(ratio(seconds, longest), "idle", f"{name}: {duration(seconds)}")
            rows.append(bar_row(name, [part], _value(seconds, whole), is_outer=True))
    colours = {"device computes": "device", "the host, or a kernel's start": "host", "idle": "idle"}
    return section(
        "Where the time of an iteration goes",
        f"Each bar is the time of one operation of the algorithm{summed_over_text(profile)}. Those inside it "
        "follow it indented. The longer the bar, the more there is to gain. Blue: the device computes for it; "
        "orange: the device does not, while a kernel is being started or only the host is at work.",
        [
            legend(colours, hatched="device, estimated" if any(node.mixed for node in shown) else ""),
            *rows,
            _left_out(left_out, "shorter operations"),
            *([f"<p>{escaped(device_kinds_text(profile))}</p>"] if any(node.device for node in shown) else []),
            folded("the same as a table", [_operation_table(shown, whole)]),
        ],
    )


def _operation_bar(node: OperationNode, whole: WholeTime, longest: float) -> str:
    known, name = node.device - node.mixed, path_text(node.path)
    parts = [
        BarPart(ratio(known, longest), "device", f"{name}, device: {duration(node.device)}"),
        BarPart(ratio(node.mixed, longest), "device", f"{name}, device, estimated: {duration(node.mixed)}", True),
        BarPart(ratio(node.host, longest), "host", f"{name}, host: {duration(node.host)}"),
    ]
    return bar_row(node.name, parts, _value(node.seconds, whole), depth=node.depth, is_outer=not node.depth)


def _value(seconds: float, whole: WholeTime) -> str:
    return f"{milliseconds(seconds)} ms · {percent(whole.share(seconds))}"


def _operation_table(nodes: Sequence[OperationNode], whole: WholeTime) -> str:
    columns = ("operation", "share", "ms", "device ms", "of it estimated", "host ms", "kernels", "FLOP", "bytes")
    rows = [
        (
            "  " * node.depth + node.name,
            percent(whole.share(node.seconds)),
            milliseconds(node.seconds),
            milliseconds(node.device),
            milliseconds(node.mixed),
            milliseconds(node.host),
            count(node.kernels),
            _known(node.flops),
            size_of(node.bytes) if node.bytes else "-",
        )
        for node in nodes
    ]
    return table(columns, rows)


def _known(flops: float) -> str:
    return f"{flops:.3g}" if flops else "-"


def _left_out(number_of: int, name: str = "processes") -> str:
    return f'<p class="dim">{number_of:,} {name} are not shown.</p>' if number_of > 0 else ""


# --- processes ------------------------------------------------------------------------------------------


def _of_processes(processes: Sequence[ProcessTime]) -> list[str]:
    return [_overlaps(processes), _host(processes), _transitions(processes)]


def _overlaps(processes: Sequence[ProcessTime]) -> str:
    shown = first_of_each_kind(processes, MOST_PROCESSES)
    bars = [bar_row(one.name, _overlap_parts(one.overlap), duration(duration_of(one.overlap))) for one in shown]
    columns = ("process", *(f"{name}, ms" for name in OVERLAPS))
    rows = [(one.name, *map(milliseconds, overlap_values(one.overlap))) for one in shown]
    return section(
        "Do host and device work at the same time?",
        "Each bar is an iteration of one process. Green and blue are good: the device computes. Orange is time "
        "in which "
        "it waits for the host, grey time in which both wait, for example for another process.",
        [
            legend(OVERLAPS),
            *_few(shown, bars, len(processes)),
            folded_table(columns, rows),
        ],
    )


def _few(processes: Sequence[ProcessTime], rows: Sequence[str], all_of_them: int) -> list[str]:
    """Lines of a chart: those of the first processes of each kind, the others folded."""
    names = {process.name for process in first_of_each_kind(processes, FEW_PROCESSES)}
    lines = list(zip(processes, rows, strict=True))
    rest = [row for process, row in lines if process.name not in names]
    more = [folded(counted(len(rest), "more process", "more processes"), rest)] if rest else []
    return [*(row for process, row in lines if process.name in names), *more, _left_out(all_of_them - len(rows))]


def _overlap_parts(overlap: Overlap) -> list[BarPart]:
    whole = duration_of(overlap)
    return [
        BarPart(ratio(seconds, whole), colour, f"{name}: {duration(seconds)}, {percent(ratio(seconds, whole))}")
        for (name, colour), seconds in zip(OVERLAPS.items(), overlap_values(overlap), strict=True)
    ]


def _host(processes: Sequence[ProcessTime]) -> str:
    shown = first_of_each_kind(processes, MOST_PROCESSES)
    used = [name for name in CATEGORIES if any(category_seconds(process, name) > 0 for process in processes)]
    if not used:
        return ""
    longest = max(
        max(fsum(one.seconds for one in process.host), duration_of(process.overlap)) for process in shown
    )
    rows = [
        bar_row(
            process.name,
            [_category_part(process, name, longest) for name in used],
            duration(fsum(one.seconds for one in process.host)),
        )
        for process in shown
    ]
    activities = [(process.name, one) for process in shown for one in process.host]
    activities.sort(key=lambda pair: -pair[1].seconds)
    lines = [
        (one.activity, one.category, name, milliseconds(one.seconds)) for name, one in activities[:MOST_ACTIVITIES]
    ]
    columns = ("activity", "category", "process", "ms an iteration")
    return section(
        "What the host does",
        "Each bar adds up the threads of one process over an iteration, so it can be longer than the iteration "
        "itself. "
        "Waiting is no work; if it is most of the bar, the host is not what limits the training.",
        [
            legend({name: name for name in used}),
            *_few(shown, rows, len(processes)),
            folded("the longest activities", [table(columns, lines, left=(1, 2))]),
        ],
    )


def _category_part(process: ProcessTime, category: str, longest: float) -> BarPart:
    seconds = category_seconds(process, category)
    return BarPart(ratio(seconds, longest), category, f"{category}: {duration(seconds)}")


def _transitions(processes: Sequence[ProcessTime]) -> str:
    kinds = list(dict.fromkeys(kind for process in processes for kind in process.transitions))[:MOST_ACTIVITIES]
    if not kinds:
        return ""
    totals = {kind: fsum(process.transitions.get(kind, 0.0) for process in processes) for kind in kinds}
    most = max(totals.values())
    parts = [
        bar_row(kind, [BarPart(ratio(total, most), "device", f"{kind}: {count(total)}")], count(total))
        for kind, total in totals.items()
    ]
    if len(processes) > 1:
        shown = first_of_each_kind(processes, MOST_PROCESSES)
        few = kinds[:8]
        rows = [(one.name, *(count(one.transitions.get(kind, 0.0)) for kind in few)) for one in shown]
        parts.append(folded_table(("process", *few), rows))
    together = " of all processes" if len(processes) > 1 else ""
    return section(
        "How often one part of the stack calls another",
        f"Calls in an iteration{together}, such as from Python into compiled programs, or from the host to the "
        "device. Each costs a few microseconds; many of them for little work mean that programs are started too "
        "often.",
        parts,
    )
