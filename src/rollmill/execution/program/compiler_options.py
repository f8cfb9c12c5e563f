"""Options that XLA compiles programs with."""

from functools import cache
from typing import TypeAlias

import jax
from jax.sharding import Mesh

CompilerOptions: TypeAlias = dict[str, str | bool]
"""Options by their names in XLA, without the dashes."""

EXACT_PRECISION: CompilerOptions = {"xla_allow_excess_precision": False}
"""Floats of 16 bits are rounded after each operation, as kernels round them.

By default XLA may keep more digits between two operations, where it likes.
"""

ALL_REDUCES_IN_CUDA_GRAPHS: CompilerOptions = {
    "xla_gpu_enable_command_buffer": (
        "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,COLLECTIVES"
    ),
    "xla_gpu_experimental_use_collective_kernels": "",
}
"""All-reduces between GPUs are parts of CUDA graphs, as all else is.

By default they are not: each divides a CUDA graph in two, which the host has to start one after the other. XLA's
own kernel for small all-reduces cannot be a part of one, so it is off.
"""

SYMMETRIC_BUFFERS: CompilerOptions = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}
"""NCCL's kernels for small all-reduces read the buffers of other GPUs directly."""


def options_for(mesh: Mesh) -> CompilerOptions:
    """The options of a training's program on a mesh; its axes are those of `reductions.mesh_of`."""
    several_gpus = mesh.shape["gpu"] > 1 and mesh.devices.flat[0].platform == "gpu"
    if not several_gpus or mesh.shape["instance"] > 1:  # untried where processes share a GPU
        return EXACT_PRECISION
    known = (each for each in (ALL_REDUCES_IN_CUDA_GRAPHS, SYMMETRIC_BUFFERS) if _are_known(tuple(each.items())))
    return {name: value for options in (EXACT_PRECISION, *known) for name, value in options.items()}


@cache
def _are_known(options: tuple[tuple[str, str | bool], ...]) -> bool:
    """Whether this version of XLA has all of these options."""
    try:
        jax.jit(lambda: 0).lower().compile(dict(options))
    except jax.errors.JaxRuntimeError:
        return False
    return True
