"""Several trainings in one compiled program: they differ in seeds and hyperparameters alone.

Each is a run of its own, with its metrics and checkpoints, which can go on alone.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from rollmill.gpus.activity import GpuActivity
from rollmill.programs.compiled import CompiledProgram
from rollmill.record.aggregates import stacked
from rollmill.record.display import Display, choose_display
from rollmill.record.metrics import MetricsLog
from rollmill.record.run_directory import RunDirectory
from rollmill.record.signals import StopRequest, stop_on_signals
from rollmill.runs.creation import create_run, provenance_now
from rollmill.training.hook_calls import HookCalls
from rollmill.training.population_plans import plan_population
from rollmill.training.preparing import (
    PreparedTraining,
    compile_program,
    note_replay_size,
    prepare,
)
from rollmill.training.recorder import Recorder, Run, default_log_every, open_checkpoints
from rollmill.training.request import TrainingRequest
from rollmill.workers.program_training import ProgramTraining
from rollmill.workers.reports import MetricsRows, Saved, StartedUp


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
    planned = plan_population(requests)
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
    blocks = stacked(report.rows, report.counts or [1] * len(report.rows))  # once for all of them
    wanted = False
    for number, lane in enumerate(lanes):
        if saving:
            lane.recorder.request_checkpoint()
        done = lane.recorder.record_rows(report.first, [block.of_seed(number) for block in blocks])
        wanted |= lane.recorder.wants_state(done)
    return wanted


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
    return jax.tree.map(lambda leaf: leaf[number, ...], state)  # of a scalar an array, too
