"""Several runs in one compiled program, with different seeds and hyperparameters.

Each has its own metrics and checkpoints, and can be resumed separately.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from rollmill.gpus.activity import GpuActivity
from rollmill.programs.compiled import CompiledProgram, state_shapes
from rollmill.record.aggregates import stacked
from rollmill.record.checkpoints import Checkpoints, Restored
from rollmill.record.display import Display, choose_display
from rollmill.record.metrics import MetricsLog
from rollmill.record.run_directory import RunDirectory
from rollmill.record.signals import StopRequest, stop_on_signals
from rollmill.runs.creation import create_run, provenance_now
from rollmill.training.driver import tracking
from rollmill.training.evolution import EvolutionRule
from rollmill.training.evolving import Evolving, common_iteration
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
    """A member of a population."""

    run: RunDirectory
    recorder: Recorder
    wait: Any
    """Waits until its checkpoints are written."""
    restored: Restored | None = None
    """The checkpoint that it resumes from."""


class Population(NamedTuple):
    """Rules by which members copy each other."""

    rule: EvolutionRule
    folder: Path
    """Directory of the file that holds all rungs."""


def train_population(requests: Sequence[TrainingRequest], population: Population | None = None) -> list[Run]:
    """Trains what was requested, side by side in one program.

    Requests differ in `seed`, `run_dir` and hyperparameters that are data. With `population`, they take over from
    each other, and runs that have begun continue together. Raises a `UsageError` if they cannot share a program,
    `NonFiniteError` for a number of one of them, which ends all, a `CheckpointError` if runs have no checkpoint in
    common, and a `StorageError` if a run cannot be written any further.
    """
    display = choose_display(quiet=True)
    begun = common_iteration([Path(r.settings["run_dir"]) for r in requests]) if population else None
    planned = plan_population(requests, rule=population and population.rule, goes_on=begun is not None)
    evolving = population and Evolving(population.rule, population.folder, [each.graph for each in planned])
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
        if begun is None:
            lanes = [_create(stack, each, display, provenance) for each in prepared]
        else:
            lanes = [_reopen(stack, each, display, begun) for each in prepared]
            if evolving:
                _go_on(evolving, begun, lanes)
        _follow(_TrainedPopulation(program, prepared[0], lanes, stop, evolving))
        return [_end(lane, stop) for lane in lanes]


def _create(
    stack: contextlib.ExitStack, prepared: PreparedTraining, display: Display, provenance: dict[str, Any]
) -> _Lane:
    """Creates the run directory of a member, and its recorder."""
    run = create_run(prepared.config, prepared.options, provenance)
    stack.enter_context(run.lock())
    checkpoints = stack.enter_context(open_checkpoints(run, prepared.options))
    return _recorded(stack, prepared, run, checkpoints, display)


def _reopen(stack: contextlib.ExitStack, prepared: PreparedTraining, display: Display, iteration: int) -> _Lane:
    """Opens the run directory of a member to continue after this iteration, with its hyperparameters there."""
    run = RunDirectory.open(Path(str(prepared.options.run_dir)))
    stack.enter_context(run.lock())
    checkpoints = stack.enter_context(open_checkpoints(run, prepared.options))
    restored = checkpoints.restore(state_shapes(prepared.algorithm), iteration=iteration)
    return _recorded(stack, replace(prepared, restored=restored), run, checkpoints, display)


def _recorded(
    stack: contextlib.ExitStack,
    prepared: PreparedTraining,
    run: RunDirectory,
    checkpoints: Checkpoints,
    display: Display,
) -> _Lane:
    """Returns the lane of a run, with what records it."""
    restored = prepared.restored
    first = restored.iteration if restored else 0
    log = stack.enter_context(MetricsLog(run, tensorboard=prepared.options.tensorboard, resume_from=first))
    calls = HookCalls(tracking(prepared.options, display), display.note)
    recorder = Recorder(prepared, run, checkpoints, log, GpuActivity(), calls, keeps_choices=True)
    return _Lane(run, recorder, checkpoints.wait, restored)


def _go_on(evolving: Evolving, iteration: int, lanes: Sequence[_Lane]) -> None:
    """Resets the hyperparameters of all runs to their values after this iteration."""
    evolving.go_on(iteration, [lane.run for lane in lanes])
    for lane in lanes:
        lane.recorder.follow_config()


class _TrainedPopulation(NamedTuple):
    """The members trained by one program."""

    program: CompiledProgram
    first: PreparedTraining
    lanes: Sequence[_Lane]
    stop: StopRequest
    evolving: Evolving | None


def _follow(trained: _TrainedPopulation) -> None:
    """Runs the program from rung to rung, and records each member."""
    done, state = _begin(trained.program, trained.lanes)
    last, every = trained.first.algorithm.loops.iterations, trained.first.options.checkpoint_iterations
    while done < last and not trained.stop.requested:
        until = last if trained.evolving is None or every is None else min(last, (done // every + 1) * every)
        state = _train_until(trained, state, done, until)
        done = until


def _train_until(trained: _TrainedPopulation, state: Any, first: int, until: int) -> Any:
    """Trains on from the state after the `first` iterations; returns the state after a rung."""
    (program, prepared, lanes, stop, _), options = trained, trained.first.options
    training = ProgramTraining(
        prepared.algorithm,
        program,
        state,
        first=first,
        strides=[options.checkpoint_iterations] if options.checkpoint_iterations else [],
        pauses=None,
        span=options.log_every or default_log_every(prepared.algorithm),
        fault=lanes[0].run.fault,
        until=until,
    )
    for report in training.run(lambda: stop.requested):
        match report:
            case MetricsRows():
                if _record(lanes, report, saving=stop.take_checkpoint_request()):
                    training.request_snapshot()
            case Saved(iteration, after):
                state, kept = _after(trained, iteration, until, after)
                _keep(lanes, iteration, kept, stopping=stop.requested)
            case StartedUp(so_far):
                for lane in lanes:
                    lane.recorder.started_up(so_far.compiling, so_far.total)
    return state


def _after(trained: _TrainedPopulation, iteration: int, until: int, after: Any) -> tuple[Any, Any]:
    """Returns the states to continue with after an iteration, on the device and on the host."""
    kept = jax.device_get(after)
    if trained.evolving is None or iteration < until or until == trained.first.algorithm.loops.iterations:
        return after, kept
    lanes = trained.lanes
    results = [lane.recorder.mean_return for lane in lanes]
    kept = trained.evolving.rung(iteration, results, [lane.run for lane in lanes], kept)
    for lane in lanes:
        lane.recorder.follow_config()
    shardings: Any = trained.program.shardings
    learner = jax.tree.map(jax.device_put, kept.learner, shardings.learner)
    return eqx.tree_at(lambda state: state.learner, after, learner), kept


def _begin(program: CompiledProgram, lanes: Sequence[_Lane]) -> tuple[int, Any]:
    """Returns the number of completed iterations and the state after them, with which every recorder begins."""
    restored = lanes[0].restored
    if restored is None:
        state = program.start()
    else:
        states = [lane.restored.state for lane in lanes if lane.restored]
        state = program.place(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
    begun = jax.device_get(state)  # once: a slice of each leaf for each lane is thousands of small programs
    for number, lane in enumerate(lanes):
        lane.recorder.begin(_lane_of(begun, number))
    return (restored.iteration if restored else 0), state


def _record(lanes: Sequence[_Lane], report: MetricsRows, *, saving: bool) -> bool:
    """Writes the metrics of each member. Returns whether one of them needs its state.

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
    """Saves the states that are due."""
    for number, lane in enumerate(lanes):
        lane.recorder.keep(iteration, _lane_of(state, number), stopping=stopping, signalled=stopping)


def _end(lane: _Lane, stop: StopRequest) -> Run:
    lane.wait()
    summary = lane.recorder.finish(signal_name=stop.signal_name)
    return Run(lane.run.root, summary, stop.exit_code if summary["status"] == "stopped" else 0)


def _lane_of(state: PyTree[Array | np.ndarray], number: int) -> PyTree[Array | np.ndarray]:
    """Returns the state of one member."""
    return jax.tree.map(lambda leaf: leaf[number, ...], state)  # of a scalar an array, too
