"""Displays of a run's progress: a dashboard or a progress bar in a terminal, plain lines elsewhere, or nothing."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rollmill.core.text import printable
from rollmill.record.status import Status, is_output_on_terminal

if TYPE_CHECKING:
    from rich.progress import TaskID

LINE_SECONDS = 5.0
"""Seconds between two plain lines."""


@runtime_checkable
class Display(Protocol):
    """Interface of displays for the progress of a run."""

    def note(self, text: str) -> None:
        """Prints a line for the user."""

    def update(self, status: Status) -> None:
        """Shows the current progress. It may be called as often as desired."""

    def close(self) -> None:
        """Ends the display and leaves the last status visible."""


def choose_display(*, quiet: bool, dashboard: bool = True) -> Display:
    """Returns a display for standard error: none if `quiet`, and plain lines if standard error is not a terminal.

    In a terminal, it is a dashboard. Without `dashboard`, or in a small terminal, it is a progress bar.
    """
    if quiet or sys.stderr is None:
        return Quiet()
    if not sys.stderr.isatty():
        return Tolerant(Lines())
    from rollmill.record.dashboard import Dashboard, fits_terminal  # imported here, because only terminals need it

    return Tolerant(Dashboard() if dashboard and fits_terminal() else Bar())


class Tolerant:
    """A display that becomes silent if its output fails, so that a closed pipe or terminal does not end
    training.
    """

    def __init__(self, shown: Display) -> None:
        self._shown = shown

    def note(self, text: str) -> None:
        """Prints a line, unless the output has failed."""
        self._try(lambda: self._shown.note(text))

    def update(self, status: Status) -> None:
        """Shows the current progress, unless the output has failed."""
        self._try(lambda: self._shown.update(status))

    def close(self) -> None:
        """Ends the display and ignores errors of its output."""
        self._try(self._shown.close)

    def _try(self, show: Callable[[], None]) -> None:
        try:
            show()
        except (OSError, ValueError):  # for example a broken pipe, a terminal that was closed, or a closed file
            self._shown = Quiet()


class Quiet:
    """A display that shows nothing."""

    def note(self, text: str) -> None:
        """Ignores the line."""

    def update(self, status: Status) -> None:
        """Ignores the status."""

    def close(self) -> None:
        """Does nothing."""


class Lines:
    """A display that prints a plain line to standard error every few seconds."""

    def __init__(self) -> None:
        self._shown_at = -LINE_SECONDS
        self._unshown: Status | None = None

    def note(self, text: str) -> None:
        """Prints a line for the user."""
        print(printable(text), file=sys.stderr, flush=True)

    def update(self, status: Status) -> None:
        """Prints the current progress if enough time has passed since the last such line."""
        now = time.monotonic()
        if now - self._shown_at < LINE_SECONDS:
            self._unshown = status
            return
        self._shown_at, self._unshown = now, None
        self.note(str(status))

    def close(self) -> None:
        """Prints the last status if it has not been printed yet."""
        if self._unshown is not None:
            self.note(str(self._unshown))
        self._unshown = None


class Bar:
    """A display with a progress bar that stays at the bottom of the terminal."""

    def __init__(self) -> None:
        from rich.console import Console  # imported here, because only terminals need it
        from rich.progress import BarColumn, Progress, TextColumn

        columns = BarColumn(bar_width=24), TextColumn("{task.description}")
        self._progress = Progress(
            *columns,
            console=Console(stderr=True),
            refresh_per_second=8,
            redirect_stdout=is_output_on_terminal(),
        )
        self._task: TaskID | None = None

    def note(self, text: str) -> None:
        """Prints a line above the progress bar."""
        from rich.text import Text

        self._progress.console.print(Text(printable(text)))

    def update(self, status: Status) -> None:
        """Moves the progress bar to the current progress."""
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("", total=status.total_steps)
        text = f"{status.env_steps / status.total_steps:4.0%} {str(status).strip()}"
        self._progress.update(self._task, completed=status.env_steps, description=text)

    def close(self) -> None:
        """Ends the progress bar, which stays visible."""
        self._progress.stop()
