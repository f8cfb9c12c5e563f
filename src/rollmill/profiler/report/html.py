"""Renders a profile as a self-contained HTML page."""

from rollmill.core.text import compact
from rollmill.pages.page import asset, escape_html, page, tiles
from rollmill.profiler.report.memory import memory_section
from rollmill.profiler.report.profile_sections import (
    advice_section,
    devices_section,
    notes_section,
    operations_section,
    process_sections,
    profiler_section,
)
from rollmill.profiler.report.roofline import roofline_section
from rollmill.profiler.report.sections import drawn_on_page
from rollmill.profiler.report.timeline import timeline_section
from rollmill.profiling.breakdown import duration_of, total_overlap, working_processes
from rollmill.profiling.results import Profile
from rollmill.profiling.text import (
    duration,
    error_text,
    machine_text,
    percent,
    profile_title,
    sizes_text,
    speed_of,
)


def profile_page(profile: Profile) -> str:
    """Renders a profile with its advice as a page. The page stays below 300 kB, because lists and names are
    limited in length.
    """
    timeline = timeline_section(profile.processes)
    script = asset(__name__, "timeline.js") if timeline.body else ""
    sections = [
        advice_section(profile.advice),
        operations_section(profile),
        *process_sections(profile.processes),
        timeline,
        roofline_section(profile),
        devices_section(profile),
        memory_section(profile.memory),
        profiler_section(profile),
        notes_section(profile),
    ]
    return page(f"Profile of {profile_title(profile)}", [_head(profile), *drawn_on_page(sections)], script=script)


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
    title, machine = escape_html(profile_title(profile)), escape_html(machine_text(profile))
    return "\n".join([f"<h1>Profile of {title}</h1>", f'<p class="dim">{machine}</p>', tiles(figures)])
