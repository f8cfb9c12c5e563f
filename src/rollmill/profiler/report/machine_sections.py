"""Sections of a profile's page about the machine and the profiler: devices, its own cost, notes."""

from rollmill.pages.page import BarPart, bar_row, escaped, ratio, section, table
from rollmill.pages.text import number
from rollmill.profiling.results import Profile
from rollmill.profiling.text import (
    correction_text,
    count,
    counted,
    duration,
    is_correction_tested,
    milliseconds,
    percent,
)

MOST_DEVICES, MOST_LINES = 16, 30
"""Devices, and lines of tables and lists, that are shown."""


def devices_section(profile: Profile) -> str:
    """The driver's utilisation beside the time that devices were really at work; nothing without figures."""
    if not profile.devices:
        return ""
    rows = []
    for one in profile.devices[:MOST_DEVICES]:
        figures = (
            ("utilisation, by NVML", one.utilisation, "idle"),
            ("a kernel ran", one.occupied, "device"),
            ("SM activity", one.sm_activity, "both"),
        )
        rows.append(f"<h3>{escaped(one.device)}</h3>")
        rows += [
            bar_row(name, [BarPart(share or 0.0, colour, name)], "unknown" if share is None else percent(share))
            for name, share, colour in figures
        ]
    return section(
        "How busy the devices really are",
        "Utilisation, which nvidia-smi shows, is the share of sampled periods in which any kernel ran for any "
        "time. "
        "Below it are the share of time in which a kernel ran, by its events, and the share of the GPU's "
        "processors (SMs) "
        "that were active on average. If the first is much longer than the others, it promises too much.",
        rows,
    )


def profiler_section(profile: Profile) -> str:
    """The profiler's cost, and the durations that its correction is checked by."""
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
    events = sorted(profile.book_keeping, key=lambda one: -one.seconds)[:MOST_LINES]
    rows = [(one.kind, count(one.events), number(one.nanoseconds), milliseconds(one.seconds)) for one in events]
    counts = (
        f"{counted(iteration.iterations, 'iteration', 'iterations')} in "
        f"{counted(iteration.windows, 'profiled window', 'profiled windows')}."
    )
    return section(
        "What the profiler itself cost",
        "The duration of an iteration without the profiler, with it, and with its cost taken out again. The "
        "difference between the first and the last is the error of the correction. It tests the total, not how it "
        "is divided among operations: do not trust differences between them that are smaller.",
        [
            *bars,
            f"<p>{escaped(correction_text(profile))} {escaped(counts)}</p>",
            table(("event", "an iteration", "ns each", "ms"), rows) if rows else "",
        ],
    )


def notes_section(profile: Profile) -> str:
    """Notes, the command and versions."""
    versions = [(name, version) for name, version in list(profile.machine.versions.items())[:MOST_LINES]]
    notes = "".join(f"<li>{escaped(note)}</li>" for note in profile.notes[:MOST_LINES])
    return section(
        "Notes",
        "",
        [
            f"<ul>{notes}</ul>" if notes else "",
            f"<p>Profile it again: <code>{escaped(profile.training.command)}</code></p>",
            table(("software", "version"), versions, left=(1,)) if versions else "",
        ],
    )
