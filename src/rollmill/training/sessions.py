"""Opens the session of a training, in one compiled program or with workers, and closes it at the end."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax

from rollmill.core.errors import NonFiniteError
from rollmill.core.machine import return_freed_memory
from rollmill.dataflow import Graph, State
from rollmill.gpus.share import memory_notes
from rollmill.planning.plan import Plan
from rollmill.programs.all_reduce_choice import choose_all_reduce
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiled import CompiledProgram, check_devices, lower
from rollmill.programs.devices import explain_out_of_memory, take_devices
from rollmill.programs.dispatch import Pauses
from rollmill.programs.faults.replay import MESSAGE
from rollmill.programs.kernels import Launches
from rollmill.programs.memory_needs import claim_before_compiling, claim_compiled
from rollmill.programs.reductions import mesh_of
from rollmill.programs.replay_size import check_message_size, check_replay_size, replay_size
from rollmill.record.checkpoints import Restored
from rollmill.record.display import Display
from rollmill.record.json_files import write_json
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.options import RunOptions
from rollmill.training.recorder import default_log_every
from rollmill.training.starting import GivenWeights, begin_with
from rollmill.workers.launch import launch
from rollmill.workers.program_training import ProgramTraining
from rollmill.workers.reports import Saved, Training
from rollmill.workers.run_spec import (
    ClusterSettings,
    GpuSettings,
    GraphRecipe,
    KernelSettings,
    RunSpec,
    Tolerances,
)

Session: TypeAlias = AbstractContextManager[tuple[Training, State]]
"""Gives a training and its first state, and closes it."""

GRAPH_FACTORY = "rollmill.runs.specification:graph_of_worker"


def compile_program(
    graph: Graph, plan: Plan, options: RunOptions, display: Display, *, launches: Launches | None = None
) -> CompiledProgram:
    """Compiles an iteration for the devices of a plan.

    Args:
        graph: what to train.
        plan: with one group.
        options: how.
        display: shows what was compiled and fused.
        launches: launches of the kernels, as they were chosen when the run began.

    Raises:
        UsageError: a kernel was asked for and cannot be made, or the devices' memory does not suffice.
        DeviceMemoryError: other processes hold the memory that it needs, or have claimed it.
    """
    enable_compilation_cache()
    replicas = plan.partition.groups[0].replicas
    devices = take_devices(replicas if replicas > 1 else options.devices)
    check_devices(graph.loops, len(devices))
    for note in memory_notes():
        display.note(note)
    claim_before_compiling(graph, seeds=options.seeds, devices=devices)
    display.note("compiling ...")
    with explain_out_of_memory(graph.loops):
        means = choose_all_reduce(graph, mesh_of(devices), "flat" if options.num_seeds > 1 else options.reduction)
        program = lower(
            graph,
            seeds=options.seeds,
            devices=devices,
            mean=means.mean,
            unroll=options.unroll,
            fusion=options.fusion,
            numerics=options.numerics,
            launches=launches,
        )
    claim_compiled(graph, program)
    return_freed_memory()  # the compiler's is as much as many a training needs
    for note in (*program.notes, *means.notes):
        display.note(note)
    where = f"{len(devices)} x {devices[0].device_kind}"
    display.note(f"compiled in {program.compile_seconds:.1f} s for {where}")
    return program._replace(reduction=means.way)


def tell_replay_size(graph: Graph, plan: Plan, options: RunOptions, display: Display) -> None:
    """Says how much memory a replay memory takes, before anything is compiled.

    Raises:
        UsageError: it does not fit.
    """
    size = replay_size(graph, num_seeds=len(options.seeds))
    if size is None:
        return
    replicas = plan.partition.holder("gradients").replicas
    if plan.place != "ray":  # the memory of other hosts is not known here
        check_replay_size(size, devices=jax.devices(), replicas=replicas)
    check_message_size(size, place=plan.place, replicas=replicas)
    display.note(str(size))


def open_session(
    graph: Graph,
    program: CompiledProgram | None,
    spec: RunSpec,
    run: RunDirectory,
    options: RunOptions,
    restored: Restored | None,
    display: Display,
    pauses: Pauses | None = None,
    *,
    given: GivenWeights | None = None,
) -> contextlib.AbstractContextManager[tuple[Training, State]]:
    """A training and its first state.

    Args:
        graph: what to train.
        program: which trains in this process; None where workers do.
        spec: what workers get.
        run: where the run is recorded.
        options: how.
        restored: the checkpoint to go on from; None at the beginning.
        display: shows notes.
        pauses: when a training in one program waits, and for what; one with workers never does.
        given: weights to begin with, at the beginning.
    """
    if program is not None:
        return _open_program(graph, program, run, options, restored, given, pauses)
    begin = Saved(restored.iteration, restored.state) if restored else None
    if given:
        begin = Saved(0, begin_with(graph, options.seeds, given))
    return _open_workers(graph, spec, run, begin, display)


@contextlib.contextmanager
def _open_program(
    graph: Graph,
    program: CompiledProgram,
    run: RunDirectory,
    options: RunOptions,
    restored: Restored | None,
    given: GivenWeights | None,
    pauses: Pauses | None,
) -> Iterator[tuple[Training, State]]:
    """A training in one program of this process, and its first state."""
    with explain_out_of_memory(graph.loops):
        state = program.place(restored.state) if restored else program.start()
        if given:
            state = begin_with(graph, options.seeds, given, state)
        first = restored.iteration if restored else 0
        strides = [options.checkpoint_iterations] if options.checkpoint_iterations else []
        span = options.log_every or default_log_every(graph)
        training = ProgramTraining(
            graph, program, state, first=first, strides=strides, pauses=pauses, span=span, fault=run.fault
        )
        yield training, state


@contextlib.contextmanager
def _open_workers(
    graph: Graph, spec: RunSpec, run: RunDirectory, begin: Saved | None, display: Display
) -> Iterator[tuple[Training, State]]:
    """A training with workers, which build the graph from its description; and its first state."""
    with (
        _keeping_faults(run),
        launch(
            graph,
            spec,
            run,
            begin_with=begin,
            show=display.note,
            fault_advice=_fault_advice(graph, run),
        ) as (coordinator, initial),
    ):
        yield coordinator, begin.state if begin else initial


def run_spec(
    plan: Plan,
    options: RunOptions,
    *,
    described: dict[str, Any],
    imports: Sequence[str],
    launches: Launches | None = None,
) -> RunSpec:
    """The specification of a run with workers.

    Args:
        plan: where it runs.
        options: how.
        described: what `describe` says of the graph.
        imports: modules that workers import first.
        launches: of kernels, as they were chosen when the run began.
    """
    return RunSpec(
        graph=GraphRecipe(GRAPH_FACTORY, described, tuple(imports)),
        plan=plan.to_json(),
        platform=jax.default_backend(),
        seed=options.seed,
        unroll=options.unroll,
        checksums=options.checksums,
        kernels=KernelSettings(
            fusion=options.fusion if plan.place == "mesh" else "off",
            numerics=options.numerics,
            launches=dict(launches) if launches else None,
        ),
        tolerances=Tolerances(options.hang_seconds, options.start_seconds, options.max_failures),
        gpus=GpuSettings(options.gpu_sharing, options.reduction),
        cluster=ClusterSettings(options.cluster, options.host),
    )


@contextlib.contextmanager
def _keeping_faults(run: RunDirectory) -> Iterator[None]:
    """Writes the message about a number that is not finite into the run, for `rollmill doctor`."""
    if run.fault.has(MESSAGE):
        run.fault.remove(MESSAGE)
    try:
        yield
    except NonFiniteError as error:
        run.fault.make()
        write_json(run.fault, MESSAGE, {"message": str(error)})
        raise


def _fault_advice(graph: Graph, run: RunDirectory) -> str:
    """How to find the cause of a number that is not finite."""
    if graph.host is not None:
        return (
            "All rewards and observations were finite, so it came up in learning from them.\n"
            "hint: a smaller learning_rate or max_grad_norm, or normalize_observations and normalize_rewards."
        )
    resume = run.command("resume", "--distribution", "gpu-only")
    return f"To find the step and the line, go on from the last checkpoint in one program: {resume}"
