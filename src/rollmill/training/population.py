"""Several runs in one compiled program, with different seeds and hyperparameters.

Each has its own metrics and checkpoints, and can be resumed separately.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from rollmill.core.errors import NonFiniteError
from rollmill.core.types import is_key
from rollmill.dataflow import Graph
from rollmill.dataflow.lost_environments import end_running_episodes
from rollmill.gpus.activity import GpuActivity
from rollmill.programs.compiled import CompiledProgram
from rollmill.programs.faults.locate import ALMOST_ONE, FINITE
from rollmill.programs.states import start_environments, state_shapes
from rollmill.record.aggregates import StackedRows, stack_rows
from rollmill.record.checkpoints import Checkpoints, Restored
from rollmill.record.display import Display, choose_display
from rollmill.record.metrics import MetricsLog
from rollmill.record.run_directory import RunDirectory
from rollmill.record.signals import StopRequest, stop_on_signals
from rollmill.runs.creation import create_run, provenance_now
from rollmill.training.driver import tracking
from rollmill.training.evolution import EvolutionRule
from rollmill.training.evolving import Evolving, common_point
from rollmill.training.hook_calls import HookCalls
from rollmill.training.population_plans import plan_population
from rollmill.training.preparing import PreparedTraining, compile_program, note_replay_size, prepare
from rollmill.training.recorder import Recorder, Run, default_log_every, open_checkpoints
from rollmill.training.request import TrainingRequest
from rollmill.workers.program_training import ProgramTraining
from rollmill.workers.reports import MetricsRows, Saved, StartedUp

SECONDS_BETWEEN_LINES = 1.0
"""Shortest time between two writes of a member's metrics, since the process writes the metrics of all members
while the device waits."""


class _Lane(NamedTuple):
    """A member of a population."""

    run: RunDirectory
    graph: Graph
    recorder: Recorder
    wait: Any
    """Waits until its checkpoints are written."""
    restored: Restored | None = None
    """The checkpoint that it resumes from."""


class Population(NamedTuple):
    """Rules by which the members of a population copy each other."""

    rule: EvolutionRule
    folder: Path
    """Directory with the file that contains all rungs."""
    members: tuple[int, ...] = ()
    """Indices of these runs among the initial runs. Default: all of them."""
    total: int = 0
    """Number of runs at the beginning. Default: the number of these runs."""


def train_population(requests: Sequence[TrainingRequest], population: Population | None = None) -> list[Run]:
    """Trains several runs together in one compiled program.

    Requests may differ only in `seed`, `run_dir` and numeric hyperparameters. With `population`, members copy each
    other, and existing runs continue together.

    Raises:
        UsageError: the runs cannot share a program.
        NonFiniteError: a value of one run is not finite. Without `population`, this ends all runs.
        CheckpointError: the runs of a population have no checkpoint in common.
        StorageError: a run can no longer be written.
    """
    display = choose_display(quiet=True)
    begun = common_point([Path(r.settings["run_dir"]) for r in requests]).iteration if population else None
    planned = plan_population(requests, rule=population and population.rule, goes_on=begun is not None)
    evolving = population and _evolving(population, [each.graph for each in planned])
    first = planned[0]
    note_replay_size(first.graph, first.plan, display, num_seeds=len(planned))
    program = compile_program(
        first.graph,
        first.plan,
        first.options,
        display,
        seeds=[each.options.seed for each in planned],
        lanes=[each.graph for each in planned],
        in_turns=population is None,  # members that copy each other have a state in common
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
        _follow(_TrainedPopulation(program, prepared[0], lanes, stop, evolving, set()))
        return [_end(lane, stop) for lane in lanes]


def _evolving(population: Population, graphs: Sequence[Graph]) -> Evolving:
    members = population.members or tuple(range(len(graphs)))
    return Evolving(population.rule, population.folder, graphs, members, population.total or len(graphs))


def _create(
    stack: contextlib.ExitStack, prepared: PreparedTraining, display: Display, provenance: dict[str, Any]
) -> _Lane:
    """Creates the run directory of a member, and its recorder."""
    run = create_run(prepared.config, prepared.options, provenance)
    stack.enter_context(run.lock())
    checkpoints = stack.enter_context(open_checkpoints(run, prepared.options))
    return _record_lane(stack, prepared, run, checkpoints, display)


def _reopen(stack: contextlib.ExitStack, prepared: PreparedTraining, display: Display, iteration: int) -> _Lane:
    """Opens the run directory of a member to continue after this iteration, with its hyperparameters there."""
    run = RunDirectory.open(Path(str(prepared.options.run_dir)))
    stack.enter_context(run.lock())
    checkpoints = stack.enter_context(open_checkpoints(run, prepared.options))
    restored = checkpoints.restore(state_shapes(prepared.algorithm), iteration=iteration)
    return _record_lane(stack, replace(prepared, restored=restored), run, checkpoints, display)


def _record_lane(
    stack: contextlib.ExitStack,
    prepared: PreparedTraining,
    run: RunDirectory,
    checkpoints: Checkpoints,
    display: Display,
) -> _Lane:
    """Returns the lane of a run, with what records it."""
    restored = prepared.restored
    first = restored.iteration if restored else 0
    log = stack.enter_context(
        MetricsLog(run, tensorboard=prepared.options.tensorboard, resume_from=first, seconds=SECONDS_BETWEEN_LINES)
    )
    calls = HookCalls(tracking(prepared.options, display), display.note)
    recorder = Recorder(prepared, run, checkpoints, log, GpuActivity(), calls, keeps_choices=True)
    return _Lane(run, prepared.algorithm, recorder, checkpoints.wait, restored)


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
    broken: set[int]
    """Lanes with non-finite values, until they copy another lane."""


def _follow(trained: _TrainedPopulation) -> None:
    """Runs the program from rung to rung, and records each member."""
    done, state = _begin(trained.program, trained.lanes)
    last, every = trained.first.algorithm.loops.iterations, trained.first.options.checkpoint_iterations
    while done < last and not trained.stop.requested:
        until = last if trained.evolving is None or every is None else min(last, (done // every + 1) * every)
        state = _train_until(trained, state, done, until)
        done = until


def _train_until(trained: _TrainedPopulation, state: Any, first: int, until: int) -> Any:
    """Trains from the state after the `first` iterations to the next rung or the end, and returns the new
    state.
    """
    (program, prepared, lanes, stop, evolving, broken), options = trained, trained.first.options
    training = ProgramTraining(
        prepared.algorithm,
        program,
        state,
        first=first,
        strides=[options.checkpoint_iterations] if options.checkpoint_iterations else [],
        pauses=None,
        span=options.log_every or default_log_every(prepared.algorithm),
        fault=lanes[0].run.fault if evolving is None else None,
        until=until,
    )
    for report in training.run(lambda: stop.requested):
        match report:
            case MetricsRows():
                if _take_rows(trained, report):
                    training.request_snapshot()
            case Saved(iteration, after):
                if broken and iteration < until and not stop.requested:
                    continue  # the state is not finite, and is replaced at the rung
                state, kept = _after(trained, iteration, until, after)
                _keep(lanes, iteration, kept, stopping=stop.requested)
            case StartedUp(so_far):
                for lane in lanes:
                    lane.recorder.started_up(so_far.compiling, so_far.total)
    return state


def _take_rows(trained: _TrainedPopulation, report: MetricsRows) -> bool:
    """Records the metrics of all members. Returns whether a state is wanted."""
    blocks = stack_rows(report.rows, report.counts or [1] * len(report.rows))  # stacked once for all lanes
    saving = trained.stop.take_checkpoint_request()
    if trained.evolving is not None:
        _note_broken(trained, blocks)
        # saves all runs at once, so that they can continue together
        saving |= trained.lanes[0].recorder.is_overdue
    return _record(trained.lanes, report.first, blocks, saving=saving and not trained.broken)


def _note_broken(trained: _TrainedPopulation, blocks: Sequence[StackedRows]) -> None:
    """Records the lanes with non-finite values, which copy other lanes at the next rung."""
    for block in blocks:
        trained.broken.update(np.flatnonzero(block.of(FINITE).min(axis=(0, 1)) <= ALMOST_ONE).tolist())
    if len(trained.broken) == len(trained.lanes):
        raise NonFiniteError(
            f"all {len(trained.lanes)} trials of the population have numbers that are not finite. hint: use "
            "lower learning rates, or examine the environment with rollmill.check_environment."
        )


def _after(trained: _TrainedPopulation, iteration: int, until: int, after: Any) -> tuple[Any, Any]:
    """Returns the states to continue with after an iteration, on the device and on the host."""
    kept, evolving, broken, lanes = jax.device_get(after), trained.evolving, trained.broken, trained.lanes
    ends = iteration < until or until == trained.first.algorithm.loops.iterations
    if evolving is None or (ends and not broken):
        return after, kept
    results = [lane.recorder.mean_return for lane in lanes]
    runs = [lane.run for lane in lanes]
    kept, sources = evolving.rung(iteration, results, runs, kept, broken=broken, only_broken=ends)
    windows = {lane: lanes[source].recorder.episodes.windows for lane, source in sources.items()}
    for number, lane in enumerate(lanes):
        lane.recorder.follow_config()
        if number in windows:
            lane.recorder.take_over(windows[number], iteration)
    shardings: Any = trained.program.shardings
    kept = replace(kept, collector=_environments(trained, iteration, kept), rings=_experience(trained, kept))
    names = ("learner", "collector", "rings") if broken else ("learner",)
    moved = {n: jax.tree.map(jax.device_put, getattr(kept, n), getattr(shardings, n)) for n in names}
    broken.clear()
    return replace(after, **moved), kept


def _environments(trained: _TrainedPopulation, iteration: int, kept: Any) -> Any:
    """Returns the environments of all lanes, on the host. The environments of broken lanes are reset."""
    collector = kept.collector
    for lane in trained.broken:
        graph = trained.lanes[lane].graph
        index = np.arange(graph.loops.num_envs, dtype=np.int32)
        begun = start_environments(graph, jax.random.fold_in(kept.key[lane], iteration), index, iteration)
        collector = jax.tree.map(partial(_with_lane, lane), collector, jax.device_get(begun))
    return collector


def _experience(trained: _TrainedPopulation, kept: Any) -> Any:
    """Returns the experience of all lanes, on the host. The running episodes in a broken lane's copy end, because
    its environments begin new ones.
    """
    rings = kept.rings
    for lane in trained.broken:
        end = partial(end_running_episodes, trained.lanes[lane].graph)
        ended = jax.jit(end)(jax.tree.map(itemgetter(lane), rings))
        rings = jax.tree.map(partial(_with_lane, lane), rings, jax.device_get(ended))
    return rings


def _with_lane(lane: int, leaves: np.ndarray, of_lane: np.ndarray) -> np.ndarray:
    leaves = np.array(leaves)
    leaves[lane] = of_lane
    return leaves


def _begin(program: CompiledProgram, lanes: Sequence[_Lane]) -> tuple[int, Any]:
    """Returns the number of completed iterations and the state after them, with which every recorder begins."""
    restored = lanes[0].restored
    if restored is None:
        state = program.start()
    else:
        states = [lane.restored.state for lane in lanes if lane.restored]
        state = program.place(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
    begun = _split_members(state, len(lanes))
    for lane, own in zip(lanes, begun, strict=True):
        lane.recorder.begin(own)
    return (restored.iteration if restored else 0), state


def _record(lanes: Sequence[_Lane], first: int, blocks: Sequence[StackedRows], *, saving: bool) -> bool:
    """Writes the metrics of each member. Returns whether one of them needs its state.

    If `saving`, a checkpoint of each was requested.
    """
    wanted = False
    for number, lane in enumerate(lanes):
        if saving:
            lane.recorder.request_checkpoint()
        done = lane.recorder.record_rows(first, [block.of_seed(number) for block in blocks])
        wanted |= lane.recorder.wants_state(done)
    return wanted


def _keep(lanes: Sequence[_Lane], iteration: int, state: PyTree[Array | np.ndarray], *, stopping: bool) -> None:
    """Saves the states that are due."""
    for lane, own in zip(lanes, _split_members(state, len(lanes)), strict=True):
        lane.recorder.keep(iteration, own, stopping=stopping, signalled=stopping)


def _end(lane: _Lane, stop: StopRequest) -> Run:
    lane.wait()
    summary = lane.recorder.finish(signal_name=stop.signal_name)
    return Run(lane.run.root, summary, stop.exit_code if summary["status"] == "stopped" else 0)


def _split_members(state: PyTree[Array | np.ndarray], count: int) -> list[PyTree[Array | np.ndarray]]:
    """Returns the state of each member, which members that take turns have already.

    Parts of a common state are on the host but for keys. Each leaf is copied once: a slice of a leaf on the device
    is a small program for each member.
    """
    if isinstance(state, tuple):
        return list(state)
    leaves, structure = jax.tree.flatten(state)
    parts = zip(*(_parts_of(leaf, count) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, own) for own in parts]


def _parts_of(leaf: Array | np.ndarray, count: int) -> list[Array | np.ndarray]:
    if not is_key(leaf.dtype):
        values = np.asarray(leaf)
        return [values[number, ...] for number in range(count)]  # indexing with `...` turns a scalar into an array
    data, kind = np.asarray(jax.random.key_data(leaf)), jax.random.key_impl(leaf)
    return [jax.random.wrap_key_data(data[number], impl=kind) for number in range(count)]
