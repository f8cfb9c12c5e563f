"""Options that XLA compiles programs with."""

from collections.abc import Mapping
from functools import cache
from typing import TypeAlias

import jax
from jax.sharding import Mesh

CompilerOptions: TypeAlias = Mapping[str, str | bool | int]
"""Options by their names in XLA, without the dashes."""

EXACT_PRECISION: CompilerOptions = {"xla_allow_excess_precision": False}
"""Floats of 16 bits are rounded after each operation, as kernels round them.

By default XLA may keep more digits between two operations, where it likes.
"""

ALL_REDUCES_IN_GRAPHS: CompilerOptions = {
    "xla_gpu_enable_command_buffer": (
        "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,COLLECTIVES"
    ),
    "xla_gpu_experimental_use_collective_kernels": "",
}
"""All-reduces between GPUs are parts of CUDA graphs, as all else is.

By default they are not: each divides a graph in two, which the host has to start one after the other. XLA's own
kernel for small all-reduces cannot be a part of a graph, so it is off.
"""

SYMMETRIC_BUFFERS: CompilerOptions = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}
"""NCCL's kernels for small all-reduces read the buffers of other GPUs directly."""


def options_for(mesh: Mesh) -> CompilerOptions:
    """The options of a training's program on a mesh."""
    devices = list(mesh.devices.flat)
    if len(devices) == 1 or devices[0].platform != "gpu":
        return EXACT_PRECISION
    sought = [ALL_REDUCES_IN_GRAPHS]
    if len({device.process_index for device in devices}) == 1:
        sought.append(SYMMETRIC_BUFFERS)
    known = [options for options in sought if _are_known(tuple(options.items()))]
    return {name: value for options in (EXACT_PRECISION, *known) for name, value in options.items()}


@cache
def _are_known(options: tuple[tuple[str, str | bool | int], ...]) -> bool:
    """Whether this version of XLA has all of these options."""
    try:
        jax.jit(lambda: 0).lower().compile(dict(options))
    except jax.errors.JaxRuntimeError:
        return False
    return True
