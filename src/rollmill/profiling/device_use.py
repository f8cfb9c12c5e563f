"""The time in which accelerators are at work in a window, by the events of their streams alone.

It takes a small part of the time that it takes to read what these events are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64

from rollmill.profiling.attribution import LONGEST_START
from rollmill.profiling.trace import clock_offset, lanes_of

Times: TypeAlias = Float64[np.ndarray, "2 n"]
"""When each of `n` things begins and ends, in nanoseconds of a trace's clock, by their beginnings."""


class DeviceUse(NamedTuple):
    """The accelerators of a process in a window; an instant in which any is at work counts once."""

    computing: float
    """Nanoseconds in which a kernel runs."""
    starting: float
    """Nanoseconds in which none runs, but one that follows another on its stream is being started."""
    kernels: int
    """Number of kernels that end in the window."""

    @property
    def working(self) -> float:
        """Nanoseconds in which a kernel runs or is being started: all but the time in which the host is late."""
        return self.computing + self.starting


def device_use(data: Any, begin: int, end: int) -> DeviceUse:
    """The use of accelerators in a window of a trace.

    Args:
        data: a `jax.profiler.ProfileData`.
        begin: the window's first nanosecond, on the host's monotonic clock.
        end: the nanosecond after its last.
    """
    window = np.array([begin, end], np.float64) - clock_offset(data)
    streams = [_kernels(line) for _, on_device, line in lanes_of(data) if on_device]
    kernels = sum(int(np.sum((window[0] < stream[1]) & (stream[1] <= window[1]))) for stream in streams)
    computing = _length([_joined(stream, 0.0) for stream in streams], window)
    working = _length([_joined(stream, float(LONGEST_START)) for stream in streams], window)
    return DeviceUse(computing, working - computing, kernels)


def _kernels(line: Any) -> Times:
    """The kernels of a stream."""
    pairs = ((event.start_ns, event.start_ns + event.duration_ns) for event in line.events)
    return _sorted(np.fromiter(pairs, np.dtype((np.float64, 2))).T)


def _sorted(times: Float64[np.ndarray, "2 n"]) -> Times:
    return times[:, np.argsort(times[0], kind="stable")]


def _joined(times: Times, longest: float) -> Float64[np.ndarray, "2 m"]:
    """The times, with those joined that are at most so many nanoseconds apart."""
    begins, ends = times[0], np.maximum.accumulate(times[1])
    is_apart = begins[1:] > ends[:-1] + longest
    is_first = np.concatenate([np.ones(min(1, len(begins)), bool), is_apart])
    is_last = np.roll(is_first, -1)
    return np.stack([begins[is_first], ends[is_last]])


def _length(streams: Sequence[Float64[np.ndarray, "2 _"]], window: Float64[np.ndarray, "2"]) -> float:
    """Nanoseconds of a window in which any of these times is."""
    if not streams:
        return 0.0
    begins, ends = np.clip(_joined(_sorted(np.concatenate(streams, axis=1)), 0.0), *window)
    return float(np.sum(ends - begins))
