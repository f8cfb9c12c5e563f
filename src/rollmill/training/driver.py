"""Drives a run, in one program or with workers, and records its reports."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial

import jax

from rollmill.core.errors import EnvironmentFailed, NonFiniteError, RollmillError
from rollmill.core.operations import span
from rollmill.core.stored_paths import url_of
from rollmill.dataflow import Graph
from rollmill.gpus.activity import GpuActivity, watched_gpus
from rollmill.gpus.claims import release_claim, settle_claim
from rollmill.hooks import FailureKind, FailureReported, Hook, stop_at_return
from rollmill.record.checkpoints import Checkpoints
from rollmill.record.display import Display
from rollmill.record.metrics import MetricsLog
from rollmill.record.run_directory import RunDirectory
from rollmill.record.signals import StopRequest, stop_on_signals
from rollmill.runs.options import RunOptions
from rollmill.training.hook_calls import HookCalls
from rollmill.training.preparing import PreparedTraining
from rollmill.training.recorder import Recorder, Run
from rollmill.training.sessions import Session, open_session
from rollmill.workers.reports import (
    LaunchesChosen,
    LostWorker,
    MetricsRows,
    Notice,
    ReductionChosen,
    RolledBack,
    Saved,
    StartedUp,
    Training,
)

FAILURES: dict[type[Exception], FailureKind] = {
    NonFiniteError: "number",
    EnvironmentFailed: "environment",
    LostWorker: "worker",
}
"""Kind of failure for each class of errors that end a run."""

TERMINATE_SECONDS = 20.0
"""Maximum time that a run waits for its workers after a SIGTERM, since SIGKILL often follows after 30 seconds."""


class StopOverdue(RollmillError):
    """Raised if a worker does not reach the end of its iteration in time after a stop was requested. The newest
    checkpoint is kept.
    """

    exit_code = 143


def drive(
    prepared: PreparedTraining,
    run: RunDirectory,
    checkpoints: Checkpoints,
    *,
    hooks: Sequence[Hook] = (),
    keeps_choices: bool = True,
    watch: Callable[[Session], Session] = lambda session: session,
) -> Run:
    """Trains a prepared run to its end, and records it in a run directory that the caller has locked.

    Args:
        prepared: the checked and compiled run.
        run: directory in which the run is recorded.
        checkpoints: the checkpoints of the run.
        hooks: functions that are called with the events of the run.
        keeps_choices: whether the run records choices that workers made by timing. False if the run continues
            elsewhere only this time.
        watch: optional function that wraps the training session.

    Raises:
        LostWorker: a worker was lost too many times in a row.
        EnvironmentFailed: an environment failed too many times in a row.
        NonFiniteError: a value in an iteration is not finite.
        StopOverdue: a worker did not end its iteration in time after a SIGTERM.
        HookFailed: a hook raised an exception. A checkpoint was saved.
        SystemExit: a hook exited. A checkpoint was saved.
    """
    options, display, restored = prepared.options, prepared.display, prepared.restored
    calls = HookCalls([*_hooks_of(options), *tracking(options, display, prepared.algorithm), *hooks], display.note)
    first = restored.iteration if restored else 0
    with stop_on_signals() as stop:
        with (
            _claim(),
            watch(open_session(prepared, run)) as (training, state),
            MetricsLog(run, tensorboard=options.tensorboard, resume_from=first) as log,
            _activity() as gpus,
        ):
            recorder = Recorder(prepared, run, checkpoints, log, gpus, calls, keeps_choices=keeps_choices)
            with _reporting_failure(recorder, calls):
                recorder.begin(state)
                _follow(
                    training, recorder, calls, display, partial(_is_stopping, stop, calls, training, run), stop
                )
        with _reporting_failure(recorder, calls):
            checkpoints.wait()
            summary = recorder.finish(signal_name=stop.signal_name)
            if recorder.episodes.every_one_failed:
                display.note(
                    "every episode of this run failed, because the environment raised an exception, hung or "
                    "ended its process"
                )
    if calls.failure is not None:
        raise calls.failure
    if calls.exit is not None:
        raise calls.exit
    code = 1 if recorder.episodes.every_one_failed else 0
    return Run(run.root, summary, stop.exit_code if summary["status"] == "stopped" and stop.requested else code)


@contextmanager
def _claim() -> Iterator[None]:
    """Ends the claim of this process to memory with the training."""
    try:
        yield
    finally:
        release_claim()


def _hooks_of(options: RunOptions) -> list[Hook]:
    """Returns the hooks that the options of a run ask for."""
    if options.stop_at_return is None:
        return []
    evaluated = options.evaluate_every is not None
    return [stop_at_return(options.stop_at_return, evaluated=evaluated, kind=options.return_of)]


def check_tracking(options: RunOptions) -> None:
    """Raises a `UsageError` if a tracker of a run is unknown or cannot be imported."""
    if options.track:
        from rollmill.hooks.tracking import check_trackers
        from rollmill.training.video_log import video_log

        check_trackers(options.track, others={"video": video_log})


def tracking(options: RunOptions, display: Display, algorithm: Graph | None = None) -> list[Hook]:
    """Returns the hooks for the trackers of a run, which print their warnings even if the run is quiet.

    `algorithm` is the trained graph, or None if several runs share a program.
    """
    if not options.track:
        return []
    from rollmill.hooks.tracking import trackers  # imported here, because few runs need it
    from rollmill.training.video_log import video_log

    others = {"video": partial(video_log, algorithm)}
    return trackers(options.track, warnings_of(options, display), others=others)


def warnings_of(options: RunOptions, display: Display) -> Callable[[str], None]:
    """Returns a function that prints a warning to the user, even if the options contain `quiet`."""
    return _print_warning if options.quiet else display.note


def copy_to_store(run: RunDirectory, options: RunOptions, display: Display) -> AbstractContextManager[None]:
    """Context manager that copies a run to its object store, if it has one. See `mirror.mirror_run`."""
    url = url_of(run.root)
    if url is None:
        return nullcontext()
    from rollmill.record.mirror import mirror_run  # imported here, because only object stores need it

    return mirror_run(run, url, display.note, warnings_of(options, display))


def _print_warning(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads the output any more
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _reporting_failure(recorder: Recorder, calls: HookCalls) -> Iterator[None]:
    """Tells hooks of an error that ends the training."""
    try:
        yield
    except Exception as error:
        calls.emit(FailureReported(**recorder.place, kind=_kind_of(error), message=str(error), ends=True))
        raise


def _kind_of(error: Exception) -> FailureKind:
    for kind, name in FAILURES.items():
        if isinstance(error, kind):
            return name
    return "other"


def _activity() -> AbstractContextManager[GpuActivity]:
    """Returns the activity of GPUs, where JAX computes on some."""
    return watched_gpus() if jax.default_backend() == "gpu" else nullcontext(GpuActivity())


def _follow(
    training: Training,
    recorder: Recorder,
    calls: HookCalls,
    display: Display,
    stopping: Callable[[], bool],
    signals: StopRequest,
) -> None:
    for report in training.run(stopping):
        match report:
            case MetricsRows():
                settle_claim()
                if signals.take_checkpoint_request():
                    display.note("SIGUSR1: saving a checkpoint")
                    recorder.request_checkpoint()
                with span("metrics log", "storage"):
                    wants_state = recorder.wants_state(recorder.record(report))
                if wants_state:
                    training.request_snapshot()
            case Saved(iteration, state):
                with span("checkpoint", "storage"):
                    recorder.keep(iteration, state, stopping=stopping(), signalled=signals.requested)
            case StartedUp() | LaunchesChosen() | ReductionChosen() | RolledBack():
                _note(report, recorder)
            case Notice():
                _show(report, recorder, calls, display)


def _note(report: StartedUp | LaunchesChosen | ReductionChosen | RolledBack, recorder: Recorder) -> None:
    match report:
        case StartedUp(so_far):
            recorder.started_up(so_far.compiling, so_far.total)
        case LaunchesChosen(launches):
            recorder.keep_launches(launches)
        case ReductionChosen(reduction):
            recorder.keep_reduction(reduction)
        case RolledBack(iteration):
            recorder.rewind(iteration)


def _show(notice: Notice, recorder: Recorder, calls: HookCalls, display: Display) -> None:
    display.note(notice.text)
    if notice.wants_checkpoint:
        recorder.request_checkpoint()
    if notice.failed is not None:
        calls.emit(FailureReported(**recorder.place, kind=notice.failed, message=notice.text, ends=False))


def _is_stopping(stop: StopRequest, calls: HookCalls, training: Training, run: RunDirectory) -> bool:
    if stop.signal_name in ("SIGTERM", "SIGHUP"):
        _check_not_overdue(stop, training, run)
    return stop.requested or calls.stopping


def _check_not_overdue(stop: StopRequest, training: Training, run: RunDirectory) -> None:
    """Checks that a run stopped by a signal can still end on its own."""
    reason = ""
    if hosts := training.unreachable_workers:
        reason = f"there is no response from {hosts}"
    elif stop.seconds > TERMINATE_SECONDS and (workers := training.waited_for):
        reason = f"these workers are still busy: {workers}"
    if reason:
        raise StopOverdue(
            f"{stop.signal_name} arrived {stop.seconds:.0f} s ago, and {reason}\nThe run ends with its newest "
            f"checkpoint. Resume with\n  {run.command('resume')}"
        )
