"""Describes the progress of a run for displays."""

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rollmill.core.text import compact

RETURNS = "returns/"
"""Prefix of the mean returns of kinds of agents."""


class Status(NamedTuple):
    """The progress of a run, as displays show it."""

    env_steps: int
    total_steps: int
    steps_per_second: float
    episode_return: float | None
    episode_length: float | None
    seconds: float = 0.0
    """Duration of the run so far in seconds."""
    row: Mapping[str, Any] = MappingProxyType({})
    """The newest line of metrics."""

    @property
    def returns(self) -> dict[str, float]:
        """The mean return of each agent kind in the newest line of metrics. Empty if there is only one kind."""
        found = {name.removeprefix(RETURNS): x for name, x in self.row.items() if name.startswith(RETURNS)}
        known = {name: float(value) for name, value in found.items() if value is not None}
        return known if len(known) > 1 else {}

    @property
    def seconds_left(self) -> float:
        """Estimated seconds until the end of the run, at the current throughput."""
        return (self.total_steps - self.env_steps) / max(self.steps_per_second, 1e-9)

    def __str__(self) -> str:
        return (
            f"{self.env_steps:>12,} / {self.total_steps:,} steps  {compact(self.steps_per_second)} steps/s  "
            f"{clock(self.seconds_left)} left  {self._format_returns}  length {_number(self.episode_length)}"
        )

    @property
    def _format_returns(self) -> str:
        """Formats the return of each agent kind, or the mean return if there is only one kind."""
        each = ", ".join(f"{name} {_number(value)}" for name, value in self.returns.items())
        return f"returns {each}" if each else f"return {_number(self.episode_return)}"


def is_output_on_terminal() -> bool:
    """Returns whether standard output is a terminal, in which case its lines are shown above a display."""
    return getattr(sys.stdout, "isatty", lambda: False)()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def clock(seconds: float) -> str:
    """Formats a duration in seconds as `1:02:03` or `2:03`."""
    minutes, seconds = divmod(int(min(seconds, 359_999)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
