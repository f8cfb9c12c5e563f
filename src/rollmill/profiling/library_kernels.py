"""Attributes cuBLAS and cuDNN kernels to the operations that called them.

A device that runs a CUDA graph names kernels, but not their instructions. XLA's own kernels have the names of
instructions; library kernels and copies do not. The same program, compiled so that it starts each instruction by
itself, shows them. Shares are taken from that program's recording, times from the recording of the real one.
"""

from collections import defaultdict
from collections.abc import Mapping

from rollmill.profiling.classes import Classifier, kernel_name
from rollmill.profiling.hlo_text import Path
from rollmill.profiling.results import UNNAMED
from rollmill.profiling.trace import Trace

Shares = Mapping[Path, Mapping[Path, float]]
"""For each library kernel the operations that called it, with the share of each."""

SEPARATE_INSTRUCTIONS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}
"""Compiler options that start each instruction by itself."""


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
    return {kernel: _normalised(of_kernel) for kernel, of_kernel in times.items()}


def _normalised(times: Mapping[Path, float]) -> dict[Path, float]:
    total = sum(times.values())
    return {path: time / total for path, time in times.items()}
