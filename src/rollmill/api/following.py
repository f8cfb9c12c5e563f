"""Trains with workers: records what their coordinator tells, and asks it for checkpoints."""

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from rollmill.api.deployment import deployed
from rollmill.api.options import RunOptions
from rollmill.api.recorder import Recorder, Run
from rollmill.core.errors import NonFiniteError, RollmillError
from rollmill.dataflow import Graph
from rollmill.execution import is_finite
from rollmill.execution.coordination.coordinator import Coordinator
from rollmill.execution.coordination.reports import MetricsRows, Notice, RolledBack, Saved, StartedUp
from rollmill.execution.faults.replay import MESSAGE
from rollmill.planning import Plan
from rollmill.record import (
    Checkpoints,
    Display,
    MetricsLog,
    Restored,
    RunDirectory,
    StopRequest,
    stop_on_signals,
    write_json,
)

TERMINATE_SECONDS = 20.0
"""How long the end of a training is waited for after a SIGTERM. Who sends it often sends SIGKILL after 30."""


class StopOverdue(RollmillError):
    """A training that was to stop is held up by one of its workers; its newest checkpoint is kept."""

    exit_code = 143


def train_with_workers(
    run: RunDirectory,
    algorithm: Graph,
    plan: Plan,
    options: RunOptions,
    display: Display,
    checkpoints: Checkpoints,
    restored: Restored | None,
    *,
    described: dict[str, Any],
    imports: Sequence[str],
) -> Run:
    """Trains from the checkpoint that was restored, or from the beginning; the caller holds the run.

    Raises:
        LostWorker: a worker was lost too many times in a row.
        EnvironmentFailed: an environment failed too many times in a row.
        NonFiniteError: a number of an iteration is not finite.
        StopOverdue: a SIGTERM came, and a worker does not end its iteration.
    """
    first = restored.iteration if restored else 0
    with stop_on_signals() as stop:
        with (
            deployed(
                algorithm,
                plan,
                run,
                options,
                described=described,
                imports=imports,
                begin_with=(first, restored.state) if restored else None,
                display=display,
            ) as (coordinator, blank),
            MetricsLog(run, tensorboard=options.tensorboard, resume_from=first) as log,
        ):
            recorder = Recorder(run, algorithm, options, 0.0, checkpoints, log, display)
            recorder.begin(restored, restored.state if restored else blank)
            with _noting_faults(run):
                _follow(coordinator, recorder, display, stop, run, _advice(algorithm, run))
        checkpoints.wait()
        summary = recorder.finish(stopped_by=stop.signal_name)
        if recorder.every_episode_failed:
            display.note("every episode of this run failed: its environment raised, hung or ended its process")
    if summary["status"] == "stopped":
        return Run(run.root, summary, stop.exit_code)
    return Run(run.root, summary, 1 if recorder.every_episode_failed else 0)


def _follow(
    coordinator: Coordinator,
    recorder: Recorder,
    display: Display,
    stop: StopRequest,
    run: RunDirectory,
    advice: str,
) -> None:
    for told in coordinator.run(partial(_is_stopping, stop, coordinator, run)):
        match told:
            case MetricsRows(first, rows):
                recorder.record(first, rows)
                _stop_at_fault(first, rows, advice)
                if recorder.is_due(first + len(rows)):
                    coordinator.want_state()
            case Saved(iteration, state):
                recorder.save_if_due(iteration, state, now=True)
            case RolledBack(iteration):
                recorder.rewind(iteration)
            case StartedUp(so_far):
                recorder.started_up(so_far.compiling, so_far.total)
            case Notice(text):
                display.note(text)


@contextlib.contextmanager
def _noting_faults(run: RunDirectory) -> Iterator[None]:
    """Keeps what a number that is not finite says of itself, for `rollmill doctor`."""
    if run.fault.has(MESSAGE):
        run.fault.remove(MESSAGE)
    try:
        yield
    except NonFiniteError as error:
        run.fault.make()
        write_json(run.fault, MESSAGE, {"message": str(error)})
        raise


def _is_stopping(stop: StopRequest, coordinator: Coordinator, run: RunDirectory) -> bool:
    """Whether the training is to stop.

    Raises:
        StopOverdue: it was, by a SIGTERM or SIGHUP, and does not come to an end.
    """
    if stop.signal_name in ("SIGTERM", "SIGHUP") and stop.seconds > TERMINATE_SECONDS:
        raise StopOverdue(
            f"{stop.signal_name} came {stop.seconds:.0f} s ago, and this is still at work: "
            f"{coordinator.waited_for}\n"
            f"The run ends with its newest checkpoint; go on with\n  rollmill resume {shlex.quote(str(run.root))}"
        )
    return stop.requested


def _advice(algorithm: Graph, run: RunDirectory) -> str:
    """How to find what made a number that is not finite."""
    if algorithm.host is not None:
        return (
            "All rewards and observations were finite, so it came up in learning from them.\n"
            "hint: a smaller learning_rate or max_grad_norm, or normalize_observations and normalize_rewards."
        )
    resume = f"rollmill resume {shlex.quote(str(run.root))} --distribution gpu-only"
    return f"To find the step and the line, go on from the last checkpoint in one program: {resume}"


def _stop_at_fault(first: int, rows: Sequence[dict], advice: str) -> None:
    for offset, row in enumerate(rows):
        if is_finite(row):
            continue
        guilty = [name.removeprefix("finite/") for name, value in row.items() if not is_finite({name: value})]
        raise NonFiniteError(
            f"{' and '.join(guilty) or 'the loss'} gave a number that is not finite at iteration "
            f"{first + offset + 1}. {advice}"
        )
