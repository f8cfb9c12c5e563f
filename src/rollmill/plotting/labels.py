"""Titles, labels and colours that the HTML page and the PNG share."""

from collections import Counter
from collections.abc import Sequence

from rollmill.core.text import number, one_line, truncate
from rollmill.pages.charts import COLOURED
from rollmill.plotting.groups import CurveGroup, Curves

AXIS_TITLES = {"steps": "environment steps", "seconds": "seconds of training"}
MAX_LABEL = 90


def metric_title(curves: Curves) -> str:
    """Returns the name of a metric as words, such as `episode return`."""
    return one_line(truncate(curves.metric.replace("/", " ").replace("_", " "), MAX_LABEL))


def labels(groups: Sequence[CurveGroup]) -> list[str]:
    """Returns a label for each group with its number of seeds, and with a run if labels would be equal."""
    texts = [one_line(truncate(group.label, MAX_LABEL)) for group in groups]
    counts = Counter(texts)
    return [
        _distinct(text, group) if counts[text] > 1 else text + _seeds(group)
        for text, group in zip(texts, groups, strict=True)
    ]


def _distinct(text: str, group: CurveGroup) -> str:
    """Returns a label that ends with the name of a run, which no other group has."""
    run = f" [{one_line(truncate(group.runs[0], MAX_LABEL // 2))}]"
    return truncate(text, MAX_LABEL - len(run)) + run + _seeds(group)


def _seeds(group: CurveGroup) -> str:
    return f" ({group.seeds_text})" if group.seeds_text else ""


def baseline_label(name: str, value: float) -> str:
    """Returns the label of a baseline: the name of an untrained policy, and its value."""
    return f"{one_line(truncate(name, MAX_LABEL))}: {number(value)}"


def explanation(curves: Curves) -> str:
    """Returns a sentence or two on how to read the figure."""
    several = any(len(group.last) > 1 for group in curves.groups)
    means = (
        "Lines are means over seeds, and areas are 95 % confidence intervals. A seed that has ended keeps its "
        "last value."
    )
    parts = [means] if several else []
    if curves.smoothing:
        parts.append(f"Each curve is an exponential moving average with weight {curves.smoothing:g}.")
    if len(curves.groups) > COLOURED:
        parts.append(f"The {COLOURED} groups with the highest last values are coloured, the others are grey.")
    return " ".join(parts)
