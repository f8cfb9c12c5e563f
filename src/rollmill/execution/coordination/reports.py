"""The coordinator's reports of a training with workers."""

from typing import Any, NamedTuple, TypeAlias

from rollmill.dataflow import State
from rollmill.execution.coordination.start_up import Durations

Row = dict[str, Any]
"""Metrics of one iteration."""


class MetricsRows(NamedTuple):
    """Metrics of the iterations that follow the first `first` ones."""

    first: int
    rows: list[Row]


class Saved(NamedTuple):
    """The state after so many iterations, on the host."""

    iteration: int
    state: State


class RolledBack(NamedTuple):
    """All replicas begin again after so many iterations."""

    iteration: int


class Notice(NamedTuple):
    """A line for the user."""

    text: str


class StartedUp(NamedTuple):
    """A replica has reported its first iteration."""

    so_far: Durations
    """Durations over all replicas that have started."""


Report: TypeAlias = MetricsRows | Saved | RolledBack | StartedUp | Notice
