"""Profiles a training for a bounded time."""

import contextlib
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, cast

from rollmill.api.options import RunOptions
from rollmill.api.profiling.windows import ProfiledTraining, RecordsWorkers, Windows
from rollmill.api.sessions import Session
from rollmill.api.training import PreparedTraining, begin_training, prepare_training
from rollmill.core.bounds import Count, Range, check_bounds
from rollmill.core.errors import RollmillError
from rollmill.core.machine import hardware, versions
from rollmill.dataflow import Graph, State
from rollmill.execution import ProgramTraining, Training
from rollmill.planning import Plan
from rollmill.profiling import correction, results
from rollmill.profiling.advice import advise
from rollmill.profiling.ceilings import measure_ceilings
from rollmill.profiling.correction import EventCosts, PairedWindow
from rollmill.profiling.recording import TraceRecorder
from rollmill.profiling.summary import memory, operations, process_time

MONITORING = (3, 12)
"""Python from which on calls can be told apart without tracing every line (`sys.monitoring`)."""

REPORT_SECONDS = 0.02
"""Time between two reports of a training in one program; windows begin and end with reports."""


@dataclass(frozen=True)
class ProfileOptions:
    """How a training is profiled."""

    windows: Count = 3
    """Windows of time with the profiler; there is one more without it."""
    window_seconds: Annotated[float, Range(0.05, 600)] = 1.0
    """Shortest duration of a window without the profiler."""
    profiled_seconds: Annotated[float, Range(0.01, 60)] = 0.3
    """Shortest duration of a window with it; a window has at least one iteration."""

    def __post_init__(self) -> None:
        check_bounds(self)


class NothingProfiled(RollmillError):
    """The training ended before the first window with the profiler did."""


def profile(
    algorithm: Graph,
    options: RunOptions | None = None,
    *,
    how: ProfileOptions | None = None,
    imports: Sequence[str] = (),
    recipe: str | None = None,
    command: str = "",
    show: Callable[[str], None] = lambda line: None,
) -> results.Profile:
    """Trains for a bounded time, and says where the time goes.

    The training is an ordinary one, in a temporary run directory. Windows with the profiler and without it take
    turns until there are enough, or the training ends.

    Args:
        algorithm: a graph, such as `rollmill.ppo(env)`; it should train for longer than the windows take.
        options: how it is run, as for `rollmill.train`; the run directory is a temporary one.
        how: number and duration of windows.
        imports: modules that registered the environment.
        recipe: the recipe that the hyperparameters come from.
        command: the command line that profiles it again, for readers.
        show: shows a line to the user.

    Raises:
        UsageError: for options that cannot be used.
        NothingProfiled: the training ended before anything was measured.
    """
    how = how or ProfileOptions()
    with tempfile.TemporaryDirectory(prefix="rollmill-profile-", ignore_cleanup_errors=True) as folder:
        quiet = replace(options or RunOptions(), run_dir=Path(folder) / "run", quiet=True)
        prepared = prepare_training(algorithm, quiet, imports=imports, recipe=recipe)
        inside = correction.inside_share(TraceRecorder())
        ceilings = measure_ceilings() if prepared.program is not None else None
        show("compiled; training")
        windows, error = _trained(prepared, how, show)
        if not windows.profiled:
            reason = f": {error}" if error else "; it needs more environment steps than these"
            raise NothingProfiled(f"the training ended before a window was profiled{reason}") from error
        notes = [f"The training ended with an error: {error}"] if error else []
        return _result(prepared, windows, inside, ceilings, command, [*notes, *_notes(prepared, windows, how)])


def _trained(
    prepared: PreparedTraining, how: ProfileOptions, show: Callable[[str], None]
) -> tuple[Windows, RollmillError | None]:
    """Trains until all windows are done; returns them, and the error that ended the training before."""
    windows: Windows | None = None

    @contextlib.contextmanager
    def watched(session: Session) -> Iterator[tuple[Training, State]]:
        nonlocal windows
        with session as (training, state):
            windows = _windows_of(prepared, training, how, show)
            with contextlib.closing(windows):
                yield ProfiledTraining(training, windows), state

    error: RollmillError | None = None
    try:
        begin_training(prepared, watch=watched)
    except RollmillError as stopped_by:
        if windows is None:
            raise
        error = stopped_by
    assert windows is not None, "a session that opens makes windows"
    return windows, error


def _windows_of(
    prepared: PreparedTraining, training: Training, how: ProfileOptions, show: Callable[[str], None]
) -> Windows:
    if isinstance(training, ProgramTraining):
        training.report_seconds = REPORT_SECONDS
    has_processes = prepared.spec.read_plan().place in ("processes", "mesh", "ray")
    return Windows(
        count=how.windows,
        seconds=how.window_seconds,
        profiled_seconds=how.profiled_seconds,
        workers=cast(RecordsWorkers, training) if has_processes else None,
        show=show,
    )


def _result(
    prepared: PreparedTraining,
    windows: Windows,
    inside: float,
    ceilings: results.Ceilings | None,
    command: str,
    notes: Sequence[str],
) -> results.Profile:
    pairs, processes, iterations = windows.pairs(), windows.by_process(), windows.iterations
    costs = correction.costs(pairs, inside=inside)
    time = _iteration_time(windows, pairs)
    found = results.Profile(
        training=_training(prepared, command),
        machine=_machine(),
        iteration=time,
        book_keeping=_book_keeping(pairs, costs),
        operations=tuple(operations(processes, iterations, costs)),
        processes=tuple(process_time(process, iterations, costs, time.corrected) for process in processes),
        ceilings=ceilings,
        memory=memory(processes),
        notes=tuple(notes),
    )
    return replace(found, advice=tuple(advise(found)))


def _iteration_time(windows: Windows, pairs: Sequence[PairedWindow]) -> results.IterationTime:
    return results.IterationTime(
        unprofiled=statistics.median(span.per_iteration for span in windows.plain) * 1e-9,
        profiled=statistics.fmean(pair.profiled for pair in pairs) * 1e-9,
        corrected=statistics.fmean(correction.held_out_durations(pairs)) * 1e-9,
        iterations=windows.iterations,
        windows=len(pairs),
    )


def _book_keeping(pairs: Sequence[PairedWindow], costs: EventCosts) -> tuple[results.BookKeeping, ...]:
    programs = statistics.fmean(pair.program_events for pair in pairs)
    spans = statistics.fmean(pair.span_events for pair in pairs)
    return (
        results.BookKeeping("events of compiled programs", programs, costs.program),
        results.BookKeeping("spans of the host", spans, costs.span),
    )


def _training(prepared: PreparedTraining, command: str) -> results.ProfiledSetup:
    loops, described = prepared.algorithm.loops, prepared.config["graph"]
    return results.ProfiledSetup(
        algorithm=described["algorithm"],
        environment=described["environment"],
        command=command or shlex.join(sys.argv),
        placement=_placement(prepared.spec.read_plan()),
        fusion=prepared.options.fusion,
        num_envs=loops.num_envs,
        num_steps=loops.num_steps,
        env_steps=loops.batch_size,
    )


def _placement(plan: Plan) -> str:
    if plan.place == "program":
        replicas = plan.partition.groups[0].replicas
        return "one program" if replicas == 1 else f"one program on {replicas} devices"
    groups = ", ".join(f"{group.name} x {group.replicas}" for group in plan.partition.groups)
    return f"{groups} ({plan.place})"


def _machine() -> results.ProfiledMachine:
    machine = hardware()
    kinds = [device["kind"] for device in machine["devices"]]
    return results.ProfiledMachine(
        device=f"{len(kinds)} x {kinds[0]}" if kinds else "none",
        cores=machine["cores"],
        versions={name: version for name, version in versions().items() if version is not None},
    )


def _notes(prepared: PreparedTraining, windows: Windows, how: ProfileOptions) -> Iterator[str]:
    """Sentences about what is missing, or coarser than it could be."""
    if len(windows.profiled) < how.windows:
        yield f"Only {len(windows.profiled)} of {how.windows} windows were profiled before the training ended."
    names = {name for window in windows.profiled for name in window.processes}
    missing = {name for window in windows.profiled for name in names - window.processes.keys()}
    if missing:
        yield f"Not in all windows, and so left out: {', '.join(sorted(missing))}."
    if prepared.algorithm.host is not None and sys.version_info[:2] < MONITORING:
        yield (
            "The time in environments of Python is not divided into Python and the simulator's own code: this "
            f"needs Python {'.'.join(map(str, MONITORING))}, and this is {sys.version.split()[0]}."
        )
    if prepared.program is not None and any(prepared.program.launches or ()):
        launches = prepared.program.launches or {}
        if any(launches.get(part) for part in ("rollouts", "gradients")):
            yield "A fused kernel is one instruction: policy and environment inside it are not told apart."
