"""Runs a training's program with each instruction started by itself, to learn whose work libraries' kernels do."""

import jax

from rollmill.dataflow import first_learning_iteration
from rollmill.profiling.classes import Classifier
from rollmill.profiling.hlo import module_name, read_instructions
from rollmill.profiling.library_kernels import SEPARATE_INSTRUCTIONS, Shares, library_shares
from rollmill.profiling.recording import TraceRecorder
from rollmill.programs.compiled import CompiledProgram, lower
from rollmill.training.training import PreparedTraining


def measure_library_shares(prepared: PreparedTraining, program: CompiledProgram) -> Shares:
    """The operations that kernels of libraries work for, in one iteration that learns.

    Args:
        prepared: the training.
        program: its program.

    Raises:
        jax.errors.JaxRuntimeError: for example, there is no memory for a second state.
    """
    options = prepared.options
    separate = lower(
        prepared.algorithm,
        seeds=options.seeds,
        devices=program.devices,
        unroll=options.unroll,
        fusion=options.fusion,
        numerics=options.numerics,
        launches=program.launches,
        compiler_options=SEPARATE_INSTRUCTIONS,
    )
    # What is done once is not recorded: a replay memory is filled, algorithms for products are chosen.
    state, metrics = separate.advance(separate.start(), first_learning_iteration(prepared.algorithm) + 1)
    metrics.block_until_ready()
    text = separate.step.as_text() or ""
    names = Classifier({module_name(text): read_instructions(text)}, accelerated=True)
    recorder = TraceRecorder()
    recorder.start()
    try:
        jax.block_until_ready(separate.advance(state))
        return library_shares(recorder.stop_and_read(names), names)
    finally:
        recorder.abandon()
