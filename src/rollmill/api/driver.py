"""Runs a training, in whatever way, and records what it reports."""

import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import jax

from rollmill.api.options import RunOptions
from rollmill.api.recorder import Recorder, Run
from rollmill.core.errors import RollmillError
from rollmill.core.operations import span
from rollmill.dataflow import Graph, State
from rollmill.execution.instances import GpuActivity, watched_gpus
from rollmill.execution.reports import MetricsRows, Notice, RolledBack, Saved, StartedUp, Training
from rollmill.record import Checkpoints, Display, MetricsLog, Restored, RunDirectory, StopRequest, stop_on_signals

TERMINATE_SECONDS = 20.0
"""How long the end of a training is waited for after a SIGTERM. Who sends it often sends SIGKILL after 30."""


class StopOverdue(RollmillError):
    """A training that was to stop is held up by one of its workers; its newest checkpoint is kept."""

    exit_code = 143


def drive(
    session: AbstractContextManager[tuple[Training, State]],
    run: RunDirectory,
    graph: Graph,
    options: RunOptions,
    display: Display,
    checkpoints: Checkpoints,
    restored: Restored | None,
) -> Run:
    """Runs a training from the checkpoint that was restored, or from the beginning; the caller holds the run.

    Args:
        session: gives the training and its first state, and closes it.
        run: where it is recorded.
        graph: what is trained.
        options: how often to save and log.
        display: shows progress.
        checkpoints: of the run.
        restored: the checkpoint to go on from.

    Raises:
        LostWorker: a worker was lost too many times in a row.
        EnvironmentFailed: an environment failed too many times in a row.
        NonFiniteError: a number of an iteration is not finite.
        StopOverdue: a SIGTERM came, and a worker does not end its iteration.
    """
    first = restored.iteration if restored else 0
    with stop_on_signals() as stop:
        with (
            session as (training, state),
            MetricsLog(run, tensorboard=options.tensorboard, resume_from=first) as log,
            _activity() as gpus,
        ):
            recorder = Recorder(run, graph, options, checkpoints, log, display, gpus)
            recorder.begin(restored, state)
            _follow(training, recorder, display, partial(_is_stopping, stop, training, run))
        checkpoints.wait()
        summary = recorder.finish(stopped_by=stop.signal_name)
        if recorder.every_episode_failed:
            display.note("every episode of this run failed: its environment raised, hung or ended its process")
    if summary["status"] == "stopped":
        return Run(run.root, summary, stop.exit_code)
    return Run(run.root, summary, 1 if recorder.every_episode_failed else 0)


def _activity() -> AbstractContextManager[GpuActivity]:
    """The activity of GPUs, where JAX computes on some."""
    return watched_gpus() if jax.default_backend() == "gpu" else nullcontext(GpuActivity())


def _follow(training: Training, recorder: Recorder, display: Display, stopping: Callable[[], bool]) -> None:
    for report in training.run(stopping):
        match report:
            case MetricsRows():
                with span("metrics log", "storage"):
                    is_due = recorder.is_due(recorder.record(report))
                if is_due:
                    training.request_snapshot()
            case Saved(iteration, state):
                with span("checkpoint", "storage"):
                    recorder.save(iteration, state)
            case RolledBack(iteration):
                recorder.rewind(iteration)
            case StartedUp(so_far):
                recorder.started_up(so_far.compiling, so_far.total)
            case Notice(text):
                display.note(text)


def _is_stopping(stop: StopRequest, training: Training, run: RunDirectory) -> bool:
    """Whether the training is to stop.

    Raises:
        StopOverdue: it was, by a SIGTERM or SIGHUP, and its workers do not come to an end.
    """
    overdue = stop.signal_name in ("SIGTERM", "SIGHUP") and stop.seconds > TERMINATE_SECONDS
    if overdue and (workers := training.waited_for):
        raise StopOverdue(
            f"{stop.signal_name} came {stop.seconds:.0f} s ago, and this is still at work: {workers}\n"
            f"The run ends with its newest checkpoint; go on with\n  rollmill resume {shlex.quote(str(run.root))}"
        )
    return stop.requested
