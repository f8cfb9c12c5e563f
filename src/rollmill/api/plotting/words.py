"""Titles, labels and colours that the page and the PNG share."""

from rollmill.api.plotting.groups import CurveGroup, Curves
from rollmill.pages.text import cut, printable

AXIS_TITLES = {"steps": "environment steps", "seconds": "seconds of training"}
COLOURED = 8
"""Groups that have a colour of their own, the best ones; others are grey."""
LONGEST_LABEL = 90


def metric_title(curves: Curves) -> str:
    """The metric in words: `episode return`."""
    return printable(cut(curves.metric.replace("/", " ").replace("_", " "), LONGEST_LABEL))


def label(group: CurveGroup) -> str:
    """The label of a group, with its number of seeds."""
    count = len(group.runs)
    seeds = f" ({count} seeds)" if count > 1 else ""
    return printable(cut(group.label, LONGEST_LABEL)) + seeds


def explanation(curves: Curves) -> str:
    """How to read the figure, in a sentence or two."""
    several = any(len(group.runs) > 1 for group in curves.groups)
    means = "Lines are means over seeds, areas their ranges; a seed that has ended keeps its last value."
    parts = [means] if several else []
    if curves.smoothing:
        parts.append(f"Each curve is an exponential moving mean with weight {curves.smoothing:g}.")
    if len(curves.groups) > COLOURED:
        parts.append(f"The {COLOURED} groups with the highest last values have colours; the others are grey.")
    return " ".join(parts)
