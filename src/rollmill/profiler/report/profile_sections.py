"""Describes the sections of a profile's report, for the page and the terminal."""

from collections.abc import Sequence
from math import fsum

from rich.padding import Padding
from rich.text import Text

from rollmill.core.text import format_count, number, one_line
from rollmill.pages.page import BarPart, bar_row, escape_html, folded_table, folding_section, legend, ratio, table
from rollmill.profiler.report.sections import MIN_SHOWN, Section, paragraph
from rollmill.profiling.breakdown import (
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
    correction_text,
    count,
    device_kinds_text,
    duration,
    is_correction_tested,
    milliseconds,
    path_text,
    percent,
    size_of,
    summed_over_text,
)

MAX_OPERATIONS = 40
"""Maximum number of operations and activities that the page shows, the longest ones."""
MAX_PROCESSES, FEW_PROCESSES = 48, 16
"""Maximum number of processes in charts, and number of processes shown before a reader unfolds the others. Tables
in the terminal list the latter, and sum up the others."""
MAX_COLUMNS = 3
"""Maximum number of processes that have a column in the terminal."""
MAX_DEVICES, MAX_LINES = 16, 30
"""Maximum number of devices, and of lines in other tables and lists, that the page shows."""


def advice_section(advice: Sequence[Advice]) -> Section:
    """Returns the report section with changes that would make the run faster."""
    title = "What would make it faster"
    if not advice:
        nothing = [f"<p>{escape_html(NOTHING_TO_ADVISE)}</p>"]
        return Section(title, "", nothing, "Advice", below=[paragraph(NOTHING_TO_ADVISE)])
    below = []
    for rank, one in enumerate(advice, 1):
        saves = f" ({_saves(one)})" if one.saves > 0 else ""
        below.append(Padding(Text.assemble(f"{rank}. ", (one_line(one.title), "bold"), saves), (0, 0, 0, 2)))
        below.append(paragraph(one.text, indent=5))
        below += [paragraph(one.options, indent=5, style="cyan")] if one.options else []
    return Section(
        title,
        "Changes that the figures below suggest, the largest predicted saving first. Predictions are guesses.",
        [f'<ol class="advice">{"".join(map(_draw_advice, advice[:MAX_LINES]))}</ol>'],
        "Advice",
        below=below,
    )


def _saves(advice: Advice) -> str:
    return f"saves about {duration(advice.saves)} an iteration"


def _draw_advice(advice: Advice) -> str:
    saves = f' <span class="saves">{_saves(advice)}</span>' if advice.saves > 0 else ""
    options = f" <br><code>{escape_html(advice.options)}</code>" if advice.options else ""
    return f"<li><b>{escape_html(advice.title)}</b>{saves}<br>{escape_html(advice.text)}{options}</li>"


# --- operations -----------------------------------------------------------------------------------------


def operations_section(profile: Profile) -> Section:
    """Returns the report section that divides an iteration's time among the operations of the algorithm."""
    whole = whole_time(profile)
    nodes = longest_operations(profile, least=MIN_SHOWN).nodes
    shown, left_out = longest_operations(profile, least=MIN_SHOWN, most=MAX_OPERATIONS)
    longest = max([node.seconds for node in shown] + [whole.idle, whole.unnamed], default=0.0)
    rest = [
        ("idle", "(idle: neither host nor device)", whole.idle),
        ("of no operation", "(of no operation)", whole.unnamed),
    ]
    rest = [one for one in rest if whole.share(one[-1]) >= MIN_SHOWN]
    colours = {"device computes": "device", "the host, or a kernel's start": "host", "idle": "idle"}
    kinds = device_kinds_text(profile)
    mixed = fsum(operation.mixed for operation in profile.operations if operation.path)
    estimated = (
        f"~ {milliseconds(mixed)} ms of the device are an estimate: fused operations that span several "
        "operations, divided by their cost."
    )
    return Section(
        "Where the time of an iteration goes",
        f"Each bar is the time of one operation of the algorithm{summed_over_text(profile)}. Those inside it "
        "follow it indented. The longer the bar, the more there is to gain. Blue: the device computes for it; "
        "orange: the device does not, while a kernel is being started or only the host is at work.",
        [
            legend(colours, hatched="device, estimated" if any(node.mixed for node in shown) else ""),
            *(_operation_bar(node, whole, longest) for node in shown),
            *(
                bar_row(
                    name,
                    [BarPart(ratio(seconds, longest), "idle", f"{name}: {duration(seconds)}")],
                    _time_and_share(seconds, whole),
                    is_outer=True,
                )
                for name, _, seconds in rest
            ),
            _draw_left_out(left_out, "shorter operations"),
            f"<p>{escape_html(kinds)}</p>" if any(node.device for node in shown) else "",
            folding_section("the same as a table", [_operation_table(shown, whole)]),
        ],
        "Operations",
        f"ms an iteration{summed_over_text(profile)}",
        ("operation", "share", "ms", "device", "host", "kernels"),
        [
            *(_operation_row(node, whole) for node in nodes),
            *((name, percent(whole.share(time)), milliseconds(time), "", "", "") for _, name, time in rest),
        ],
        [
            *([paragraph(kinds)] if any(operation.device for operation in profile.operations) else []),
            *([paragraph(estimated)] if whole.share(mixed) >= MIN_SHOWN else []),
        ],
    )


def _operation_row(node: OperationNode, whole: WholeTime) -> tuple[str | Text, ...]:
    estimated = "~" if node.seconds and node.mixed / node.seconds >= 0.01 else ""
    return (
        Text("  " * node.depth + one_line(node.name), style="" if node.depth else "bold"),
        percent(whole.share(node.seconds)),
        milliseconds(node.seconds),
        estimated + milliseconds(node.device),
        milliseconds(node.host),
        count(node.kernels) if node.kernels else "",
    )


def _operation_bar(node: OperationNode, whole: WholeTime, longest: float) -> str:
    known, name = node.device - node.mixed, path_text(node.path)
    parts = [
        BarPart(ratio(known, longest), "device", f"{name}, device: {duration(node.device)}"),
        BarPart(ratio(node.mixed, longest), "device", f"{name}, device, estimated: {duration(node.mixed)}", True),
        BarPart(ratio(node.host, longest), "host", f"{name}, host: {duration(node.host)}"),
    ]
    value = _time_and_share(node.seconds, whole)
    return bar_row(node.name, parts, value, depth=node.depth, is_outer=not node.depth)


def _time_and_share(seconds: float, whole: WholeTime) -> str:
    return f"{milliseconds(seconds)} ms · {percent(whole.share(seconds))}"


def _operation_table(nodes: Sequence[OperationNode], whole: WholeTime) -> str:
    columns = ("operation", "share", "ms", "device ms", "of it estimated", "host ms", "kernels", "FLOP", "bytes")
    rows = [
        (
            "  " * node.depth + node.name,
            percent(whole.share(node.seconds)),
            *map(milliseconds, (node.seconds, node.device, node.mixed, node.host)),
            count(node.kernels),
            f"{node.flops:.3g}" if node.flops else "-",
            size_of(node.bytes) if node.bytes else "-",
        )
        for node in nodes
    ]
    return table(columns, rows)


def _draw_left_out(number_of: int, name: str = "processes") -> str:
    return f'<p class="dim">{number_of:,} {name} are not shown.</p>' if number_of > 0 else ""


# --- processes ------------------------------------------------------------------------------------------


def process_sections(processes: Sequence[ProcessTime]) -> list[Section]:
    """Returns the report sections on processes: overlap of host and device, host activities, and transitions.

    The list is empty if there are no processes.
    """
    return [_overlaps(processes), _host(processes), _transitions(processes)] if processes else []


def _overlaps(processes: Sequence[ProcessTime]) -> Section:
    shown, listed = (first_of_each_kind(processes, most) for most in (MAX_PROCESSES, FEW_PROCESSES))
    bars = [bar_row(one.name, _overlap_parts(one.overlap), duration(duration_of(one.overlap))) for one in shown]
    rows = [(one.name, *map(milliseconds, overlap_values(one.overlap))) for one in shown]
    lines = [_overlap_row(one.name, one.overlap) for one in listed]
    if len(training := working_processes(processes)) > 1:
        lines.append(_overlap_row(f"all {len(training)}", total_overlap(training)))
    few = "" if len(processes) <= FEW_PROCESSES else f"; {FEW_PROCESSES} of {len(processes)} processes"
    return Section(
        "Do host and device work at the same time?",
        "Each bar is an iteration of one process. Green and blue are good: the device computes. Orange is time "
        "in which it waits for the host, grey time in which both wait, for example for another process.",
        [
            legend(OVERLAPS),
            *_few(shown, bars, len(processes)),
            folded_table(("process", *(f"{name}, ms" for name in OVERLAPS)), rows),
        ],
        "Host and device at work",
        f"share of an iteration{few}",
        ("process", "ms", "both", "device only", "host only", "neither"),
        lines,
    )


def _overlap_row(name: str, overlap: Overlap) -> tuple[str, ...]:
    whole = duration_of(overlap)
    return (name, milliseconds(whole), *(percent(_part(value, whole)) for value in overlap_values(overlap)))


def _part(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _few(processes: Sequence[ProcessTime], rows: Sequence[str], all_of_them: int) -> list[str]:
    """Returns rows of a chart: the first processes of each kind, with the others folded."""
    names = {process.name for process in first_of_each_kind(processes, FEW_PROCESSES)}
    lines = list(zip(processes, rows, strict=True))
    rest = [row for process, row in lines if process.name not in names]
    more = [folding_section(format_count(len(rest), "more process", "more processes"), rest)] if rest else []
    return [
        *(row for process, row in lines if process.name in names),
        *more,
        _draw_left_out(all_of_them - len(rows)),
    ]


def _overlap_parts(overlap: Overlap) -> list[BarPart]:
    whole = duration_of(overlap)
    return [
        BarPart(ratio(seconds, whole), colour, f"{name}: {duration(seconds)}, {percent(ratio(seconds, whole))}")
        for (name, colour), seconds in zip(OVERLAPS.items(), overlap_values(overlap), strict=True)
    ]


def _host(processes: Sequence[ProcessTime]) -> Section:
    """Returns activities by category. In the terminal categories are rows, so that any number of them fits."""
    times = {name: [category_seconds(process, name) for process in processes] for name in CATEGORIES}
    times = {name: seconds for name, seconds in times.items() if any(one > 0 for one in seconds)}
    if not times:
        return Section("", "", (), below=[Text("No activity of a host was recorded.")])
    names = [process.name for process in processes] if len(processes) <= MAX_COLUMNS else []
    whole = fsum(duration_of(process.overlap) for process in processes)
    rows = [
        (
            category,
            *map(milliseconds, seconds if names else [fsum(seconds)]),
            percent(_part(fsum(seconds), whole)),
            _longest(processes, category),
        )
        for category, seconds in times.items()
    ]
    return Section(
        "What the host does",
        "Each bar adds up the threads of one process over an iteration, so it can be longer than the iteration "
        "itself. Waiting is no work; if it is most of the bar, the host is not what limits the training.",
        [legend({name: name for name in times}), *_host_chart(processes, list(times))],
        "Host by category",
        "ms an iteration, of all threads",
        ("category", *(names or [f"all {len(processes)}"]), "share", " longest activity"),
        rows,
    )


def _host_chart(processes: Sequence[ProcessTime], categories: Sequence[str]) -> list[str]:
    shown = first_of_each_kind(processes, MAX_PROCESSES)
    totals = [fsum(one.seconds for one in process.host) for process in shown]
    longest = max(max(total, duration_of(one.overlap)) for total, one in zip(totals, shown, strict=True))
    bars = []
    for process, total in zip(shown, totals, strict=True):
        times = {name: category_seconds(process, name) for name in categories}
        parts = [BarPart(ratio(time, longest), name, f"{name}: {duration(time)}") for name, time in times.items()]
        bars.append(bar_row(process.name, parts, duration(total)))
    activities = sorted(
        ((process.name, one) for process in shown for one in process.host), key=lambda pair: -pair[1].seconds
    )
    rows = [
        (one.activity, one.category, name, milliseconds(one.seconds)) for name, one in activities[:MAX_OPERATIONS]
    ]
    activity_table = table(("activity", "category", "process", "ms an iteration"), rows, left=(1, 2))
    return [*_few(shown, bars, len(processes)), folding_section("the longest activities", [activity_table])]


def _longest(processes: Sequence[ProcessTime], category: str) -> str:
    activities = [one for process in processes for one in process.host if one.category == category]
    return max(activities, key=lambda one: one.seconds).activity


def _transitions(processes: Sequence[ProcessTime]) -> Section:
    """Returns the calls from one part of the stack into another."""
    kinds = dict.fromkeys(kind for process in processes for kind in process.transitions)
    calls = {kind: [process.transitions.get(kind, 0.0) for process in processes] for kind in kinds}
    if not calls:
        return Section("", "", ())
    totals = {kind: fsum(each) for kind, each in list(calls.items())[:MAX_OPERATIONS]}
    most = max(totals.values())
    parts = [
        bar_row(kind, [BarPart(ratio(total, most), "device", f"{kind}: {count(total)}")], count(total))
        for kind, total in totals.items()
    ]
    if len(processes) > 1:
        few = list(kinds)[:8]
        rows = [
            (one.name, *(count(one.transitions.get(kind, 0.0)) for kind in few))
            for one in first_of_each_kind(processes, MAX_PROCESSES)
        ]
        parts.append(folded_table(("process", *few), rows))
    together = " of all processes" if len(processes) > 1 else ""
    names = [process.name for process in processes] if len(processes) <= MAX_COLUMNS else []
    columns = names if len(names) == 1 else [*names, f"all {len(processes)}"]
    return Section(
        "How often one part of the stack calls another",
        f"Calls in an iteration{together}, such as from Python into compiled programs, or from the host to the "
        "device. Each costs a few microseconds; many of them for little work mean that programs are started too "
        "often.",
        parts,
        "Transitions",
        "calls an iteration",
        ("from one part into another", *columns),
        [
            (kind, *map(count, [*(each if names else []), *([] if len(names) == 1 else [fsum(each)])]))
            for kind, each in calls.items()
        ],
    )


# --- the machine and the profiler -----------------------------------------------------------------------


def devices_section(profile: Profile) -> Section:
    """Returns the report section that compares the driver's utilisation with the time in which devices really
    worked.
    """
    bars, rows = [], []
    for index, one in enumerate(profile.devices):
        activity = "-" if one.sm_activity is None else percent(one.sm_activity)
        rows.append((one.device, percent(one.utilisation), activity, percent(one.occupied)))
        figures = (
            ("utilisation, by NVML", one.utilisation, "idle"),
            ("a kernel ran", one.occupied, "device"),
            ("SM activity", one.sm_activity, "both"),
        )
        if index < MAX_DEVICES:
            bars.append(f"<h3>{escape_html(one.device)}</h3>")
            bars += [
                bar_row(
                    name, [BarPart(share or 0.0, colour, name)], "unknown" if share is None else percent(share)
                )
                for name, share, colour in figures
            ]
    return Section(
        "How busy the devices really are",
        "Utilisation, which nvidia-smi shows, is the share of sampled periods in which any kernel ran for any "
        "time. Below it are the share of time in which a kernel ran, by its events, and the share of the GPU's "
        "processors (SMs) that were active on average. If the first is much longer than the others, it promises "
        "too much.",
        bars,
        "Devices" if rows else "",
        "share of the time",
        ("device", "utilisation (NVML)", "SM activity", "kernels ran") if rows else (),
        rows,
    )


def profiler_section(profile: Profile) -> Section:
    """Returns the report section on the profiler's cost, with the durations that test its correction."""
    iteration = profile.iteration
    durations = (
        ("without the profiler", iteration.unprofiled, "both"),
        ("with the profiler", iteration.profiled, "idle"),
        *([("corrected", iteration.corrected, "device")] if is_correction_tested(profile) else []),
    )
    longest = max(seconds for _, seconds, _ in durations)
    bars = [
        bar_row(
            name, [BarPart(ratio(seconds, longest), colour, f"{name}: {duration(seconds)}")], duration(seconds)
        )
        for name, seconds, colour in durations
    ]
    rows = [
        (one.kind, count(one.events), number(one.nanoseconds), milliseconds(one.seconds))
        for one in sorted(profile.book_keeping, key=lambda one: -one.seconds)
    ]
    iterations = format_count(iteration.iterations, "iteration")
    windows = format_count(iteration.windows, "profiled window")
    return Section(
        "What the profiler itself cost",
        "The duration of an iteration without the profiler, with it, and with its cost taken out again. The "
        "difference between the first and the last is the error of the correction. It tests the total, not how it "
        "is divided among operations: do not trust differences between them that are smaller.",
        [
            *bars,
            f"<p>{escape_html(correction_text(profile))} {escape_html(f'{iterations} in {windows}.')}</p>",
            table(("event", "an iteration", "ns each", "ms"), rows[:MAX_LINES]) if rows else "",
        ],
        "Cost of the profiler" if rows else "",
        f"{iterations} in {format_count(iteration.windows, 'window')}",
        ("event", "an iteration", "ns each", "ms an iteration") if rows else (),
        rows,
    )


def notes_section(profile: Profile) -> Section:
    """Returns the report section with notes. On the page, it also contains the command and the versions."""
    versions = list(profile.machine.versions.items())[:MAX_LINES]
    notes = "".join(f"<li>{escape_html(note)}</li>" for note in profile.notes[:MAX_LINES])
    return Section(
        "Notes",
        "",
        [
            f"<ul>{notes}</ul>" if notes else "",
            f"<p>Profile it again: <code>{escape_html(profile.training.command)}</code></p>",
            table(("software", "version"), versions, left=(1,)) if versions else "",
        ],
        "Notes" if notes else "",
        below=[paragraph(note) for note in profile.notes],
    )
