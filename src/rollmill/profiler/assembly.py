"""Builds the profile of a run from its recorded windows."""

import statistics
import sys
from collections.abc import Iterator, Sequence

import jax

from rollmill.core.errors import first_line
from rollmill.core.machine import hardware, versions
from rollmill.profiler.advice import with_advice
from rollmill.profiler.operations import operations_of
from rollmill.profiler.profiled_setup import setup_of
from rollmill.profiler.windows import Windows
from rollmill.profiling import correction, results
from rollmill.profiling.calibration import Calibration, load_or_calibrate
from rollmill.profiling.correction import EventCosts, PairedWindow
from rollmill.profiling.summary import device_activities, memory, process_time
from rollmill.training.training import PreparedTraining


def profile_of(
    prepared: PreparedTraining, windows: Windows, *, calibrate: bool, error: Exception | None, command: str
) -> results.Profile:
    """Builds a run's profile, with advice, from its windows. At least one window must have been read.

    `calibrate` repeats the calibration of the machine. `error` is the error that ended training, if any. `command`
    is the command line for profiling the run again. If it is empty, the command line of this process is used.
    """
    notes = [f"Training ended with an error: {first_line(error)}"] if error else []
    notes += _notes(prepared, windows)
    pairs, processes, calibration = windows.pairs(), windows.by_process(), _calibration(calibrate, notes)
    accelerated = jax.default_backend() != "cpu"
    if not calibration.event_nanoseconds:
        notes.append(
            "The cost of an event could not be measured in a program of known duration. --calibrate tries again."
        )
    costs = correction.costs(
        pairs, inside=calibration.inside, in_idle_time=accelerated, calibrated=calibration.event_nanoseconds
    )
    time = _iteration_time(windows, pairs, costs.calibrated)
    process_times = tuple(process_time(process, costs, time.unprofiled) for process in processes)
    found = results.Profile(
        training=setup_of(prepared, command),
        machine=_machine(),
        iteration=time,
        book_keeping=tuple(_book_keeping(windows, pairs, costs)),
        operations=tuple(operations_of(prepared, processes, costs, time.unprofiled, notes)),
        processes=process_times,
        ceilings=calibration.ceilings,
        memory=memory(processes),
        devices=device_activities(windows.activities, process_times),
        # Ray workers may be on other hosts
        cores=None if prepared.spec.read_plan().place == "ray" else windows.cores,
        windows=tuple(
            results.WindowDuration(
                1e-9 * pair.profiled,
                1e-9 * pair.unprofiled,
                pair.program_events,
                read=bool(window.processes),
                waiting=None if pair.waiting is None else 1e-9 * pair.waiting,
            )
            for pair, window in zip(pairs, windows.recorded, strict=True)
        ),
        notes=tuple(notes),
    )
    return with_advice(found)


def _iteration_time(windows: Windows, pairs: Sequence[PairedWindow], calibrated: float) -> results.IterationTime:
    unprofiled = statistics.median(span.per_iteration for span in windows.plain) * 1e-9
    return results.IterationTime(
        unprofiled=unprofiled,
        profiled=unprofiled * correction.middle_mean([pair.profiled / pair.unprofiled for pair in pairs]),
        corrected=unprofiled * correction.held_out_ratio(pairs, calibrated=calibrated),
        iterations=windows.iterations,
        windows=len(windows.profiled),
    )


def _book_keeping(
    windows: Windows, pairs: Sequence[PairedWindow], costs: EventCosts
) -> Iterator[results.BookKeeping]:
    programs = statistics.fmean(pair.program_events for pair in pairs)
    yield results.BookKeeping("events of compiled programs", programs, costs.program, costs.calibrated)
    if costs.waiting_kept is None:
        spans = statistics.fmean(pair.span_events for pair in pairs)
        yield results.BookKeeping("spans of the host", spans, costs.span)
    elif waits := windows.waits:
        longer = max(0.0, correction.middle_mean([pair.waiting or 0.0 for pair in pairs]) - costs.waiting_kept)
        yield results.BookKeeping("times that the device waits for the host", waits, longer / waits)


def _machine() -> results.ProfiledMachine:
    machine = hardware()
    kinds = [device["kind"] for device in machine["devices"]]
    return results.ProfiledMachine(
        device=f"{len(kinds)} x {kinds[0]}" if kinds else "none",
        cores=machine["cores"],
        versions={name: version for name, version in versions().items() if version is not None},
    )


def _notes(prepared: PreparedTraining, windows: Windows) -> Iterator[str]:
    """Returns notes on missing or imprecise parts of a profile."""
    if not windows.done:
        yield f"Training ended after {len(windows.recorded)} of {windows.planned} windows with the profiler."
    if windows.left_out:
        yield (
            f"{windows.left_out} further windows with the profiler were left out, because iterations are long. "
            "They would lower the error of the profiler's correction."
        )
    if len(windows.profiled) == 1:
        yield "Operations come from a single window, so their shares are rough."
    if windows.incomplete:
        yield (
            "Left out: windows in which a worker was lost or did not report its recording in time "
            f"({len(windows.incomplete)}: {', '.join(windows.lost_workers)})."
        )
    yield from _silent_workers(windows)
    if (every := max(each.every for window in windows.profiled for each in window.processes.values())) > 1:
        yield (
            f"Windows had too many events to read them all: one of every {every} ms was read and represents the "
            "rest."
        )
    if prepared.algorithm.host is not None and sys.version_info < (3, 12):
        yield "Before Python 3.12, a simulator's own code cannot be distinguished from the Python code around it."


def _silent_workers(windows: Windows) -> Iterator[str]:
    """Returns notes on recorded workers without events."""
    for process in windows.by_process():
        empty = sum(not each.times.program_events and not each.times.span_events for each in process.windows)
        if empty:
            yield (
                f"{process.name} recorded no events in {empty} of {len(process.windows)} windows, so its "
                "activity in them is not known."
            )


def _calibration(calibrate: bool, notes: list[str]) -> Calibration:
    """Returns the calibration of this machine. If it cannot be measured, the calibration says nothing, and there
    is a note.
    """
    try:
        return load_or_calibrate(fresh=calibrate)
    except jax.errors.JaxRuntimeError as error:
        notes.append(f"The machine's peaks and the cost of an event could not be measured: {first_line(error)}")
        return Calibration(machine="", inside=1.0, event_nanoseconds=0.0, ceilings=None)
