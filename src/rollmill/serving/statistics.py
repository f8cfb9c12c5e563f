"""Counts the work of a server in memory that all of its workers share.

Each worker writes its own row, so no lock is needed. The worker that is asked for the counts sums the rows.
"""

import math
import mmap
from typing import Any

import numpy as np
from jaxtyping import Int

COUNTS = (
    "connections",
    "requests",
    "errors",
    "decisions",
    "batches",
    "padding",
    "failed_batches",
    "open_connections",
    "queued",
    "sessions",
    "largest_batch",
)
"""Names of the counts. From `open_connections` on, they describe the present state, or a maximum so far."""

STATUSES = (200, 400, 401, 404, 405, 408, 409, 413, 417, 431, 500, 501, 503)
"""All HTTP statuses that an answer may have."""

BUCKETS_PER_OCTAVE = 16
SHORTEST, OCTAVES = 1e-6, 28
"""Shortest counted latency in seconds, and the number of doublings up to the longest, about four minutes. Each
bucket is 4.4 % wider than the previous one."""

BUCKETS = BUCKETS_PER_OCTAVE * OCTAVES
WIDTH = len(COUNTS) + len(STATUSES) + BUCKETS
_COUNT = {name: index for index, name in enumerate(COUNTS)}
_STATUS = {status: len(COUNTS) + index for index, status in enumerate(STATUSES)}
_FIRST_BUCKET = len(COUNTS) + len(STATUSES)


def bucket_of(seconds: float) -> int:
    """Returns the histogram bucket in which a latency is counted."""
    place = math.ceil(BUCKETS_PER_OCTAVE * math.log2(max(seconds, SHORTEST) / SHORTEST))
    return min(place, BUCKETS - 1)


def quantile(buckets: Int[np.ndarray, " buckets"], share: float) -> float | None:
    """Returns a quantile of latencies in seconds, rounded up by at most 4.4 %, or None without requests.

    `share` is the fraction of requests, such as 0.99.
    """
    total = int(buckets.sum())
    if not total:
        return None
    bucket = int(np.searchsorted(np.cumsum(buckets), math.ceil(share * total)))
    return SHORTEST * 2 ** (bucket / BUCKETS_PER_OCTAVE)


class ServerStatistics:
    """The counts of worker `index` of a server, and the sums over all workers.

    `descriptor` belongs to a file of `statistics_bytes(workers)` zeros that all workers have opened. If it is -1,
    the counts are private to this process.
    """

    def __init__(self, workers: int = 1, index: int = 0, descriptor: int = -1) -> None:
        self._memory = mmap.mmap(descriptor, statistics_bytes(workers))
        self._rows = np.frombuffer(self._memory, np.int64).reshape(workers, WIDTH)
        self._own = memoryview(self._memory).cast("q")[index * WIDTH : (index + 1) * WIDTH]

    def add(self, name: str, number: int = 1) -> None:
        """Adds `number` to a count."""
        self._own[_COUNT[name]] += number

    def set(self, name: str, number: int) -> None:
        """Sets a count that describes the present state, such as open connections."""
        self._own[_COUNT[name]] = number

    def count_response(self, status: int) -> None:
        """Counts an answer by its HTTP status."""
        self._own[_STATUS[status]] += 1
        if status >= 400:
            self.add("errors")

    def record_latency(self, seconds: float) -> None:
        """Counts the latency of a request for actions, in seconds."""
        self._own[_FIRST_BUCKET + bucket_of(seconds)] += 1

    def record_batch(self, rows: int, size: int) -> None:
        """Counts a batch of `rows` observations that was padded to `size`."""
        self.add("batches")
        self.add("decisions", rows)
        self.add("padding", size - rows)
        self.set("largest_batch", max(rows, self._own[_COUNT["largest_batch"]]))

    def report(self) -> dict[str, Any]:
        """Returns the counts, summed over all workers, as JSON."""
        sums = self._rows.sum(axis=0)
        counts = {name: int(sums[index]) for name, index in _COUNT.items()}
        largest = int(self._rows[:, _COUNT["largest_batch"]].max())
        batches = counts["batches"]
        latencies = [quantile(sums[_FIRST_BUCKET:], share) for share in SHARES.values()]
        return counts | {
            "largest_batch": largest,
            "mean_batch": counts["decisions"] / batches if batches else None,
            "answers": {str(status): int(sums[i]) for status, i in _STATUS.items() if sums[i]},
            "latency_ms": dict(zip(SHARES, map(_as_milliseconds, latencies), strict=True)),
            "workers": len(self._rows),
        }


SHARES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
"""Percentiles of latencies in the report, as fractions."""


def statistics_bytes(workers: int) -> int:
    """Returns the number of bytes that the counts of all workers need."""
    return workers * WIDTH * 8


def _as_milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds * 1e3:.4g}")
