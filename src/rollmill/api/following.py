"""Trains with workers: records what their coordinator tells, and asks it for checkpoints."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from rollmill.api.deployment import deployed
from rollmill.api.options import RunOptions
from rollmill.api.recorder import Recorder, Run, open_checkpoints
from rollmill.core.errors import NonFiniteError
from rollmill.dataflow import Graph
from rollmill.execution import is_finite, state_shapes
from rollmill.execution.coordinator import Coordinator, Notice, Rewound, Rows, Saved
from rollmill.planning import Plan
from rollmill.record import Display, MetricsLog, RunDirectory, StopRequest, stop_on_signals


def train_with_workers(
    run: RunDirectory,
    algorithm: Graph,
    plan: Plan,
    options: RunOptions,
    display: Display,
    *,
    described: dict[str, Any],
    imports: Sequence[str],
) -> Run:
    """Trains from the newest checkpoint, or from the beginning.

    Raises:
        LostWorker: a worker was lost too many times in a row.
        NonFiniteError: a number of an iteration is not finite.
    """
    with (
        contextlib.closing(display),
        run.lock(),
        stop_on_signals() as stop,
        open_checkpoints(run, options) as checkpoints,
    ):
        restored = checkpoints.restore(state_shapes(algorithm))
        first = restored.iteration if restored else 0
        if first >= algorithm.loops.iterations and run.read_summary() is not None:
            display.note("this run is finished already; nothing was changed")
            return Run(run.root, run.read_summary() or {}, 0)
        began = time.perf_counter()
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
            recorder = Recorder(run, algorithm, options, time.perf_counter() - began, checkpoints, log, display)
            recorder.begin(restored, restored.state if restored else blank)
            _follow(coordinator, recorder, display, stop, run)
        checkpoints.wait()
        summary = recorder.finish(stopped_by=stop.signal_name)
    return Run(run.root, summary, stop.exit_code if summary["status"] == "stopped" else 0)


def _follow(
    coordinator: Coordinator, recorder: Recorder, display: Display, stop: StopRequest, run: RunDirectory
) -> None:
    for told in coordinator.run(lambda: stop.requested):
        match told:
            case Rows(first, rows):
                recorder.record(first, rows)
                _stop_at_fault(first, rows, run)
                if recorder.is_due(first + len(rows)):
                    coordinator.want_state()
            case Saved(iteration, state):
                recorder.save_if_due(iteration, state, now=True)
            case Rewound(iteration):
                recorder.rewind(iteration)
            case Notice(text):
                display.note(text)


def _stop_at_fault(first: int, rows: Sequence[dict], run: RunDirectory) -> None:
    for offset, row in enumerate(rows):
        if is_finite(row):
            continue
        guilty = [name.removeprefix("finite/") for name, value in row.items() if not is_finite({name: value})]
        raise NonFiniteError(
            f"{' and '.join(guilty) or 'the loss'} gave a number that is not finite at iteration "
            f"{first + offset + 1}. To find the step and the line, go on from the last checkpoint in one "
            f"program: rollmill resume {run.root} --distribution gpu-only"
        )
