"""Launch configurations worth timing on a GPU, and estimates of how long kernels take to compile."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from rollmill.core.errors import UsageError
from rollmill.core.machine import Numerics
from rollmill.fusion.backends.base import AnyLaunch, Backend, CompilingAhead, KernelKind, launch_problem
from rollmill.fusion.backends.triton.compile import Kernel, capability_here, compilation_of
from rollmill.fusion.backends.triton.gradients import (
    GradientLaunch,
    gradient_kernel,
    gradient_operations,
    run_gradients_kernel,
)
from rollmill.fusion.backends.triton.parallel_compile import KernelCompilers
from rollmill.fusion.backends.triton.reloading import MAX_MATRIX_BYTES
from rollmill.fusion.backends.triton.rollout import Launch, rollout_kernel, run_kernel
from rollmill.fusion.estimate.pressure import Pressure
from rollmill.fusion.kernels.gradients import GradientStep
from rollmill.fusion.kernels.wide_gradients import largest_summed_size, wide_gradients
from rollmill.fusion.opt.row_tiles import TILE
from rollmill.fusion.opt.segments import needs_segments

KernelOf: TypeAlias = Callable[..., tuple[Kernel, list[Any]]]
"""Function that returns the kernel for a launch and a task, and the arrays that the kernel takes."""

MIN_CAPABILITY = 8.0
"""Minimum compute capability of a GPU: Ampere."""

ROLLOUTS = (
    *(Launch(16, 1), Launch(16, 2), Launch(32, 1), Launch(32, 2), Launch(64, 2), Launch(64, 4), Launch(128, 4)),
    *(Launch(32, 1, max_registers=128), Launch(128, 4, max_registers=128)),
)
LONG_ROLLOUTS = (Launch(32, 1),)
"""The launch for steps with many operations, whose kernels take minutes to compile. With it, kernels of robots:Ant
and robots:FrankaCabinet were 2.7 and 3.0 times as fast as XLA on an H200 (benchmarks/robots_backends.py)."""
COMPILE_SECONDS = 0.0085
"""Approximate seconds for each operation of a long step, to compile its kernel.

The kernels of robots:Ant and robots:FrankaCabinet, with 17,325 and 15,055 operations, took 129 and 143 s on the
host of an H200, beside other compilations (benchmarks/robots_backends.py)."""
MAX_GRADIENT_OPERATIONS = 3_000
"""Maximum number of operations of a gradient kernel that compiles in a minute on one core."""
EXACT_ROLLOUTS = (Launch(16, 2), Launch(32, 4), Launch(16, 4), Launch(64, 4))
"""Launches for float32 matrix products, which use no tensor cores and need more registers."""
GRADIENTS = ((1, 128, 8), (2, 64, 4), (4, 64, 4))
"""Launches of gradient kernels: programs per multiprocessor, samples per block, and warps per block.

Blocks of 32 samples with 2 warps were slower in nine searches on an H200, mostly by more than half, and took the
longest to compile."""

FEW_SAMPLES = ((1, 16, 4), (1, 16, 2), (1, 32, 4))
"""Launches of gradient kernels for small minibatches, for which larger blocks leave most of the GPU idle."""
SEQUENCES = ((1, 16, 4, 0), (2, 16, 4, 1), (2, 32, 4, 1))
"""Launches of gradient kernels for recurrent policies. The last number is 1 if matrices are reloaded in every
step.

If matrices stay on the chip, a GRU with 64 units takes 218 KB of shared memory."""


MAX_WHOLE = 128 * 128
"""Maximum number of elements of a matrix that gradient kernels multiply by as a whole. They hold it and its
transpose in shared memory, in 128 KB."""
WIDE_ROLLOUTS = (
    *(
        Launch(32, 4, tile=TILE, kept_kilobytes=192),
        Launch(64, 4, tile=TILE, kept_kilobytes=192),
        Launch(128, 8, tile=TILE, kept_kilobytes=192),
    ),
    *(Launch(32, 4, tile=TILE), Launch(64, 4, tile=TILE)),
)
"""Launches for matrices that are read in tiles. They were not measured on a GPU, so each is verified before it is
used.

Compiled for sm_90, two layers of 256 take 213 KB of shared memory with 192 KB of kept tiles, and 16 KB without.
Blocks of 32 have 4 warps, although 2 of them compute the same as the others: with 2 warps, 1,480 bytes of each
thread spill instead of 32."""
WIDE_GRADIENTS = ((2, 64, 4, 0, TILE), (1, 128, 8, 0, TILE))
"""Launches of gradient kernels that read matrices in tiles. They were not measured on a GPU, so each is verified
before it is used.

There are 16 samples for each warp. In smaller blocks, several warps would compute the same samples."""
MAX_TILED_PRODUCTS = 100
"""Maximum number of products of tiles in a gradient kernel. Two layers of 256 in actor and critic have 76, and
their kernel compiled in four minutes on a busy core."""
TOLERANCES: dict[Numerics, float] = {"float32": 1e-3, "tf32": 0.03, "bfloat16": 0.15}
"""Errors of verified kernels. Measured gradients differ by a third of them (docs/fusion.md)."""


def triton_backend(numerics: Numerics) -> Backend:
    """Returns the Triton backend, with matrix products in the precision `numerics`."""
    rollouts = lambda launch, *task: rollout_kernel(*task, launch=Launch(*launch), numerics=numerics)
    gradients = lambda launch, *task: gradient_kernel(*task, launch=GradientLaunch.read(launch), numerics=numerics)
    compilers = KernelCompilers()
    return Backend(
        package="triton",
        device_name=lambda device: device.device_kind,
        check=_check_chip,
        reason_to_skip_gradients=reason_to_skip_gradients_on_gpu,
        compile_seconds=compile_seconds_on_gpu,
        timed_repeats=4,
        has_lanes=True,
        unroll=16,  # enough for all epochs of a usual iteration to become one CUDA graph
        rollouts=KernelKind(
            launches=partial(_rollout_launches, numerics),
            run=lambda launch, lanes=1: partial(
                run_kernel, launch=Launch(*launch), numerics=numerics, lanes=lanes
            ),
            share=lambda launch, lanes: launch,
            text=partial(_text, rollouts),
            describe=_describe_rollouts,
            compile_ahead=partial(_compile_ahead, compilers, rollouts),
            find_problem=partial(launch_problem, Launch),
            is_unverified=lambda launch: bool(Launch(*launch).tile),
        ),
        gradients=KernelKind(
            launches=partial(_gradient_launches, numerics),
            run=lambda launch, lanes=1: partial(
                run_gradients_kernel, launch=GradientLaunch.read(launch), numerics=numerics, lanes=lanes
            ),
            share=_shared_programs,
            text=partial(_text, gradients),
            describe=_describe_gradients,
            compile_ahead=partial(_compile_ahead, compilers, gradients),
            find_problem=lambda launch: launch_problem(GradientLaunch, GradientLaunch.numbers(launch)),
            is_unverified=lambda launch: bool(GradientLaunch.read(launch).tile),
        ),
        compilers=compilers.running,
        tolerance=TOLERANCES[numerics],
    )


def compile_seconds_on_gpu(pressure: Pressure) -> float:
    """Returns the approximate seconds that the rollout kernel of a long step takes to compile, or 0 for other
    steps.

    The size of a step does not tell whether its kernel is faster than XLA. Bodies-12 and Bodies-20 (12,000 and
    23,600 instructions) took 1.4 and 2.5 times as long as XLA on an H200 (benchmarks/fusion_limits.py), but
    robots:Ant, with 29,500 instructions, was 2.7 times as fast (benchmarks/robots_backends.py).
    """
    return COMPILE_SECONDS * pressure.num_operations if needs_segments(pressure.num_operations) else 0.0


def reason_to_skip_gradients_on_gpu(step: GradientStep) -> str | None:
    """Returns the reason why a gradient kernel would take too long to compile, or None.

    The computation of agents that share weights is counted once.
    """
    size = gradient_operations(step)
    if size <= MAX_GRADIENT_OPERATIONS:
        return _too_many_tiles(step)
    return (
        f"the gradients of a sample have {size:,} operations. A kernel with more than "
        f"{MAX_GRADIENT_OPERATIONS:,} takes minutes to compile"
    )


def _too_many_tiles(step: GradientStep) -> str | None:
    if largest_summed_size(step) <= MAX_WHOLE:
        return None
    nodes = wide_gradients(step, TILE).step.program.nodes()
    products = sum(node.op == "dot" for node in nodes)
    if products <= MAX_TILED_PRODUCTS:
        return None
    return (
        f"the gradients of a sample have {products} products of matrix tiles. A kernel with more than "
        f"{MAX_TILED_PRODUCTS} takes minutes to compile"
    )


def _check_chip(device: Any) -> None:
    capability = str(device.compute_capability)
    if not capability.replace(".", "").isdigit() or float(capability) < MIN_CAPABILITY:
        raise UsageError(
            f"kernels need an NVIDIA GPU of compute capability {MIN_CAPABILITY} or newer, but "
            f"{device.device_kind} has {capability}"
        )


def _rollout_launches(
    numerics: Numerics, num_envs: int, num_nodes: int, *, largest_matrix: int = 0
) -> Sequence[Launch]:
    if numerics == "float32":
        return EXACT_ROLLOUTS[:1] if needs_segments(num_nodes) else EXACT_ROLLOUTS
    is_long, only_in_tiles = needs_segments(num_nodes), 4 * largest_matrix > MAX_MATRIX_BYTES
    if is_long:
        return (Launch(32, 4, tile=TILE),) if only_in_tiles else LONG_ROLLOUTS  # keeps nothing: it has to fit
    if largest_matrix <= MAX_WHOLE:
        return ROLLOUTS
    return WIDE_ROLLOUTS if only_in_tiles else (*ROLLOUTS, *WIDE_ROLLOUTS)


def _gradient_launches(
    numerics: Numerics, num_rows: int, device: Any, *, by_step: bool = False, largest_matrix: int = 0
) -> list[GradientLaunch]:
    processors = getattr(device, "core_count", None) or 128
    candidates = SEQUENCES if by_step else FEW_SAMPLES if num_rows < 32 * processors else GRADIENTS
    if largest_matrix > MAX_WHOLE and not by_step and numerics != "float32":
        candidates = WIDE_GRADIENTS
    return [GradientLaunch(processors * n, *others) for n, *others in candidates]


def _shared_programs(launch: AnyLaunch, lanes: int) -> GradientLaunch:
    own = GradientLaunch.read(launch)
    return own._replace(num_programs=max(1, own.num_programs // lanes))


def _text(kernel_of: KernelOf, launch: AnyLaunch, *task: Any) -> str:
    kernel, _ = kernel_of(launch, *task)
    return f"{kernel.source}{kernel.constants}"


def _compile_ahead(
    compilers: KernelCompilers, kernel_of: KernelOf, launches: Sequence[AnyLaunch], *task: Any
) -> CompilingAhead:
    capability = capability_here()
    return compilers.compiling([compilation_of(*kernel_of(launch, *task), capability) for launch in launches])


def _describe_rollouts(launch: AnyLaunch) -> str:
    own = Launch(*launch)
    few = f" with at most {own.max_registers} registers per thread" if own.max_registers else ""
    tiles = f", matrices in tiles of {own.tile}" if own.tile else ""
    return f"blocks of {own.block} environments, {own.num_warps} warps each{few}{tiles}"


def _describe_gradients(launch: AnyLaunch) -> str:
    own = GradientLaunch.read(launch)
    tiles = f", matrices in tiles of {own.tile}" if own.tile else ""
    return f"{own.num_programs} programs of {own.block} samples, {own.num_warps} warps each{tiles}"
