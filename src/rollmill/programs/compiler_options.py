"""Options with which XLA compiles programs, by platform and mesh."""

from functools import cache
from typing import TypeAlias

import jax
from jax.sharding import Mesh

CompilerOptions: TypeAlias = dict[str, str | bool]
"""XLA options by name, without leading dashes."""

EXACT_PRECISION: CompilerOptions = {"xla_allow_excess_precision": False}
"""Rounds 16-bit floats after each operation, as kernels do. By default, XLA may keep more digits."""

PLAIN_CONVOLUTIONS: CompilerOptions = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE",
}
"""On CPUs, XLA leaves matrix products and reductions to the library YNNPACK, and computes convolutions itself.

By default it leaves convolutions to YNNPACK, too, which takes up to seven times as long for one of a gradient.
The gradient of 32 images of 84 x 84 x 4 and the network of Mnih et al. (2015) took 55 instead of 36 ms of
processor time, on one core with AVX2.
"""

KEPT_BARRIERS: CompilerOptions = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""Keeps optimisation barriers on CPUs until XLA has fused operations, as jaxlib 0.11 does anyway.

jaxlib 0.10 removes them first, and fuses several generations of random keys. LLVM then takes more than 20 minutes
to compile R2D2 with priorities for two seeds, instead of 20 s.
"""

UNOPTIMISED: CompilerOptions = {"xla_backend_optimization_level": "0"}
"""Turns off LLVM's optimisations on CPUs, for programs that run once."""

QUICK_COMPILATION: CompilerOptions = {**UNOPTIMISED, "xla_cpu_use_fusion_emitters": False}
"""Turns off LLVM's optimisations and XLA's newer emitters on CPUs, for programs that run once.

Compiling the start of PPO on CartPole-v1 then takes 1.0 instead of 5.0 s of processor time, and running it takes
19 instead of 7 ms. Weights differ by rounding. jaxlib 0.11 has only the newer emitters.
"""

LARGE_START_BYTES = 32 * 2**20
"""Size of the training state of one seed, in bytes, from which its start is compiled as usual, as filling a replay
memory would take long.
"""

ALL_REDUCES_IN_CUDA_GRAPHS: CompilerOptions = {
    "xla_gpu_enable_command_buffer": (
        "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,COLLECTIVES"
    ),
    "xla_gpu_experimental_use_collective_kernels": "",
}
"""Records all-reduces between GPUs into CUDA graphs.

By default, XLA leaves all-reduces out. Each of them then divides a CUDA graph in two, and the host has to start
both parts. The kernel of XLA for small all-reduces cannot be recorded, so these options turn it off."""

SYMMETRIC_BUFFERS: CompilerOptions = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}
"""Lets NCCL's kernels for small all-reduces read the buffers of other GPUs directly."""


CONCURRENT_GRAPHS: CompilerOptions = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""Lets kernels of a CUDA graph that do not depend on each other run at the same time.

By default, each waits for the one before. A step of an environment often consists of many small kernels. On an
H200, rollouts of 8,192 copies of CraftaxClassic-v0 are 1.3 times as fast with this option.
"""

WITHOUT_TUNING: CompilerOptions = {"xla_gpu_autotune_level": "0"}
"""On GPUs, XLA times no algorithms for the matrix products that it computes itself.

The algorithms could differ between two starts, and with them the rounding. If rollouts and gradients are kernels,
the few products that are left take no time worth mentioning: the value of the last observations, for example."""


def program_options(platform: str | None = None) -> CompilerOptions:
    """Returns the XLA options for all programs on a platform. Default: the platform that JAX uses."""
    match platform or jax.default_backend():
        case "cpu":
            return _join(EXACT_PRECISION, *_filter_known(PLAIN_CONVOLUTIONS))
        case "gpu":
            return _join(EXACT_PRECISION, CONCURRENT_GRAPHS)
    return EXACT_PRECISION


def start_options(num_bytes: int = 0) -> CompilerOptions:
    """Returns the XLA options for the program that creates the first state, of `num_bytes` bytes for each seed."""
    if jax.default_backend() != "cpu" or num_bytes >= LARGE_START_BYTES:
        return program_options()
    return _join(program_options(), *(_filter_known(QUICK_COMPILATION) or _filter_known(UNOPTIMISED)))


def single_call_options() -> CompilerOptions:
    """Returns the XLA options for a program that runs only once."""
    return without_tuning(program_options(), jax.default_backend())


def without_tuning(options: CompilerOptions, platform: str) -> CompilerOptions:
    """Returns options with which XLA times no algorithms on a GPU. On other platforms, it never does."""
    return _join(options, WITHOUT_TUNING) if platform == "gpu" else options


def options_for(mesh: Mesh, *, draws_for_seeds: bool = False) -> CompilerOptions:
    """Returns the XLA options for training programs on a mesh from `meshes.mesh_of`.

    `draws_for_seeds` says whether a program draws from the replay memories of several seeds at once.
    """
    platform = mesh.devices.flat[0].platform
    if platform == "cpu" and draws_for_seeds:
        return _join(program_options(platform), *_filter_known(KEPT_BARRIERS))
    if platform != "gpu" or mesh.size == 1:
        return program_options(platform)
    if mesh.shape["instance"] > 1:  # other options are untested if processes share a GPU
        return EXACT_PRECISION
    return _join(EXACT_PRECISION, *_filter_known(ALL_REDUCES_IN_CUDA_GRAPHS, SYMMETRIC_BUFFERS))


def _join(*parts: CompilerOptions) -> CompilerOptions:
    return {name: value for options in parts for name, value in options.items()}


def _filter_known(*parts: CompilerOptions) -> list[CompilerOptions]:
    """Returns the parts that this version of XLA has."""
    return [options for options in parts if _are_known(tuple(options.items()))]


@cache
def _are_known(options: tuple[tuple[str, str | bool], ...]) -> bool:
    """Returns whether this version of XLA has all of these options."""
    try:
        jax.jit(lambda: 0).lower().compile(dict(options))
    except jax.errors.JaxRuntimeError:
        return False
    return True
