"""Notices for the user: failures of Python environments, which are also counted, and links to other hosts."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollmill.channels.transport.tcp_options import SECONDS_UNTIL_LOST
from rollmill.processes.events import Audible, Silent
from rollmill.workers.protocol import EnvFailures, EnvGrowth
from rollmill.workers.reports import Notice, Row

REPORTED_EACH = 3
"""The first failures of each environment are reported one by one, later ones at every power of two."""


class FailureLog:
    """Failures of all environments in a run."""

    def __init__(self) -> None:
        self._each: Counter[int] = Counter()
        self._since_row = 0
        self._growth_reported = False

    def lost(self) -> None:
        """Counts a worker lost while stepping environments."""
        self._since_row += 1

    def receive(self, worker: str, message: EnvFailures | EnvGrowth, environment: str) -> Iterator[Notice]:
        """Yields notices about the environments of a worker."""
        if isinstance(message, EnvGrowth):
            return self._grown(worker, message, environment)
        return self.add(worker, message.failures)

    def add(self, worker: str, failures: Sequence[Mapping[str, Any]]) -> Iterator[Notice]:
        """Counts failures, the fields of `HostFailure`, that a worker has sent, and yields notices of some."""
        for failure in failures:
            self._since_row += 1
            self._each[failure["index"]] += 1
            count = self._each[failure["index"]]
            if count <= REPORTED_EACH or count & (count - 1) == 0:
                yield _notice(worker, failure, count)

    def _grown(self, worker: str, growth: EnvGrowth, environment: str) -> Iterator[Notice]:
        """Reports the first worker whose memory grows with the steps of its environments."""
        if not self._growth_reported:
            self._growth_reported = True
            yield Notice(
                f"{worker}: its memory grows by about {_size(growth.bytes_per_step)} per environment step, to "
                f"{_size(growth.resident)} so far, while it steps environments {growth.first} to {growth.last} "
                f"of {environment}: the environment does not free memory, or records all of its steps"
            )

    def add_to(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Adds the number of failures since the previous row, to the first of several rows."""
        counts = [self._since_row, *[0] * (len(rows) - 1)]
        self._since_row = 0
        return [{**row, "episodes/failed": count} for row, count in zip(rows, counts, strict=True)]


def _size(num_bytes: int | float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def _notice(worker: str, failure: Mapping[str, Any], count: int) -> Notice:
    times = f", for the {count}th time" if count > REPORTED_EACH else ""
    return Notice(
        f"{worker}: environment {failure['index']} failed in {failure['doing']}{times}: {failure['error']}, at "
        f"{failure['line']}. Its episode was truncated",
        failed="environment",
    )


def link_notice(event: Silent | Audible) -> Notice:
    """Returns the notice about a host that has become silent, or is heard again."""
    match event:
        case Silent(job, seconds, host):
            return Notice(
                f"{job.name} on {host} has not responded for {seconds:.0f} s. It counts as lost after "
                f"{SECONDS_UNTIL_LOST} s"
            )
        case Audible(job, seconds, host):
            return Notice(f"{job.name} on {host} responds again after {seconds:.0f} s")
