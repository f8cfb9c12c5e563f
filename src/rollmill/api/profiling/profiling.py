"""Profiles a training for a bounded time."""

import contextlib
import math
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple, cast

import jax

from rollmill.api.options import RunOptions
from rollmill.api.placing import choose_plan
from rollmill.api.profiling.library_kernels import measure_library_shares
from rollmill.api.profiling.windows import ProfiledTraining, RecordsWorkers, Windows
from rollmill.api.recorder import default_log_every
from rollmill.api.sessions import Session
from rollmill.api.training import PreparedTraining, begin_training, prepare_training
from rollmill.core.bounds import Range, check_bounds
from rollmill.core.errors import RollmillError, UsageError
from rollmill.core.machine import hardware, versions
from rollmill.dataflow import Graph, State, first_learning_iteration
from rollmill.execution import CompiledProgram, ProgramTraining, Training
from rollmill.execution.instances import GpuActivity, watched_gpus
from rollmill.execution.program.kernel_parts import rollout_parts
from rollmill.execution.program.kernels import possible_fusion
from rollmill.fusion import CannotFuse, backend_of
from rollmill.planning import Plan
from rollmill.profiling import correction, results
from rollmill.profiling.advice import with_advice
from rollmill.profiling.calibration import Calibration, calibrated
from rollmill.profiling.classes import ROLLOUT_KERNEL_PATH
from rollmill.profiling.correction import EventCosts, PairedWindow
from rollmill.profiling.summary import device_activities, divide, memory, operations, process_time

MOST_UNNAMED = 0.01
"""Share of the device's time that kernels of libraries may have without being divided among operations."""
REPORT_SECONDS = 0.02
"""Time between two reports of a training in one program; windows begin and end with reports."""


@dataclass(frozen=True)
class ProfileOptions:
    """How a training is profiled."""

    windows: Annotated[int, Range(1, 1000)] = 3
    """Windows of time with the profiler; before and after each there is one without it."""
    unread_windows: Annotated[int, Range(0, 1000)] = 4
    """Further windows with the profiler after each of these, which tell only how much longer it makes an
    iteration, and how long a GPU waits."""
    window_seconds: Annotated[float, Range(0.05, 600)] = 0.5
    """Shortest duration of a window without the profiler."""
    profiled_seconds: Annotated[float, Range(0.01, 60)] = 0.3
    """Shortest duration of a window with it; a window has at least one iteration."""
    calibrate: bool = False
    """Measure this machine's peaks and the profiler's cost of an event again, instead of taking them from the
    cache; on an idle machine."""

    def __post_init__(self) -> None:
        check_bounds(self)


class NothingProfiled(RollmillError):
    """The training ended before the first window with the profiler did."""


class ProfilingStopped(RollmillError):
    """A signal or an error ended the training before all windows were done.

    Args:
        reason: the signal or the error.
        code: the exit code: of a signal, 128 plus its number.
        found: the profile by the windows that were done; None if none was.
    """

    def __init__(self, reason: str, code: int, found: results.Profile | None) -> None:
        seen = 0 if found is None else found.iteration.windows
        when = f"after {seen} window{'s' if seen > 1 else ''}" if seen else "before a window was profiled"
        super().__init__(f"stopped {when}, by {reason}")
        self.exit_code = code
        self.profile = found


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
        imports: modules that registered the environment, network or algorithm.
        recipe: the recipe that the hyperparameters come from.
        command: the command line that profiles it again, for readers.
        show: shows a line to the user.

    Raises:
        UsageError: for options that cannot be used.
        NothingProfiled: the training ended before anything was measured.
        ProfilingStopped: a signal or an error ended the training; it has the profile of what was measured.
    """
    how = how or ProfileOptions()
    with tempfile.TemporaryDirectory(prefix="rollmill-profile-", ignore_cleanup_errors=True) as folder:
        quiet = replace(options or RunOptions(), run_dir=Path(folder) / "run", quiet=True)
        prepared = prepare_training(algorithm, quiet, imports=imports, recipe=recipe)
        show("compiled; training")
        windows, error, code = _trained(prepared, how, show)
        stopped_by = _reason(error, code) if not windows.done else None
        if not windows.profiled:
            if stopped_by is not None:
                raise ProfilingStopped(stopped_by, code, None) from error
            raise NothingProfiled(
                "the training ended before a window was profiled; it needs more environment steps:"
                " leave out --total-timesteps"
            )
        notes = [f"The training ended with an error: {_first_line(error)}"] if error else []
        notes += _notes(prepared, windows, how)
        found = _result(prepared, windows, _calibration(how, notes), command, notes)
        if stopped_by is not None:
            raise ProfilingStopped(stopped_by, code, found) from error
        return found


class _Trained(NamedTuple):
    windows: Windows
    error: Exception | None
    """The error that ended the training."""
    code: int
    """The exit code of the training."""


def _reason(error: Exception | None, code: int) -> str | None:
    """The signal or the error that ended a training with this exit code; None if it came to its end."""
    if code > 128:
        return f"{signal.Signals(code - 128).name}."
    if error is None:
        return None
    return f"an error: {error}" if isinstance(error, RollmillError) else f"{type(error).__name__}: {error}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _calibration(how: ProfileOptions, notes: list[str]) -> Calibration:
    """The calibration of this machine; if it cannot be measured, one that says nothing, and a note."""
    try:
        return calibrated(fresh=how.calibrate)
    except jax.errors.JaxRuntimeError as error:
        notes.append(f"The machine's peaks and the cost of an event could not be measured: {_first_line(error)}")
        return Calibration(machine="", inside=1.0, event_nanoseconds=0.0, ceilings=None)


def _trained(prepared: PreparedTraining, how: ProfileOptions, show: Callable[[str], None]) -> _Trained:
    """Trains until all windows are done."""
    windows: Windows | None = None

    @contextlib.contextmanager
    def watched(session: Session) -> Iterator[tuple[Training, State]]:
        nonlocal windows
        with session as (training, state), _activity() as activity:
            windows = _windows_of(prepared, training, how, activity, show)
            with contextlib.closing(windows):
                yield ProfiledTraining(training, windows), state

    error: Exception | None = None
    try:
        code = begin_training(prepared, watch=watched).exit_code
    except Exception as ended_by:  # of any kind: what was measured must not be lost
        if windows is None:
            raise
        error = ended_by
        code = error.exit_code if isinstance(error, RollmillError) else 1
    assert windows is not None, "a session that opens makes windows"
    return _Trained(windows, error, code)


def _activity() -> contextlib.AbstractContextManager[GpuActivity]:
    """The driver's figures of GPUs, where JAX computes on some."""
    return watched_gpus() if jax.default_backend() == "gpu" else contextlib.nullcontext(GpuActivity())


def _windows_of(
    prepared: PreparedTraining,
    training: Training,
    how: ProfileOptions,
    activity: GpuActivity,
    show: Callable[[str], None],
) -> Windows:
    if isinstance(training, ProgramTraining):
        training.report_seconds = REPORT_SECONDS
    has_processes = prepared.spec.read_plan().place in ("processes", "mesh", "ray")
    return Windows(
        count=how.windows,
        unread=how.unread_windows,
        seconds=how.window_seconds,
        profiled_seconds=how.profiled_seconds,
        workers=cast(RecordsWorkers, training) if has_processes else None,
        activity=activity,
        learns_from=first_learning_iteration(prepared.algorithm),
        show=show,
    )


def _result(
    prepared: PreparedTraining,
    windows: Windows,
    calibration: Calibration,
    command: str,
    notes: Sequence[str],
) -> results.Profile:
    pairs, processes, notes = windows.pairs(), windows.by_process(), list(notes)
    accelerated = jax.default_backend() != "cpu"
    if not calibration.event_nanoseconds:
        notes.append("The cost of an event in a program of known duration was not found; --calibrate tries again.")
    costs = correction.costs(
        pairs, inside=calibration.inside, in_idle_time=accelerated, calibrated=calibration.event_nanoseconds
    )
    time = _iteration_time(windows, pairs, costs.calibrated)
    process_times = tuple(process_time(process, costs, time.unprofiled) for process in processes)
    found = results.Profile(
        training=_training(prepared, command),
        machine=_machine(),
        iteration=time,
        book_keeping=tuple(_book_keeping(windows, pairs, costs)),
        operations=tuple(_operations(prepared, windows, costs, time.unprofiled, notes)),
        processes=process_times,
        ceilings=calibration.ceilings,
        memory=memory(processes),
        devices=device_activities(windows.activities, process_times),
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


def _training(prepared: PreparedTraining, command: str) -> results.ProfiledSetup:
    loops, described, options = prepared.algorithm.loops, prepared.config["graph"], prepared.options
    plan = prepared.spec.read_plan()
    return results.ProfiledSetup(
        algorithm=described["algorithm"],
        environment=described["environment"],
        command=command or shlex.join(sys.argv),
        placement=_placement(plan),
        fusion=options.fusion,
        num_envs=loops.num_envs,
        num_steps=loops.num_steps,
        env_steps=loops.batch_size * options.num_seeds,
        num_seeds=options.num_seeds,
        possible_fusion=_possible_fusion(prepared, plan),
        replicas=sum(group.replicas for group in plan.partition.groups),
        can_be_asynchronous=_can_be_asynchronous(prepared),
        log_every=options.log_every or default_log_every(prepared.algorithm),
        checkpoint_seconds=options.checkpoint_seconds if math.isfinite(options.checkpoint_seconds) else None,
        checkpoint_iterations=options.checkpoint_iterations,
    )


def _possible_fusion(prepared: PreparedTraining, plan: Plan) -> str:
    graph, options = prepared.algorithm, prepared.options
    if plan.place not in ("program", "mesh") or graph.host is not None or options.num_seeds > 1:
        return "off"
    if options.fusion == "full":  # it was
        return "full"
    return possible_fusion(graph, options.numerics)


def _can_be_asynchronous(prepared: PreparedTraining) -> bool:
    if prepared.options.asynchronous:
        return False
    try:
        choose_plan(prepared.algorithm, replace(prepared.options, asynchronous=True))
    except UsageError:
        return False
    return True


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
    if len(windows.profiled) == 1:
        yield "Operations are those of one window, so their shares are rough."
    if 1 < len(windows.recorded) < (planned := how.windows * (1 + how.unread_windows)):
        yield f"The training ended after {len(windows.recorded)} of {planned} windows: the error is less certain."
    if windows.incomplete:
        missing = frozenset[str]().union(*(window.missing for window in windows.incomplete))
        yield (
            f"Left out: windows in which a worker was lost, or did not tell in time what it recorded"
            f" ({len(windows.incomplete)}: {', '.join(sorted(missing))})."
        )
    if (every := max(each.every for window in windows.profiled for each in window.processes.values())) > 1:
        yield f"Windows had too many events to read: of every {every} ms one was read, and stands for all."
    if prepared.algorithm.host is not None and sys.version_info < (3, 12):
        yield "Before Python 3.12 a simulator's own code cannot be told apart from the Python code around it."


def _operations(
    prepared: PreparedTraining, windows: Windows, costs: EventCosts, iteration: float, notes: list[str]
) -> list[results.OperationTime]:
    """The operations; kernels of libraries, and a rollout kernel, are divided among those that they work for.

    Where there are workers, the process that coordinates them waits, and has no part in the time of an iteration.
    """
    processes = windows.by_process()
    workers = [process for process in processes if process.name != results.THIS_PROCESS]
    found = operations(workers or processes, costs, iteration)
    if prepared.program is None:
        notes += _not_divided(found)
        return found
    found = _with_libraries_divided(found, prepared, prepared.program, notes)
    return _with_rollouts_divided(found, prepared, prepared.program, notes)


def _not_divided(found: Sequence[results.OperationTime]) -> Iterator[str]:
    """Sentences about kernels that are divided among operations only where this process computes."""
    if _has_unnamed_kernels(found):
        yield f"Kernels of libraries are divided only in one program; in workers they are `{results.UNNAMED}`."
    if any(operation.path == ROLLOUT_KERNEL_PATH for operation in found):
        yield "A rollout kernel is divided into policy and environment only in one program."


def _has_unnamed_kernels(found: Sequence[results.OperationTime]) -> bool:
    unnamed = sum(operation.device for operation in found if operation.path[0] == results.UNNAMED)
    whole = sum(operation.device for operation in found)
    return jax.default_backend() != "cpu" and unnamed > MOST_UNNAMED * whole


def _with_libraries_divided(
    found: list[results.OperationTime], prepared: PreparedTraining, program: CompiledProgram, notes: list[str]
) -> list[results.OperationTime]:
    if not _has_unnamed_kernels(found):
        return found
    try:
        shares = measure_library_shares(prepared, program)
    except jax.errors.JaxRuntimeError as error:
        notes.append(f"Kernels of libraries are not divided among operations: {_first_line(error)}")
        return found
    for kernel, parts in shares.items():
        found = divide(found, kernel, parts)
    notes.append("Kernels of libraries are divided as in a program that starts each instruction by itself.")
    return found


def _with_rollouts_divided(
    found: list[results.OperationTime], prepared: PreparedTraining, program: CompiledProgram, notes: list[str]
) -> list[results.OperationTime]:
    launch, graph, devices = (program.launches or {}).get("rollouts"), prepared.algorithm, program.devices
    if launch is None or all(operation.path != ROLLOUT_KERNEL_PATH for operation in found):
        return found
    backend = backend_of(devices[0], prepared.options.numerics)
    try:
        parts = rollout_parts(graph, backend, tuple(launch), graph.loops.num_envs // len(devices))
    except (CannotFuse, jax.errors.JaxRuntimeError) as error:
        notes.append(f"The rollout kernel is not divided into policy and environment: {_first_line(error)}")
        return found
    notes.append("A rollout kernel's parts are estimates: kernels without one of them were timed.")
    shares = {("collect", "environment"): parts.environment, ("collect", "policy"): parts.policy}
    return divide(found, ROLLOUT_KERNEL_PATH, {**shares, ROLLOUT_KERNEL_PATH: parts.rest})
