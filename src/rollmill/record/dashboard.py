"""A dashboard at the bottom of the terminal: progress, speed, returns, losses, GPU use, memory and
remaining time.
"""

import os
import resource
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rollmill.core.text import compact, format_bytes, number, printable, truncate
from rollmill.record.status import Status, clock, is_output_on_terminal

if TYPE_CHECKING:
    from rich.text import Text

FRAMES_PER_SECOND = 2
MIN_COLUMNS, MIN_LINES = 60, 14
"""Minimum size of a terminal with a dashboard."""
BARS = "▁▂▃▄▅▆▇█"
FILLED, EMPTY = "━", "╌"
"""Characters of the progress bar."""
SPARK = 40
"""Maximum number of values in the small chart of returns."""
LOSSES, EVALUATED = "losses/", "evaluation/returns/"
FIRST = ("losses/policy", "losses/value", "losses/entropy", "losses/approx_kl")
"""Losses that are shown first, if the algorithm has them."""


def fits_terminal() -> bool:
    """Returns whether standard error is a terminal that is large enough, can move its cursor, and can show the
    bars.
    """
    size = shutil.get_terminal_size()
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return is_terminal and size.columns >= MIN_COLUMNS and size.lines >= MIN_LINES and _shows_bars()


def _shows_bars() -> bool:
    """Returns whether standard error can encode the bars, because escape sequences would break the lines."""
    try:
        f"{BARS}{FILLED}{EMPTY}".encode(sys.stderr.encoding or "ascii")
    except (LookupError, UnicodeError):
        return False
    return True


class Dashboard:
    """A display that redraws the latest status of a run twice a second in a separate thread. An update only stores
    the status.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._status: Status | None = None
        self._returns = Sampled(2 * SPARK)
        self._console = Console(stderr=True)
        self._live = Live(
            console=self._console,
            refresh_per_second=FRAMES_PER_SECOND,
            get_renderable=self._draw,
            vertical_overflow="crop",
            redirect_stdout=is_output_on_terminal(),
        )

    def note(self, text: str) -> None:
        """Prints a line above the dashboard."""
        from rich.text import Text

        self._console.print(Text(printable(text)))

    def update(self, status: Status) -> None:
        """Stores the status for the next frame."""
        starts = self._status is None
        self._status = status
        if starts:
            self._live.start()
            self._console.show_cursor(True)  # because a killed process could not restore it

    def close(self) -> None:
        """Ends the dashboard. The last status stays visible."""
        self._live.stop()

    def _draw(self) -> "Text":
        from rich.text import Text

        if self._status is None:
            return Text("")
        self._returns.add(self._status.episode_return)
        width = self._console.width
        return Text("\n".join(truncate(line, width) for line in lines(self._status, self._returns.values, width)))


def lines(status: Status, returns: list[float], width: int) -> Iterator[str]:
    """Yields the lines of a dashboard that shows a status and the `returns` so far."""
    share = min(1.0, status.env_steps / max(1, status.total_steps))
    steps = f"{compact(status.env_steps)} of {compact(status.total_steps)} steps"
    times = f"{clock(status.seconds)} so far, {clock(status.seconds_left)} left"
    length = max(10, width - len(steps) - len(times) - 9)
    yield f"{steps}  {progress_bar(share, length)} {share:4.0%}  {times}"
    speed = f"steps/s {compact(status.steps_per_second)}"
    if status.episode_return is None:
        yield f"{speed}   no episode has ended yet"
    else:
        episode = "" if status.episode_length is None else f"   length {number(status.episode_length)}"
        picture = sparkline(returns, min(SPARK, width // 3))
        yield f"{speed}   return {number(status.episode_return)} {picture}{episode}"
    yield from _rows_of_metrics(status, width)
    yield f"peak memory of this process: {format_bytes(peak_memory())}"


def _rows_of_metrics(status: Status, width: int) -> Iterator[str]:
    """Yields lines on losses, kinds of agents, the latest evaluation and the GPUs, as far as metrics have them."""
    numbers = {name: value for name, value in status.row.items() if isinstance(value, int | float)}
    losses = sorted((name for name in numbers if name.startswith(LOSSES)), key=_rank)
    if losses:
        yield fitting("losses", (f"{name.removeprefix(LOSSES)} {number(numbers[name])}" for name in losses), width)
    if status.returns:
        yield fitting("returns", (f"{name} {number(value)}" for name, value in status.returns.items()), width)
    if "evaluation/return" in numbers:
        of_kinds = {name.removeprefix(EVALUATED): numbers[name] for name in numbers if name.startswith(EVALUATED)}
        each = (f"{name} {number(value)}" for name, value in of_kinds.items() if "_seed" not in name)
        yield fitting(f"evaluation {number(numbers['evaluation/return'])}", each, width)
    gpu = [(name.removeprefix("gpu/"), numbers[name]) for name in numbers if name.startswith("gpu/")]
    if gpu:
        yield fitting("GPU", (f"{name.replace('_', ' ')} {value:.0%}" for name, value in gpu), width)


def _rank(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def fitting(title: str, parts: Iterable[str], width: int) -> str:
    """Joins a title and the first parts that fit into a line of `width` characters."""
    line = title
    for part in parts:
        gap = " " if line == title else "   "
        if len(line) + len(gap) + len(part) > width:
            break
        line += gap + part
    return line


class Sampled:
    """Evenly spaced samples of all past values. When there are too many samples, every second one is dropped."""

    def __init__(self, most: int) -> None:
        self._most, self._every, self._seen = most, 1, 0
        self.values: list[float] = []

    def add(self, value: float | None) -> None:
        """Adds a value. It is kept only if a sample is due."""
        if value is None:
            return
        if self._seen % self._every == 0:
            self.values.append(value)
        self._seen += 1
        if len(self.values) > self._most:
            self.values, self._every = self.values[::2], 2 * self._every


def sparkline(values: list[float], width: int) -> str:
    """Returns values as a line of at most `width` small bars."""
    if len(values) < 2:
        return ""
    shown = [values[round(at * (len(values) - 1) / (width - 1))] for at in range(width)] if width > 1 else []
    shown = shown if len(values) > width else values
    low, high = min(shown), max(shown)
    top = len(BARS) - 1
    return "".join(BARS[round(top * (value - low) / (high - low)) if high > low else 0] for value in shown)


def progress_bar(share: float, length: int) -> str:
    """Returns a progress bar of `length` characters, filled to a fraction."""
    filled = round(share * length)
    return FILLED * filled + EMPTY * (length - filled)


def peak_memory() -> int:
    """Returns the peak memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
