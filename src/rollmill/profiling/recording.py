"""Records windows of one process with the JAX profiler, and reduces each of them to sums at once.

A trace of one second may contain a million events, so only sums are kept and sent to other processes.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import jax

from rollmill.core.operations import SPAN_MARK, set_recording
from rollmill.profiling.attribution import DeviceTime, WindowTimes, attribute
from rollmill.profiling.classes import Classifier, HostActivity
from rollmill.profiling.device_use import DeviceUse, device_use
from rollmill.profiling.hlo import Instruction, module_name, program_key, program_number, read_instructions
from rollmill.profiling.jax_trace import JaxTrace, trace_of_programs
from rollmill.profiling.program_memory import memory_by_operation
from rollmill.profiling.results import MemoryUse, OperationMemory, Overlap, TimelineSpan
from rollmill.profiling.simulator_calls import SimulatorCalls
from rollmill.profiling.timeline import timeline
from rollmill.profiling.trace import CLOCK, MAX_EVENTS, Trace, read_trace
from rollmill.profiling.traced_programs import AssignedProgram, assigned_programs, known_program

BY_PATH = ("device", "host", "host_only", "starts")
"""Fields of `WindowTimes` whose keys are not strings."""
MAX_TEXT = 64 * 2**20
"""Maximum length of a compiled program's text, in characters, that is read."""


class RecordedWindow(NamedTuple):
    """What one process did in one window, as sums over events."""

    times: WindowTimes
    spans: tuple[TimelineSpan, ...]
    memory: tuple[MemoryUse, ...]
    """Memory of the compiled programs that contain operations."""
    every: int = 1
    """One of this many intervals was read, because of too many events. Sums are scaled to all intervals."""
    accelerators: int = 0
    """Number of accelerators that computed for the process, or 0 if its programs ran on a CPU."""

    def to_json(self) -> dict[str, Any]:
        """Returns the window in values that JSON can hold."""
        times = self.times._asdict() | {"overlap": asdict(self.times.overlap), "calls": dict(self.times.calls)}
        times |= {name: [[list(key), value] for key, value in times[name].items()] for name in BY_PATH}
        spans = [list(asdict(span).values()) for span in self.spans]
        memory = [asdict(use) for use in self.memory]
        return self._asdict() | {"times": times, "spans": spans, "memory": memory}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RecordedWindow":
        """Restores a window from the values that `to_json` returns."""
        by_path = {name: {tuple(key): value for key, value in values["times"][name]} for name in BY_PATH}
        times = WindowTimes(**{**values["times"], **by_path, "overlap": Overlap(**values["times"]["overlap"])})
        times = times._replace(
            device={path: DeviceTime(*time) for path, time in times.device.items()},
            host={HostActivity(*activity): time for activity, time in times.host.items()},
        )
        spans = tuple(TimelineSpan(*span) for span in values["spans"])
        return cls(
            **{**values, "times": times, "spans": spans, "memory": tuple(map(_memory_use, values["memory"]))}
        )


class TraceRecorder:
    """Records windows of this process, one at a time, with the JAX profiler.

    If a window has more than `most_events` events, only some intervals of it are read.
    """

    def __init__(self, *, most_events: int = MAX_EVENTS) -> None:
        self._most_events = most_events
        self._running: JaxTrace | None = None
        self._programs = _Programs()
        self._simulators = SimulatorCalls()

    @property
    def is_recording(self) -> bool:
        """True after `start`, until the recording is stopped or abandoned."""
        return self._running is not None

    def start(self) -> None:
        """Starts recording the events of this process."""
        self._running = JaxTrace()
        set_recording(True)
        self._simulators.start()
        with jax.profiler.TraceAnnotation(f"{SPAN_MARK}:{CLOCK}:{time.monotonic_ns()}"):
            pass

    def stop(self, begin: int, end: int) -> RecordedWindow:
        """Stops recording, and returns the window between `begin` and `end`, in nanoseconds of
        `time.monotonic_ns`.
        """
        return self._window(self._end_trace().stop(), begin, end)

    def stop_with_use(self, begin: int, end: int, *, read: bool) -> tuple[RecordedWindow | None, DeviceUse]:
        """Stops recording a process that uses accelerators. Returns how long they worked, and the window if
        `read`.
        """
        recorded = self._end_trace().stop()
        window = self._window(recorded, begin, end) if read else None
        return window, device_use(recorded, begin, end)

    def stop_and_read(self, classify: Classifier) -> Trace:
        """Stops recording, and returns the whole trace."""
        return read_trace(self._end_trace().stop(), classify.is_ambiguous)

    def abandon(self) -> None:
        """Stops a recording in progress and discards its events."""
        if self.is_recording:
            self._end_trace().abandon()

    def _window(self, recorded: Any, begin: int, end: int) -> RecordedWindow:
        self._programs.read_new()
        classify = Classifier(self._programs.instructions, accelerated=jax.default_backend() != "cpu")
        trace = read_trace(recorded, classify.is_ambiguous, window=(begin, end), most_events=self._most_events)
        sampled = trace.sampling.time
        first, last = sampled(begin - trace.clock_offset), sampled(end - trace.clock_offset)
        longer = (end - begin) / max(1, last - first)
        times = attribute(trace, classify, first, last).longer(longer)
        spans = [
            replace(span, start=span.start * longer, end=span.end * longer)
            for span in timeline(trace, classify, first, last)
        ]
        memory = tuple(self._programs.memory)
        return RecordedWindow(times, tuple(spans), memory, trace.sampling.every, trace.accelerators)

    def _end_trace(self) -> JaxTrace:
        """Returns the running trace, to which Rollmill's own code adds no more events."""
        assert self._running is not None, "a recording was started"
        self._simulators.stop()
        set_recording(False)
        running, self._running = self._running, None
        return running


def _memory_use(values: Mapping[str, Any]) -> MemoryUse:
    operations = tuple(
        OperationMemory(tuple(each["path"]), each["bytes"], tuple(each["course"])) for each in values["operations"]
    )
    return MemoryUse(**{**values, "operations": operations})


class _Programs:
    """The compiled programs of this process, each read once."""

    def __init__(self) -> None:
        self.instructions: dict[str, dict[str, Instruction]] = {}
        self.memory: list[MemoryUse] = []
        self._read: set[Any] = set()

    def read_new(self) -> None:
        """Reads the programs compiled since the last call."""
        with_operations = []
        for executable in jax.devices()[0].client.live_executables():
            identity = executable.fingerprint or id(executable)
            if identity not in self._read:
                self._read.add(identity)
                with_operations += [(executable, *program) for program in self._read_program(executable)]
        if with_operations:
            self._note_memory(with_operations)

    def _read_program(self, executable: Any) -> Iterator[tuple[str, bytes]]:
        """Reads a program's modules, and yields the key and serialized module of those with operations."""
        for module in executable.hlo_modules():
            text = module.to_string()
            if len(text) > MAX_TEXT:
                continue
            serialised = module.as_serialized_hlo_module_proto()
            key = program_key(module_name(text), program_number(serialised))
            instructions = self.instructions.setdefault(key, {})
            instructions.update(read_instructions(text))
            if any(path for each in instructions.values() for path in each.shares):
                yield key, serialised

    def _note_memory(self, programs: Sequence[tuple[Any, str, bytes]]) -> None:
        traced: Sequence[AssignedProgram] = ()
        with contextlib.suppress(Exception):  # some backends do not report these sizes
            traced = assigned_programs(trace_of_programs())
        for executable, key, module in programs:
            with contextlib.suppress(Exception):
                name = key.partition("/")[0]
                stats = executable.get_compiled_memory_stats()
                sizes = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes
                program = known_program(name, module, stats.temp_size_in_bytes, traced)
                operations = memory_by_operation(program, self.instructions[key]) if program else ()
                self.memory.append(MemoryUse(name, *sizes, operations))
