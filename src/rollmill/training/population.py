"""Several trainings in one compiled program: they differ in seeds and hyperparameters alone.

Each is a run of its own, with its metrics and checkpoints, which can go on alone.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.json_data import writable
from rollmill.dataflow import Graph
from rollmill.gpus.activity import GpuActivity
from rollmill.programs.compiled import CompiledProgram
from rollmill.record.display import Display, choose_display
from rollmill.record.metrics import MetricsLog
from rollmill.record.run_directory import RunDirectory
from rollmill.record.signals import StopRequest, stop_on_signals
from rollmill.runs.creation import create_run, provenance_now
from rollmill.training.hook_calls import HookCalls
from rollmill.training.placing import prepare_devices
from rollmill.training.preparing import (
    PlannedTraining,
    PreparedTraining,
    compile_program,
    note_replay_size,
    prepare,
)
from rollmill.training.recorder import Recorder, Run, default_log_every, open_checkpoints
from rollmill.training.request import TrainingRequest, resolve
from rollmill.training.training import plan_training
from rollmill.workers.program_training import ProgramTraining
from rollmill.workers.reports import MetricsRows, Saved, StartedUp

ALONE = ("evaluate_every", "stop_at_return", "start_from")
"""Options of runs that have a program of their own."""

SHARED = ("unroll", "fusion", "numerics", "devices", "checkpoint_iterations", "log_every")
"""Options that a program, or its windows, follow."""


class _Lane(NamedTuple):
    """One of the trainings."""

    run: RunDirectory
    recorder: Recorder
    wait: Any
    """Waits until its checkpoints are written."""


def train_population(requests: Sequence[TrainingRequest]) -> list[Run]:
    """Trains what was requested, side by side in one program.

    Requests differ in `seed`, `run_dir` and hyperparameters that are data. Raises a `UsageError` if they cannot
    share a program, `NonFiniteError` for a number of one of them, which ends all, and a `StorageError` if a run
    cannot be written any further.
    """
    display = choose_display(quiet=True)
    planned = _planned(requests)
    first = planned[0]
    note_replay_size(first.graph, first.plan, display, num_seeds=len(planned))
    program = compile_program(
        first.graph,
        first.plan,
        first.options,
        display,
        seeds=[each.options.seed for each in planned],
        lanes=[each.graph for each in planned],
    )
    prepared = [prepare(each, None, display, shared=program) for each in planned]
    with stop_on_signals() as stop, contextlib.ExitStack() as stack:
        provenance = provenance_now()
        lanes = [_open(stack, each, display, provenance) for each in prepared]
        _follow(program, prepared[0], lanes, stop)
        return [_end(lane, stop) for lane in lanes]


def _planned(requests: Sequence[TrainingRequest]) -> list[PlannedTraining]:
    """Checks that the trainings can share a program, and plans each."""
    if len(requests) < 2:
        raise UsageError("a population needs at least two trainings.")
    prepare_devices(requests[0].options, environment=requests[0].environment)
    planned: list[PlannedTraining] = []
    for request in requests:
        resolved = resolve(request)
        graph, options = resolved.graph(), resolved.options
        if options.log_every is None:  # one process writes the lines of all
            options = replace(options, log_every=default_log_every(graph, trainings=len(requests)))
        # The graph is traced for the first one alone: the others are the same program.
        described = {**planned[0].described, **_own_settings(graph)} if planned else None
        planned.append(
            plan_training(
                graph,
                options,
                imports=request.imports,
                recipe=request.recipe,
                described=described,
            )
        )
        _check_same_program(planned[0], planned[-1])
    return planned


def _own_settings(graph: Graph) -> dict[str, Any]:
    """Returns the settings in which trainings of a program may differ."""
    settings = writable(graph.settings)
    return {name: settings[name] for name in ("config", "environment_options")}


def _check_same_program(first: PlannedTraining, other: PlannedTraining) -> None:
    """Checks that two trainings differ in seeds and hyperparameters alone."""
    for name in ALONE:
        if getattr(other.options, name) is not None:
            raise UsageError(f"a training with {name} has a program of its own.")
    if other.plan.place != "program" or other.options.num_seeds > 1 or other.graph.host is not None:
        raise UsageError("a population consists of trainings of one seed each, in one program of this process.")
    ours, theirs = _constants(first), _constants(other)
    if differ := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        raise UsageError(f"trainings that differ in {', '.join(differ)} cannot share a program.")


def _constants(planned: PlannedTraining) -> dict[str, Any]:
    """Returns what a compiled program contains of a training."""
    graph, options = planned.graph, planned.options
    config = {name: value for name, value in graph.settings["config"].items() if name not in graph.hyperparameters}
    settings = {name: value for name, value in graph.settings.items() if name != "config"}
    settings["environment_options"] = {
        name: value for name, value in settings["environment_options"].items() if name not in graph.parameters
    }
    held = {"inputs": sorted(graph.inputs), "loops": graph.loops, "plan": planned.plan.to_json()}
    how = {name: getattr(options, name) for name in SHARED}
    return {**settings, **config, **held, **how}


def _open(
    stack: contextlib.ExitStack, prepared: PreparedTraining, display: Display, provenance: dict[str, Any]
) -> _Lane:
    """Creates the run of a training, and what records it."""
    run = create_run(prepared.config, prepared.options, provenance)
    stack.enter_context(run.lock())
    checkpoints = stack.enter_context(open_checkpoints(run, prepared.options))
    log = stack.enter_context(MetricsLog(run, tensorboard=prepared.options.tensorboard, resume_from=0))
    calls = HookCalls([], display.note)
    recorder = Recorder(prepared, run, checkpoints, log, GpuActivity(), calls, keeps_choices=True)
    return _Lane(run, recorder, checkpoints.wait)


def _follow(
    program: CompiledProgram, prepared: PreparedTraining, lanes: Sequence[_Lane], stop: StopRequest
) -> None:
    """Runs the program to its end, and records what becomes of each training."""
    graph, options = prepared.algorithm, prepared.options
    state = program.start()
    begun = jax.device_get(state)  # once: a slice of each leaf for each lane is thousands of small programs
    for number, lane in enumerate(lanes):
        lane.recorder.begin(_lane_of(begun, number))
    training = ProgramTraining(
        graph,
        program,
        state,
        first=0,
        strides=[options.checkpoint_iterations] if options.checkpoint_iterations else [],
        pauses=None,
        span=options.log_every or default_log_every(graph),
        fault=lanes[0].run.fault,
    )
    for report in training.run(lambda: stop.requested):
        match report:
            case MetricsRows():
                if _record(lanes, report, saving=stop.take_checkpoint_request()):
                    training.request_snapshot()
            case Saved(iteration, after):
                _keep(lanes, iteration, jax.device_get(after), stopping=stop.requested)
            case StartedUp(so_far):
                for lane in lanes:
                    lane.recorder.started_up(so_far.compiling, so_far.total)


def _record(lanes: Sequence[_Lane], report: MetricsRows, *, saving: bool) -> bool:
    """Writes down the metrics of each training. Returns whether one of them needs its state.

    If `saving`, a checkpoint of each was requested.
    """
    for lane in lanes if saving else ():
        lane.recorder.request_checkpoint()
    done = [lane.recorder.record(_rows_of(report, number)) for number, lane in enumerate(lanes)]
    return any(lane.recorder.wants_state(iteration) for lane, iteration in zip(lanes, done, strict=True))


def _keep(lanes: Sequence[_Lane], iteration: int, state: PyTree[Array | np.ndarray], *, stopping: bool) -> None:
    """Saves the state of each training for which it is due."""
    for number, lane in enumerate(lanes):
        lane.recorder.keep(iteration, _lane_of(state, number), stopping=stopping, signalled=stopping)


def _end(lane: _Lane, stop: StopRequest) -> Run:
    lane.wait()
    summary = lane.recorder.finish(signal_name=stop.signal_name)
    return Run(lane.run.root, summary, stop.exit_code if summary["status"] == "stopped" else 0)


def _lane_of(state: PyTree[Array | np.ndarray], number: int) -> PyTree[Array | np.ndarray]:
    """Returns the state of one training."""
    return jax.tree.map(lambda leaf: leaf[number], state)


def _rows_of(report: MetricsRows, number: int) -> MetricsRows:
    """Returns the metrics of one training."""
    rows = [{name: value[number] for name, value in row.items()} for row in report.rows]
    return MetricsRows(report.first, rows, report.counts)
