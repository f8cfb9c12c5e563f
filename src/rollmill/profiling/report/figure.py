"""A profile as a PNG, for papers and slides: where an iteration goes, and whether host and device overlap."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollmill.pages.text import cut
from rollmill.pictures import GREY, new_figure, tidy
from rollmill.profiling.breakdown import (
    OperationNode,
    duration_of,
    first_of_each_kind,
    in_order,
    operation_tree,
    whole_time,
)
from rollmill.profiling.results import ProcessTime, Profile
from rollmill.profiling.text import machine_text, path_text, sizes_text, speed_text, titled

DEVICE, HOST, BOTH = "#0072b2", "#e69f00", "#009e73"
WIDTH, LINE, MARGIN = 8.0, 0.24, 1.1
"""Inches: of the figure, and of the height of a bar and of what is around the bars."""
LONGEST_NAME = 48
"""Characters."""
LEAST_SHOWN, MOST_OPERATIONS, MOST_PROCESSES = 0.005, 30, 12
"""Share of an iteration from which on an operation has a bar, and the most bars."""
OVERLAPS = (
    ("both at work", "both", BOTH),
    ("only the device", "device_only", DEVICE),
    ("only the host", "host_only", HOST),
    ("neither", "neither", GREY),
)
"""Titles, names in `Overlap` and colours."""


def write_figure(path: Path, profile: Profile) -> None:
    """Writes the figure.

    Raises:
        UsageError: matplotlib is not installed.
    """
    nodes = _longest_operations(profile)
    processes = first_of_each_kind(profile.processes, MOST_PROCESSES)
    heights = [LINE * max(1, len(nodes)) + MARGIN, LINE * max(1, len(processes)) + MARGIN]
    figure = new_figure(WIDTH, sum(heights))
    figure.suptitle(f"{titled(profile)}: {speed_text(profile)}\n{machine_text(profile)}", fontsize=9)
    upper, lower = figure.subplots(2, 1, height_ratios=heights)
    _draw_operations(upper, nodes, profile)
    _draw_overlaps(lower, processes)
    figure.savefig(path, format="png")


def _longest_operations(profile: Profile) -> list[OperationNode]:
    """The operations that have a bar, each before those inside."""
    whole = whole_time(profile)
    nodes = [
        node for node in in_order(operation_tree(profile.operations)) if whole.share(node.seconds) >= LEAST_SHOWN
    ]
    longest = sorted(nodes, key=lambda node: -node.seconds)[:MOST_OPERATIONS]
    return [node for node in nodes if node in longest]


def _draw_operations(axes: Any, nodes: Sequence[OperationNode], profile: Profile) -> None:
    names = [cut(path_text(node.path), LONGEST_NAME) for node in nodes]
    sure = [1e3 * (node.device - node.mixed) for node in nodes]
    mixed = [1e3 * node.mixed for node in nodes]
    host = [1e3 * node.host for node in nodes]
    places = range(len(nodes))
    axes.barh(places, sure, color=DEVICE, label="device computes")
    axes.barh(places, mixed, left=sure, color=DEVICE, alpha=0.55, hatch="////", label="device, estimated")
    starts = [a + b for a, b in zip(sure, mixed, strict=True)]
    axes.barh(places, host, left=starts, color=HOST, label="only the host is at work")
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlabel(f"milliseconds of an iteration of {sizes_text(profile)}", fontsize=8)
    _finish(axes)


def _draw_overlaps(axes: Any, processes: Sequence[ProcessTime]) -> None:
    places, begin = range(len(processes)), [0.0] * len(processes)
    for title, name, colour in OVERLAPS:
        shares = [
            100.0 * getattr(process.overlap, name) / (duration_of(process.overlap) or 1.0) for process in processes
        ]
        axes.barh(places, shares, left=begin, color=colour, label=title)
        begin = [a + b for a, b in zip(begin, shares, strict=True)]
    axes.set_yticks(places, [process.name for process in processes], fontsize=8)
    axes.set_xlabel("% of an iteration of each process", fontsize=8)
    axes.set_xlim(0.0, 100.0)
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    tidy(axes, grid="x")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, frameon=False, fontsize=8)
