"""Opens and closes training sessions, in one compiled program or with workers."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

from rollmill.core.errors import NonFiniteError
from rollmill.dataflow import Graph, State
from rollmill.programs.compiled import CompiledProgram
from rollmill.programs.devices import explain_out_of_memory
from rollmill.programs.faults.locate import MESSAGE
from rollmill.record.json_files import write_json
from rollmill.record.run_directory import RunDirectory
from rollmill.training.initial_weights import begin_with
from rollmill.training.preparing import PreparedTraining
from rollmill.training.recorder import default_log_every
from rollmill.workers.program_training import ProgramTraining
from rollmill.workers.reports import Saved, Training

Session: TypeAlias = AbstractContextManager[tuple[Training, State]]
"""A context manager that opens a training session with its first state, and closes it."""


def open_session(prepared: PreparedTraining, run: RunDirectory) -> Session:
    """Opens the training session of a prepared run, as a context manager."""
    if prepared.program is None:
        return _open_workers(prepared, run)
    return _open_program(prepared, prepared.program, run)


@contextlib.contextmanager
def _open_program(
    prepared: PreparedTraining, program: CompiledProgram, run: RunDirectory
) -> Iterator[tuple[Training, State]]:
    """Trains in one program of this process."""
    graph, options, restored = prepared.algorithm, prepared.options, prepared.restored
    with explain_out_of_memory(graph.loops):
        state = program.place(restored.state) if restored else program.start()
        if prepared.given:
            state = begin_with(graph, options.seeds, prepared.given, state)
        training = ProgramTraining(
            graph,
            program,
            state,
            first=restored.iteration if restored else 0,
            strides=[options.checkpoint_iterations] if options.checkpoint_iterations else [],
            pauses=prepared.evaluation.pauses if prepared.evaluation else None,
            span=options.log_every or default_log_every(graph),
            fault=run.fault,
        )
        yield training, state


@contextlib.contextmanager
def _open_workers(prepared: PreparedTraining, run: RunDirectory) -> Iterator[tuple[Training, State]]:
    """Trains with workers, which build the graph from its description."""
    # imported here, because runs in one program need neither workers nor channels
    from rollmill.workers.launch import launch

    graph, restored, begin = prepared.algorithm, prepared.restored, None
    if restored:
        begin = Saved(restored.iteration, restored.state)
    elif prepared.given:
        begin = Saved(0, begin_with(graph, prepared.options.seeds, prepared.given))
    advice, show = _fault_advice(graph, run), prepared.display.note
    with (
        _keeping_faults(run),
        launch(graph, prepared.spec, run, begin_with=begin, show=show, fault_advice=advice) as (training, initial),
    ):
        yield training, begin.state if begin else initial


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
    """Returns advice on finding the cause of a number that is not finite."""
    if graph.host is not None:
        return (
            "All rewards and observations were finite, so the NaN appeared while learning from them.\nhint: a "
            "smaller learning_rate or max_grad_norm, or normalize_observations and normalize_rewards."
        )
    resume = run.command("resume", "--distribution", "gpu-only")
    return f"To find the step and the line, resume from the last checkpoint in a single program: {resume}"
