"""Attributes cuBLAS and cuDNN kernels to the operations that called them.

A device that runs a CUDA graph names kernels, but not their instructions. Kernels by XLA have the names of
instructions. Library kernels and copies do not. The same program, compiled so that it starts each instruction
separately, shows them. Shares are taken from the recording of that program, and times from the recording of the
real program.
"""

from collections import defaultdict
from collections.abc import Mapping

import jax

from rollmill.dataflow import first_learning_iteration
from rollmill.profiling.classes import Classifier, kernel_name
from rollmill.profiling.hlo import module_name, read_instructions
from rollmill.profiling.hlo_text import Path
from rollmill.profiling.recording import TraceRecorder
from rollmill.profiling.results import UNNAMED
from rollmill.profiling.trace import Trace
from rollmill.programs.compiled import CompiledProgram, lower
from rollmill.training.training import PreparedTraining

Shares = Mapping[Path, Mapping[Path, float]]
"""For each library kernel the operations that called it, with the share of each."""

SEPARATE_INSTRUCTIONS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}
"""Compiler options that start each instruction by itself."""


def measure_library_shares(prepared: PreparedTraining, program: CompiledProgram) -> Shares:
    """Runs one iteration that learns, and attributes its library kernels to operations.

    JAX raises a `JaxRuntimeError` if there is no memory for a second state, for example.
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


def library_shares(trace: Trace, names: Classifier) -> Shares:
    """Attributes library kernels by their time in a program compiled with `SEPARATE_INSTRUCTIONS`."""
    times: dict[Path, dict[Path, float]] = defaultdict(lambda: defaultdict(float))
    for lane in trace.lanes:
        for event in lane.events if lane.on_device else ():
            if names.is_instruction(event.name):
                continue
            for path, share in names.device_instruction(event).shares.items():
                if path and path[0] != UNNAMED:
                    times[UNNAMED, kernel_name(event.name)][path] += share * (event.end - event.start)
    return {kernel: _normalized(of_kernel) for kernel, of_kernel in times.items()}


def _normalized(times: Mapping[Path, float]) -> dict[Path, float]:
    total = sum(times.values())
    return {path: time / total for path, time in times.items()}
