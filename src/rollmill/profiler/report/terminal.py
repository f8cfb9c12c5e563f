"""Renders a profile as tables in a terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from rollmill.profiler.report.memory import memory_section
from rollmill.profiler.report.profile_sections import (
    advice_section,
    devices_section,
    notes_section,
    operations_section,
    process_sections,
    profiler_section,
)
from rollmill.profiler.report.sections import as_text, drawn_in_terminal
from rollmill.profiling.results import Profile
from rollmill.profiling.text import correction_text, duration, machine_text, profile_title, sizes_text, speed_text


def draw_profile(profile: Profile, *, width: int = 80) -> str:
    """Renders a profile with its advice as plain text, for a terminal of at least 60 columns."""
    return as_text(profile_view(profile), width=width)


def profile_view(profile: Profile) -> RenderableType:
    """Returns a profile for `rich.console.Console.print`. It fits into 80 columns."""
    sections = [
        operations_section(profile),
        *process_sections(profile.processes),
        devices_section(profile),
        memory_section(profile.memory),
        profiler_section(profile),
        advice_section(profile.advice),
        notes_section(profile),
    ]
    return Group(
        Text.assemble((profile_title(profile), "bold"), f": {speed_text(profile)}"),
        Text(machine_text(profile)),
        Text(f"an iteration: {sizes_text(profile)}, {duration(profile.iteration.unprofiled)}"),
        Text(correction_text(profile)),
        *drawn_in_terminal(sections),
    )
