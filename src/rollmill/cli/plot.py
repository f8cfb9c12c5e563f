"""The command `rollmill plot RUN [RUN ...]`, which draws learning curves of runs and sweeps."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rollmill.cli.parsing import parse
from rollmill.core.errors import UsageError
from rollmill.core.options import Arg
from rollmill.core.stored_paths import RunPath
from rollmill.core.text import compact, number, printable
from rollmill.plotting.curves import plot
from rollmill.plotting.groups import Curves

MAX_LINES = 20


@dataclass(frozen=True)
class Plot:
    """Draw learning curves: the mean over the seeds of each configuration, with its interval."""

    runs: Annotated[tuple[RunPath, ...], Arg(metavar="RUN [RUN ...]", positional=True)]
    """Directories of runs and of sweeps."""
    output: Path = Path("curves.html")
    """File to write, which ends in .html or .png."""
    metric: str | None = None
    """Name of the metric, as in metrics.jsonl. Default: episode/return, or the return of each kind of agents
    if there are several kinds."""
    x: str = "both"
    """Horizontal axis: steps, seconds, or both."""
    smoothing: float = 0.0
    """Weight of the past in an exponential moving mean of each curve, from 0 to below 1."""
    baselines: Annotated[tuple[str, ...], Arg(name="baseline", metavar="NAME=NUMBER", repeated=True)] = ()
    """Draw a horizontal line, such as the mean return that `rollmill evaluate random` prints. May be repeated."""
    force: Annotated[bool, Arg(only_on=True)] = False
    """Replace an existing file."""


def run(arguments: list[str]) -> int:
    """Writes the figure, and prints the last values of each group. Returns the exit code."""
    options = parse(Plot, arguments, prog="rollmill plot")
    curves = plot(
        *options.runs,
        output=options.output,
        metric=options.metric,
        x=options.x,
        smoothing=options.smoothing,
        force=options.force,
        baselines=dict(map(_baseline, options.baselines)),
    )
    if curves.left_out:
        print(
            f"these have no values of {curves.metric} yet: {', '.join(map(printable, curves.left_out))}",
            file=sys.stderr,
        )
    print("\n".join(_lines(curves)))
    print(f"wrote {options.output}")
    return 0


def _baseline(text: str) -> tuple[str, float]:
    """Returns the name and the value of `NAME=NUMBER`. Raises a `UsageError` for another text."""
    name, equals, value = text.rpartition("=")
    try:
        if name and equals:
            return name, float(value)
    except ValueError:
        pass
    raise UsageError(f"--baseline {text} must be NAME=NUMBER, such as random=22.5.")


def _lines(curves: Curves) -> list[str]:
    """Returns a line for each group, the highest last values first."""
    lines = []
    for group in curves.groups[:MAX_LINES]:
        last = (group.last.mean(), group.last.min(), group.last.max())
        mean, low, high = (number(float(value)) for value in last)
        extremes = f" from {low} to {high}" if len(group.last) > 1 else ""
        seeds = f", {group.seeds_text}{extremes}" if group.seeds_text else ""
        lines.append(
            f"{printable(group.label)}: {curves.metric} {mean}{seeds}, after {compact(group.last_steps)} steps"
        )
    hidden = len(curves.groups) - len(lines)
    return [*lines, f"and {hidden} more"] if hidden else lines
