"""Draws a profile as a PNG for papers and slides: where an iteration's time goes, and whether host and device
overlap.
"""

from collections.abc import Sequence
from typing import IO, Any

from rollmill.core.text import truncate
from rollmill.pages.page import ratio
from rollmill.pictures import GREY, new_figure, tidy_axes
from rollmill.profiling.breakdown import (
    OVERLAPS,
    OperationNode,
    duration_of,
    first_of_each_kind,
    longest_operations,
    overlap_values,
)
from rollmill.profiling.results import ProcessTime, Profile
from rollmill.profiling.text import machine_text, path_text, profile_title, sizes_text, speed_text

COLOURS = {"device": "#0072b2", "host": "#e69f00", "both": "#009e73", "idle": GREY}
"""Colours of the figure, which the page also uses."""
WIDTH, LINE, MARGIN = 8.0, 0.24, 1.1
"""Sizes in inches: the width of the figure, the height of a bar, and the height of everything around the bars."""
MAX_NAME = 48
"""Maximum length of an operation's name in characters."""
MIN_SHOWN, MAX_OPERATIONS, MAX_PROCESSES = 0.005, 30, 12
"""Smallest share of an iteration for which an operation has a bar, and maximum number of bars."""


def write_figure(file: IO[bytes], profile: Profile) -> None:
    """Writes the figure of a profile as a PNG. Raises a `UsageError` if matplotlib is not installed."""
    nodes, _ = longest_operations(profile, least=MIN_SHOWN, most=MAX_OPERATIONS)
    processes = first_of_each_kind(profile.processes, MAX_PROCESSES)
    heights = [LINE * max(1, len(nodes)) + MARGIN, LINE * max(1, len(processes)) + MARGIN]
    figure = new_figure(WIDTH, sum(heights))
    figure.suptitle(f"{profile_title(profile)}: {speed_text(profile)}\n{machine_text(profile)}", fontsize=9)
    upper, lower = figure.subplots(2, 1, height_ratios=heights)
    _draw_operations(upper, nodes, profile)
    _draw_overlaps(lower, processes)
    figure.savefig(file, format="png")


def _draw_operations(axes: Any, nodes: Sequence[OperationNode], profile: Profile) -> None:
    names = [truncate(path_text(node.path), MAX_NAME) for node in nodes]
    sure = [1e3 * (node.device - node.mixed) for node in nodes]
    mixed = [1e3 * node.mixed for node in nodes]
    host = [1e3 * node.host for node in nodes]
    places, device = range(len(nodes)), COLOURS["device"]
    axes.barh(places, sure, color=device, label="device computes")
    axes.barh(places, mixed, left=sure, color=device, alpha=0.55, hatch="////", label="device, estimated")
    starts = [a + b for a, b in zip(sure, mixed, strict=True)]
    axes.barh(places, host, left=starts, color=COLOURS["host"], label="the host, or a kernel's start")
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlabel(f"milliseconds of an iteration of {sizes_text(profile)}", fontsize=8)
    _finish(axes)


def _draw_overlaps(axes: Any, processes: Sequence[ProcessTime]) -> None:
    places, begin = range(len(processes)), [0.0] * len(processes)
    for part, (title, colour) in enumerate(OVERLAPS.items()):
        shares = [
            100.0 * ratio(overlap_values(process.overlap)[part], duration_of(process.overlap))
            for process in processes
        ]
        axes.barh(places, shares, left=begin, color=COLOURS[colour], label=title)
        begin = [a + b for a, b in zip(begin, shares, strict=True)]
    axes.set_yticks(places, [process.name for process in processes], fontsize=8)
    axes.set_xlabel("% of an iteration of each process", fontsize=8)
    axes.set_xlim(0.0, 100.0)
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    tidy_axes(axes, grid="x")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, frameon=False, fontsize=8)
