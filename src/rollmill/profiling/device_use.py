"""Measures how long an accelerator works in a window, using only the times of its kernels.

Reading the names of kernels takes longer than reading their times. Only some windows are therefore read in full,
but the kernel times of all windows are read.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64

from rollmill.profiling.attribution import MAX_START_GAP
from rollmill.profiling.trace import clock_offset, lanes_of

Times: TypeAlias = Float64[np.ndarray, "2 n"]
"""Beginnings and ends of `n` kernels, in nanoseconds since the start of a window, sorted by their beginnings."""


class DeviceUse(NamedTuple):
    """How long the accelerators of a process worked in a window. An instant counts once, even if several work."""

    computing: float
    """Nanoseconds in which a kernel or a copy runs."""
    starting: float
    """Nanoseconds in which no kernel or copy runs, but one is being launched: short gaps in a stream."""
    kernels: int
    """Number of kernels and copies that end in the window."""
    waits: int
    """Number of the other gaps, in which all accelerators wait for the host."""
    devices: int
    """Number of accelerators that computed."""

    @property
    def working(self) -> float:
        """Nanoseconds in which a kernel or a copy was running or being launched."""
        return self.computing + self.starting


def device_use(data: Any, begin: int, end: int) -> DeviceUse:
    """Measures the use of accelerators in a `ProfileData`, from `begin` up to, but excluding, `end`.

    Both are nanoseconds of the host's monotonic clock.
    """
    origin, length = begin - clock_offset(data), float(end - begin)
    streams = {
        name: _within(_kernels(line, origin), length) for name, on_device, line in lanes_of(data) if on_device
    }
    kernels = sum(int(np.sum(stream[1] <= length)) for stream in streams.values())
    devices = {name.partition(" stream ")[0] for name, stream in streams.items() if stream.size}
    computing = _any_of([_join(stream, 0.0) for stream in streams.values()])
    working = _any_of([_join(stream, float(MAX_START_GAP)) for stream in streams.values()])
    lengths = [float(np.sum(np.diff(np.clip(times, 0.0, length), axis=0))) for times in (computing, working)]
    waits = 1 + working.shape[1] - np.sum(working[0] <= 0.0) - np.sum(working[1] >= length)
    return DeviceUse(lengths[0], lengths[1] - lengths[0], kernels, int(waits), len(devices))


def _kernels(line: Any, origin: int) -> Times:
    """Returns the kernels of a stream, with times relative to `origin` on the trace's clock."""
    flat = chain.from_iterable((event.start_ns - origin, event.duration_ns) for event in line.events)
    begins, durations = np.fromiter(flat, np.float64).reshape(-1, 2).T
    return _sort(np.stack([begins, begins + durations]))


def _within(times: Times, length: float) -> Float64[np.ndarray, "2 _"]:
    """Returns the times that lie in a window of this length, or reach into it."""
    return times[:, (times[1] > 0.0) & (times[0] < length)]


def _sort(times: Float64[np.ndarray, "2 n"]) -> Times:
    return times[:, np.argsort(times[0], kind="stable")]


def _join(times: Times, longest: float) -> Float64[np.ndarray, "2 _"]:
    """Joins times that are at most `longest` nanoseconds apart."""
    begins, ends = times[0], np.maximum.accumulate(times[1])
    is_apart = begins[1:] > ends[:-1] + longest
    is_first = np.concatenate([np.ones(min(1, len(begins)), bool), is_apart])
    is_last = np.roll(is_first, -1)
    return np.stack([begins[is_first], ends[is_last]])


def _any_of(streams: Sequence[Float64[np.ndarray, "2 _"]]) -> Float64[np.ndarray, "2 _"]:
    """Returns the times that lie in any stream's."""
    return _join(_sort(np.concatenate([np.empty((2, 0)), *streams], axis=1)), 0.0)
