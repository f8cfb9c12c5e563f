"""Creates notices for the user about failed Python environments and about the links to other hosts.

It also counts the failures of environments.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollmill.channels.transport.tcp_options import SECONDS_UNTIL_LOST
from rollmill.processes.events import Audible, Silent
from rollmill.workers.protocol import EnvFailures, EnvGrowth
from rollmill.workers.reports import Notice, Row

REPORTED_EACH = 3
"""Number of failures of an environment that are reported one by one. Later, every power of two is."""


class FailureLog:
    """Counts the failures of all environments in a run, and describes them for the user."""

    def __init__(self) -> None:
        self._each: Counter[int] = Counter()
        self._since_row = 0
        self._growth_reported = False

    def lost(self) -> None:
        """Counts the loss of a worker that was stepping environments."""
        self._since_row += 1

    def receive(self, worker: str, message: EnvFailures | EnvGrowth, environment: str) -> Iterator[Notice]:
        """Counts the failures in a worker's message, and yields notices about its environments."""
        if isinstance(message, EnvGrowth):
            return self._report_growth(worker, message, environment)
        return self.add(worker, message.failures)

    def add(self, worker: str, failures: Sequence[Mapping[str, Any]]) -> Iterator[Notice]:
        """Counts failures that a worker has sent (fields of `HostFailure`), and yields notices about some
        failures.
        """
        for failure in failures:
            self._since_row += 1
            self._each[failure["index"]] += 1
            count = self._each[failure["index"]]
            if count <= REPORTED_EACH or count & (count - 1) == 0:
                yield _notice(worker, failure, count)

    def _report_growth(self, worker: str, growth: EnvGrowth, environment: str) -> Iterator[Notice]:
        """Reports the first worker whose memory grows with the steps of its environments."""
        if not self._growth_reported:
            self._growth_reported = True
            yield Notice(
                f"{worker}: its memory grows by about {_size(growth.bytes_per_step)} per environment step, to "
                f"{_size(growth.resident)} so far, while it steps environments {growth.first} to {growth.last} "
                f"of {environment}: the environment does not free memory, or records all of its steps"
            )

    def add_to(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Returns rows of metrics with `episodes/failed`, the number of failures.

        The first row gets all failures since the last call, and other rows get 0.
        """
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
    """Returns the notice about a host that has become silent, or that responds again."""
    match event:
        case Silent(job, seconds, host):
            return Notice(
                f"{job.name} on {host} has not responded for {seconds:.0f} s. It counts as lost after "
                f"{SECONDS_UNTIL_LOST} s"
            )
        case Audible(job, seconds, host):
            return Notice(f"{job.name} on {host} responds again after {seconds:.0f} s")
