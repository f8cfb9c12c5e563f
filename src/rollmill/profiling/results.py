"""The result of profiling a run, which profile.json stores and reports show.

Unless a field says otherwise, durations are seconds per training iteration, without the profiler's own cost. The
questions and the correction follow RL-Scope (Gleeson et al., "RL-Scope: Cross-Stack Profiling for Deep
Reinforcement Learning Workloads", MLSys 2021).
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from rollmill.core.errors import DataError
from rollmill.core.json_data import parse_json
from rollmill.core.schema import read_as
from rollmill.profiling.processor_time import CoreUse

VERSION = 1
MAX_BYTES = 64 * 2**20
MAX_NUMBER = 1e18
"""Upper bound on values in a profile, so that reports can multiply any two of them."""
UNNAMED = "other"
"""Name for the time that belongs to no operation."""
THIS_PROCESS = "training"
"""Name of the process that ran the profiler, which either computes or coordinates workers."""


@dataclass(frozen=True)
class ProfiledSetup:
    """What was profiled: the algorithm, environment and options of the run."""

    algorithm: str
    environment: str
    command: str
    """The command line for profiling the run again."""
    placement: str
    """Placement of the run in a few words: `one program`, `actor x 4, learner x 1 (processes)`."""
    fusion: str
    num_envs: int
    num_steps: int
    env_steps: int
    """Environment steps per iteration, of all seeds together."""
    num_seeds: int = 1
    """Number of seeds trained at the same time."""
    possible_fusion: str = "off"
    """The deepest fusion that is worth trying, or `off`."""
    replicas: int = 1
    """Number of replicas of all groups. If there are several, they wait for each other."""
    can_be_asynchronous: bool = False
    """True if actors wait for weights and `--asynchronous` is supported."""
    possible_actors: tuple[int, ...] = ()
    """Numbers of actors that `single-learner-coarse` supports for this run."""
    log_every: int = 1
    """Number of iterations per line of metrics."""
    checkpoint_seconds: float | None = 30.0
    """Seconds between checkpoints, or None if checkpoints are saved by iterations only."""
    checkpoint_iterations: int | None = None
    """Number of iterations between checkpoints."""


@dataclass(frozen=True)
class ProfiledMachine:
    """The hardware and software on which a run was profiled."""

    device: str
    """Name and number of devices, such as `1 x NVIDIA H200`, or `2 x cpu`."""
    cores: int
    versions: dict[str, str]


@dataclass(frozen=True)
class IterationTime:
    """Duration of an iteration with and without the profiler."""

    unprofiled: float
    """Median duration over the windows without the profiler."""
    profiled: float
    """Interquartile mean over the windows with the profiler, each relative to the preceding window without it."""
    corrected: float
    """`profiled` after subtracting the profiler's cost, as measured in other windows."""
    iterations: int
    """Number of iterations in the windows whose events were read."""
    windows: int
    """Number of windows whose events were read."""

    @property
    def error(self) -> float:
        """Relative difference of the corrected duration from the unprofiled one."""
        return self.corrected / self.unprofiled - 1.0 if self.unprofiled else 0.0


@dataclass(frozen=True)
class WindowDuration:
    """Seconds per iteration in a window with the profiler, and in the preceding window without it."""

    profiled: float
    unprofiled: float
    events: float
    """Number of program events per iteration, or the mean of other windows if the events were not read."""
    read: bool = True
    """True if the events of the window were read."""
    waiting: float | None = None
    """The part of `profiled` in which an accelerator waits for the host, in seconds, or None if not known."""


@dataclass(frozen=True)
class BookKeeping:
    """The total cost of one kind of event that the profiler records or prolongs."""

    kind: str
    events: float
    """Number of such events per iteration."""
    nanoseconds: float
    """Cost of one such event."""
    calibrated: float = 0.0
    """Cost of one such event in a program of known duration, or 0 if it was not measured."""

    @property
    def seconds(self) -> float:
        """Total cost to the profiler of events of this kind, in seconds per iteration."""
        return self.events * self.nanoseconds * 1e-9


@dataclass(frozen=True)
class OperationTime:
    """Time of one operation, summed over all processes, in seconds per iteration."""

    path: tuple[str, ...]
    """Path of the operation, the outermost first, such as `("collect", "policy")`."""
    device: float
    """Seconds in which the device computes for the operation, without the operations inside it. Each instant is
    divided among the running operations."""
    host: float
    """Seconds in which no device computes, but the host is at work or a kernel is being launched for the
    operation, without the operations inside it."""
    kernels: float = 0.0
    """Number of instructions of the compiled program (thunks, kernels) per iteration."""
    mixed: float = 0.0
    """The estimated part of `device`: fusions of several operations, divided by cost."""
    flops: float = 0.0
    """Floating-point operations per iteration, counted in the compiled program's text, or 0 if unknown."""
    bytes: float = 0.0
    """Bytes of memory read and written per iteration, counted in the same way."""
    copies: float = 0.0
    """The part of `device` spent on copies."""
    collectives: float = 0.0
    """The part of `device` in which devices exchange data or wait for each other."""

    @property
    def seconds(self) -> float:
        """Device and host time of the operation together, in seconds per iteration."""
        return self.device + self.host


@dataclass(frozen=True)
class HostTime:
    """Time of one host activity, summed over all threads of a process, in seconds per iteration."""

    activity: str
    """Name of the activity, such as `dispatch` or `environment step`."""
    category: str
    """Category of the activity, one of `CATEGORIES`."""
    seconds: float


CATEGORIES = ("python", "simulator", "dispatch", "cuda", "transfer", "compile", "channel", "storage", "waiting")
"""Kinds of host activities. `simulator`: compiled code of host environments, before Python 3.12 including the
Python code around it; `dispatch`: JAX and XLA launch programs; `cuda`: calls of the CUDA API; `channel`: sending
and receiving between workers; `waiting`: waiting for the device or another worker."""


@dataclass(frozen=True)
class Overlap:
    """Seconds per iteration in which the host, the device, both or neither are at work.

    They add up to the duration of an iteration.
    """

    host_only: float
    device_only: float
    both: float
    neither: float


@dataclass(frozen=True)
class TimelineSpan:
    """A span on a lane of a process's timeline, in seconds since the beginning of the window, not per
    iteration.
    """

    lane: str
    """Name of the lane, such as `thread python3 2` or `GPU 0 stream 13`."""
    name: str
    """Name of the operation or activity."""
    start: float
    end: float


@dataclass(frozen=True)
class ProcessTime:
    """The times of one process in a profiled run."""

    name: str
    """Name of the process: `training`, or a worker's name, such as `actor/0`."""
    host: tuple[HostTime, ...]
    overlap: Overlap
    transitions: dict[str, float]
    """Number of calls per iteration from one part of the stack into another, such as `host to device memory`."""
    timeline: tuple[TimelineSpan, ...] = ()
    """Timeline of one window: the longest activity in each of some hundred intervals."""
    accelerators: int = 0
    """Number of accelerators that computed for the process, or 0 if its programs ran on a CPU."""


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates of the machine."""

    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True)
class OperationMemory:
    """Temporary memory that one operation uses in a compiled program."""

    path: tuple[str, ...]
    bytes: int
    """Bytes at the program's memory peak."""
    course: tuple[int, ...] = ()
    """Bytes from the beginning to the end of the program: after each change, or the maximum in each of up to 120
    intervals. Empty if unknown."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory that a compiled program uses."""

    program: str
    arguments: int
    outputs: int
    temporary: int
    """Bytes of temporary memory, which is needed only while the program runs."""
    operations: tuple[OperationMemory, ...] = ()
    """Operations that use the temporary memory, the largest first. Empty if unknown."""


@dataclass(frozen=True)
class DeviceActivity:
    """The driver's figures for a GPU in the windows without the profiler, and the share of time in which it
    computed in the windows with the profiler, all from 0 to 1.
    """

    device: str
    utilisation: float
    """Share of sampled periods in which any kernel ran, as reported by NVML."""
    sm_activity: float | None
    occupied: float
    """Share of time in which a kernel ran, according to recorded events."""


@dataclass(frozen=True)
class Advice:
    """A suggested change that would make the run faster, with its predicted saving."""

    title: str
    text: str
    """The evidence and the suggested change, in plain words."""
    options: str
    """Command-line options that make the change, or empty if no option does."""
    saves: float
    """Predicted saving in seconds per iteration, of which at least half should be realised, or 0 if only a
    measurement can tell."""


@dataclass(frozen=True)
class Profile:
    """The result of profiling a run."""

    training: ProfiledSetup
    machine: ProfiledMachine
    iteration: IterationTime
    book_keeping: tuple[BookKeeping, ...]
    operations: tuple[OperationTime, ...]
    processes: tuple[ProcessTime, ...]
    ceilings: Ceilings | None = None
    memory: tuple[MemoryUse, ...] = ()
    devices: tuple[DeviceActivity, ...] = ()
    cores: CoreUse | None = None
    """How many cores were at work in the windows without the profiler. None if the system does not report it, or
    if workers may be on other hosts."""
    advice: tuple[Advice, ...] = ()
    windows: tuple[WindowDuration, ...] = ()
    """Durations of all windows with the profiler, in order."""
    notes: tuple[str, ...] = ()
    """Sentences about missing or approximate results."""
    version: int = VERSION

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second without the profiler."""
        return self.training.env_steps / self.iteration.unprofiled

    def to_json(self) -> str:
        """Returns the profile as the document that profile.json contains."""
        return json.dumps(asdict(self), indent=1)


def read_profile(data: bytes | str, *, where: str) -> Profile:
    """Reads a profile from the document that `Profile.to_json` returns.

    Args:
        data: the document.
        where: source of the document, for messages.

    Raises:
        DataError: it is another kind of document or another version, or a number in it is too large.
    """
    document: Any = parse_json(data, where=where, limit=MAX_BYTES)
    version = document.get("version") if isinstance(document, dict) else None
    if version != VERSION:
        raise DataError(f"{where}: version is {version!r}, but this release reads version {VERSION}.")
    profile = read_as(Profile, document, where=where)
    for field, number in _numbers(profile, ""):
        if abs(number) > MAX_NUMBER:
            raise DataError(f"{where}: {field} is {number}, more than the limit of {MAX_NUMBER:g}.")
    return profile


def _numbers(value: Any, field: str) -> Iterator[tuple[str, float]]:
    """Yields all numeric values in a profile, with their fields."""
    if isinstance(value, int | float):
        yield field, value
    elif is_dataclass(value):
        for part in fields(value):
            yield from _numbers(getattr(value, part.name), f"{field}.{part.name}" if field else part.name)
    elif isinstance(value, tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part, field)
